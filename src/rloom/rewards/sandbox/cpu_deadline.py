"""A deadline for programs on a machine whose cores may be busy with something else."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rloom.rewards.pipes import Deadline, is_ready
from rloom.rewards.sandbox.process_tree import cpu_use

if TYPE_CHECKING:
    from rloom.rewards.sandbox.sandbox import Sandbox

# The most that a program may take by the clock on a busy machine, as a multiple of its time limit.
MAX_STRETCH = 5
# An extension of the deadline by less than this many seconds is not worth another wait.
WORTH_WAITING = 0.005
# How often the processes of a program that takes its time are looked at.
LOOK_SECONDS = 0.05


class CpuDeadline(Deadline):
    """A time limit that a busy machine extends, so that it fails no right program.

    For each second in which processes of the machine waited for a core while a process of the program's sandboxes was
    runnable, there are `MAX_STRETCH` more. The whole stays below `MAX_STRETCH` times the limit, and there is no
    extension once the program's processes together have used more than the limit and one second of CPU time.
    """

    def __init__(self, seconds: float, *sandboxes: Sandbox) -> None:
        super().__init__(seconds)
        self.seconds, self.sandboxes = seconds, sandboxes
        self.began = self.looked = time.monotonic()
        self.stalled, self.waited = stalled_seconds(), 0.0

    @property
    def over(self) -> bool:
        """Whether the limit has passed by the clock: what ends then has used up its CPU time."""
        return time.monotonic() - self.began >= self.seconds

    def wait(self, fd: int, event: int) -> None:
        """Wait until a pipe can be read or written; `TimeoutError` when the deadline comes first."""
        while not is_ready(fd, event, min(self.end - time.monotonic(), LOOK_SECONDS)):
            if not self._extended():
                raise TimeoutError

    def _extended(self) -> bool:
        """Whether there is time left, with what the machine's other work has taken since the last look."""
        now, stalled = time.monotonic(), stalled_seconds()
        pids = [sandbox.process.pid for sandbox in self.sandboxes]
        runnable, used = cpu_use(pids) if pids else (True, 0.0)
        if runnable:
            self.waited += self._contention(now, stalled)
        self.looked, self.stalled = now, stalled
        more = MAX_STRETCH * self.waited if used < self.seconds + 1 else 0.0
        self.end = self.began + min(self.seconds + more, MAX_STRETCH * self.seconds)
        return self.end > now + WORTH_WAITING

    def _contention(self, now: float, stalled: float | None) -> float:
        """The seconds since the last look in which processes waited for a core; by the load where the kernel does not
        count them."""
        if stalled is not None and self.stalled is not None:
            return stalled - self.stalled
        return now - self.looked if os.getloadavg()[0] > (os.cpu_count() or 1) else 0.0


def stalled_seconds() -> float | None:
    """The seconds since the machine started in which processes waited for a core, on the mean of its cores (pressure
    stall information). None where the kernel does not count it."""
    try:
        with open("/proc/pressure/cpu") as file:
            return int(file.readline().rsplit("total=", 1)[1]) / 1e6
    except (OSError, ValueError, IndexError):
        return None
