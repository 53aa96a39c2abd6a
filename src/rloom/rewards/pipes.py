"""Pipes to processes that cannot be trusted to go on: made and closed together, read and written by a deadline."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pipes(*names: str) -> Iterator[dict[str, int]]:
    """New pipes, as descriptors `NAME_read` and `NAME_write`. Those still in the dict at the end are closed."""
    fds: dict[str, int] = {}
    try:
        for name in names:
            fds[f"{name}_read"], fds[f"{name}_write"] = os.pipe()
        yield fds
    finally:
        close(fds, *fds)


def close(fds: dict[str, int], *names: str) -> None:
    """Close some of the descriptors, and take them out of the dict."""
    for name in names:
        os.close(fds.pop(name))


class Deadline:
    """A point in time until which pipes are read and written."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def wait(self, fd: int, event: int) -> None:
        """Wait until a pipe can be read or written; `TimeoutError` when the deadline comes first."""
        if not is_ready(fd, event, self.end - time.monotonic()):
            raise TimeoutError

    def read(self, fd: int, size: int) -> bytes:
        """Read at most `size` bytes."""
        self.wait(fd, select.POLLIN)
        return os.read(fd, size)

    def write(self, fd: int, data: memoryview) -> int:
        """Write what the pipe takes. The descriptor must not block."""
        self.wait(fd, select.POLLOUT)
        return os.write(fd, data)


def is_ready(fd: int, event: int, seconds: float) -> bool:
    """Whether a pipe can be read or written before some seconds are over."""
    # select() knows no descriptors above 1023, which a training process may have.
    poll = select.poll()
    poll.register(fd, event)
    return seconds > 0 and bool(poll.poll(seconds * 1000))
