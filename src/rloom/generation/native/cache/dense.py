"""Keys and values in plain padded tensors, attended to with plain matrix products: the form for CPUs, for heads that
the kernels do not fit, and the one that the kernels are tested against.

A group's rows still read their prompt together: (rows · heads, width) times (width, prompt length) for each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloom.generation.native.cache.geometry import Geometry
from rloom.generation.native.rows import Rows, groups_of
from rloom.generation.native.scheduler import Sequence, SharedPrompt
from rloom.types import PackedRow

SPARE = 32
"""Tokens that rows get room for beyond the next steps, so that they are not moved at every look of the host."""


@dataclass(slots=True)
class _Arrangement:
    """The rows of the next steps."""

    members: Tensor  # (G, M): rows of each group, 0 where there is none
    place: Tensor  # (B,): where a row stands in (G · M)
    prompt_mask: Tensor  # (G, P): True inside a prompt
    prompt_lengths: Tensor  # (B,)


class DenseCache:
    """One tensor per prompt and layer; the rows' own in one tensor per layer, moved when rows change."""

    def __init__(self, geometry: Geometry, max_new_tokens: int, device: torch.device) -> None:
        self.geometry, self.max_new_tokens, self.device = geometry, max_new_tokens, device
        self.prompts: dict[SharedPrompt, list[tuple[Tensor, Tensor]]] = {}
        self.own: list[tuple[Tensor, Tensor]] = []
        self.stacked: list[tuple[Tensor, Tensor]] = []
        self.row_of: dict[Sequence, int] = {}
        self.arranged: _Arrangement | None = None
        self.prefilled: list[SharedPrompt] = []
        self.order: list[Sequence] = []
        self.longest = 0

    def begin_prefill(self, prompts: list[SharedPrompt]) -> None:
        """The prompts whose keys and values come next, in the order of the packed row."""
        self.prefilled = prompts
        for prompt in prompts:
            self.prompts[prompt] = []

    def keep(self, layer: int, key: Tensor, value: Tensor, row: PackedRow) -> None:
        """A layer's keys and values (1, H, T, D) of the prompts."""
        for prompt, block in zip(self.prefilled, row.blocks, strict=True):
            part = slice(block.start, block.start + block.prompt)
            self.prompts[prompt].append((key[0, :, part].clone(), value[0, :, part].clone()))

    def arrange(self, sequences: list[Sequence], rows: Rows, steps: int) -> None:
        """Bring the rows' keys and values into the order of these sequences."""
        self.longest = max(s.cached for s in sequences)
        if self.own and self.order == sequences and self.own[0][0].shape[2] >= self._width(steps):
            return
        entries = groups_of(sequences, most=len(sequences))
        most = max(len(members) for _, members in entries)
        lengths = [len(prompt.token_ids) for prompt, _ in entries]
        members = torch.zeros((len(entries), most), dtype=torch.long)
        place = torch.zeros(len(sequences), dtype=torch.long)
        for index, (_, found) in enumerate(entries):
            members[index, : len(found)] = torch.tensor(found)
            place[found] = index * most + torch.arange(len(found))
        mask = torch.arange(max(lengths)).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)
        self.arranged = _Arrangement(
            members=members.to(self.device),
            place=place.to(self.device),
            prompt_mask=mask.to(self.device),
            prompt_lengths=torch.tensor([len(s.prompt.token_ids) for s in sequences], device=self.device),
        )
        self._stack([prompt for prompt, _ in entries], max(lengths))
        self._move(sequences, steps)
        self.order = list(sequences)
        self._forget(sequences)

    def _width(self, steps: int) -> int:
        return min(self.longest + steps, self.max_new_tokens)

    def _stack(self, prompts: list[SharedPrompt], width: int) -> None:
        self.stacked = []
        for index in range(len(self.geometry.layers)):
            both = []
            for which in (0, 1):
                parts = [self.prompts[prompt][index][which] for prompt in prompts]
                both.append(torch.stack([torch.nn.functional.pad(p, (0, 0, 0, width - p.shape[1])) for p in parts]))
            self.stacked.append((both[0], both[1]))  # (G, H, P, D)

    def _move(self, sequences: list[Sequence], steps: int) -> None:
        """Rows that stay keep what they have; new ones begin with nothing. Room for `steps` more tokens."""
        width = min(self._width(steps) + SPARE, self.max_new_tokens)
        old = torch.tensor([self.row_of.get(s, 0) for s in sequences], device=self.device)
        moved: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self.geometry.layers):
            pair = []
            for which, size in ((0, layer.width), (1, layer.value_width)):
                shape = (len(sequences), layer.heads, width, size)
                fresh = torch.zeros(shape, dtype=layer.dtype, device=self.device)
                if self.own:
                    before = self.own[index][which][old]
                    fresh[:, :, : before.shape[2]] = before[:, :, :width]
                pair.append(fresh)
            moved.append((pair[0], pair[1]))
        self.own = moved
        self.row_of = {s: row for row, s in enumerate(sequences)}

    def _forget(self, sequences: list[Sequence]) -> None:
        """Drop prompts of which nothing is left to do."""
        self.prompts = {prompt: kept for prompt, kept in self.prompts.items() if prompt.unfinished}

    def stepped(self) -> None:
        """A step is done: one more token is kept."""
        self.longest += 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: dict[str, Any]
    ) -> Tensor:
        """query (B, H, 1, D), key and value (B, H_kv, 1, ·) of the new token → (B, 1, H, E)."""
        arranged = self.arranged
        assert arranged is not None
        if options.get("rotation"):
            query, key = (rotated(x, *options["rotation"]) for x in (query, key))
        own_k, own_v = self.own[layer]
        count, heads, _, width = query.shape
        shared = key.shape[1]
        at = rows.cached.long()
        index = torch.arange(count, device=query.device)
        own_k[index, :, at] = key[:, :, 0].to(own_k.dtype)
        own_v[index, :, at] = value[:, :, 0].to(own_v.dtype)
        length = min(self.longest + 1, own_k.shape[2])  # rows at the limit stay, while others go on
        own_k, own_v = own_k[:, :, :length], own_v[:, :, :length]
        prompt_k, prompt_v = self.stacked[layer]
        q = query[:, :, 0].view(count, shared, heads // shared, width)
        on_prompt = self._by_group(q, arranged) @ prompt_k.transpose(-1, -2)  # (G, H_kv, M·r, P)
        scores = torch.cat([self._by_row(on_prompt, q, arranged), q @ own_k.transpose(-1, -2)], -1)
        scores = scores.float() * options["scale"]
        weights = self._weights(scores, length, at, rows.positions[:, 0], arranged, options).to(query.dtype)
        size = prompt_k.shape[2]
        from_prompt = self._by_group(weights[..., :size], arranged) @ prompt_v
        out = self._by_row(from_prompt, q, arranged) + weights[..., size:] @ own_v
        return out.reshape(count, 1, heads, -1)

    @staticmethod
    def _by_group(x: Tensor, arranged: _Arrangement) -> Tensor:
        """(B, H_kv, r, N) → (G, H_kv, M·r, N)"""
        groups, most = arranged.members.shape
        x = x[arranged.members]  # (G, M, H_kv, r, N)
        return x.transpose(1, 2).reshape(groups, x.shape[2], most * x.shape[3], x.shape[4])

    @staticmethod
    def _by_row(x: Tensor, q: Tensor, arranged: _Arrangement) -> Tensor:
        """(G, H_kv, M·r, N) → (B, H_kv, r, N)"""
        groups, most = arranged.members.shape
        _, shared, repeat, _ = q.shape
        x = x.view(groups, shared, most, repeat, -1).transpose(1, 2)
        return x.reshape(groups * most, shared, repeat, -1)[arranged.place]

    def _weights(
        self, scores: Tensor, length: int, at: Tensor, position: Tensor, arranged: _Arrangement, options: dict[str, Any]
    ) -> Tensor:
        """Probabilities over [prompt, own], (B, H_kv, r, P + L)."""
        if options["softcap"]:
            scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
        most = arranged.members.shape[1]
        prompt_seen = arranged.prompt_mask.repeat_interleave(most, 0)[arranged.place]  # (B, P)
        own = torch.arange(length, device=scores.device).unsqueeze(0)
        seen = torch.cat([prompt_seen, own <= at.unsqueeze(1)], 1)
        if options["window"]:
            before = torch.arange(prompt_seen.shape[1], device=scores.device).expand_as(prompt_seen)
            where = torch.cat([before, arranged.prompt_lengths.unsqueeze(1) + own], 1)
            seen &= position.unsqueeze(1) - where < options["window"]
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        if options["sinks"] is None:
            return scores.softmax(-1)
        sinks = options["sinks"].float().view(1, scores.shape[1], scores.shape[2], 1).expand(len(scores), -1, -1, -1)
        return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, H, 1, D) turned by angles (B, 1, D), as transformers does it: the first half and the second are pairs.

    >>> turn = torch.tensor([[[0.0, 0.0]]]), torch.tensor([[[1.0, 1.0]]])  # a quarter
    >>> rotated(torch.tensor([[[[3.0, 4.0]]]]), *turn).tolist()
    [[[[-4.0, 3.0]]]]
    """
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)
