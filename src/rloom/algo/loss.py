"""The surrogate loss: from log-probabilities and advantages to what is minimised.

Shapes: log-probabilities and `mask` are (B, T), padded; advantages are (B,), one per completion, or (B, T), one per
token. Nothing here divides by a batch size: `aggregate` returns sums, and the caller divides by one denominator
that covers the whole update, whatever micro-batches and processes it is split into.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
    level: str = "sequence",
    surrogate: str = "clip",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    dual_clip: float | None = None,
) -> LossTerms:
    """The policy-gradient loss per completion (`level="sequence"`) or per token (`level="token"`).

        ρ = exp(log π_θ − log π_old),  summed over the completion at sequence level
        "clip":       −min(ρ·A, clip(ρ, 1−ε_low, 1+ε_high)·A)                 PPO, Schulman et al. 2017
        dual clip c:  where A < 0 also at most −c·A, i.e. max(min(…), c·A)    Ye et al. 2020 (arXiv 1912.09729)
        "reinforce":  −A · log π_θ                                            Williams 1992

    On the first update ρ = 1 and all three have the same gradient. "clip" bounds later ones: biased, on purpose;
    "reinforce" ignores that the samples are from π_old. A ratio per token (token level) treats each token as an
    action; a ratio per completion treats the completion as one action, as RLOO's authors argue.
    """
    if level == "sequence":
        policy, old = (policy * mask).sum(-1), (old * mask).sum(-1)  # (B,)
    elif advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)  # (B, 1), broadcast over tokens
    log_ratio = policy - old
    ratio = torch.exp(log_ratio)
    if surrogate == "reinforce":
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return LossTerms(values=-advantages * policy, log_ratio=log_ratio, low_clipped=never, high_clipped=never)

    objective = torch.min(ratio * advantages, ratio.clamp(1 - epsilon_low, 1 + epsilon_high) * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    return LossTerms(
        values=-objective,
        log_ratio=log_ratio,
        low_clipped=(ratio < 1 - epsilon_low) & (advantages < 0),
        high_clipped=(ratio > 1 + epsilon_high) & (advantages > 0),
    )


def aggregate(values: Tensor, mask: Tensor, how: str) -> Tensor:
    """Sum of loss values, (B,) or (B, T), to be divided by the update's denominator.

    - `"sequence_mean"`: each completion counts once; a token-level loss is summed over its tokens. Divide by N.
    - `"sequence_token_mean"`: each completion counts once, as the mean over its tokens. Divide by N.
    - `"token_mean"`: each token counts once. Divide by the number of tokens. For a token-level loss this is
      `"sequence_mean"` scaled by one over the mean length, and unlike `"sequence_token_mean"` it does not make the
      tokens of long completions count less.

    A sequence-level value under `"token_mean"` counts once per token of its completion.
    """
    lengths = mask.sum(-1)  # (B,)
    if values.dim() == 1:
        return (values * lengths).sum() if how == "token_mean" else values.sum()
    per_sequence = (values * mask).sum(-1)
    if how == "sequence_token_mean":
        per_sequence = per_sequence / lengths.clamp(min=1)
    return per_sequence.sum()
