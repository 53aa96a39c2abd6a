"""The sequences that are decoded together, as tensors: one row each, in buffers whose addresses never change.

The host knows the whole state once it has read back what was drawn, and writes it anew when the rows change. In between
`advance` moves the rows on by themselves, for as many steps as the host likes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rloom.errors import EngineError
from rloom.generation.native.sampling.sampler import Drawn
from rloom.generation.native.scheduler import SampledSequence, SharedPrompt
from rloom.models.triton_support import runs_kernels

CHUNK = 16
"""Steps between two readbacks, at most."""


@dataclass(slots=True, eq=False)
class Readback:
    """What some steps have drawn, on its way to the host."""

    sequences: list[SampledSequence]  # of the first rows
    steps: int
    tokens: Tensor  # (B, steps) int64, −1: nothing was drawn
    stats: Tensor  # (B, steps, 3)
    arrived: torch.cuda.Event | None = None  # where the device copies by itself

    def read(self) -> tuple[list[list[int]], np.ndarray]:
        """What each row has drawn: tokens, and their statistics, (B, steps, 3).

        Statistics stay an array: as lists, those of 128 rows would take the host as long as two steps take the device.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens, stats = self.tokens.numpy(), self.stats.numpy()
        drawn = tokens >= 0
        if np.isnan(stats[..., :2][drawn]).any():
            raise not_finite()
        return [row[:count].tolist() for row, count in zip(tokens, drawn.sum(1), strict=True)], stats


@dataclass(slots=True, eq=False)
class Rows:
    """State of B rows. Rows without a sequence, and those that have ended, draw nothing (`alive` 0)."""

    tokens: Tensor  # (B, 1) int64: the next input
    positions: Tensor  # (B, 1) int64
    cached: Tensor  # (B,) int32: tokens of the completion whose keys and values are kept
    counts: Tensor  # (B,) int64: tokens drawn so far
    remaining: Tensor  # (B,) int32: tokens that may still be drawn
    alive: Tensor  # (B,) int32
    keys: Tensor  # (B,) int64
    step: Tensor  # (1,) int64: since the last readback
    out_tokens: Tensor  # (B, CHUNK) int64, −1: nothing was drawn
    out_stats: Tensor  # (B, CHUNK, 3) float32: log-probability, the drawn one's, entropy
    ends: Tensor  # end tokens, int64
    vocabulary: int
    seen: Tensor | None = None  # (B, V) bool, for the repetition penalty
    loaded: list[SampledSequence] = field(default_factory=list)  # of the first rows
    lengths: list[int] = field(default_factory=list)  # tokens that each of them will have drawn, if none ends

    @classmethod
    def empty(cls, count: int, ends: Tensor, vocabulary: int, *, with_seen: bool) -> Rows:
        """Rows that do nothing yet."""
        device = ends.device
        long: dict[str, Any] = {"dtype": torch.int64, "device": device}
        short: dict[str, Any] = {"dtype": torch.int32, "device": device}
        return cls(
            tokens=torch.zeros((count, 1), **long),
            positions=torch.zeros((count, 1), **long),
            cached=torch.zeros(count, **short),
            counts=torch.zeros(count, **long),
            remaining=torch.zeros(count, **short),
            alive=torch.zeros(count, **short),
            keys=torch.zeros(count, **long),
            step=torch.zeros(1, **long),
            out_tokens=torch.full((count, CHUNK), -1, **long),
            out_stats=torch.zeros((count, CHUNK, 3), device=device),
            ends=ends,
            vocabulary=vocabulary,
            seen=torch.zeros((count, vocabulary), dtype=torch.bool, device=device) if with_seen else None,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def load(self, sequences: list[SampledSequence], max_new_tokens: int, steps: int) -> None:
        """Write the state of these sequences into the first rows, for the next `steps`; the others do nothing.

        Rows that have moved on by themselves are right already.
        """
        lengths = [len(s.tokens) for s in sequences]
        moved_on = self.loaded == sequences and self.lengths == lengths
        self.loaded, self.lengths = list(sequences), lengths
        self.run_ahead(steps)
        if moved_on:
            return
        idle = [0] * (len(self) - len(sequences))
        columns = [
            (self.tokens.view(-1), [s.tokens[-1] for s in sequences]),
            (self.positions.view(-1), [s.position for s in sequences]),
            (self.cached, [s.cached for s in sequences]),
            (self.counts, lengths),
            (self.remaining, [max_new_tokens - length for length in lengths]),
            (self.alive, [1] * len(sequences)),
            (self.keys, [s.key for s in sequences]),
        ]
        state = torch.tensor([values + idle for _, values in columns]).to(self.tokens.device)
        for (target, _), source in zip(columns, state, strict=True):
            target.copy_(source)
        if self.seen is not None:
            self.seen.zero_()
            tokens = [np.array(s.prompt.token_ids + s.tokens) for s in sequences]
            rows = np.repeat(np.arange(len(tokens)), [len(t) for t in tokens])
            index = torch.from_numpy(np.stack([rows, np.concatenate(tokens)])).to(self.seen.device)
            self.seen[index[0], index[1]] = True

    def run_ahead(self, steps: int) -> None:
        """Make ready for more steps of the same rows; the host need not know yet where they are."""
        self.lengths = [length + steps for length in self.lengths]
        self.rewind()

    def rewind(self) -> None:
        """Write the next step to the first column. Every step writes one, also for rows that draw nothing."""
        self.step.zero_()

    def advance(self, drawn: Drawn) -> None:
        """Take the drawn tokens in, and move on those rows that have not ended."""
        if runs_kernels(self.tokens.device):
            from rloom.generation.native.kernels.draw import advance_rows

            advance_rows(self, drawn)
        else:
            self._advance(drawn)
        if self.seen is not None:
            self.seen.scatter_(1, self.tokens, True)

    def _advance(self, drawn: Drawn) -> None:
        alive = self.alive.bool()
        at = self.step.expand(len(self), 1)
        self.out_tokens.scatter_(1, at, torch.where(alive, drawn.tokens, -1).unsqueeze(1))
        self.out_stats.scatter_(1, at.unsqueeze(-1).expand(-1, 1, 3), drawn.stats().unsqueeze(1))
        goes_on = alive & ~torch.isin(drawn.tokens, self.ends) & (self.remaining > 1)
        self.tokens.copy_(torch.where(goes_on, drawn.tokens, self.tokens[:, 0]).unsqueeze(1))
        self.positions += goes_on.unsqueeze(1)
        for counter in (self.cached, self.counts):
            counter += goes_on
        self.remaining -= goes_on.int()
        self.alive.copy_(goes_on)
        self.step += 1

    def read_back(self, steps: int) -> Readback:
        """Send what was drawn to the host, without waiting for it; the rows may go on meanwhile."""
        drawn = (self.out_tokens[:, :steps], self.out_stats[:, :steps])
        if not self.tokens.is_cuda:
            return Readback(self.loaded, steps, drawn[0].clone(), drawn[1].clone())
        tokens, stats = (x.to("cpu", non_blocking=True) for x in drawn)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(self.tokens.device))
        return Readback(self.loaded, steps, tokens, stats, arrived)


def not_finite() -> EngineError:
    """The error for a model whose logits are not finite."""
    return EngineError(
        "the model's logits are not finite (NaN or infinity): its weights are broken. Look at the last updates: a "
        "learning rate that is too high, float16 without loss scaling"
    )


def groups_of(sequences: list[SampledSequence], most: int) -> list[tuple[SharedPrompt, list[int]]]:
    """Rows that read the same prompt, at most `most` to an entry.

    Rows need not be neighbours: a prompt's sequences may have come at different times.
    """
    entries: dict[SharedPrompt, list[list[int]]] = {}
    for row, sequence in enumerate(sequences):
        lists = entries.setdefault(sequence.prompt, [[]])
        if len(lists[-1]) == most:
            lists.append([])
        lists[-1].append(row)
    return [(prompt, rows) for prompt, lists in entries.items() for rows in lists]
