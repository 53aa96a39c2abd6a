"""A bound on what a sandbox takes as a whole: a control group of its own, where there is one that we may write to.

Limits of processes hold for each of them, so a program that forks has its limit several times over. The kernel counts
the memory of a group together, and ends a process of that group when there is no more. Where this process may make no
groups (in most containers, for most users), sandboxes do without: see docs/rewards.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import subprocess
import time
from pathlib import Path

from rloom.printable import get_logger

logger = get_logger(__name__)

JOIN = 'echo $$ >"$1"'
PREFIX = "rloom-"
END_SECONDS = 1.0
_numbers = itertools.count()
# Groups whose last process had not ended yet when it was killed.
_left: list[Path] = []


class ControlGroup:
    """A control group whose processes together have at most so many bytes of memory."""

    def __init__(self, parent: Path, max_bytes: int) -> None:
        self.folder = parent / f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self.folder.mkdir()
        try:
            if (self.folder / "memory.max").exists():
                (self.folder / "memory.max").write_text(str(max_bytes))
                _write_if_there(self.folder / "memory.swap.max", 0)
            else:
                (self.folder / "memory.limit_in_bytes").write_text(str(max_bytes))
                _write_if_there(self.folder / "memory.memsw.limit_in_bytes", max_bytes)
        except OSError:
            self.folder.rmdir()
            raise

    @property
    def processes(self) -> Path:
        """The file that takes the number of a process that joins."""
        return self.folder / "cgroup.procs"

    def close(self) -> None:
        """Remove it, now or when its last process has ended."""
        _left.append(self.folder)
        remove_empty()


def new_group(max_bytes: int) -> ControlGroup | None:
    """A control group for a sandbox; None where there can be none."""
    folder = parent()
    if folder is None:
        return None
    try:
        return ControlGroup(folder, max_bytes)
    except OSError as error:
        # There are too many of them, say.
        logger.info("a sandbox has no limit on its memory as a whole: %s", error)
        return None


def remove_empty() -> None:
    """Remove the groups whose processes have all ended."""
    for folder in list(_left):
        # A group that is busy is removed next time.
        with contextlib.suppress(OSError):
            folder.rmdir()
        if not folder.exists():
            # Another thread may have been first.
            with contextlib.suppress(ValueError):
                _left.remove(folder)


@functools.cache
def parent() -> Path | None:
    """The folder that groups can be made in, found out once by making one and having a process join it."""
    try:
        places = candidates(Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text())
    except OSError:
        # This is not Linux.
        return None
    for place in places:
        try:
            _try(place)
        except (OSError, subprocess.SubprocessError) as error:
            logger.info("sandboxes cannot have control groups in %s: %s", place, error)
            continue
        _remove_stale(place)
        atexit.register(_at_exit)
        return place
    return None


def candidates(groups: str, mounts: str) -> list[Path]:
    """Where groups with a bound on memory might be made, by what the kernel says of this process and its mounts.

    In version 1 that is below this process's own group. In version 2 a group that has processes has no bounded groups
    below it, so it is beside the own one.

    >>> mounts = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
    >>> candidates("4:memory:/user", mounts)
    [PosixPath('/sys/fs/cgroup/memory/user')]
    """
    found = []
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        root, where = fields.split()[3:5]
        name, _, options = kind.split(maxsplit=2)
        if name == "cgroup" and "memory" in options.split(","):
            own = next((g.split(":", 2)[2] for g in groups.splitlines() if "memory" in g.split(":")[1].split(",")), "")
        elif name == "cgroup2":
            own = next((g.split(":", 2)[2] for g in groups.splitlines() if g.startswith("0::")), "")
        else:
            continue
        if own and (own + "/").startswith(root.rstrip("/") + "/"):
            folder = Path(where, os.path.relpath(own, root))
            found += [folder] if name == "cgroup" else [folder, folder.parent] if folder != Path(where) else [folder]
    return found


def _try(place: Path) -> None:
    trial = ControlGroup(place, 2**28)
    try:
        line = ["sh", "-c", JOIN, "sh", str(trial.processes)]
        subprocess.run(line, check=True, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        trial.close()


def _remove_stale(place: Path) -> None:
    """Remove the groups that were left by a process that was killed."""
    for folder in place.glob(f"{PREFIX}*-*"):
        pid = folder.name.removeprefix(PREFIX).split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _at_exit() -> None:
    end = time.monotonic() + END_SECONDS
    remove_empty()
    while _left and time.monotonic() < end:
        time.sleep(0.01)
        remove_empty()


def _write_if_there(path: Path, number: int) -> None:
    """Write a limit on swap, where the kernel counts that."""
    if path.exists():
        path.write_text(str(number))
