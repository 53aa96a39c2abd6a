"""All reward functions of a run, with the processes and threads that they are called in."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from rloom.errors import RewardError
from rloom.rewards.base import Reward, RewardBatch, unique_names
from rloom.rewards.calling.caller import CallDefaults, Caller
from rloom.rewards.calling.scoring import Scoring
from rloom.rewards.calling.worker_pool import WorkerPool
from rloom.rewards.scored import Scored


class RewardSet:
    """All reward functions of a run.

    `score` scores completions that are all there; `begin` begins with a rollout whose groups are still to come.

    Args:
        rewards: the functions, models and services that score.
        weights: one per score; None: 1 each.
        when: for each of them (column, values), the rows that it is for; None: all.
        on_error: what a failing function costs: "raise" (the run), "none" (its samples' scores), or a number that they
            get instead. A sample that hung or killed its worker never costs the run.
        workers: worker processes, and threads for functions that take them; None: one per core, at most 8.
        time_limit: seconds per sample for isolated functions that do not say.
        concurrency: calls of an async function at a time, where it does not say.
        table_columns: names that functions may not give to columns of their own.
        check_metric: raises [`RewardError`] for a metric that functions may not log, by name and value.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        weights: Sequence[float] | None,
        *,
        when: Sequence[tuple[str, tuple[Any, ...]] | None] | None = None,
        on_error: str | float = "raise",
        workers: int | None = None,
        time_limit: float = 60.0,
        concurrency: int = 64,
        table_columns: Collection[str] = (),
        check_metric: Callable[[str, Any], None] | None = None,
    ) -> None:
        if not rewards:
            raise RewardError("no reward function: pass at least one as `reward_funcs`")
        if weights is not None and len(weights) != len(rewards):
            raise RewardError(
                f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(rewards)})"
            )
        self.rewards = list(rewards)
        self.names = unique_names([reward.name for reward in rewards])
        self.weights = torch.tensor(weights if weights is not None else [1.0] * len(rewards), dtype=torch.float32)
        self._told: set[str] = set()
        self.on_error, self.table_columns, self.check_metric = on_error, table_columns, check_metric
        defaults = CallDefaults(workers=workers or min(_cores(), 8), time_limit=time_limit, concurrency=concurrency)
        self.pool = WorkerPool(defaults.workers)
        self.callers = [
            Caller(reward, name, defaults, self.pool, route, check_metric)
            for reward, name, route in zip(self.rewards, self.names, when or [None] * len(rewards), strict=True)
        ]

    @property
    def streaming(self) -> bool:
        """Whether any function can begin before all completions are there."""
        return any(caller.streaming for caller in self.callers)

    @property
    def score_on_error(self) -> float | None:
        """The score of a sample on which a function failed, where that does not end the run."""
        return None if isinstance(self.on_error, str) else float(self.on_error)

    def told_once(self, frames: str) -> str:
        """The frames of a failure the first time, then nothing: a reward that fails tends to fail in one place."""
        if frames in self._told:
            return ""
        self._told.add(frames)
        return frames

    def begin(self) -> Scoring:
        """The scoring of one rollout, whose groups can be added as they come."""
        return Scoring(self)

    def score(self, batch: RewardBatch) -> Scored:
        """The scores of a batch of completions that is there as a whole."""
        return self.begin().score(batch)

    def close(self) -> None:
        """End worker processes and threads. They start again when needed."""
        self.pool.close()
        for caller in self.callers:
            caller.close()


def _cores() -> int:
    """The cores that this process may use, where the system tells; its share of them, where a launcher has started
    several on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
