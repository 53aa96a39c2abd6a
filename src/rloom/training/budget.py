"""How many tokens a micro-batch may have: asked for or decided at the start, and less where memory has run out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from rloom.printable import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

SMALLEST = 16
NO_GRAD_FACTOR = 8  # how many times more tokens a forward may have when nothing is kept for a backward


class TokenBudget:
    """Tokens per micro-batch. Shrinks when memory runs out, and stays shrunk."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self.asked = tokens
        self.tried = False  # whether the worst case has been run
        self.factor = NO_GRAD_FACTOR  # shrinks by itself, where a pass without gradient runs out

    @property
    def without_gradient(self) -> int:
        """Tokens per micro-batch where nothing is kept for a backward."""
        return self.tokens * self.factor

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, and on what machine: it holds for no other."""
        learnt = {"tokens": self.tokens, "factor": self.factor, "tried": self.tried}
        return {**learnt, "asked": self.asked, "device": _device()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was learnt, so that micro-batches are cut as before; on another machine, begin anew."""
        if state.get("device") == _device() and state.get("asked") == self.asked:
            self.tokens, self.tried = state["tokens"], state["tried"]
            self.factor = state.get("factor", self.factor)

    def retrying(self, work: Callable[[], T], undo: Callable[[], None] | None = None, *, gradient: bool = True) -> T:
        """Do some work; out of memory, `undo` what it has done and do it again in smaller pieces.

        With gradients taken back by `undo`, they are those of one clean run: nothing of the failed one is kept, also
        when it failed in the middle of a backward. Random draws (dropout) are repeated. `gradient`: whether the work
        has a backward, and so which of the two budgets it is cut by.
        """
        while True:
            randomness = random_state()
            before = self._allowed(gradient)
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if before <= SMALLEST:
                    raise
                self._shrink(gradient)
                reason = str(error).splitlines()[0][:120]
            if undo is not None:  # outside of `except`: the error holds on to the failed run's tensors
                undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            restore_random_state(randomness)
            logger.warning(
                "out of memory (%s): it is done again with at most %d tokens per micro-batch, %d before; the "
                "result is the same",
                reason,
                self._allowed(gradient),
                before,
            )

    def _allowed(self, gradient: bool) -> int:
        return self.tokens if gradient else self.without_gradient

    def _shrink(self, gradient: bool) -> None:
        """Halve the budget. A pass without gradient first gives up what it may have more than an update: that it ran
        out says nothing about updates until it has as few tokens as they."""
        if not gradient and self.factor > 1:
            self.factor //= 2
        else:
            self.tokens = max(SMALLEST, self.tokens // 2)


def _device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{properties.name}, {properties.total_memory}"


def random_state() -> tuple[Any, Any]:
    """Of the host's and the GPU's generators."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


def restore_random_state(state: tuple[Any, Any]) -> None:
    """As if nothing had been drawn since."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
