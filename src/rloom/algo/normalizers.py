"""Bringing scores and advantages to a common scale. NaN marks a value that does not exist."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.algo.tables import Choice, by_name


def masked_mean(values: Tensor) -> Tensor:
    """Mean over the numbers among `values`; NaN when there is none."""
    return values.nanmean()


def masked_std(values: Tensor) -> Tensor:
    """Standard deviation (n−1) over the numbers among `values`; NaN with fewer than two."""
    known = values[~values.isnan()]
    return known.std() if known.numel() > 1 else values.new_full((), math.nan)


def normalize(values: Tensor, eps: float = 1e-4) -> Tensor:
    """(x − mean) / (std + eps) over the numbers among `values`; NaN stays NaN, fewer than two are left alone.

    Bias: the mean and std contain the value itself, so the result depends on the batch; the sign of an advantage
    can flip when the batch's mean is far from 0.

    >>> normalize(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-0.7071,  0.7071])
    """
    # In float32 the rounding of a large mean would pass for a difference.
    exact = values.double()
    std = masked_std(exact)
    return values if std.isnan() else ((exact - masked_mean(exact)) / (std + eps)).to(values.dtype)


@dataclass(slots=True)
class RunningMoments:
    """Mean and variance of everything seen so far, merged batch by batch (Chan, Golub & LeVeque 1979).

    >>> moments = RunningMoments()
    >>> moments.update(torch.tensor([1.0, 2.0])); moments.update(torch.tensor([6.0]))
    >>> moments.mean, round(moments.std, 4)
    (3.0, 2.6458)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # Σ (x − mean)²

    def update(self, values: Tensor) -> None:
        """Take in a batch; NaN is passed over. An infinite value would stay in the mean for ever, and is refused."""
        known = values[~values.isnan()].double()
        if known.isinf().any():
            raise ValueError("an infinite score cannot be normalised: clip it, or give None instead")
        if not known.numel():
            return
        count, mean = known.numel(), known.mean().item()
        delta, total = mean - self.mean, self.count + count
        self.squares += ((known - mean) ** 2).sum().item() + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Standard deviation (n−1); 1 until there are two values, so that dividing by it changes nothing."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 1.0

    def normalize(self, values: Tensor, eps: float = 1e-4) -> Tensor:
        """(x − mean) / (std + eps) with the moments so far; in float64, as [`normalize`]."""
        return ((values.double() - self.mean) / (self.std + eps)).to(values.dtype)


def clip(values: Tensor, limits: tuple[float, float] | None) -> Tensor:
    """Values held within (min, max); None: unchanged. NaN stays NaN."""
    return values if limits is None else torch.clamp(values, min=limits[0], max=limits[1])


def _by_all_so_far(values: Tensor, moments: RunningMoments, update: bool) -> Tensor:
    if update:
        moments.update(values)
    return moments.normalize(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer(Choice):
    """One value of `normalize_rewards`. `function` takes scores (N,), the run's moments and whether to update these."""

    function: Callable[[Tensor, RunningMoments, bool], Tensor]


NORMALIZERS = by_name(
    Normalizer(name="batch", function=lambda values, moments, update: normalize(values)),
    Normalizer(name="running", function=_by_all_so_far),
)

OFF = "off"
"""The value of `normalize_rewards` that switches off what an objective turns on."""
