"""The most memory that this process has held."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")


def most_held() -> int:
    """The high-water mark of this process's resident memory, in bytes: since it began, whatever is freed by now.

    On Linux it is asked of the kernel's status file: `ru_maxrss` begins at the size of the process that started this
    one.
    """
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
