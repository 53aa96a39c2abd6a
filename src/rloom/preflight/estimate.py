"""How long the whole run takes, how many tokens it reads and writes, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rloom.config import RLOOConfig
from rloom.data.datasets import is_iterable
from rloom.data.loader import make_schedule
from rloom.preflight.dry_run import Measurement


@dataclass(slots=True, kw_only=True)
class Estimate:
    """The whole run."""

    updates: int
    completions: int
    tokens: int  # of prompts and completions, as the metric num_tokens counts them
    seconds: float
    by_phase: dict[str, float]  # seconds
    cost: float | None


def whole_run(found: Measurement, config: RLOOConfig, rows: Any, price_per_hour: float | None) -> Estimate | None:
    """The estimate; None for a stream without max_steps, whose length nobody knows.

    Generation, rewards and the reference are paid once for each completion, updates once in each pass over it.
    """
    updates = updates_of(config, rows)
    if updates is None:
        return None
    per_update = config.per_device_train_batch_size * config.gradient_accumulation_steps
    trained = updates * per_update
    sampled = trained // config.num_iterations
    by_phase = {
        phase: seconds * (trained if phase == "update" else sampled) for phase, seconds in found.seconds.items()
    }
    seconds = sum(by_phase.values())
    tokens = fmean(len(r.prompt.token_ids) + len(r.completion.token_ids) for r in found.records)
    return Estimate(
        updates=updates, completions=sampled, tokens=round(tokens * sampled), seconds=seconds, by_phase=by_phase,
        cost=None if price_per_hour is None else price_per_hour * seconds / 3600,
    )  # fmt: skip


def updates_of(config: RLOOConfig, rows: Any) -> int | None:
    """The updates of the whole run."""
    if config.max_steps > 0:
        return config.max_steps
    if is_iterable(rows):
        return None
    schedule = make_schedule(config)
    return max(1, round(config.num_train_epochs * schedule.num_updates(schedule.num_rollouts(len(rows)))))
