"""What the processes of a sandbox are doing, by what the kernel says of them in /proc."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

RUNNABLE = "R"
# The most processes that are looked at: a sandbox has far fewer.
MAX_PROCESSES = 1000


def cpu_use(pids: Iterable[int]) -> tuple[bool, float]:
    """Whether any of some processes, or of what they started, runs or waits for a core; and the CPU seconds that all of
    them have used, with those that have ended and were waited for. (True, 0) where the kernel does not tell."""
    if not _children(os.getpid(), threading.get_native_id()).exists():
        return True, 0.0
    runnable, ticks = False, 0
    for pid in _tree(pids):
        try:
            # User and system time, of the process itself and of its children.
            ticks += sum(map(int, _fields(Path(f"/proc/{pid}/stat"))[11:15]))
            states = (_fields(task / "stat")[0] for task in Path(f"/proc/{pid}/task").iterdir())
            runnable = runnable or RUNNABLE in states
        except OSError:
            # The process has ended.
            continue
    return runnable, ticks / os.sysconf("SC_CLK_TCK")


def _tree(pids: Iterable[int]) -> Iterator[int]:
    left, seen = list(pids), 0
    while left and seen < MAX_PROCESSES:
        pid = left.pop()
        seen += 1
        yield pid
        try:
            for task in os.listdir(f"/proc/{pid}/task"):
                left += map(int, _children(pid, int(task)).read_text().split())
        except OSError:
            continue


def _children(pid: int, thread: int) -> Path:
    return Path(f"/proc/{pid}/task/{thread}/children")


def _fields(stat: Path) -> list[str]:
    """What follows a process's name, which may hold anything; the first is its state."""
    return stat.read_text(errors="replace").rpartition(")")[2].split()
