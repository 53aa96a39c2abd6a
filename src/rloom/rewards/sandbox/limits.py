"""How much a sandbox may use."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Megabytes that the kernel may need for the processes of a sandbox, beside their own memory.
OVERHEAD_MB = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one sandbox. Memory is per process, and where there are control groups also for all processes together;
    `processes` counts threads too."""

    seconds: float = 5.0
    memory_mb: int = 512
    disk_mb: int = 16
    processes: int = 4
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def total_bytes(self) -> int:
        """Memory of the sandbox as a whole: /tmp is memory too, and the kernel has some for each process."""
        return (self.memory_mb + self.disk_mb + OVERHEAD_MB) * 2**20

    def as_rlimits(self, ours: int = 2) -> dict[str, int]:
        """The resource limits that a process sets itself before it runs what it was given. Of the processes, some are
        `ours`: the sandbox's first, and the one that runs the program or waits for it."""
        return {
            "RLIMIT_AS": self.memory_mb * 2**20,
            # One second more: Python has used some CPU time before the program begins.
            "RLIMIT_CPU": math.ceil(self.seconds) + 1,
            "RLIMIT_FSIZE": self.disk_mb * 2**20,
            "RLIMIT_NPROC": self.processes + ours,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            # Covers timers too, which the kernel counts for all processes of a user.
            "RLIMIT_SIGPENDING": 64,
        }
