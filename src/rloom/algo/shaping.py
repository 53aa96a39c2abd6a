"""What happens to scores before they become rewards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloom.algo.tables import Choice, by_name


def weighted_sum(scores: Tensor, weights: Tensor) -> Tensor:
    """score_i = Σ_f w_f · f_i over the functions that returned a number; NaN where none did. (N, F) → (N,)

    >>> scores = torch.tensor([[1.0, 2.0], [torch.nan, 3.0], [torch.nan, torch.nan]])
    >>> weighted_sum(scores, torch.tensor([1.0, 0.5]))
    tensor([2.0000, 1.5000,    nan])
    """
    total = (scores * weights).nansum(-1)
    return torch.where(scores.isnan().all(-1), scores.new_full((), torch.nan), total)


def missing_eos(scores: Tensor, ended: Tensor, penalty: float | None) -> Tensor:
    """score − penalty where the completion did not end by itself (the "EOS trick"). (N,), (N,) bool → (N,)"""
    return scores if not penalty else scores - penalty * (~ended).to(scores.dtype)


def linear_length(lengths: Tensor, *, coefficient: float, max_length: int, margin: int) -> Tensor:
    """coefficient · length / max_length. (N,) → (N,), ≥ 0"""
    return coefficient * lengths / max_length


def soft_overlong(lengths: Tensor, *, coefficient: float, max_length: int, margin: int) -> Tensor:
    """0 up to max_length − margin, then rising linearly to coefficient at max_length. (N,) → (N,), ≥ 0

    Source: DAPO, Yu et al. 2025 (arXiv 2503.14476).

    >>> soft_overlong(torch.tensor([10.0, 90.0, 100.0]), coefficient=1.0, max_length=100, margin=20)
    tensor([0.0000, 0.5000, 1.0000])
    """
    return coefficient * ((lengths - (max_length - margin)) / margin).clamp(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRegularization(Choice):
    """One value of `length_regularization`: what a completion's length costs it."""

    function: Callable[..., Tensor]


LENGTH_REGULARIZATIONS = by_name(
    LengthRegularization(name="linear", function=linear_length, options=("length_coefficient",)),
    LengthRegularization(name="soft_overlong", function=soft_overlong, options=("length_coefficient", "length_margin")),
)


def length_penalty(lengths: Tensor, kind: str | None, **options: Any) -> Tensor:
    """What a completion's length costs it, to be subtracted from its score; None: nothing. (N,) → (N,), ≥ 0"""
    lengths = lengths.float()
    return torch.zeros_like(lengths) if kind is None else LENGTH_REGULARIZATIONS[kind].function(lengths, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation(Choice):
    """One value of `truncated_completions`: what a completion that was cut off is used for."""

    trained: bool = False  # it is in the loss
    counted: bool = True  # it is in its siblings' baseline, in normalisation and in the update's denominator


TRUNCATIONS = by_name(
    Truncation(name="keep", trained=True),
    Truncation(name="mask", note="no loss"),
    Truncation(name="exclude", note="no loss, no baseline", counted=False),
)


def reward_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """Σ_{t' ≥ t} r_{t'} over the tokens that `mask` keeps. (B, T) → (B, T)

    >>> reward_to_go(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3))
    tensor([[7., 6., 4.]])
    """
    return (rewards * mask).flip(-1).cumsum(-1).flip(-1) * mask
