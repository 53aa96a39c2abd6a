"""KL(π_θ ‖ π_ref) at each token, estimated from the sampled token or computed over the whole vocabulary.

With ℓ = log π_θ(y_t) − log π_ref(y_t) for a token sampled from π_θ:

| name | value             | as a value            | its gradient, put into the loss            |
|------|-------------------|-----------------------|--------------------------------------------|
| k1   | ℓ                 | unbiased, may be < 0  | zero in expectation: useless in the loss   |
| k2   | ℓ²/2              | biased, low variance  | unbiased gradient of the token's KL        |
| k3   | exp(−ℓ) − 1 + ℓ   | unbiased, ≥ 0         | biased: that of KL(π_ref ‖ π_θ)            |
| full | Σ_v π_θ log π_θ/π_ref | exact at this token | exact at this token                      |

In the *reward* it is the score function that is differentiated, and only k1 gives the gradient of the KL there. The
exact KL at a token is the same number whichever token is drawn, so that it teaches that token nothing (only earlier
ones); k2's and k3's gradients through the reward are not that of the KL either. In the *loss* k2 and full are right,
token by token: they do not see what a token does to the KL of later ones. The trainer says so when a combination is
chosen that is not sound.
Source: Schulman, "Approximating KL divergence" (2020); Tang & Munos 2025 (arXiv 2506.09477) on the gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.algo.tables import Choice, by_name


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """ℓ, the log-ratio: unbiased as a value; negative wherever the reference likes the token better.

    >>> k1(torch.tensor([-1.0, -2.0]), torch.tensor([-2.0, -1.0]))
    tensor([ 1., -1.])
    """
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """ℓ²/2: a biased value (exact to second order) with an unbiased gradient in the loss."""
    return (policy - reference).square() / 2


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """exp(−ℓ) − 1 + ℓ: an unbiased value that is never negative; GRPO puts it into the loss."""
    log_ratio = policy - reference
    return torch.expm1(-log_ratio) + log_ratio


def exact_kl(policy_logits: Tensor, reference_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Σ_v π_θ(v) · (log π_θ(v) − log π_ref(v)) from logits (..., V), in float32 → (...).

    >>> exact_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]))
    tensor(0.)
    """
    policy = (policy_logits.float() / temperature).log_softmax(-1)
    reference = (reference_logits.float() / temperature).log_softmax(-1)
    return (policy.exp() * (policy - reference)).sum(-1)


def adapted_beta(beta: float, kl: float, target: float, gain: float) -> float:
    """β ← β · (1 + gain · clip(kl / target − 1, −0.2, 2)): the weight grows while the KL is above its target.

    Source: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2, where the gain is 0.1 and the clip ±0.2: they train for
    two million episodes. Runs of a hundred updates need a β that follows a KL of several times its target.

    >>> adapted_beta(0.5, kl=0.11, target=0.1, gain=0.1)
    0.505
    >>> adapted_beta(0.5, kl=9.0, target=0.1, gain=0.1), adapted_beta(0.5, kl=-1.0, target=0.1, gain=0.1)
    (0.6, 0.49)
    """
    error = min(max(kl / target - 1.0, -0.2), 2.0)
    return beta * (1.0 + gain * error)


@dataclass(frozen=True, slots=True, kw_only=True)
class KLEstimator(Choice):
    """One value of `kl_estimator`. `function` takes the sampled tokens' log-probabilities by policy and reference, of
    any shape; where the estimator needs whole distributions, it takes logits (..., V)."""

    function: Callable[[Tensor, Tensor], Tensor]
    unbiased: bool  # as a value
    reward_gradient: str | None = None  # the divergence whose gradient it gives as part of the reward; None: of none
    loss_gradient: str | None = None  # … as part of the loss
    needs_distributions: bool = False


KL, REVERSED_KL = "KL(π_θ ‖ π_ref)", "KL(π_ref ‖ π_θ)"

KL_ESTIMATORS = by_name(
    KLEstimator(name="k1", function=k1, unbiased=True, reward_gradient=KL),
    KLEstimator(name="k2", function=k2, unbiased=False, loss_gradient=KL),
    KLEstimator(name="k3", function=k3, unbiased=True, loss_gradient=REVERSED_KL),
    KLEstimator(
        name="full",
        note="over the whole vocabulary",
        function=exact_kl,
        unbiased=True,
        loss_gradient=KL,
        needs_distributions=True,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KLPlacement(Choice):
    """One value of `kl_placement`: where β·KL is charged."""

    in_loss: bool = False  # else in the reward
    before_baseline: bool = False  # the baseline sees rewards from which the completion's KL was taken
    per_token: bool = False  # token t is charged for the KL from t on, so that each token has its own advantage


KL_PLACEMENTS = by_name(
    KLPlacement(name="reward", before_baseline=True),
    KLPlacement(name="reward_tokens", before_baseline=True, per_token=True),
    KLPlacement(name="reward_tokens_after_baseline", per_token=True),
    KLPlacement(name="loss", in_loss=True),
)
