"""Says which rewards are still running after half a minute, by name: a slow one looks like a run that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rloom.printable import get_logger

logger = get_logger(__name__)

SAID_AFTER = 30.0
"""Seconds after which a reward is said to be running, and again whenever they have doubled."""
LOOKS_EVERY = 1.0


@dataclass(slots=True)
class Running:
    """A reward whose scores are awaited."""

    count: int  # completions that it is asked about
    began: float
    said_at: float  # seconds after which it is said next
    calls: list[tuple[int, Future[Any]]] = field(default_factory=list)  # completions of each call, once all have begun

    def words(self) -> str:
        """How many completions are scored, where that is known."""
        done = sum(size for size, future in self.calls if future.done())
        return f": {done} of {self.count} completions are scored" if done else f", on {self.count} completions"


class StillRunning:
    """Watches the rewards that a rollout's scoring waits for, from a thread of its own.

    >>> with StillRunning() as watch:
    ...     watch.begin("slow", count=4)
    ...     watch.end("slow")
    """

    def __init__(self, after: float | None = None) -> None:
        self.after = SAID_AFTER if after is None else after
        self._running: dict[str, Running] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rloom-still-running", daemon=True)

    def __enter__(self) -> StillRunning:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def begin(self, name: str, *, count: int) -> None:
        """From now on a reward is waited for."""
        self._running[name] = Running(count, time.monotonic(), self.after)

    def begun(self, name: str, calls: Sequence[tuple[int, Future[Any]]]) -> None:
        """A reward runs elsewhere, in these calls, each with its number of completions."""
        self._running[name].calls = list(calls)
        if all(future.done() for _, future in calls):
            self.end(name)

    def end(self, name: str) -> None:
        """Its scores are there."""
        self._running.pop(name, None)

    def _watch(self) -> None:
        while not self._over.wait(min(LOOKS_EVERY, self.after)):
            # The scoring adds and removes entries meanwhile.
            for name, running in list(self._running.items()):
                self._say(name, running)

    def _say(self, name: str, running: Running) -> None:
        seconds = time.monotonic() - running.began
        finished = bool(running.calls) and all(future.done() for _, future in running.calls)
        if seconds < running.said_at or finished:
            return
        running.said_at = 2 * seconds
        logger.warning("the reward '%s' has been running for %.0f s%s", name, seconds, running.words())
