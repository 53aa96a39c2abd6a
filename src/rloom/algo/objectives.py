"""What "RLOO" computes in different places, as one table of choices.

Four frameworks call four different objectives RLOO. `objective="…"` in the config picks a row; a single option given
beside it overrides that one choice. docs/algorithms.md tells the rows apart in words and formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from rloom.algo.advantages import ADVANTAGE_ESTIMATORS
from rloom.algo.kl import KL_ESTIMATORS, KL_PLACEMENTS
from rloom.algo.loss import AGGREGATIONS, RATIO_LEVELS, SURROGATES
from rloom.algo.tables import Choice

TABLES: dict[str, Mapping[str, Choice]] = {
    "advantage_estimator": ADVANTAGE_ESTIMATORS,
    "kl_estimator": KL_ESTIMATORS,
    "kl_placement": KL_PLACEMENTS,
    "ratio_level": RATIO_LEVELS,
    "surrogate": SURROGATES,
    "loss_aggregation": AGGREGATIONS,
}
"""What those options may be that every objective has a value for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One combination: which baseline, where the KL goes, how the ratio is taken and the loss averaged.

    `kl_placement`:
      "reward"                        reward_i = score_i − β·Σ_t kl_t, then the baseline
      "reward_tokens"                 as "reward" for the baseline; token t is credited with −β·Σ_{t'≥t} kl_t' only
      "reward_tokens_after_baseline"  the baseline sees scores only; token t gets A_i − β·Σ_{t'≥t} kl_t'
      "loss"                          + β·kl_t in the loss
    """

    advantage_estimator: str = "leave_one_out"
    kl_estimator: str = "k1"
    kl_placement: str = "reward"
    ratio_level: str = "sequence"
    surrogate: str = "clip"
    loss_aggregation: str = "sequence_mean"
    dual_clip: float | None = None
    advantage_clip: float | None = None
    normalize_rewards: str | None = None
    normalize_advantages: bool = False
    reward_clip_range: tuple[float, float] | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The choices' names, which are also options of the config."""
        return tuple(field.name for field in fields(cls))


OBJECTIVES: dict[str, Objective] = {
    # TRL 1.16: k1 summed over the completion, in the reward, before the baseline; one ratio per completion.
    "trl": Objective(),
    # Ahmadian et al. 2024: the same reward and baseline; plain REINFORCE instead of a clipped ratio.
    "paper": Objective(surrogate="reinforce"),
    # OpenRLHF 0.11: baseline over scores, clipped at ±10; the KL per token, to go, with no baseline; token ratio.
    "openrlhf": Objective(
        kl_placement="reward_tokens_after_baseline",
        ratio_level="token",
        loss_aggregation="token_mean",
        advantage_clip=10.0,
    ),
    # verl 0.9: the KL in the reward before the baseline, one advantage for all tokens; token ratio, dual clip.
    "verl": Objective(ratio_level="token", loss_aggregation="token_mean", dual_clip=3.0),
    # REINFORCE++ (Hu 2025): no group baseline; rewards normalised and clipped, KL per token to go, advantages
    # normalised over the batch, PPO's token-level clip.
    "reinforce++": Objective(
        advantage_estimator="none",
        kl_placement="reward_tokens_after_baseline",
        ratio_level="token",
        loss_aggregation="token_mean",
        normalize_rewards="batch",
        reward_clip_range=(-10.0, 10.0),
        normalize_advantages=True,
    ),
}
