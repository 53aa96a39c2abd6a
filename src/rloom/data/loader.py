"""DataLoaders for training and evaluation.

In training a batch is a whole update: an [`UpdatePlan`] with rows in place of indices. In evaluation it is a list of
rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from rloom.config import RLOOConfig
from rloom.data.datasets import is_iterable
from rloom.data.plan import PlanSampler, Schedule, UpdatePlan, plan_stream
from rloom.errors import DataError
from rloom.printable import get_logger

logger = get_logger(__name__)


class PlannedDataset(Dataset):
    """A map-style data set that is indexed by an update's plan, and returns the plan with its rows filled in."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = rows

    def __getitem__(self, plan: UpdatePlan) -> UpdatePlan:
        filled = {r: [self.rows[i] for i in indices] for r, indices in plan.prompts.items()}
        return dataclasses.replace(plan, prompts=filled)

    def __len__(self) -> int:
        return len(self.rows)


class Stream(IterableDataset):
    """Wraps any iterable for torch's DataLoader."""

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
                # A stream that shuffles does so anew in each epoch.
                self.rows.set_epoch(epoch)
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
    """A DataLoader that forwards `set_epoch` to its [`PlanSampler`]."""

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        if isinstance(self.batch_sampler, PlanSampler):
            self.batch_sampler.set_epoch(epoch)


class RoundRobin:
    """Gives this process every `count`-th batch of `size` rows, beginning with batch number `rank`.

    `in_step`: all processes have equally many. Those for which there are no rows in the last round have an empty one.

    >>> list(RoundRobin(2, rank=1, count=2)("abcdefg"))
    [['c', 'd'], ['g']]
    >>> list(RoundRobin(2, rank=1, count=2, in_step=True)("abcdef"))
    [['c', 'd'], []]
    """

    def __init__(self, size: int, *, rank: int, count: int, in_step: bool = False) -> None:
        self.size, self.rank, self.count, self.in_step = size, rank, count, in_step

    def __call__(self, rows: Iterable[Any]) -> Iterator[list[Any]]:
        """The batches of this process, in order."""
        left = iter(rows)
        while round_of_all := list(itertools.islice(left, self.size * self.count)):
            own = round_of_all[self.size * self.rank : self.size * (self.rank + 1)]
            if own or self.in_step:
                yield own

    def number(self, length: int) -> int:
        """How many batches this process has of so many rows."""
        batches = -(-length // self.size)
        return len(range(0 if self.in_step else self.rank, batches, self.count))


class RoundRobinIndices:
    """A batch sampler of this process' batches."""

    def __init__(self, length: int, share: RoundRobin) -> None:
        self.length, self.share = length, share

    def __iter__(self) -> Iterator[list[int]]:
        return self.share(range(self.length))

    def __len__(self) -> int:
        return self.share.number(self.length)


class RoundRobinStream(IterableDataset):
    """A stream that this process reads completely, keeping only its own batches."""

    def __init__(self, rows: Iterable[dict[str, Any]], share: RoundRobin) -> None:
        self.rows, self.share = rows, share

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self.share(self.rows)


def _round_robin_loader(rows: Any, share: RoundRobin, *, stream: bool, **options: Any) -> DataLoader:
    """Loader of this process' batches. Other processes have the other batches."""
    if stream:
        return DataLoader(RoundRobinStream(rows, share), batch_size=None, collate_fn=as_is)
    return DataLoader(rows, batch_sampler=RoundRobinIndices(len(rows), share), collate_fn=as_is, **options)


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
    """Loader over a stream. This process reads it: several workers would each read a stream of their own."""
    return PlanLoader(PlannedStream(rows, schedule), batch_size=None, collate_fn=as_is, **{**options, "num_workers": 0})


# -- of a run


def make_schedule(args: RLOOConfig) -> Schedule:
    """How this run's rollouts are cut into updates."""
    # The config has set both.
    assert args.generation_batch_size is not None
    assert args.steps_per_generation is not None
    prompts = args.generation_batch_size // args.num_generations // args.world_size
    return Schedule(
        prompts=prompts,
        parts=args.steps_per_generation,
        passes=args.num_iterations,
        parts_per_update=args.gradient_accumulation_steps,
        world_size=args.world_size,
        rank=args.process_index,
    )


def train_loader(dataset: Any, args: RLOOConfig, plan: Schedule) -> DataLoader:
    """Loader whose batches are updates."""
    if is_iterable(dataset):
        if args.shuffle_dataset and hasattr(dataset, "shuffle"):
            dataset = dataset.shuffle(seed=args.seed)
        return stream_loader(dataset, plan)
    seed = args.seed if args.data_seed is None else args.data_seed
    sampler = PlanSampler(plan, len(dataset), shuffle=bool(args.shuffle_dataset), seed=seed)
    if sampler.num_left_out and not args.process_index:
        logger.warning(
            "%d of the %d prompts do not fill a rollout and sit out each epoch%s",
            sampler.num_left_out,
            len(dataset),
            " (others each time)" if args.shuffle_dataset else "",
        )
    return map_style_loader(dataset, sampler, **_loader_options(args))


def eval_loader(dataset: Any, args: RLOOConfig, *, in_step: bool = False) -> DataLoader:
    """Loader whose batches are lists of rows. `in_step`: all processes have equally many, some of them empty."""
    prompts = max(1, args.eval_batch_size // (args.num_generations_eval or args.num_generations))
    options = _loader_options(args)
    if args.world_size > 1:
        # Processes take turns at whole batches, so that the batches are the same as in a single process.
        share = RoundRobin(prompts, rank=args.process_index, count=args.world_size, in_step=in_step)
        return _round_robin_loader(dataset, share, stream=is_iterable(dataset), **options)
    if is_iterable(dataset):
        dataset, options = Stream(dataset), {}
    return DataLoader(dataset, batch_size=prompts, collate_fn=as_is, **options)


def _loader_options(args: RLOOConfig) -> dict[str, Any]:
    return {
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
        "prefetch_factor": args.dataloader_prefetch_factor,
    }
