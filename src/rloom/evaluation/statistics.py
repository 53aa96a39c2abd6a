"""Estimates with bootstrap intervals, and pass@k.

Prompts are the random sample, so prompts are resampled.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over prompts and its 95% bootstrap interval."""

    value: float
    low: float
    high: float
    count: int  # prompts

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def estimate(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of one value per prompt. NaN marks a prompt without a value, and is left out.

    The interval is a percentile bootstrap: prompts are drawn with replacement, 1000 times.

    >>> estimate([1.0, 1.0, 1.0])
    Estimate(value=1.0, low=1.0, high=1.0, count=3)
    """
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Estimate(value=math.nan, low=math.nan, high=math.nan, count=0)
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(known, k=len(known))) / len(known) for _ in range(RESAMPLES))
    low, high = means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES) - 1]
    return Estimate(value=sum(known) / len(known), low=low, high=high, count=len(known))


def pass_at_k(passed: int, count: int, k: int) -> float:
    """The probability that one of k completions passes, from `passed` of `count`: 1 − C(n−c, k) / C(n, k).

    Unbiased, unlike 1 − (1 − c/n)^k (Chen et al. 2021, arXiv 2107.03374).

    >>> pass_at_k(1, 2, 1), pass_at_k(1, 4, 2), pass_at_k(3, 4, 2)
    (0.5, 0.5, 1.0)
    """
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} needs at least {k} completions, and there are {count}")
    return 1.0 - math.comb(count - passed, k) / math.comb(count, k)


def over_prompts(groups: Sequence[Sequence[float]]) -> Estimate:
    """The mean over prompts of each group's mean. NaN marks a completion without a value, and is left out.

    >>> over_prompts([[1.0, 0.0], [1.0, math.nan], []]).value
    0.75
    """
    known = [[value for value in group if not math.isnan(value)] for group in groups]
    return estimate([sum(group) / len(group) for group in known if group])


def pass_at(
    groups: Sequence[Sequence[float]], ks: Sequence[int] | None = None, threshold: float | None = None
) -> dict[int, Estimate]:
    """pass@k by k. Scores must be 0 or 1, or there must be a threshold; otherwise the result is empty.

    `ks` unset: 1 and the largest possible k.

    >>> {k: found.value for k, found in pass_at([[1.0, 0.0], [0.0, 0.0]]).items()}
    {1: 0.25, 2: 0.5}
    >>> pass_at([[0.3, 1.0]])
    {}
    """
    known = [[value for value in group if not math.isnan(value)] for group in groups]
    if threshold is None and not {value for group in known for value in group} <= {0.0, 1.0}:
        return {}
    at = 1.0 if threshold is None else threshold
    wanted = sorted(set(ks or (1, max(map(len, known), default=0))) - {0})
    return {
        k: estimate([pass_at_k(sum(v >= at for v in group), len(group), k) for group in known if len(group) >= k])
        for k in wanted
    }


def per_token(whole: Estimate, length: float) -> Estimate:
    """An estimate of whole completions, divided by their mean length."""
    scaled = {name: getattr(whole, name) / max(length, 1e-9) for name in ("value", "low", "high")}
    return Estimate(**scaled, count=whole.count)
