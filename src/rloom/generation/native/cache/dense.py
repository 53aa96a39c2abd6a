"""Keys and values in plain padded tensors, attended to with plain matrix products: the form for CPUs, for heads that
the kernels do not fit, and the one that the kernels are tested against.

A group's rows still read their prompt together: (rows · heads, width) times (width, prompt length) for each group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rloom.generation.native.cache.geometry import Geometry
from rloom.generation.native.rows import Rows, groups_of
from rloom.generation.native.scheduler import SampledSequence, SharedPrompt
from rloom.types import PackedRow

SPARE = 32
"""Tokens that rows get room for beyond the next steps, so that they are not moved at every readback."""


@dataclass(slots=True)
class _Arrangement:
    """The rows of the next steps."""

    members: Tensor  # (G, M): rows of each group, 0 where there is none
    place: Tensor  # (B,): where a row stands in (G · M)
    prompt_mask: Tensor  # (G, P): True inside a prompt
    prompt_lengths: Tensor  # (B,)

    def by_group(self, x: Tensor) -> Tensor:
        """(B, H_kv, r, N) → (G, H_kv, M·r, N)"""
        groups, most = self.members.shape
        x = x[self.members]  # (G, M, H_kv, r, N)
        return x.transpose(1, 2).reshape(groups, x.shape[2], most * x.shape[3], x.shape[4])

    def by_row(self, x: Tensor) -> Tensor:
        """(G, H_kv, M·r, N) → (B, H_kv, r, N)"""
        groups, most = self.members.shape
        shared, repeat = x.shape[1], x.shape[2] // most
        x = x.view(groups, shared, most, repeat, -1).transpose(1, 2)
        return x.reshape(groups * most, shared, repeat, -1)[self.place]


class DenseCache:
    """One tensor per prompt and layer; the rows' own in one tensor per layer, moved when rows change."""

    def __init__(self, geometry: Geometry, max_new_tokens: int, device: torch.device) -> None:
        self.geometry, self.max_new_tokens, self.device = geometry, max_new_tokens, device
        self.prompts: dict[SharedPrompt, list[tuple[Tensor, Tensor]]] = {}
        self.prefilled: list[SharedPrompt] = []
        self.stacked: list[tuple[Tensor, Tensor]] = []  # prompts of the arranged rows by layer, (G, H, P, D)
        self.own: list[tuple[Tensor, Tensor]] = []  # tokens of the arranged rows by layer, (B, H, L, D)
        self.order: list[SampledSequence] = []
        self.arranged: _Arrangement
        self.longest = 0

    def begin_prefill(self, prompts: list[SharedPrompt]) -> None:
        """The prompts whose keys and values come next, in the order of the packed row."""
        self.prefilled = prompts
        for prompt in prompts:
            self.prompts[prompt] = []

    def keep(self, layer: int, key: Tensor, value: Tensor, row: PackedRow) -> None:
        """Keep a layer's keys and values (1, H, T, D) of the prompts."""
        for prompt, block in zip(self.prefilled, row.blocks, strict=True):
            part = slice(block.start, block.start + block.prompt)
            self.prompts[prompt].append((key[0, :, part].clone(), value[0, :, part].clone()))

    def arrange(self, sequences: list[SampledSequence], tables: object, steps: int) -> None:
        """Bring the rows' keys and values into the order of these sequences, with room for `steps` more tokens."""
        self.longest = max(s.cached for s in sequences)
        if self.own and self.order == sequences and self.own[0][0].shape[2] >= self._width(steps):
            return
        entries = groups_of(sequences, most=len(sequences))
        most = max(len(members) for _, members in entries)
        lengths = torch.tensor([len(prompt.token_ids) for prompt, _ in entries])
        members = torch.zeros((len(entries), most), dtype=torch.long)
        place = torch.zeros(len(sequences), dtype=torch.long)
        for index, (_, found) in enumerate(entries):
            members[index, : len(found)] = torch.tensor(found)
            place[found] = index * most + torch.arange(len(found))
        mask = torch.arange(int(lengths.max())).unsqueeze(0) < lengths.unsqueeze(1)
        self.arranged = _Arrangement(
            members=members.to(self.device),
            place=place.to(self.device),
            prompt_mask=mask.to(self.device),
            prompt_lengths=lengths[place // most].to(self.device),
        )
        self._stack([prompt for prompt, _ in entries], mask.shape[1])
        self._move(sequences, steps)
        # Prompts whose sequences have all ended are not read again.
        self.prompts = {prompt: kept for prompt, kept in self.prompts.items() if prompt.unfinished}

    def lengthen(self, sequences: list[SampledSequence]) -> None:
        """Nothing to do: there are no pages."""

    def _width(self, steps: int) -> int:
        return min(self.longest + steps, self.max_new_tokens)

    def _stack(self, prompts: list[SharedPrompt], width: int) -> None:
        padded = lambda x: functional.pad(x, (0, 0, 0, width - x.shape[1]))  # noqa: E731
        self.stacked = []
        for pairs in zip(*(self.prompts[prompt] for prompt in prompts), strict=True):
            keys, values = (torch.stack([padded(x) for x in parts]) for parts in zip(*pairs, strict=True))
            self.stacked.append((keys, values))

    def _move(self, sequences: list[SampledSequence], steps: int) -> None:
        """Rows that stay keep what they have; new ones begin with nothing. Room for `steps` more tokens."""
        width = min(self._width(steps) + SPARE, self.max_new_tokens)
        row_of = {sequence: row for row, sequence in enumerate(self.order)}
        rows = torch.tensor([row_of.get(s, 0) for s in sequences], device=self.device)

        def moved(before: Tensor | None, heads: int, size: int, dtype: torch.dtype) -> Tensor:
            fresh = torch.zeros((len(sequences), heads, width, size), dtype=dtype, device=self.device)
            if before is not None:
                kept = before[rows]
                fresh[:, :, : kept.shape[2]] = kept[:, :, :width]
            return fresh

        old: list[Any] = self.own or [(None, None)] * len(self.geometry.layers)
        self.own = [
            (moved(keys, x.heads, x.width, x.dtype), moved(values, x.heads, x.value_width, x.dtype))
            for (keys, values), x in zip(old, self.geometry.layers, strict=True)
        ]
        self.order = list(sequences)

    def stepped(self) -> None:
        """A step outside of a graph is done: one more token is kept."""
        self.longest += 1

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: dict[str, Any]
    ) -> Tensor:
        """Keep one more token per row, and attend to all that is kept: query (B, H, 1, D), key and value
        (B, H_kv, 1, ·) of the new token → (B, 1, H, E).

        `options["rotation"]`: cosines and sines (B, 1, D) by which query and key are still to be rotated.
        """
        arranged = self.arranged
        if options.get("rotation"):
            query, key = (rotated(x, *options["rotation"]) for x in (query, key))
        own_k, own_v = self.own[layer]
        count, heads, _, width = query.shape
        shared = key.shape[1]
        at = rows.cached.long()
        index = torch.arange(count, device=query.device)
        own_k[index, :, at] = key[:, :, 0].to(own_k.dtype)
        own_v[index, :, at] = value[:, :, 0].to(own_v.dtype)
        # A row at the limit has no room for more, while others go on.
        length = min(self.longest + 1, own_k.shape[2])
        own_k, own_v = own_k[:, :, :length], own_v[:, :, :length]
        prompt_k, prompt_v = self.stacked[layer]
        q = query[:, :, 0].view(count, shared, heads // shared, width)
        on_prompt = arranged.by_group(q) @ prompt_k.transpose(-1, -2)  # (G, H_kv, M·r, P)
        scores = torch.cat([arranged.by_row(on_prompt), q @ own_k.transpose(-1, -2)], -1)
        scores = scores.float() * options["scale"]
        weights = self._weights(scores, at, rows.positions[:, 0], options).to(query.dtype)
        size = prompt_k.shape[2]
        from_prompt = arranged.by_group(weights[..., :size]) @ prompt_v
        out = arranged.by_row(from_prompt) + weights[..., size:] @ own_v
        return out.reshape(count, 1, heads, -1)

    def _weights(self, scores: Tensor, at: Tensor, position: Tensor, options: dict[str, Any]) -> Tensor:
        """Probabilities over [prompt, own], (B, H_kv, r, P + L). `at`: where the rows' new tokens are in L."""
        if options["softcap"]:
            scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
        arranged = self.arranged
        most = arranged.members.shape[1]
        prompt_seen = arranged.prompt_mask.repeat_interleave(most, 0)[arranged.place]  # (B, P)
        own = torch.arange(scores.shape[-1] - prompt_seen.shape[1], device=scores.device).unsqueeze(0)
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
