"""How long the whole run takes, how many tokens it reads and writes, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rloom.config import RLOOConfig
from rloom.data.datasets import is_iterable
from rloom.data.loader import make_schedule
from rloom.preflight.dry_run import Measurement
from rloom.preflight.group_size import comparable, signal_by_size


@dataclass(slots=True, kw_only=True)
class Estimate:
    """The whole run."""

    updates: int
    completions: int  # that are sampled
    tokens: int  # of prompts and completions, as the metric num_tokens counts them
    seconds: float
    by_phase: dict[str, float]  # seconds
    cost: float | None


def whole_run(found: Measurement, config: RLOOConfig, rows: Any, price_per_hour: float | None) -> Estimate | None:
    """The estimate; None for a stream without max_steps, whose length nobody knows.

    Generation and rewards are paid once for each completion that is sampled, the reference once for each that is
    trained on, updates once in each pass over it.
    """
    updates = updates_of(config, rows)
    if updates is None:
        return None
    per_update = config.per_device_train_batch_size * config.gradient_accumulation_steps
    trained = updates * per_update
    kept = trained // config.num_iterations
    sampled = round(kept * draws_per_group(found, config))
    counts = {"generation": sampled, "rewards": sampled, "reference": kept, "update": trained}
    by_phase = {phase: seconds * counts[phase] for phase, seconds in found.seconds.items()}
    seconds = sum(by_phase.values())
    tokens = fmean(len(r.prompt.token_ids) + len(r.completion.token_ids) for r in found.records)
    return Estimate(
        updates=updates, completions=sampled, tokens=round(tokens * sampled), seconds=seconds, by_phase=by_phase,
        cost=None if price_per_hour is None else price_per_hour * seconds / 3600,
    )  # fmt: skip


def draws_per_group(found: Measurement, config: RLOOConfig) -> float:
    """How many groups are sampled for one that is kept: with `dynamic_sampling`, another in each round for each that
    has no signal yet. With R rounds and signal in a share s of groups, Σ_{r ≤ R} (1−s)^r."""
    if not config.dynamic_sampling or not comparable(found.groups):
        return 1.0
    without = 1.0 - signal_by_size(found.groups)(config.num_generations)
    return sum(without**number for number in range(config.dynamic_sampling + 1))


def updates_of(config: RLOOConfig, rows: Any) -> int | None:
    """The updates of the whole run."""
    if config.max_steps > 0:
        return config.max_steps
    if is_iterable(rows):
        return None
    schedule = make_schedule(config)
    return max(1, round(config.num_train_epochs * schedule.num_updates(schedule.num_rollouts(len(rows)))))
