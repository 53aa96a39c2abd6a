"""How many tokens a micro-batch may have: asked for, found from free memory, learnt from running out of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

SMALLEST = 16
LARGEST = 32_768  # beyond that a GPU is busy anyway
HEADROOM = 0.85  # of the memory that is free; the rest is for fragments, and for what comes later


class TokenBudget:
    """Tokens per micro-batch. Shrinks when memory runs out, and stays shrunk."""

    def __init__(self, tokens: int) -> None:
        self.tokens = self.asked = tokens
        self.tried = False  # whether the worst case has been run

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, and on what machine: it holds for no other."""
        return {"tokens": self.tokens, "tried": self.tried, "asked": self.asked, "device": _device()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was learnt, so that micro-batches are cut as before; on another machine, begin anew."""
        if state.get("device") == _device() and state.get("asked") == self.asked:
            self.tokens, self.tried = state["tokens"], state["tried"]

    def retrying(self, work: Callable[[], T], undo: Callable[[], None] | None = None) -> T:
        """Do some work; out of memory, `undo` what it has done and do it again in smaller pieces.

        With gradients taken back by `undo`, they are those of one clean run: nothing of the failed one is kept, also
        when it failed in the middle of a backward. Random draws (dropout) are repeated.
        """
        while True:
            randomness = random_state()
            try:
                return work()
            except torch.OutOfMemoryError as error:
                if self.tokens <= SMALLEST:
                    raise
                before, self.tokens = self.tokens, max(SMALLEST, self.tokens // 2)
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
                self.tokens,
                before,
            )


def fitted(tokens: int, used: int, free: int) -> int:
    """The budget that fits `free` bytes when `tokens` took `used`: in powers of two, up to LARGEST.

    >>> fitted(8192, used=8 << 30, free=40 << 30)
    32768
    >>> fitted(8192, used=8 << 30, free=6 << 30)
    4096
    """
    size = SMALLEST
    while size * 2 <= LARGEST and used / tokens * size * 2 <= free * HEADROOM:
        size *= 2
    return size


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
