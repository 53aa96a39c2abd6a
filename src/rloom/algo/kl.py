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

import torch
from torch import Tensor


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


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""The estimators that need the sampled token's log-probabilities only; `"full"` needs the distributions."""


def token_kl(estimator: str, policy: Tensor, reference: Tensor) -> Tensor:
    """The named estimator at each token, from the sampled tokens' log-probabilities. Any shape."""
    return KL_ESTIMATORS[estimator](policy, reference)


def exact_kl(policy_logits: Tensor, reference_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Σ_v π_θ(v) · (log π_θ(v) − log π_ref(v)) from logits (..., V), in float32 → (...).

    >>> exact_kl(torch.tensor([0.0, 0.0]), torch.tensor([0.0, 0.0]))
    tensor(0.)
    """
    policy = (policy_logits.float() / temperature).log_softmax(-1)
    reference = (reference_logits.float() / temperature).log_softmax(-1)
    return (policy.exp() * (policy - reference)).sum(-1)
