"""What happens to scores before they become rewards."""

from __future__ import annotations

import torch
from torch import Tensor


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


def length_penalty(lengths: Tensor, kind: str | None, *, coefficient: float, max_length: int, margin: int) -> Tensor:
    """What a completion's length costs it, to be subtracted from its score. (N,) → (N,), ≥ 0

    - `"linear"`: coefficient · length / max_length
    - `"soft_overlong"`: 0 up to max_length − margin, then rising linearly to coefficient at max_length
      (DAPO, Yu et al. 2025, arXiv 2503.14476)

    >>> length_penalty(torch.tensor([10, 90, 100]), "soft_overlong", coefficient=1.0, max_length=100, margin=20)
    tensor([0.0000, 0.5000, 1.0000])
    """
    lengths = lengths.float()
    if kind is None:
        return torch.zeros_like(lengths)
    if kind == "linear":
        return coefficient * lengths / max_length
    return coefficient * ((lengths - (max_length - margin)) / margin).clamp(0, 1)


def reward_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """Σ_{t' ≥ t} r_{t'} over the tokens that `mask` keeps. (B, T) → (B, T)

    >>> reward_to_go(torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3))
    tensor([[7., 6., 4.]])
    """
    return (rewards * mask).flip(-1).cumsum(-1).flip(-1) * mask
