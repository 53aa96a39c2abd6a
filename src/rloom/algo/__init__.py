"""The method as pure functions on tensors: no model, no device, no file, no log.

Completions come as flat rows, (N,), with `groups`, (N,), saying which prompt each belongs to, so that groups of
unequal size need no special case. A completion that could not be scored is NaN.
"""

from rloom.algo.advantages import (
    ADVANTAGE_ESTIMATORS,
    MovingAverage,
    batch_mean,
    clip_advantages,
    comparable,
    group_mean,
    leave_one_out,
    no_baseline,
)
from rloom.algo.kl import KL_ESTIMATORS, KL_PLACEMENTS, exact_kl, k1, k2, k3
from rloom.algo.loss import AGGREGATIONS, RATIO_LEVELS, SURROGATES, LossTerms, aggregate, policy_loss
from rloom.algo.normalizers import NORMALIZERS, RunningMoments, clip, masked_mean, masked_std, normalize
from rloom.algo.objectives import OBJECTIVES, Objective
from rloom.algo.shaping import (
    LENGTH_REGULARIZATIONS,
    TRUNCATIONS,
    length_penalty,
    missing_eos,
    reward_to_go,
    weighted_sum,
)

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "KL_PLACEMENTS",
    "LENGTH_REGULARIZATIONS",
    "NORMALIZERS",
    "OBJECTIVES",
    "RATIO_LEVELS",
    "SURROGATES",
    "TRUNCATIONS",
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
    "weighted_sum",
]
