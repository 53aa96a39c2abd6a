"""The surrogate loss: from log-probabilities and advantages to what is minimised.

Shapes: log-probabilities and `mask` are (B, T), padded; advantages are (B,), one per completion, or (B, T), one per
token. Nothing here divides by a batch size: `aggregate` returns sums, and the caller divides by one denominator
that covers the whole update, whatever micro-batches and processes it is split into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.algo.tables import Choice, by_name


@dataclass(slots=True, kw_only=True)
class LossTerms:
    """A loss before summation, and what the clip did, at the level of the ratio: (B,) or (B, T)."""

    values: Tensor
    log_ratio: Tensor  # log ρ, which is a number also where ρ overflows or is 0
    low_clipped: Tensor
    high_clipped: Tensor

    @property
    def ratio(self) -> Tensor:
        """ρ."""
        return self.log_ratio.exp()


def policy_loss(
    policy: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: str,
    surrogate: str,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossTerms:
    """The policy-gradient loss per completion or per token, as the ratio's `level` says.

        ρ = exp(log π_θ − log π_old),  summed over the completion at sequence level

    On the first update ρ = 1 and all surrogates have the same gradient. A ratio per token treats each token as an
    action; a ratio per completion treats the completion as one action, as RLOO's authors argue.
    """
    if not RATIO_LEVELS[level].per_token:
        policy, old = (policy * mask).sum(-1), (old * mask).sum(-1)  # (B,)
    elif advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)  # (B, 1), broadcast over tokens
    clips = {"epsilon_low": epsilon_low, "epsilon_high": epsilon_high, "dual_clip": dual_clip}
    return SURROGATES[surrogate].function(policy, policy - old, advantages, **clips)


def clipped_ratio(
    policy: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None,
) -> LossTerms:
    """PPO's surrogate, which bounds how far later updates of a rollout go: biased, on purpose.

                  −min(ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A)                 Schulman et al. 2017
    dual clip c:  where A < 0 also at most −c·A, i.e. max(min(…), c·A)    Ye et al. 2020 (arXiv 1912.09729)
    """
    ratio = torch.exp(log_ratio)
    objective = torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    return LossTerms(
        values=-objective,
        log_ratio=log_ratio,
        low_clipped=(ratio < 1 - epsilon_low) & (advantages < 0),
        high_clipped=(ratio > 1 + epsilon_high) & (advantages > 0),
    )


def plain_reinforce(policy: Tensor, log_ratio: Tensor, advantages: Tensor, **clips: float | None) -> LossTerms:
    """−A · log π_θ (Williams 1992). It has no ratio to clip: it ignores that the samples are from π_old."""
    never = torch.zeros_like(log_ratio, dtype=torch.bool)
    return LossTerms(values=-advantages * policy, log_ratio=log_ratio, low_clipped=never, high_clipped=never)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioLevel(Choice):
    """One value of `ratio_level`: what one ratio ρ is taken over."""

    per_token: bool


RATIO_LEVELS = by_name(
    RatioLevel(name="sequence", note="per completion", per_token=False),
    RatioLevel(name="token", note="per token", per_token=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate(Choice):
    """One value of `surrogate`. `function` takes log π_θ, log ρ, advantages and the clips' bounds."""

    function: Callable[..., LossTerms]
    uses_ratio: bool


SURROGATES = by_name(
    Surrogate(
        name="clip",
        note="PPO's clipped ratio",
        function=clipped_ratio,
        uses_ratio=True,
        options=("epsilon", "epsilon_high", "dual_clip"),
    ),
    Surrogate(name="reinforce", note="plain log-probabilities", function=plain_reinforce, uses_ratio=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregation(Choice):
    """One value of `loss_aggregation`: what counts once in the mean."""

    over_tokens: bool = False  # each token: the sum is divided by the number of tokens, else by that of completions
    mean_of_completion: bool = False  # a completion counts as the mean over its tokens, else as their sum


AGGREGATIONS = by_name(
    Aggregation(name="sequence_mean"),
    Aggregation(name="sequence_token_mean", mean_of_completion=True),
    Aggregation(name="token_mean", over_tokens=True),
)


def aggregate(values: Tensor, mask: Tensor, how: str) -> Tensor:
    """Sum of loss values, (B,) or (B, T), to be divided by the update's denominator.

    - Each completion counts once, as the sum over its tokens. Divide by N.
    - `mean_of_completion`: each completion counts once, as the mean over its tokens. Divide by N.
    - `over_tokens`: each token counts once. Divide by the number of tokens. For a token-level loss this is the first
      one scaled by one over the mean length, and unlike the second it does not make the tokens of long completions
      count less.

    A sequence-level value counts once per token of its completion if the mean is over tokens.
    """
    aggregation = AGGREGATIONS[how]
    lengths = mask.sum(-1)  # (B,)
    if values.dim() == 1:
        return (values * lengths).sum() if aggregation.over_tokens else values.sum()
    per_sequence = (values * mask).sum(-1)
    if aggregation.mean_of_completion:
        per_sequence = per_sequence / lengths.clamp(min=1)
    return per_sequence.sum()
