"""Cuts rollouts into micro-batches, and makes tensors of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.data.model_inputs import join, join_packed
from rloom.data.packing import drawn_tokens, pack, runs_of_groups
from rloom.data.transfer import flat_tokens, upload
from rloom.types import MicroBatch, PackedRow, Rollout


class Batcher:
    """Cuts rows of a rollout into micro-batches of at most `budget` tokens, and makes tensors of them.

    Packed, a prompt counts once for all of its completions. Padded, every row counts with the longest prompt and
    completion of its micro-batch. A completion that is longer than the budget is a micro-batch of its own. Rows with
    images have micro-batches of their own. `packs_images(rollout)` says whether the model can pack them; it is called
    once, with the first rollout that has images.
    """

    def __init__(
        self,
        *,
        packed: bool,
        pad_token_id: int,
        multiple: int | None = None,
        packs_images: Callable[[Rollout], bool] | None = None,
    ) -> None:
        self.packed, self.pad_token_id, self.multiple = packed, pad_token_id, multiple
        self.packs_images = packs_images
        self.images_packed = False
        self._settled = not packed or packs_images is None

    def settle(self, rollout: Rollout) -> None:
        """Find out whether rows with images can be packed, before the first of them are planned."""
        rows = [row for row, completion in enumerate(rollout.completion_ids) if completion]
        if not self._settled and self.packs_images is not None and has_images(rollout, rows):
            self.images_packed = self.packs_images(rollout)
            self._settled = True

    def plan(self, rollout: Rollout, rows: Sequence[int], budget: int, *, whole_groups: bool) -> list[list[int]]:
        """The rows of each micro-batch, in order. With `whole_groups` no group is cut, so that a training forward can
        give its advantages."""
        groups = rollout.groups.tolist()
        units = [[rows[i] for i in run] for run in runs_of_groups(rows, groups)]
        if not whole_groups:
            units = [[row] for unit in units for row in unit]
        plans: list[list[int]] = []
        filled, pictured = Extent(), False
        for unit in units:
            images = has_images(rollout, unit)
            grown = filled.grown(rollout, unit, groups)
            if plans and images == pictured and grown.tokens(self._packs(images)) <= budget:
                plans[-1] += unit
                filled = grown
            else:
                plans.append(list(unit))
                filled, pictured = Extent().grown(rollout, unit, groups), images
        return plans

    def size(self, rollout: Rollout, rows: Sequence[int]) -> int:
        """The number of tokens of these rows in a forward."""
        return Extent().grown(rollout, rows, rollout.groups.tolist()).tokens(self._packs(has_images(rollout, rows)))

    def _packs(self, images: bool) -> bool:
        return self.packed and (self.images_packed or not images)

    def make(self, rollout: Rollout, rows: Sequence[int], device: torch.device) -> MicroBatch:
        """The rows as tensors."""
        drawn = [rollout.drawn_ids(row) for row in rows]
        lengths = [len(ids) for ids in drawn]
        packed = pack(rollout, rows, device) if self._packs(has_images(rollout, rows)) else None
        width = _round_up(max(lengths), None if packed else self.multiple)
        mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
        batch = MicroBatch(
            rollout=rollout,
            rows=list(rows),
            lengths=lengths,
            flat=upload(mask.flatten().nonzero().squeeze(-1), device),
            completion_mask=upload(mask.float(), device),
            targets=_targets(drawn, packed, device),
            packed=packed,
        )
        if packed is not None:
            batch.prompt_inputs = _inputs_of_packed(batch)
        else:
            self._pad(batch, device)
        return batch

    def _pad(self, batch: MicroBatch, device: torch.device) -> None:
        """Pad prompts on the left and completions on the right. Positions are counted per row."""
        prompts = [batch.rollout.prompt_ids[row] for row in batch.rows]
        lengths = torch.tensor([len(batch.rollout.completion_ids[row]) for row in batch.rows])
        batch.width = right = _round_up(int(lengths.max()), self.multiple)
        places = (torch.arange(right) < lengths.unsqueeze(1)).flatten().nonzero().squeeze(-1)
        drawn = drawn_tokens(batch.rollout, batch.rows)
        batch.places = upload(places if drawn is None else places[drawn], device)
        left = _round_up(max(map(len, prompts)), self.multiple)
        input_ids = torch.full((len(prompts), left + right), self.pad_token_id, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for line, (prompt, row) in enumerate(zip(prompts, batch.rows, strict=True)):
            completion = batch.rollout.completion_ids[row]
            input_ids[line, left - len(prompt) : left] = torch.tensor(prompt)
            input_ids[line, left : left + len(completion)] = torch.tensor(completion)
            mask[line, left - len(prompt) : left + len(completion)] = 1
        batch.input_ids = upload(input_ids, device)
        batch.attention_mask = upload(mask, device)
        batch.position_ids = upload((mask.cumsum(-1) - 1).clamp(min=0), device)
        batch.prompt_inputs = join([batch.rollout.prompt_inputs[row] for row in batch.rows], left, right)


@dataclass(frozen=True, slots=True)
class Extent:
    """How many tokens some rows have in a forward, in either layout. Rows can be added."""

    rows: int = 0
    prompt: int = 0  # the longest prompt
    completion: int = 0  # the longest completion
    packed: int = 0  # tokens, where neighbours of one group share their prompt
    group: int | None = None  # the last row's group

    def grown(self, rollout: Rollout, rows: Sequence[int], groups: Sequence[int]) -> Extent:
        """The extent with more rows."""
        prompt, completion, packed, group = self.prompt, self.completion, self.packed, self.group
        for row in rows:
            length, own = len(rollout.prompt_ids[row]), len(rollout.completion_ids[row])
            packed += own if groups[row] == group else length + own
            prompt, completion, group = max(prompt, length), max(completion, own), groups[row]
        return Extent(self.rows + len(rows), prompt, completion, packed, group)

    def tokens(self, packed: bool) -> int:
        """The number of tokens, packed or padded."""
        return self.packed if packed else self.rows * (self.prompt + self.completion)


def _inputs_of_packed(batch: MicroBatch) -> dict[str, torch.Tensor]:
    """The tensors of images, once for each prompt of a packed row."""
    assert batch.packed is not None
    prompts = [batch.rollout.prompt_inputs[row] for row in batch.first_rows()]
    if not any(prompts):
        return {}
    return join_packed(prompts, [block.prompt for block in batch.packed.blocks], batch.packed.input_ids.shape[1])


def has_images(rollout: Rollout, rows: Sequence[int]) -> bool:
    """Whether the prompt of any of these rows has images."""
    return any(rollout.prompt_inputs[row] for row in rows)


def _targets(drawn: list[list[int]], packed: PackedRow | None, device: torch.device) -> Tensor:
    """The tokens that the policy drew. If it drew all completion tokens, they are the end of the packed row, and
    nothing is copied."""
    if packed is not None and len(packed.source) == packed.input_ids.shape[1] - packed.num_prompt_tokens:
        return packed.input_ids[0, packed.num_prompt_tokens :]
    return upload(flat_tokens(drawn), device)


def _round_up(width: int, multiple: int | None) -> int:
    return width if not multiple else -(-width // multiple) * multiple
