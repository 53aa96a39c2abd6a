"""Plans which prompts are sampled when, and which update trains on which rollout.

The arithmetic is TRL's. A *rollout* holds P prompts, hence P·K completions, in S parts (`steps_per_generation`). It is
trained on μ times (`num_iterations`). This gives a stream of parts

    rollout 0: 0 1 … S−1  0 1 … S−1  (μ times)   rollout 1: 0 1 … S−1 …

and an *update* takes the next A of them (`gradient_accumulation_steps`), fewer at the end of an epoch. With S = A and
μ = 1, the default, one update is one rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rloom.errors import DataError
from rloom.seeds import derive_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How rollouts are cut into updates.

    >>> schedule = Schedule(prompts=2, parts=4, passes=2, parts_per_update=3)
    >>> [[(p.rollout, p.part) for p in update] for update in schedule.updates(rollouts=1)]
    [[(0, 0), (0, 1), (0, 2)], [(0, 3), (0, 0), (0, 1)], [(0, 2), (0, 3)]]
    """

    prompts: int  # prompts of this process per rollout
    parts: int  # S, parts of a rollout
    passes: int  # μ, how often a rollout is trained on
    parts_per_update: int  # A
    world_size: int = 1
    rank: int = 0

    def num_rollouts(self, num_prompts: int) -> int:
        """The number of whole rollouts in a data set of `num_prompts`. The remaining prompts do not fill one."""
        return num_prompts // (self.prompts * self.world_size)

    def num_updates(self, rollouts: int) -> int:
        """The number of updates on so many rollouts."""
        return -(-rollouts * self.parts * self.passes // self.parts_per_update)

    def updates(self, rollouts: int) -> Iterator[list[PartRef]]:
        """The parts that each update of an epoch trains on."""
        stream = [
            PartRef(rollout=rollout, part=part, parts=self.parts)
            for rollout in range(rollouts)
            for _ in range(self.passes)
            for part in range(self.parts)
        ]
        for start in range(0, len(stream), self.parts_per_update):
            yield stream[start : start + self.parts_per_update]

    def most_together(self, num_generations: int) -> int:
        """The most completions of one rollout that an update trains on in this process.

        >>> Schedule(prompts=2, parts=4, passes=2, parts_per_update=3).most_together(8)
        12
        """
        return -(-self.prompts * num_generations * min(self.parts_per_update, self.parts) // self.parts)

    def places(self) -> list[int]:
        """The places of this process' prompts among those of all processes in a rollout.

        Every process has a share of each part, so that an update trains on the same groups as in one process. Where a
        part does not hold whole groups, each process has neighbouring prompts instead.

        >>> Schedule(prompts=4, parts=2, passes=1, parts_per_update=1, world_size=2, rank=1).places()
        [2, 3, 6, 7]
        """
        share = self.prompts // self.parts if self.prompts % self.parts == 0 else self.prompts
        starts = range(self.rank * share, self.prompts * self.world_size, share * self.world_size)
        return [start + index for start in starts for index in range(share)]

    def local(self, indices: list[int], rollout: int) -> list[int]:
        """This process' prompts of a rollout. `indices` is the epoch's order."""
        start = rollout * self.world_size * self.prompts
        return [indices[start + place] for place in self.places()]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """One part of one rollout, by number; rollouts are counted from the start of the epoch."""

    rollout: int
    part: int
    parts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """One update: its parts, the rollouts they belong to, and each rollout's prompts (indices, later rows)."""

    epoch: int
    parts: list[PartRef]
    prompts: dict[int, list[Any]]

    def key(self, rollout: int) -> tuple[int, int]:
        """The key of a rollout, unique in the whole run."""
        return (self.epoch, rollout)


def plan_epoch(schedule: Schedule, epoch: int, indices: list[int]) -> Iterator[UpdatePlan]:
    """The updates of one epoch, given the order of the prompts."""
    for parts in schedule.updates(schedule.num_rollouts(len(indices))):
        yield _plan(epoch, parts, lambda rollout: schedule.local(indices, rollout))


def _plan(epoch: int, parts: list[PartRef], prompts_of: Callable[[int], list[Any]]) -> UpdatePlan:
    used = dict.fromkeys(ref.rollout for ref in parts)
    return UpdatePlan(epoch=epoch, parts=parts, prompts={rollout: prompts_of(rollout) for rollout in used})


class PlanSampler:
    """Yields the epoch's updates as batches of one [`UpdatePlan`] each, for a DataLoader's `batch_sampler`.

    The order depends on (seed, epoch) alone, so that a resumed run has the same order.
    """

    def __init__(self, schedule: Schedule, num_prompts: int, *, shuffle: bool, seed: int) -> None:
        self.schedule, self.num_prompts, self.shuffle, self.seed = schedule, num_prompts, shuffle, seed
        self.epoch = 0
        needed = schedule.prompts * schedule.world_size
        if num_prompts < needed:
            raise DataError(
                f"the data set has {num_prompts} prompts, and one rollout needs {needed}: add prompts, or lower "
                "per_device_train_batch_size or steps_per_generation"
            )

    @property
    def num_left_out(self) -> int:
        """Prompts that do not fill a rollout, and are left out. With shuffling, they differ between epochs."""
        return self.num_prompts % (self.schedule.prompts * self.schedule.world_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def order(self) -> list[int]:
        """The order of the prompts in this epoch."""
        if not self.shuffle:
            return list(range(self.num_prompts))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order", self.epoch))
        return torch.randperm(self.num_prompts, generator=generator).tolist()

    def __iter__(self) -> Iterator[list[UpdatePlan]]:
        for plan in plan_epoch(self.schedule, self.epoch, self.order()):
            yield [plan]

    def __len__(self) -> int:
        return self.schedule.num_updates(self.schedule.num_rollouts(self.num_prompts))


def plan_stream(schedule: Schedule, epoch: int, rows: Iterator[Any]) -> Iterator[UpdatePlan]:
    """The updates of a stream of rows of unknown length. Rows at the end that fill no rollout are left out."""
    per_rollout = schedule.prompts * schedule.world_size
    window: dict[int, list[Any]] = {}
    pending: list[PartRef] = []
    rollout = 0
    chunk: list[Any] = []
    for row in rows:
        chunk.append(row)
        if len(chunk) < per_rollout:
            continue
        window[rollout], chunk = [chunk[place] for place in schedule.places()], []
        for _ in range(schedule.passes):
            pending += [PartRef(rollout=rollout, part=p, parts=schedule.parts) for p in range(schedule.parts)]
        rollout += 1
        while len(pending) >= schedule.parts_per_update:
            parts, pending = pending[: schedule.parts_per_update], pending[schedule.parts_per_update :]
            yield _plan(epoch, parts, window.__getitem__)
        window = {r: kept for r, kept in window.items() if any(ref.rollout == r for ref in pending)}
    if pending:
        yield _plan(epoch, pending, window.__getitem__)
