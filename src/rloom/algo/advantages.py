"""From rewards to advantages: what each completion is compared with.

Every function takes `rewards` (N,) and `groups` (N,) and returns advantages (N,). NaN marks a completion that could
not be scored: it enters nobody's baseline and its own advantage is 0. Sums are taken in float64, so that equal rewards
give advantages of exactly 0 whatever their scale.

A baseline that does not depend on the completion it is subtracted from leaves the expected policy gradient
unchanged; it only changes the variance. "Unbiased" below is meant in that sense.

`ADVANTAGE_ESTIMATORS`, at the end, is the table of them: a new estimator is a function and an entry there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from rloom.algo.tables import Choice, by_name


def _group_sums(values: Tensor, groups: Tensor) -> Tensor:
    """Σ of `values` over each row's group, at each row. (N,) → (N,)"""
    # On a GPU the largest number is not asked for: the host would wait for it. There, groups are numbered below N.
    slots = len(values) if groups.device.type != "cpu" else int(groups.max()) + 1 if len(groups) else 0
    return values.new_zeros(slots).index_add(0, groups, values)[groups]


def _scorable(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards with 0 in place of NaN, and 1/0 flags of which are numbers."""
    known = ~rewards.isnan()
    # Apple's GPUs have no float64.
    exact = torch.float32 if rewards.device.type == "mps" else torch.float64
    return torch.where(known, rewards, rewards.new_zeros(())).to(exact), known.to(exact)


def comparable(rewards: Tensor, groups: Tensor) -> Tensor:
    """Which completions have a score and a scored sibling to be compared with. (N,) bool"""
    _, known = _scorable(rewards)
    return (known > 0) & (_group_sums(known, groups) > 1)


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """REINFORCE Leave-One-Out: each completion against the mean of its siblings.

        A_i = r_i − 1/(K−1) · Σ_{j≠i} r_j  =  K/(K−1) · (r_i − group mean)

    Source: Kool, van Hoof & Welling 2019; Ahmadian et al. 2024 (arXiv 2402.14740).
    Bias: none, since the siblings are drawn independently of completion i.
    Variance: the baseline's own noise is Var(r)/(K−1), so it falls with K.
    K counts the scorable completions of the group; with fewer than two there is nothing to compare with: 0.

    >>> leave_one_out(torch.tensor([1.0, 2.0, 5.0, 8.0]), torch.zeros(4, dtype=torch.long))
    tensor([-4.0000, -2.6667,  1.3333,  5.3333])
    """
    filled, known = _scorable(rewards)
    total, count = _group_sums(filled, groups), _group_sums(known, groups)
    baseline = (total - filled) / (count - 1).clamp(min=1)
    return torch.where(comparable(rewards, groups), filled - baseline, torch.zeros_like(filled)).to(rewards.dtype)


def group_mean(rewards: Tensor, groups: Tensor, *, divide_by_std: bool = False, eps: float = 1e-4) -> Tensor:
    """GRPO: each completion against the mean of its whole group, itself included.

        A_i = r_i − mean_group(r)              [/ (std_group(r) + eps)]

    Source: Shao et al. 2024 (arXiv 2402.03300); without the division: Liu et al. 2025 (arXiv 2503.20783).
    Bias: the mean contains r_i, so the gradient is (K−1)/K times leave-one-out's: the same direction, a smaller
    step. Dividing by the group's standard deviation does change the direction: it weighs every prompt alike,
    which favours those that are almost always or almost never solved.
    Variance: as leave-one-out, scaled by ((K−1)/K)².
    """
    filled, known = _scorable(rewards)
    count = _group_sums(known, groups)
    centred = (filled - _group_sums(filled, groups) / count.clamp(min=1)) * known
    if divide_by_std:
        variance = _group_sums(centred**2, groups) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    return torch.where(comparable(rewards, groups), centred, torch.zeros_like(centred)).to(rewards.dtype)


def batch_mean(rewards: Tensor) -> Tensor:
    """REINFORCE with the mean reward of the whole batch as baseline, prompts mixed.

        A_i = r_i − mean_batch(r)

    Source: Williams 1992. Bias: the mean contains r_i: (N−1)/N times the unbiased gradient.
    Variance: does not remove the differences between easy and hard prompts.
    """
    filled, known = _scorable(rewards)
    return ((filled - filled.sum() / known.sum().clamp(min=1)) * known).to(rewards.dtype)


def no_baseline(rewards: Tensor) -> Tensor:
    """Plain REINFORCE: A_i = r_i. Unbiased; the variance grows with the square of the mean reward."""
    filled, _ = _scorable(rewards)
    return filled.to(rewards.dtype)


@dataclass(slots=True)
class MovingAverage:
    """REINFORCE with an exponential moving average of past rewards as baseline.

        A_i = r_i − b,     then  b ← m·b + (1−m)·mean_batch(r)

    Source: Williams 1992; the "vanilla policy gradient" that Ahmadian et al. 2024 compare with.
    Bias: none, b comes from earlier batches. Variance: one number for all prompts, and it lags behind the policy.
    The first batch, which has no past, is its own baseline.

    >>> average = MovingAverage(momentum=0.5)
    >>> average.advantages(torch.tensor([1.0, 3.0]))  # b = 2, the batch's own mean
    tensor([-1.,  1.])
    >>> average.advantages(torch.tensor([2.0, 6.0]))  # b = 2 still; afterwards 0.5·2 + 0.5·4 = 3
    tensor([0., 4.])
    >>> average.value
    3.0
    """

    momentum: float = 0.9
    value: float | None = None

    def advantages(self, rewards: Tensor, *, update: bool = True) -> Tensor:
        """Advantages against the average so far; `update=False` leaves the average alone (evaluation)."""
        filled, known = _scorable(rewards)
        if not known.any():
            return filled.to(rewards.dtype)
        mean = (filled.sum() / known.sum()).item()
        baseline = mean if self.value is None else self.value
        if update:
            self.value = self.momentum * baseline + (1 - self.momentum) * mean
        return ((filled - baseline) * known).to(rewards.dtype)


def clip_advantages(advantages: Tensor, limit: float | None) -> Tensor:
    """Advantages held within ±`limit` (OpenRLHF clips its leave-one-out advantages at 10); None: unchanged."""
    return advantages if limit is None else advantages.clamp(-limit, limit)


class Scope(Enum):
    """What a completion is compared with."""

    GROUP = "the other completions of its prompt"
    BATCH = "completions of all prompts"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator(Choice):
    """One value of `advantage_estimator`.

    `function` takes rewards (N,), groups (N,), the run's moving average of rewards and whether to update that, and
    returns advantages (N,).
    """

    function: Callable[[Tensor, Tensor, MovingAverage, bool], Tensor]
    scope: Scope

    @property
    def min_generations(self) -> int:
        """The smallest K that it can work with."""
        return 2 if self.scope is Scope.GROUP else 1

    @property
    def needs_batch(self) -> bool:
        """Whether all of a rollout must be known first."""
        return self.scope is Scope.BATCH

    def usable(self, rewards: Tensor, groups: Tensor) -> Tensor:
        """Which completions have an advantage. (N,) bool"""
        return comparable(rewards, groups) if self.scope is Scope.GROUP else ~rewards.isnan()


def _within_groups(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda rewards, groups, average, update: function(rewards, groups)


def _over_rewards(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda rewards, groups, average, update: function(rewards)


ADVANTAGE_ESTIMATORS = by_name(
    AdvantageEstimator(name="leave_one_out", function=_within_groups(leave_one_out), scope=Scope.GROUP),
    AdvantageEstimator(name="group_mean", function=_within_groups(group_mean), scope=Scope.GROUP),
    AdvantageEstimator(
        name="group_mean_std",
        function=_within_groups(functools.partial(group_mean, divide_by_std=True)),
        scope=Scope.GROUP,
    ),
    AdvantageEstimator(name="batch_mean", function=_over_rewards(batch_mean), scope=Scope.BATCH),
    AdvantageEstimator(
        name="moving_average",
        function=lambda rewards, groups, average, update: average.advantages(rewards, update=update),
        scope=Scope.BATCH,
        options=("baseline_momentum",),
    ),
    AdvantageEstimator(name="none", function=_over_rewards(no_baseline), scope=Scope.NOTHING),
)
