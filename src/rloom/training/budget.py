"""The token budget of a micro-batch, which shrinks when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from rloom.printable import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

SMALLEST = 16
"""The budget shrinks no further. An update that still runs out of memory then ends the run."""

NO_GRAD_FACTOR = 8
"""How many times more tokens a forward may have when nothing is kept for a backward."""


class TokenBudget:
    """Tokens per micro-batch. Shrinks when memory runs out, and stays shrunk."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self.asked = tokens
        # Whether the worst case has been run.
        self.tried = False
        # The factor shrinks by itself when a pass without gradient runs out of memory.
        self.factor = NO_GRAD_FACTOR

    @property
    def without_gradient(self) -> int:
        """Tokens per micro-batch where nothing is kept for a backward."""
        return self.tokens * self.factor

    def state_dict(self) -> dict[str, Any]:
        """The budget that was found to fit, and the machine: it holds for no other."""
        learnt = {"tokens": self.tokens, "factor": self.factor, "tried": self.tried}
        return {**learnt, "asked": self.asked, "device": _device()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the budget, so that micro-batches are cut as before. On another machine the budget begins anew."""
        if state.get("device") == _device() and state.get("asked") == self.asked:
            self.tokens, self.tried = state["tokens"], state["tried"]
            self.factor = state.get("factor", self.factor)

    def retrying(self, work: Callable[[], T], undo: Callable[[], None] | None = None, *, gradient: bool = True) -> T:
        """Do some work. Out of memory, `undo` its effects and repeat it in smaller micro-batches.

        `undo` takes the gradients of the failed attempt back, also of one that failed in the middle of a backward: the
        result is that of one clean run. Random draws (dropout) are repeated. `gradient`: whether the work has a
        backward, which decides which of the two budgets applies.
        """
        while True:
            randomness = random_state()
            before = self.allowed(gradient)
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if before <= SMALLEST:
                    raise
                self._shrink(gradient)
                reason = str(error).splitlines()[0][:120]
            # This runs outside of `except`, since the error holds references to the failed attempt's tensors.
            if undo is not None:
                undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            restore_random_state(randomness)
            logger.warning(
                "out of memory (%s): it is done again with at most %d tokens per micro-batch, %d before; the "
                "result is the same",
                reason,
                self.allowed(gradient),
                before,
            )

    def allowed(self, gradient: bool) -> int:
        """Tokens per micro-batch, with or without a backward."""
        return self.tokens if gradient else self.without_gradient

    def size(self) -> tuple[int, int]:
        """Tokens per micro-batch, and how many times more there are without a backward."""
        return self.tokens, self.factor

    def shrink_with(self, sizes: Sequence[tuple[int, int]], failed: Sequence[int], *, gradient: bool) -> bool:
        """Take on the smallest of all processes' budgets, and a smaller one than those that have `failed` had.

        All have the same one then. False: there is none so small.

        >>> budget = TokenBudget(64)
        >>> budget.shrink_with([(64, 8), (512, 8)], failed=[1], gradient=True), budget.tokens
        (True, 64)
        >>> budget.shrink_with([(64, 8), (64, 8)], failed=[0], gradient=True), budget.tokens
        (True, 32)
        """
        had = min(sizes[rank][0] * (1 if gradient else sizes[rank][1]) for rank in failed)
        if had <= SMALLEST:
            return False
        self.tokens, self.factor = min(tokens for tokens, _ in sizes), min(factor for _, factor in sizes)
        if self.allowed(gradient) >= had:
            self._shrink(gradient)
        return True

    def _shrink(self, gradient: bool) -> None:
        """Halve the budget. A pass without gradient first halves its own factor: as long as it has more tokens than an
        update, its failure says nothing about updates."""
        if not gradient and self.factor > 1:
            self.factor //= 2
        else:
            self.tokens = max(SMALLEST, self.tokens // 2)


def _device() -> str:
    """The name and memory of the device, as a checkpoint records it."""
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory}"


def random_state() -> tuple[Any, Any]:
    """The state of the host's and the GPU's random generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def restore_random_state(state: tuple[Any, Any]) -> None:
    """Set both generators back, as if nothing had been drawn since."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
