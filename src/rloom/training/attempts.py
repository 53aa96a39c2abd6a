"""Out of memory in one of several processes that run in step: all of them do it again in smaller micro-batches.

Where weights or gradients are sharded, a micro-batch has collectives: layers are gathered, gradients are summed. Where
a process fails, the others wait for it in the next one. So it first runs the rest of the attempt with idle
micro-batches. Every micro-batch of every process has the same collectives in the same order. The first idle one stands
in for the one that has failed, and leaves out as many as that had taken part in. What it computes is wrong, and is
thrown away: at the attempt's end all processes hear that one has failed, and all undo and repeat it.

Without a backward, what a forward has gathered may stay for the next one, so that micro-batches differ. There the whole
attempt is run again by idle ones, and all collectives so far are left out. So it always is under DeepSpeed.

How collectives are counted, and how a failed micro-batch is forgotten, is in `sharded_attempts.py` for FSDP2 and in
`zero_attempts.py` for DeepSpeed.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloom.errors import ProcessError
from rloom.printable import get_logger
from rloom.training.budget import SMALLEST, TokenBudget, random_state, restore_random_state
from rloom.training.exchange import explaining_lost_peers
from rloom.training.processes import Processes

logger = get_logger(__name__)

T = TypeVar("T")


class Collectives:
    """Counts the collectives of a micro-batch, and leaves out the first ones of a micro-batch that catches up.

    >>> collectives, output = Collectives(), torch.ones(2)
    >>> collectives.begin(left_out=1)
    >>> collectives.run(lambda: "sent", output), output, collectives.run(lambda: "sent", output), collectives.done
    (None, tensor([0., 0.]), 'sent', 2)
    """

    def __init__(self) -> None:
        self.done = self.left_out = 0

    def begin(self, *, left_out: int = 0) -> None:
        """Begin a micro-batch."""
        self.done, self.left_out = 0, left_out

    def run(self, collective: Callable[[], Any], output: Tensor) -> Any:
        """Take part in a collective, or leave it out. Its output is then zeros: what memory held may be NaN."""
        if self.done < self.left_out:
            output.zero_()
            result = None
        else:
            result = collective()
        # Counted when it is under way: what fails before that, such as its memory, has not joined the others.
        self.done += 1
        return result


class Attempts(ABC):
    """Attempts that all processes make together. Subclasses say what they run, and how it is left and forgotten."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.collectives = Collectives()
        # How many micro-batches of this attempt are not done. None: processes have not agreed on their number yet.
        self.left: int | None = None

    def begin(self, rounds: int) -> None:
        """All processes run so many micro-batches now."""
        self.left = rounds
        self.collectives.begin()

    def micro_batch_done(self) -> None:
        """A micro-batch is done, forward and backward. A pass without gradient does not call this."""
        if self.left is not None:
            self.left -= 1
        self.collectives.begin()

    def retrying(
        self,
        budget: TokenBudget,
        work: Callable[[], T],
        *,
        undo: Callable[[], None] | None,
        idle: Callable[[bool], None],
        gradient: bool,
    ) -> T:
        """Do some work in all processes. Where one runs out of memory, all undo it and repeat it in smaller pieces.

        `idle` runs a micro-batch from which nothing is learnt, and is told whether it is the attempt's last one. The
        rest is as in `TokenBudget.retrying`.
        """
        while True:
            randomness, before = random_state(), budget.allowed(gradient)
            self._end()
            result, reason = _attempted(work)
            if reason is not None:
                with explaining_lost_peers():
                    self._go_along(idle, gradient)
            # Also where all is well: work that this was a part of has not begun its own micro-batches.
            self._end()
            found = self.processes.gather((reason, budget.size()))
            failed = {rank: reason for rank, (reason, _) in enumerate(found) if reason is not None}
            if not failed:
                return result  # type: ignore[return-value]
            # Nothing of this attempt is kept meanwhile.
            result = None
            if not budget.shrink_with([size for _, size in found], list(failed), gradient=gradient):
                raise torch.OutOfMemoryError(
                    f"{_words(failed)}: micro-batches of {SMALLEST} tokens, the smallest, do not fit"
                )
            self._drop_attempt()
            if undo is not None:
                undo()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            restore_random_state(randomness)
            if self.processes.is_main:
                logger.warning(
                    "%s: all do it again with at most %d tokens per micro-batch, %d before; the result is the same",
                    _words(failed),
                    budget.allowed(gradient),
                    before,
                )

    def _end(self) -> None:
        """No attempt is under way: nothing is left to do, and nothing to be left out."""
        self.left = None
        self.collectives.begin()

    def _go_along(self, idle: Callable[[bool], None], gradient: bool) -> None:
        """After a failure: run the rest of the attempt with the others, in idle micro-batches."""
        # The failed attempt may be in circles of references, with its memory.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        left, left_out = self.left, self.collectives.done
        if left is None:
            # This process failed before all agreed on a number, and has nothing to run.
            left, left_out = self.processes.rounds(0), 0
        self._forget_micro_batch()
        self.collectives.begin(left_out=left_out)
        for number in range(1, left + 1):
            idle(number == left)
            if self.collectives.done < left_out and (number == left or self._stands_in(gradient)):
                raise ProcessError(
                    f"after running out of memory this process cannot join the others again: an idle micro-batch "
                    f"has {self.collectives.done} collectives, and the one that failed had {left_out}. Does "
                    "compute_loss run the model more than once?"
                )

    def _stands_in(self, gradient: bool) -> bool:
        """Whether the first idle micro-batch stands in for the one that has failed, not for the attempt's first."""
        return gradient

    @abstractmethod
    def _forget_micro_batch(self) -> None:
        """Forget the micro-batch that has failed in this process."""

    @abstractmethod
    def _drop_attempt(self) -> None:
        """Drop what an attempt that has failed somewhere has left, in all processes, but for the gradients."""


def _attempted(work: Callable[[], T]) -> tuple[T | None, str | None]:
    """What the work returns, or why memory ran out. The error itself would keep the attempt's tensors."""
    try:
        return work(), None
    except torch.OutOfMemoryError as error:
        return None, (str(error).splitlines() or [""])[0][:120]


def _words(failed: dict[int, str]) -> str:
    """
    >>> _words({1: "tried to allocate 2 GiB"}), _words({0: "", 3: ""})
    ('out of memory in process 1 (tried to allocate 2 GiB)', 'out of memory in process 0, 3')
    """
    reason = next(iter(failed.values()))
    return f"out of memory in process {', '.join(map(str, failed))}" + (f" ({reason})" if reason else "")
