"""A reference's weights, which follow the policy's by an exponential moving average and lose none of it to bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from rloom.models.low_bits import Piece, Value, join_float32, store_float32

ELEMENTS_AT_A_TIME = 1 << 22
"""Numbers mixed at once, 16 MiB in float32: a CPU maps larger buffers anew each time."""

LOW_BITS_SUFFIX = ":rest"
"""In a checkpoint, behind the name of the weight that low bits belong to."""


class Parts(Protocol):
    """How weights are cut over processes: each holds some rows of each weight (`training/processes.py`)."""

    def own_part(self, p: Tensor) -> Tensor:
        """What this process holds of a weight."""
        ...

    def first_row(self, p: Tensor) -> int:
        """The row of the whole weight at which that begins."""
        ...

    def joined(self, p: Tensor, part: Tensor) -> Tensor:
        """A whole of the values that processes have for their parts of a weight; in the main process, if they are
        several. All must ask for it."""
        ...


class Uncut:
    """This process holds all weights as a whole."""

    def own_part(self, p: Tensor) -> Tensor:
        """The weight."""
        return p

    def first_row(self, p: Tensor) -> int:
        """The first."""
        return 0

    def joined(self, p: Tensor, part: Tensor) -> Tensor:
        """The values as they are."""
        return part


class MovingAverage:
    """Weights by name that can move towards others: mine ← α·theirs + (1−α)·mine.

    A bfloat16 weight has 8 bits of precision: a hundredth of the way to another one is mostly less than the gap to the
    next bfloat16 number, and would be rounded away. Weights that shall move (`moves`) therefore have the bits that
    bfloat16 drops beside them, as the optimizer keeps them for the policy; the weight is what they round to.

    `parts`: how weights are cut, where each process moves its own rows.

    >>> weight = torch.ones(2, dtype=torch.bfloat16)
    >>> average = MovingAverage({"w": weight}, moves=True)
    >>> for _ in range(3):  # 3 steps of a thousandth, each below the spacing of bfloat16 at 1 (0.0078)
    ...     average.move([torch.full((2,), 2.0)], 0.001, lambda theirs, piece: theirs[piece])
    >>> average.value("w")
    tensor([1.0030, 1.0030])
    >>> for _ in range(3):
    ...     average.move([torch.full((2,), 2.0)], 0.001, lambda theirs, piece: theirs[piece])
    >>> weight
    tensor([1.0078, 1.0078], dtype=torch.bfloat16)
    """

    def __init__(self, weights: Mapping[str, Tensor], *, moves: bool, parts: Parts | None = None) -> None:
        self.weights, self.moves = dict(weights), moves
        self._parts = parts or Uncut()
        self.low_bits: dict[str, Tensor] = {}
        # Now, so that a run that has no memory for them fails at its start.
        for name in self.weights if moves else ():
            self._low_bits(name)

    @torch.no_grad()
    def begin_with(self, low_bits: Iterable[Tensor | None]) -> None:
        """Low bits to begin with, in the order of the weights; None for none."""
        for name, given in zip(self.weights, low_bits, strict=True):
            if given is not None and (own := self._low_bits(name)) is not None:
                own.copy_(given)

    @torch.no_grad()
    def move(self, others: Iterable[Tensor], alpha: float, value: Value) -> None:
        """Move towards the others, which come in the order of the weights; `value` tells what one of them stands for.

        A piece at a time: no float32 copy of all weights is made.
        """
        assert self.moves, "weights that stand still have no place for their low bits"
        for name, theirs in zip(self.weights, others, strict=True):
            mine, low_bits = self._own(name), self._low_bits(name)
            for piece in _pieces(mine):
                other = value(theirs, self._in_whole(name, piece))
                if low_bits is None:
                    mine[piece].mul_(1 - alpha).add_(other.to(mine), alpha=alpha)
                else:
                    _mix(mine[piece], low_bits[piece], other.float(), alpha)

    def _own(self, name: str) -> Tensor:
        return self._parts.own_part(self.weights[name])

    def _in_whole(self, name: str, piece: Piece) -> Piece:
        """Where a piece of this process' part is in the whole weight."""
        weight, part = self.weights[name], self._own(name)
        if part.shape == weight.shape:
            return piece
        first = self._parts.first_row(weight)
        rows = range(len(part))[piece if isinstance(piece, slice) else slice(None)]
        return slice(first + rows.start, first + rows.stop)

    def _low_bits(self, name: str) -> Tensor | None:
        """The low bits of a weight, on its device; None for one that has none.

        Weights may be cast, and moved to a device, after this object was made.
        """
        weight = self._own(name)
        if weight.dtype != torch.bfloat16:
            return None
        if name not in self.low_bits:
            self.low_bits[name] = torch.zeros_like(weight, dtype=torch.int16)
        self.low_bits[name] = self.low_bits[name].to(weight.device)
        return self.low_bits[name]

    def value(self, name: str) -> Tensor:
        """What a weight stands for, with its low bits."""
        weight = self._own(name)
        return join_float32(weight, self.low_bits[name]) if name in self.low_bits else weight

    def state_dict(self) -> dict[str, Tensor]:
        """The whole weights by name, and their low bits."""
        weights = {name: self._parts.joined(p, self._own(name).detach()) for name, p in self.weights.items()}
        return weights | {name + LOW_BITS_SUFFIX: self._joined_bits(name) for name in self.low_bits}

    def _joined_bits(self, name: str) -> Tensor:
        """The low bits of a whole weight. Not all backends of processes send numbers of 16 bits.

        All processes ask for them, also one that has all rows of a weight with few.
        """
        return self._parts.joined(self.weights[name], self.low_bits[name].int()).short()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights in, and their low bits; those that nobody saved are zero.

        They may have been saved in another dtype, as by another number of processes: float32 has the low bits itself.
        """
        for name in self.weights:
            rows, own = self._in_whole(name, ...), self._own(name)
            saved, bits = state[name][rows], state.get(name + LOW_BITS_SUFFIX)
            if bits is not None and saved.dtype == torch.bfloat16:
                saved = join_float32(saved, bits[rows])
            low_bits = self._low_bits(name) if self.moves else None
            if low_bits is None:
                own.copy_(saved)
            else:
                store_float32(saved.float(), own, low_bits)


def _mix(mine: Tensor, low_bits: Tensor, theirs: Tensor, alpha: float) -> None:
    """One piece, on the others' device: weights in the host's memory round as they would there."""
    word = join_float32(mine.to(theirs.device), low_bits.to(theirs.device))
    store_float32(word.mul_(1 - alpha).add_(theirs, alpha=alpha), mine, low_bits)


def _pieces(weight: Tensor) -> Iterator[Piece]:
    """What to index a weight with to see all of it in pieces of bounded size: some rows, a view however it lies."""
    if weight.numel() <= ELEMENTS_AT_A_TIME:
        yield ...
        return
    rows = max(1, ELEMENTS_AT_A_TIME * len(weight) // weight.numel())
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)
