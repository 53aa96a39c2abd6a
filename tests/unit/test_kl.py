"""KL estimators: their values by sampling, and their gradients exactly, by going through a small vocabulary.

A policy over four tokens is small enough to write every expectation as a sum over the vocabulary, so that the table
in `rloom.algo.kl` is checked to rounding error and not to sampling error.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from rloom.algo import KL_ESTIMATORS, exact_kl, k1, k2, k3
from rloom.algo.kl import KL, REVERSED_KL

POLICY = [0.6, -0.4, 1.1, 0.0]
REFERENCE = [-0.5, 0.3, 0.9, 0.7]
BY_TOKENS = [name for name, estimator in KL_ESTIMATORS.items() if not estimator.needs_distributions]


def logits(values: list[float] = POLICY) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def reference_logprobs() -> Tensor:
    return torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(-1)


def divergence(left: Tensor, right: Tensor) -> Tensor:
    """KL of one distribution from another, from log-probabilities."""
    return sum((left[v].exp() * (left[v] - right[v]) for v in range(len(left))), torch.zeros((), dtype=torch.float64))


def gradient(value: Tensor, parameter: Tensor) -> Tensor:
    return torch.autograd.grad(value, parameter, retain_graph=True)[0]


def kl_gradient() -> Tensor:
    """∇ KL(π_θ ‖ π_ref)."""
    theta = logits()
    return gradient(divergence(theta.log_softmax(-1), reference_logprobs()), theta)


def other_kl_gradient() -> Tensor:
    """∇ KL(π_ref ‖ π_θ)."""
    theta = logits()
    return gradient(divergence(reference_logprobs(), theta.log_softmax(-1)), theta)


def gradient_in_loss(estimator) -> Tensor:
    """E_{y ~ π}[∇ k(y)]: the samples are given, the estimator is differentiated."""
    theta = logits()
    policy = theta.log_softmax(-1)
    weights = policy.exp().detach()
    return gradient((weights * estimator(policy, reference_logprobs())).sum(), theta)


def gradient_in_reward(estimator) -> Tensor:
    """E_{y ~ π}[k(y) · ∇ log π(y)]: the estimator is a number, the log-probability is differentiated."""
    theta = logits()
    policy = theta.log_softmax(-1)
    weights, values = policy.exp().detach(), estimator(policy.detach(), reference_logprobs())
    return gradient((weights * values * policy).sum(), theta)


# -- values


def test_values_by_hand():
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -0.5])  # log-ratios 0.5 and −1.5
    torch.testing.assert_close(k1(policy, reference), torch.tensor([0.5, -1.5]))
    torch.testing.assert_close(k2(policy, reference), torch.tensor([0.125, 1.125]))
    expected = torch.tensor([math.exp(-0.5) - 1 + 0.5, math.exp(1.5) - 1 - 1.5])
    torch.testing.assert_close(k3(policy, reference), expected)


def test_the_names_choose_the_estimators():
    policy, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    values = {name: KL_ESTIMATORS[name].function(policy, reference).item() for name in BY_TOKENS}
    assert values == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": math.exp(-0.5) - 0.5})


def test_all_are_zero_where_policy_and_reference_agree():
    same = torch.tensor([-0.3, -2.0, -9.0])
    for name in BY_TOKENS:
        assert KL_ESTIMATORS[name].function(same, same.clone()).tolist() == [0, 0, 0]


def test_k2_and_k3_are_never_negative_and_k1_may_be():
    ratios = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    zeros = torch.zeros_like(ratios)
    assert (k1(ratios, zeros) < 0).any()
    assert (k2(ratios, zeros) >= 0).all()
    assert (k3(ratios, zeros) >= 0).all()


def test_k3_keeps_its_digits_near_zero():
    """exp(−ℓ) − 1 + ℓ taken literally in float32 has lost ℓ²/2 to rounding at ℓ = 1e−3."""
    small = torch.tensor([1e-3, -1e-3])
    torch.testing.assert_close(k3(small, torch.zeros(2)), small**2 / 2, rtol=2e-3, atol=0)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
    """400,000 draws, seed 0. The tolerance is five standard errors of each mean, at most 0.006."""
    policy, reference = logits().detach().log_softmax(-1), reference_logprobs()
    exact = divergence(policy, reference).item()
    drawn = torch.multinomial(policy.exp(), 400_000, replacement=True, generator=torch.Generator().manual_seed(0))
    errors = {}
    for name in BY_TOKENS:
        values = KL_ESTIMATORS[name].function(policy[drawn], reference[drawn])
        tolerance = 5 * values.std().item() / math.sqrt(len(values))
        assert tolerance < 6e-3
        errors[name] = abs(values.mean().item() - exact) / tolerance
    assert errors["k1"] < 1
    assert errors["k3"] < 1
    assert errors["k2"] > 3  # the bias, many standard errors wide


def test_k1_and_k3_are_unbiased_exactly():
    policy, reference = logits().detach().log_softmax(-1), reference_logprobs()
    exact = divergence(policy, reference)
    for estimator in (k1, k3):
        torch.testing.assert_close((policy.exp() * estimator(policy, reference)).sum(), exact)
    assert abs((policy.exp() * k2(policy, reference)).sum() - exact) > 0.02


@pytest.mark.parametrize("name", BY_TOKENS)
def test_the_table_says_which_are_unbiased_and_whose_gradients_they_have(name):
    estimator = KL_ESTIMATORS[name]
    policy, reference = logits().detach().log_softmax(-1), reference_logprobs()
    mean = (policy.exp() * estimator.function(policy, reference)).sum()
    assert torch.isclose(mean, divergence(policy, reference)).item() == estimator.unbiased
    in_reward, in_loss = gradient_in_reward(estimator.function), gradient_in_loss(estimator.function)
    assert torch.allclose(in_reward, kl_gradient()) == (estimator.reward_gradient == KL)
    assert torch.allclose(in_loss, kl_gradient()) == (estimator.loss_gradient == KL)
    assert torch.allclose(in_loss, other_kl_gradient()) == (estimator.loss_gradient == REVERSED_KL)


def test_k3_varies_less_than_k1_near_the_reference():
    policy, reference = logits().detach().log_softmax(-1), reference_logprobs()
    near = (0.9 * reference + 0.1 * policy).log_softmax(-1)
    variance = {
        name: (near.exp() * KL_ESTIMATORS[name].function(near, reference).square()).sum()
        - (near.exp() * KL_ESTIMATORS[name].function(near, reference)).sum().square()
        for name in ("k1", "k3")
    }
    assert variance["k3"] < variance["k1"] / 10


# -- gradients at one token, exactly


def test_k1_in_the_loss_has_no_expected_gradient():
    torch.testing.assert_close(gradient_in_loss(k1), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)


def test_k2_in_the_loss_has_the_gradient_of_the_kl():
    torch.testing.assert_close(gradient_in_loss(k2), kl_gradient())


def test_k3_in_the_loss_has_the_gradient_of_the_other_kl():
    """Of KL(π_ref ‖ π_θ), not of KL(π_θ ‖ π_ref)."""
    torch.testing.assert_close(gradient_in_loss(k3), other_kl_gradient())
    assert (gradient_in_loss(k3) - kl_gradient()).norm() > 0.1 * kl_gradient().norm()


def test_k1_in_the_reward_has_the_gradient_of_the_kl():
    torch.testing.assert_close(gradient_in_reward(k1), kl_gradient())


def test_k3_in_the_reward_has_the_difference_of_two_gradients():
    torch.testing.assert_close(gradient_in_reward(k3), kl_gradient() - other_kl_gradient())
    # The two nearly cancel: what is left hardly pulls towards the reference.
    assert gradient_in_reward(k3).norm() < 0.5 * kl_gradient().norm()


def test_k2_in_the_reward_has_the_gradient_of_its_own_mean_less_that_of_the_kl():
    theta = logits()
    policy = theta.log_softmax(-1)
    own = gradient((policy.exp() * k2(policy, reference_logprobs())).sum(), theta)
    torch.testing.assert_close(gradient_in_reward(k2), own - kl_gradient())
    assert (gradient_in_reward(k2) - kl_gradient()).norm() > 0.5 * kl_gradient().norm()


def test_the_exact_kl_in_the_loss_has_its_own_gradient():
    theta = logits()
    got = gradient(exact_kl(theta, torch.tensor(REFERENCE, dtype=torch.float64)), theta)
    torch.testing.assert_close(got, kl_gradient(), rtol=1e-5, atol=1e-6)  # computed in float32


def test_the_exact_kl_in_the_reward_has_no_expected_gradient_at_its_token():
    """It is the same number whichever token is drawn, so it says nothing about the draw."""
    constant = exact_kl(logits().detach(), torch.tensor(REFERENCE, dtype=torch.float64)).double()
    got = gradient_in_reward(lambda policy, reference: constant.expand_as(policy))
    torch.testing.assert_close(got, torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)


# -- the exact KL


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_exact_kl_is_that_of_the_distributions(temperature):
    generator = torch.Generator().manual_seed(1)
    policy, reference = (3 * torch.randn(2, 5, 7, generator=generator) for _ in range(2))
    got = exact_kl(policy, reference, temperature)
    expected = kl_divergence(Categorical(logits=policy / temperature), Categorical(logits=reference / temperature))
    assert got.shape == (2, 5)
    torch.testing.assert_close(got, expected)


def test_exact_kl_by_hand():
    # (3/4, 1/4) from (1/2, 1/2)
    got = exact_kl(torch.tensor([math.log(3), 0.0]), torch.tensor([5.0, 5.0]))
    assert got.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-6)


def test_exact_kl_is_computed_in_float32():
    policy, reference = torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([2.0, 1.0], dtype=torch.bfloat16)
    got = exact_kl(policy, reference)
    assert got.dtype == torch.float32
    share = 1 / (1 + math.e)
    assert got.item() == pytest.approx(1 - 2 * share, abs=1e-6)
