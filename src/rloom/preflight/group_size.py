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

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import comb, fsum, prod, sqrt
from statistics import fmean, variance

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
class Outcomes:
    """How often prompts get each score: a Dirichlet distribution over prompts, of which each draws its completions'
    scores. Of two scores, that is a beta distribution of success probabilities.

    >>> round(Outcomes((1.0, 1.0)).alike(2), 3)
    0.667
    """

    weights: tuple[float, ...]  # one for each score

    @classmethod
    def fitted(cls, groups: Groups) -> Outcomes:
        """From how often each score is there, and how often two completions of a prompt score alike. ρ, the correlation
        within a prompt, is how much oftener that is than for any two completions: E[Σ p²] = S + ρ(1 − S), with S the
        sum of squared shares, and the weights' sum is 1/ρ − 1."""
        scores = [score for group in groups for score in group]
        shares = [count / len(scores) for count in Counter(scores).values()]
        chance = fsum(share * share for share in shares)
        if chance >= 1.0:
            raise ValueError("all completions score alike: nothing can be said about prompts between them")
        excess = (fmean(_all_equal(group, 2) for group in groups) - chance) / (1.0 - chance)
        rho = min(max(excess, 1e-3), 0.999)
        return cls(tuple(share * (1 / rho - 1) for share in shares))

    def alike(self, size: int) -> float:
        """The share of groups without signal: Σ_v E[p_v^K], with E[p^K] = Π_{j<K} (a+j)/(A+j), A the weights' sum."""
        total = fsum(self.weights)
        # Where scores are real numbers there are many of the same weight.
        counts = Counter(self.weights).items()
        return fsum(n * prod((weight + j) / (total + j) for j in range(size)) for weight, n in counts)


def signal_by_size(groups: Groups) -> Callable[[int], float]:
    """The share of groups with signal, as a function of their size, from the scores of some groups.

    Up to a group's own size it is counted, over all choices of K of its completions: 1 − Σ_v C(c_v, K)/C(n, K), with
    c_v completions of score v. For more, nobody has seen what they score: what was counted of groups without signal
    becomes rarer as it does among the [`Outcomes`] that are fitted to all groups.

    >>> share = signal_by_size([[0.0, 0.5, 1.0, 1.0]])
    >>> round(share(2), 3)
    0.833
    """
    groups = comparable(groups)
    if len({score for group in groups for score in group}) < 2:
        return lambda size: 0.0
    alike = cache(Outcomes.fitted(groups).alike)

    def without(group: Sequence[float], size: int) -> float:
        seen = min(size, len(group))
        return _all_equal(group, seen) * alike(size) / alike(seen)

    return lambda size: 1.0 - fmean(without(group, size) for group in groups)


def measured_size(groups: Groups) -> int:
    """The largest size at which no group's signal is extrapolated."""
    return min(len(group) for group in comparable(groups))


def _all_equal(group: Sequence[float], size: int) -> float:
    """The probability that `size` of a group's completions, drawn without replacement, score alike."""
    return sum(comb(count, size) for count in Counter(group).values()) / comb(len(group), size)


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
