"""What to set, from what was measured; each with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rloom.config import RLOOConfig
from rloom.preflight.dry_run import Measurement
from rloom.preflight.group_size import (
    best_size,
    comparable,
    efficiency,
    have_signal,
    measured_size,
    signal_by_size,
    spread_within,
)

FURTHEST = 100
"""The learning rate that is recommended is at most so many times the one that was measured, or a part of it."""
SIGNAL_GROUPS = 16
"""Groups with signal that an update shall have."""
BATCH = (64, 512)
"""Completions per update: the least and the most that are recommended."""
KL_BUDGET = 10.0
"""Nats per completion that the policy may go away from the reference."""
BETA = (0.001, 0.2)
STEP = 0.01
"""Nats per token that the first update may move the policy: the usual trust region. (Adam's first step is its largest:
every weight moves by the whole rate.)"""
TRUNCATED = 0.05
"""Share of truncated completions that is left alone."""
NEAR_ZERO = 0.02
"""Share of groups with signal below which there is nothing to begin with."""


@dataclass(slots=True, kw_only=True)
class Advice:
    """A value for an option, the value that it has, and why."""

    option: str
    value: Any
    now: Any
    reason: str


def cold_start(found: Measurement) -> str | None:
    """Why RLOO cannot begin with this model; None where it can."""
    scores = [score for group in found.groups for score in group]
    if not scores:
        return "no completion got a score"
    if not comparable(found.groups):
        return "no prompt has two completions with a score: there is nothing to compare"
    signal = have_signal(found.groups)
    if signal > NEAR_ZERO:
        return None
    if max(scores) == min(scores) != 0:
        return (
            f"every completion scores {scores[0]:.3g}: there is nothing to compare. Where that is the best score, the "
            "task is solved: take harder prompts. Where it is the lowest, train supervised first"
        )
    if fmean(scores) <= min(scores) + 0.5 * (max(scores) - min(scores)):
        return (
            f"base success is near zero: {signal:.0%} of groups have completions that score differently, and the mean "
            f"score is {fmean(scores):.3g}. RLOO reinforces what a model sometimes does: train it supervised first"
        )
    return f"the task is solved already: {signal:.0%} of groups have completions that score differently; harder prompts"


def recommend(
    found: Measurement, config: RLOOConfig, *, context: int | None, prompts: int | None = None
) -> list[Advice]:
    """What to set. Nothing for a model that cannot begin. `context`: tokens that a completion may have; `prompts`: of
    the data set. None: nobody knows."""
    if cold_start(found) is not None:
        return []
    signal = signal_by_size(found.groups)
    # The batch is recommended too, so that the given one is no bound.
    size = best_size(signal, BATCH[1])
    found_advice = [
        Advice(
            option="num_generations", value=size, now=config.num_generations, reason=_worth(found, signal, size)
        ),
        _batch(signal(size), size, config, prompts),
        *_evaluation(size, config),
        _length(found, config, context),
        _rate(found, config),
    ]  # fmt: skip
    return [*found_advice, _beta(found, config)] if config.beta else found_advice


def _worth(found: Measurement, signal: Callable[[int], float], size: int) -> str:
    """Why this size; and which of the numbers nobody has measured."""
    seen = measured_size(found.groups)
    beyond = "" if 2 * size <= seen else f" (groups of more than {seen} were not sampled: theirs is an extrapolation)"
    return (
        f"{signal(size):.0%} of groups of {size} have signal, and a completion is worth {efficiency(signal, size):.2f} "
        f"of one with a perfect baseline; of {2 * size}, {efficiency(signal, 2 * size):.2f}{beyond}"
    )


def _batch(signal: float, size: int, config: RLOOConfig, available: int | None) -> Advice:
    least, most = (math.ceil(bound / size) for bound in BATCH)
    # In fours: batches of round numbers.
    prompts = min(max(4 * round(SIGNAL_GROUPS / max(signal, 1e-6) / 4), least), most)
    bound = ""
    if available is not None and available < prompts:
        # A rollout has no prompt twice, so a larger one would be refused.
        prompts, bound = available, f"; the data set has no more than {available} prompts"
    return Advice(
        option="per_device_train_batch_size", value=prompts * size, now=config.per_device_train_batch_size,
        reason=f"{prompts} prompts × {size}: about {prompts * signal:.0f} groups have signal "
        f"in an update (wanted: {SIGNAL_GROUPS}, with "
        f"{BATCH[0]} to {BATCH[1]} completions{bound}); memory does not depend on it",
    )  # fmt: skip


def _evaluation(size: int, config: RLOOConfig) -> list[Advice]:
    """Evaluations have whole groups too, of the size that is recommended where no other was given."""
    now = config.per_device_eval_batch_size
    if config.num_generations_eval is not None or now % size == 0:
        return []
    reason = f"evaluation has whole groups too, of {size} unless num_generations_eval says otherwise"
    return [Advice(option="per_device_eval_batch_size", value=size * math.ceil(now / size), now=now, reason=reason)]


def _length(found: Measurement, config: RLOOConfig, context: int | None) -> Advice:
    lengths, limit = sorted(found.completion_tokens), config.max_completion_length
    cut = fmean(record.completion.truncated for record in found.records)
    if cut > TRUNCATED:
        value = 2 * limit if context is None else min(2 * limit, context)
        reason = f"{cut:.0%} of completions are cut off at {limit}"
    else:
        longest = lengths[min(len(lengths) - 1, math.ceil(0.99 * len(lengths)) - 1)]
        value = min(limit, 8 * math.ceil(1.25 * longest / 8))
        reason = f"99% of completions have at most {longest} tokens, and {cut:.0%} are cut off; a quarter more is room"
    return Advice(option="max_completion_length", value=value, now=limit, reason=reason)


def _beta(found: Measurement, config: RLOOConfig) -> Advice:
    """The best policy at weight β is π_ref · exp(r/β), and for small tilts its KL is Var(r) / 2β²."""
    spread = spread_within(found.groups)
    value = _rounded(min(max(spread / math.sqrt(2 * KL_BUDGET), BETA[0]), BETA[1]))
    return Advice(
        option="beta", value=value, now=config.beta,
        reason=f"scores of a prompt differ by {spread:.2g} (standard deviation): with this weight the best policy is "
        f"about {spread**2 / (2 * value**2):.2g} nats per completion away from the reference (σ²/2β²)",
    )  # fmt: skip


def _rate(found: Measurement, config: RLOOConfig) -> Advice:
    now = config.learning_rate
    if not found.movement:
        reason = "not measured: no group of the last update had signal, or the weights did not move"
        return Advice(option="learning_rate", value=now, now=now, reason=reason)
    # Small steps move the policy by a KL that grows with their square.
    wanted = now * math.sqrt(STEP / found.movement)
    value = _rounded(min(max(wanted, now / FURTHEST), now * FURTHEST))
    reason = f"one update at {now:g} moves the policy by {found.movement:.1g} nats per token; wanted: {STEP:g}, "
    if now / FURTHEST <= wanted <= now * FURTHEST:
        reason += "which is careful: up to three times this rate may learn faster"
    else:
        reason += f"for which more than a factor of {FURTHEST} is missing: run preflight again with this rate"
    return Advice(option="learning_rate", value=value, now=now, reason=reason)


def _rounded(value: float) -> float:
    """To one digit.

    >>> _rounded(0.0268)
    0.03
    """
    return float(f"{value:.0e}")
