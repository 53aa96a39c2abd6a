"""How many completions per prompt: which share of groups has signal, and what a group's size is worth.

A group teaches something if its scores are not all equal. With success probability p_i on prompt i, K completions have
signal with probability 1 − p_i^K − (1−p_i)^K. Of a group that has signal, the leave-one-out advantage r_i − mean of the
others has variance σ²·K/(K−1): a noisier baseline makes K completions worth K−1. So of the completions that are paid
for,

    efficiency(K) = E_i[1 − p_i^K − (1−p_i)^K] · (K−1)/K

is worth something. It grows with K, ever more slowly, while the number of prompts that a batch has room for shrinks:
the smallest K is taken that twice as many would not make better by more than 15%.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, pvariance, variance

SIZES = (2, 4, 8, 16, 32)
"""Group sizes that are considered."""
GAIN = 1.15
"""How much better twice the size must be."""
PROMPTS = 4
"""Prompts that an update has at least, whatever the size."""

Groups = Sequence[Sequence[float]]
"""The scores of each group."""


def comparable(groups: Groups) -> list[Sequence[float]]:
    """The groups with at least two scores. The others, where rewards were not known, tell nothing of any spread."""
    return [group for group in groups if len(group) > 1]


def have_signal(groups: Groups) -> float:
    """The share of groups whose scores are not all equal.

    >>> have_signal([[0.0, 1.0], [1.0, 1.0], [1.0]])
    0.5
    """
    return fmean(len(set(group)) > 1 for group in comparable(groups))


def spread_within(groups: Groups) -> float:
    """The standard deviation of a prompt's scores: variances of samples (by K−1), which are right on average however
    small the groups are.

    >>> round(spread_within([[0.0, 1.0], [1.0, 1.0], [1.0]]), 3)
    0.5
    """
    return sqrt(fmean(variance(group) for group in comparable(groups)))


@dataclass(frozen=True, slots=True)
class Successes:
    """Success probabilities of prompts, as a Beta(a, b) distribution.

    >>> round(Successes(1.0, 1.0).signal(2), 3)
    0.333
    """

    a: float
    b: float

    @classmethod
    def fitted(cls, shares: Sequence[float], size: int) -> Successes:
        """The beta-binomial distribution of the groups' shares of successes, by its first two moments. `size`:
        completions per group. ρ, the correlation within a prompt, is what of the variance is not the groups' own
        drawing: Var = m(1−m)/n · (1 + (n−1)ρ), and a + b = 1/ρ − 1."""
        mean = fmean(shares)
        if not 0 < mean < 1:
            raise ValueError("all completions succeed, or none: nothing can be said about prompts between them")
        excess = size * pvariance(shares, mean) / (mean * (1 - mean)) - 1
        rho = min(max(excess / max(1, size - 1), 1e-3), 0.999)
        total = 1 / rho - 1
        return cls(mean * total, (1 - mean) * total)

    def signal(self, size: int) -> float:
        """E[1 − p^K − (1−p)^K], with E[p^K] = Π_{j<K} (a+j)/(a+b+j)."""
        return 1.0 - _moment(self.a, self.a + self.b, size) - _moment(self.b, self.a + self.b, size)


def _moment(a: float, total: float, power: int) -> float:
    result = 1.0
    for j in range(power):
        result *= (a + j) / (total + j)
    return result


def signal_by_size(groups: Groups) -> Callable[[int], float]:
    """The share of groups with signal, as a function of their size, from the scores of some groups of one size. Groups
    with fewer than two scores tell nothing, and are left out.

    Scores of two values are successes and failures. Of other scores, the share is counted over all choices of K of a
    group's completions, 1 − Σ_v C(c_v, K)/C(n, K) with c_v completions of score v, up to the size that was measured.

    >>> share = signal_by_size([[0.0, 0.5, 1.0, 1.0]])
    >>> round(share(2), 3)
    0.833
    """
    groups = comparable(groups)
    values = sorted({score for group in groups for score in group})
    if len(values) < 2:
        return lambda size: 0.0
    sizes = {len(group) for group in groups}
    if len(values) == 2 and len(sizes) == 1:
        shares = [fmean(score == values[1] for score in group) for group in groups]
        return Successes.fitted(shares, sizes.pop()).signal

    def counted(size: int) -> float:
        return fmean(1.0 - _all_equal(group, min(size, len(group))) for group in groups)

    return counted


def _all_equal(group: Sequence[float], size: int) -> float:
    """The probability that `size` of a group's completions, drawn without replacement, score alike."""
    return sum(comb(list(group).count(value), size) for value in set(group)) / comb(len(group), size)


def efficiency(signal: Callable[[int], float], size: int) -> float:
    """What a completion is worth in groups of this size.

    >>> efficiency(lambda size: 1.0, 4)
    0.75
    """
    return signal(size) * (size - 1) / size


def best_size(signal: Callable[[int], float], completions: int) -> int:
    """The smallest size that twice as many would not make better by more than `GAIN`, with room for several prompts in
    an update of so many completions.

    >>> best_size(lambda size: 1.0, completions=256), best_size(lambda size: 1.0, completions=16)
    (8, 4)
    """
    possible = [size for size in SIZES if size * PROMPTS <= completions] or [SIZES[0]]
    for size in possible:
        if efficiency(signal, 2 * size) <= GAIN * efficiency(signal, size):
            return size
    return possible[-1]
