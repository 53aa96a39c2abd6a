"""The method as pure functions on tensors: no model, no device, no file, no log.

Completions come as flat rows, (N,), with `groups`, (N,), saying which prompt each belongs to, so that groups of
unequal size need no special case. A completion that could not be scored is NaN.
"""

from rloom.algo.advantages import (
    MovingAverage,
    batch_mean,
    clip_advantages,
    comparable,
    group_mean,
    leave_one_out,
    no_baseline,
)
from rloom.algo.kl import KL_ESTIMATORS, exact_kl, k1, k2, k3, token_kl
from rloom.algo.loss import LossTerms, aggregate, policy_loss
from rloom.algo.normalizers import RunningMoments, clip, masked_mean, masked_std, normalize
from rloom.algo.objectives import OBJECTIVES, Objective
from rloom.algo.shaping import length_penalty, missing_eos, reward_to_go, weighted_sum

__all__ = [
    "KL_ESTIMATORS",
    "OBJECTIVES",
    "LossTerms",
    "MovingAverage",
    "Objective",
    "RunningMoments",
    "aggregate",
    "batch_mean",
    "clip",
    "clip_advantages",
    "comparable",
    "exact_kl",
    "group_mean",
    "k1",
    "k2",
    "k3",
    "leave_one_out",
    "length_penalty",
    "masked_mean",
    "masked_std",
    "missing_eos",
    "no_baseline",
    "normalize",
    "policy_loss",
    "reward_to_go",
    "token_kl",
    "weighted_sum",
]
