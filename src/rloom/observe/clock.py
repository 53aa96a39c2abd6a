"""Where the time of a run goes: seconds by phase, by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PHASES = ("generation", "rewards", "reference", "update", "saving")
"""The phases of an update, which are logged as `time/…`."""
EVALUATION = "evaluation"
"""Another phase, of which transformers logs the seconds as `eval_runtime`. Nothing inside it is counted elsewhere."""


class PhaseClock:
    """Counts seconds by phase. A phase inside another one interrupts it, so that no second is counted twice.

    Nothing here waits for a device: what a GPU still has to do when the host goes on is counted in the phase in which
    the host waits for it.

    >>> clock = PhaseClock(now=iter([0.0, 3.0, 5.0, 6.0]).__next__)
    >>> with clock.measuring("update"):
    ...     with clock.measuring("reference"):
    ...         pass
    >>> clock.take()
    {'generation': 0.0, 'rewards': 0.0, 'reference': 2.0, 'update': 4.0, 'saving': 0.0}
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.reset()

    def reset(self) -> None:
        """Begin a run: nothing is measured yet."""
        self.totals = dict.fromkeys((*PHASES, EVALUATION), 0.0)
        # Seconds of the phases when `take` was last called.
        self._taken = dict(self.totals)
        # The phases that have begun and not ended, the innermost last, and since when each is there.
        self._open: list[tuple[str, float]] = []
        self._since = 0.0

    @contextmanager
    def measuring(self, phase: str) -> Iterator[None]:
        """Count the time of the block. In an evaluation nothing else is counted."""
        if any(name == EVALUATION for name, _ in self._open):
            yield
            return
        depth = len(self._open)
        self.enter(phase)
        try:
            yield
        finally:
            self._leave(depth)

    def enter(self, phase: str) -> None:
        """Begin a phase that does not end with a block of code. It ends with `leave`."""
        now = self._now()
        self._count(now)
        self._open.append((phase, now))

    def leave(self, phase: str) -> bool:
        """End a phase and all that began inside it. Returns whether it had begun."""
        depths = [depth for depth, (name, _) in enumerate(self._open) if name == phase]
        if depths:
            self._leave(depths[0])
        return bool(depths)

    def _leave(self, depth: int) -> None:
        # An error may have left inner phases open, or a new run may have begun.
        if len(self._open) > depth:
            self._count(self._now())
            del self._open[depth:]

    def _count(self, now: float) -> None:
        """Add the time since the last change to the innermost phase."""
        if self._open:
            self.totals[self._open[-1][0]] += now - self._since
        self._since = now

    def take(self) -> dict[str, float]:
        """The seconds of an update's phases since this was last called."""
        found = {phase: self.totals[phase] - self._taken[phase] for phase in PHASES}
        self._taken = dict(self.totals)
        return found

    def current(self) -> tuple[str, float] | None:
        """The phase that is going on, and for how many seconds. None between phases.

        >>> clock = PhaseClock(now=iter([0.0, 2.0]).__next__)
        >>> clock.enter("generation")
        >>> clock.current()
        ('generation', 2.0)
        """
        # Another thread may ask while the phase ends.
        for phase, began in self._open[-1:]:
            return phase, self._now() - began
        return None
