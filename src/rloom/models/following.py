"""Weights that follow others a little at a time, and lose none of it to bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import EllipsisType

import torch
from torch import Tensor

from rloom.models.precision import Value, join, split

ELEMENTS_AT_A_TIME = 1 << 22  # mixed at once, 16 MiB in float32: a CPU maps larger buffers anew each time
REST = ":rest"  # in a checkpoint, behind the name of the weight that the bits belong to


class FollowingWeights:
    """Weights by name that can move towards others: mine ← α·theirs + (1−α)·mine.

    A bfloat16 weight has 8 bits of precision: a hundredth of the way to another one is mostly less than the gap to the
    next bfloat16 number, and would be rounded away. Weights that shall move (`moves`) therefore have the bits that
    bfloat16 drops beside them, as the optimizer keeps them for the policy; the weight is what they round to.

    >>> weight = torch.ones(2, dtype=torch.bfloat16)
    >>> following = FollowingWeights({"w": weight}, moves=True)
    >>> for _ in range(3):  # 3 steps of a thousandth, each below the spacing of bfloat16 at 1 (0.0078)
    ...     following.move([torch.full((2,), 2.0)], 0.001, lambda theirs, piece: theirs[piece])
    >>> following.value("w")
    tensor([1.0030, 1.0030])
    >>> for _ in range(3):
    ...     following.move([torch.full((2,), 2.0)], 0.001, lambda theirs, piece: theirs[piece])
    >>> weight
    tensor([1.0078, 1.0078], dtype=torch.bfloat16)
    """

    def __init__(self, weights: Mapping[str, Tensor], *, moves: bool) -> None:
        self.weights, self.moves = dict(weights), moves
        self.rests: dict[str, Tensor] = {}
        for name in self.weights if moves else ():
            self._rest(name)  # now, so that a run that has no memory for them fails at its start

    @torch.no_grad()
    def begin_with(self, rests: Iterable[Tensor | None]) -> None:
        """Dropped bits to begin with, in the order of the weights; None for none."""
        for name, given in zip(self.weights, rests, strict=True):
            if given is not None and (rest := self._rest(name)) is not None:
                rest.copy_(given)

    @torch.no_grad()
    def move(self, others: Iterable[Tensor], alpha: float, value: Value) -> None:
        """Move towards the others, which come in the order of the weights; `value` tells what one of them stands for.

        A piece at a time: no float32 copy of all weights is made.
        """
        assert self.moves, "weights that stand still have no place for the bits that bfloat16 drops"
        for (name, mine), theirs in zip(self.weights.items(), others, strict=True):
            rest = self._rest(name)
            for piece in _pieces(mine):
                if rest is None:
                    mine[piece].mul_(1 - alpha).add_(value(theirs, piece).to(mine), alpha=alpha)
                else:
                    _mix(mine[piece], rest[piece], value(theirs, piece).float(), alpha)

    def _rest(self, name: str) -> Tensor | None:
        """The dropped bits of a weight, beside it; None for one that drops none. Weights may be cast and moved to a
        device after this was made."""
        weight = self.weights[name]
        if weight.dtype != torch.bfloat16:
            return None
        if name not in self.rests:
            self.rests[name] = torch.zeros_like(weight, dtype=torch.int16)
        self.rests[name] = self.rests[name].to(weight.device)
        return self.rests[name]

    def value(self, name: str) -> Tensor:
        """What a weight stands for, with the bits that it dropped."""
        return join(self.weights[name], self.rests[name]) if name in self.rests else self.weights[name]

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name, and their dropped bits."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        return weights | {name + REST: rest for name, rest in self.rests.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the weights in, and their dropped bits; those that nobody saved are zero."""
        for name, weight in self.weights.items():
            weight.copy_(state[name])
        for name in self.weights if self.moves else ():
            if (rest := self._rest(name)) is not None:
                rest.copy_(state.get(name + REST, torch.zeros_like(rest)))


def _mix(mine: Tensor, rest: Tensor, theirs: Tensor, alpha: float) -> None:
    """One piece, on the others' device: weights in the host's memory round as they would there."""
    word = join(mine.to(theirs.device), rest.to(theirs.device))
    weight, dropped = split(word.mul_(1 - alpha).add_(theirs, alpha=alpha))
    mine.copy_(weight)
    rest.copy_(dropped)


def _pieces(weight: Tensor) -> Iterator[slice | EllipsisType]:
    """What to index a weight with to see all of it in pieces of bounded size: some rows, a view however it lies."""
    if weight.numel() <= ELEMENTS_AT_A_TIME:
        yield ...
        return
    rows = max(1, ELEMENTS_AT_A_TIME * len(weight) // weight.numel())
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)
