"""DataLoaders whose batches are whole updates ([`UpdatePlan`] with rows in place of indices)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from rloom.data.plan import PlanSampler, Schedule, UpdatePlan, plan_stream
from rloom.errors import DataError


class PlannedDataset(Dataset):
    """A map-style data set that is indexed by an update's plan and answers with its rows filled in."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def __getitem__(self, plan: UpdatePlan) -> UpdatePlan:
        filled = {r: [self.rows[i] for i in indices] for r, indices in plan.prompts.items()}
        return dataclasses.replace(plan, prompts=filled)

    def __len__(self) -> int:
        return len(self.rows)


class Stream(IterableDataset):
    """Anything that can be iterated over, as torch's DataLoader wants it."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


class PlannedStream(IterableDataset):
    """A stream of rows cut into updates, read from the start again whenever it ends.

    `max_steps` ends the run. Restarting in here, rather than in the Trainer's loop, keeps the number of updates that
    a resumed run has to skip independent of how often the stream ended.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], schedule: Schedule) -> None:
        self.rows, self.schedule = rows, schedule

    def __iter__(self) -> Iterator[UpdatePlan]:
        epoch = 0
        while True:
            if hasattr(self.rows, "set_epoch"):
                self.rows.set_epoch(epoch)  # a stream that shuffles does so anew
            empty = True
            for plan in plan_stream(self.schedule, epoch, iter(self.rows)):
                empty = False
                yield plan
            if empty:
                raise DataError(
                    f"the stream of prompts ended (pass {epoch + 1} over it) before it filled a rollout of "
                    f"{self.schedule.prompts * self.schedule.world_size} prompts: give more prompts, a stream "
                    "that can be read again, or a lower `max_steps`"
                )
            epoch += 1


class PlanLoader(DataLoader):
    """A DataLoader that forwards `set_epoch` to whatever plans the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        if isinstance(self.batch_sampler, PlanSampler):
            self.batch_sampler.set_epoch(epoch)


class Turns:
    """Batches of `size`, of which every `count`-th, from number `rank` on, is this process'.

    >>> list(Turns(2, rank=1, count=2)("abcdefg"))
    [['c', 'd'], ['g']]
    """

    def __init__(self, size: int, *, rank: int, count: int) -> None:
        self.size, self.rank, self.count = size, rank, count

    def __call__(self, rows: Iterable[Any]) -> Iterator[list[Any]]:
        """The batches of this process, in order."""
        left = iter(rows)
        batches = iter(lambda: list(itertools.islice(left, self.size)), [])
        return itertools.islice(batches, self.rank, None, self.count)


class DealtIndices:
    """A batch sampler of this process' batches."""

    def __init__(self, length: int, turns: Turns) -> None:
        self.length, self.turns = length, turns

    def __iter__(self) -> Iterator[list[int]]:
        return self.turns(range(self.length))

    def __len__(self) -> int:
        return len(range(self.turns.rank, -(-self.length // self.turns.size), self.turns.count))


class DealtStream(IterableDataset):
    """A stream of which this process reads all, and has its own batches."""

    def __init__(self, rows: Iterable[dict[str, Any]], turns: Turns) -> None:
        self.rows, self.turns = rows, turns

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self.turns(self.rows)


def dealt_loader(rows: Any, turns: Turns, *, stream: bool, **options: Any) -> DataLoader:
    """Loader of this process' batches of rows, of which other processes have others."""
    if stream:
        return DataLoader(DealtStream(rows, turns), batch_size=None, collate_fn=as_is)
    return DataLoader(rows, batch_sampler=DealtIndices(len(rows), turns), collate_fn=as_is, **options)


def only(batch: list[Any]) -> Any:
    """The single element of a batch (a function of its own, so that worker processes can import it)."""
    return batch[0]


def as_is(batch: Any) -> Any:
    """The batch itself."""
    return batch


def map_style_loader(rows: Sequence[dict[str, Any]], sampler: PlanSampler, **options: Any) -> PlanLoader:
    """Loader over an indexable data set."""
    return PlanLoader(PlannedDataset(rows), batch_sampler=sampler, collate_fn=only, **options)


def stream_loader(rows: Iterable[dict[str, Any]], schedule: Schedule, **options: Any) -> PlanLoader:
    """Loader over a stream; it is read by one process, since several would cut groups apart."""
    return PlanLoader(PlannedStream(rows, schedule), batch_size=None, collate_fn=as_is, **{**options, "num_workers": 0})
