"""What processes that train together tell each other: plain objects and numbers.

It goes over a process group on the host, so that no GPU waits for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rloom.errors import ProcessError
from rloom.training.heartbeat import Heartbeat, begin


class Exchange:
    """This process among those that train together. Without arguments: a process that trains alone.

    All processes must call every method in the same order, except the properties.

    >>> alone = Exchange()
    >>> alone.gather("mine"), alone.total(3, 4), alone.any(False), alone.is_main
    (['mine'], [3, 4], False, True)
    """

    def __init__(self, rank: int = 0, count: int = 1, *, group: Any = None) -> None:
        self.rank, self.count, self._group = rank, count, group

    @property
    def alone(self) -> bool:
        """Whether there is only one process."""
        return self.count == 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that logs and writes."""
        return self.rank == 0

    # -- plain objects

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in their order."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.count
        with explaining_lost_peers():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def to_main(self, value: Any) -> list[Any]:
        """The values of all processes, at the main one; an empty list at the others."""
        if self.alone:
            return [value]
        values: list[Any] | None = [None] * self.count if self.is_main else None
        with explaining_lost_peers():
            dist.gather_object(None if self.is_main else value, values, dst=0, group=self._group)
        return [value, *values[1:]] if values else []

    def from_main(self, value: Any) -> Any:
        """The main process' value, at all processes."""
        if self.alone:
            return value
        values = [value if self.is_main else None]
        with explaining_lost_peers():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def total(self, *numbers: float) -> list[Any]:
        """The sums of the numbers over all processes."""
        return [sum(column) for column in zip(*self.gather(numbers), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process."""
        return any(self.gather(bool(flag)))

    def wait(self) -> None:
        """Wait until all processes are here, for example before one reads a file that another writes."""
        if not self.alone:
            with explaining_lost_peers():
                dist.barrier(group=self._group)

    def check_same(self, values: dict[str, str]) -> None:
        """Raise an error where processes were given different options or data. They would wait for each other for ever,
        or train on the same prompts."""
        several = self.gather(values)
        names = dict.fromkeys(name for one in several for name in one)
        found = {name: [one.get(name) for one in several] for name in names}
        differ = [f"{name} ({_who_has(column)})" for name, column in found.items() if len(set(column)) > 1]
        if differ:
            raise ProcessError(
                "processes must be given the same options, data, model and rewards, and have different "
                f"{'; '.join(differ)}. Does the script look at its rank or at the clock, or shuffle without a seed? "
                "Do machines have other files or settings? docs/recipes.md says what may differ (Several GPUs)"
            )

    # -- numbers

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the values of all processes. Each value has the same weight."""
        if self.alone:
            return values.mean()
        total, count = self.total(float(values.double().sum()), values.numel())
        return torch.tensor(total / count if count else torch.nan)

    def max(self, values: Tensor) -> Tensor:
        """The largest value of all processes."""
        if self.alone:
            return values.max()
        known = [value for value in self.gather(float(values.max()) if values.numel() else None) if value is not None]
        return torch.tensor(max(known, default=torch.nan))


LOST = re.compile(
    r"connection (was |likely )*(closed|reset|refused|abort)|reset by peer|broken pipe|socket closed|got 0 bytes"
    r"|no route to host|host is (down|unreachable)|network is (down|unreachable)|not connected|connectFullMesh"
    r"|remote process|ncclRemoteError|tim(ed|ing)[ -]?out|timeout",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say when another process has gone, or does not answer. A communicator that was
aborted is not among it: the reason for which it was follows."""


@contextmanager
def explaining_lost_peers() -> Iterator[None]:
    """Explains a broken connection: another process has ended, and its own messages say why.

    What is wrong with this process, as a GPU without memory, is raised as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_of_lost_peer(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise ProcessError(
            f"{_who()} has ended, or did not answer within ddp_timeout: the reason is in its own messages or, if it "
            f"was killed, in the launcher's. What was noticed here: {first_line}"
        ) from error


def _who_has(values: list[str | None]) -> str:
    """Each value, and the processes that have it.

    >>> _who_has(["a", "b", "a", None])
    "'a' in processes 0, 2; 'b' in process 1; nothing in process 3"
    """
    having: dict[str | None, list[int]] = {}
    for rank, value in enumerate(values):
        having.setdefault(value, []).append(rank)
    return "; ".join(
        f"{'nothing' if value is None else repr(value)} in process{'es' if ranks[1:] else ''} {_first(ranks)}"
        for value, ranks in having.items()
    )


def _first(ranks: list[int], count: int = 8) -> str:
    return ", ".join(map(str, ranks[:count])) + (f" and {len(ranks) - count} more" if len(ranks) > count else "")


def _is_of_lost_peer(error: RuntimeError) -> bool:
    # A trace of C++ may follow, in which functions have all kinds of names.
    text = str(error).partition("Exception raised from")[0]
    # Of gloo's errors some are plain ones, with the path of its file. Ours have been explained already.
    of_torch = isinstance(error, dist.DistError) or ("gloo" in text.lower() and not isinstance(error, ProcessError))
    return of_torch and LOST.search(text) is not None


def _who() -> str:
    """The processes that are silent. One that has just ended is not known to be silent yet."""
    silent = heartbeat().silent() if heartbeat.cache_info().currsize else []
    return ", ".join(map(heartbeat().name, silent)) if silent else "another process"


@functools.lru_cache
def heartbeat() -> Heartbeat:
    """One heartbeat for all trainers of this process."""
    return begin(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


@functools.lru_cache
def host_group(timeout_seconds: int) -> Any:
    """A second process group over the host's network, so that exchanges do not wait for a GPU."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
