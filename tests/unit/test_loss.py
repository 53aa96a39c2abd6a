"""The surrogate loss: values by hand, gradients against the closed form, sums that do not depend on the split."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rloom import algo
from rloom.algo import aggregate

LEVELS = ("sequence", "token")

policy_loss = functools.partial(algo.policy_loss, level="sequence", surrogate="clip")


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def terms_at(ratio: float, advantage: float, **options):
    """The loss of a completion of one token whose ratio is `ratio`."""
    policy = tensor([[math.log(ratio) - 1.0]]).requires_grad_()
    terms = policy_loss(policy, tensor([[-1.0]]), tensor([advantage]), tensor([[1.0]]), **options)
    (gradient,) = torch.autograd.grad(terms.values.sum(), policy)
    return terms, gradient.item()


# -- gradients at ratio 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_at_ratio_one_the_gradient_is_minus_advantage_times_that_of_the_log_probability(level, surrogate, dual_clip):
    """∂/∂logit_v of −A·Σ_t log π(y_t) = −A·Σ_t ([v = y_t] − π_t(v))."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64).requires_grad_()  # (B, T, V)
    tokens = torch.randint(5, (3, 4), generator=generator)
    mask = tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    advantages = tensor([1.5, -2.0, 0.25])
    policy = logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    terms = policy_loss(
        policy, policy.detach(), advantages, mask, level=level, surrogate=surrogate, dual_clip=dual_clip
    )
    (got,) = torch.autograd.grad(aggregate(terms.values, mask, "sequence_mean"), logits)

    probabilities = logits.detach().softmax(-1)
    for i in range(3):
        for t in range(4):
            for v in range(5):
                slope = float(tokens[i, t] == v) - probabilities[i, t, v].item()
                expected = -advantages[i].item() * slope * mask[i, t].item()
                assert got[i, t, v].item() == pytest.approx(expected, abs=1e-12)


def test_one_advantage_per_token():
    policy = tensor([[-1.0, -2.0, -3.0]]).requires_grad_()
    advantages, mask = tensor([[2.0, -1.0, 7.0]]), tensor([[1.0, 1.0, 0.0]])
    terms = policy_loss(policy, policy.detach(), advantages, mask, level="token")
    (got,) = torch.autograd.grad(aggregate(terms.values, mask, "sequence_mean"), policy)
    torch.testing.assert_close(got, tensor([[-2.0, 1.0, 0.0]]))


# -- the clip

CLIP_CASES = [
    # ratio, advantage, loss, slope of the loss in log π, clipped low, clipped high
    (1.0, 2.0, -2.0, -2.0, False, False),
    (1.2, 2.0, -2.4, -2.4, False, False),
    (1.5, 2.0, -2.6, 0.0, False, True),  # bounded at 1.3
    (0.5, 2.0, -1.0, -1.0, False, False),  # too low for a good completion: pulled back up in full
    (1.0, -2.0, 2.0, 2.0, False, False),
    (0.85, -2.0, 1.7, 1.7, False, False),
    (0.5, -2.0, 1.6, 0.0, True, False),  # bounded at 0.8
    (1.5, -2.0, 3.0, 3.0, False, False),  # too high for a bad completion: pushed down in full
    (1.5, 0.0, 0.0, 0.0, False, False),
    (0.5, 0.0, 0.0, 0.0, False, False),
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("ratio", "advantage", "loss", "slope", "low", "high"), CLIP_CASES)
def test_clip_on_either_side_of_one(level, ratio, advantage, loss, slope, low, high):
    terms, gradient = terms_at(ratio, advantage, level=level, epsilon_low=0.2, epsilon_high=0.3)
    assert terms.ratio.item() == pytest.approx(ratio)
    assert terms.values.item() == pytest.approx(loss)
    assert gradient == pytest.approx(slope)
    assert (terms.low_clipped.item(), terms.high_clipped.item()) == (low, high)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (2.5, -2.0, 5.0, 5.0),  # below the bound of 3
        (4.0, -2.0, 6.0, 0.0),  # held at 3·|A|
        (4.0, 2.0, -2.4, 0.0),  # a positive advantage has the ordinary clip
        (0.5, -2.0, 1.6, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_completions(level, ratio, advantage, loss, slope):
    terms, gradient = terms_at(ratio, advantage, level=level, dual_clip=3.0)
    assert terms.values.item() == pytest.approx(loss)
    assert gradient == pytest.approx(slope)


def test_without_dual_clip_the_loss_of_bad_completions_is_unbounded():
    terms, gradient = terms_at(4.0, -2.0)
    assert terms.values.item() == pytest.approx(8.0)
    assert gradient == pytest.approx(8.0)


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0])
def test_reinforce_knows_no_ratio(ratio):
    terms, gradient = terms_at(ratio, -2.0, surrogate="reinforce")
    assert terms.values.item() == pytest.approx(2.0 * (math.log(ratio) - 1))
    assert gradient == pytest.approx(2.0)
    assert not terms.low_clipped.any()
    assert not terms.high_clipped.any()


# -- levels and masks


def test_a_sequence_ratio_is_the_product_of_its_token_ratios():
    old = tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]])
    policy = old + tensor([[0.5, -0.2, 9.0], [0.1, 0.1, 0.1]])
    mask = tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    sequence = policy_loss(policy, old, tensor([1.0, 1.0]), mask, epsilon_high=10.0)
    torch.testing.assert_close(sequence.ratio, tensor([math.exp(0.3), math.exp(0.3)]))
    assert sequence.values.shape == (2,)
    token = policy_loss(policy, old, tensor([1.0, 1.0]), mask, level="token", epsilon_high=10.0)
    assert token.values.shape == (2, 3)
    torch.testing.assert_close(token.ratio[1], tensor([math.exp(0.1)] * 3))


def test_many_small_token_ratios_clip_a_sequence_and_no_token():
    """Ten tokens at ratio 1.05 each: 1.63 as a sequence."""
    old, mask = torch.full((1, 10), -1.0, dtype=torch.float64), torch.ones(1, 10, dtype=torch.float64)
    policy = old + math.log(1.05)
    sequence = policy_loss(policy, old, tensor([1.0]), mask)
    token = policy_loss(policy, old, tensor([1.0]), mask, level="token")
    assert sequence.high_clipped.all()
    assert sequence.values.item() == pytest.approx(-1.2)
    assert not token.high_clipped.any()
    assert aggregate(token.values, mask, "sequence_token_mean").item() == pytest.approx(-1.05)


def test_one_wild_token_clips_itself_only_at_token_level():
    old, mask = torch.full((1, 3), -2.0, dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64)
    policy = (old + tensor([[1.0, 0.0, 0.0]])).requires_grad_()
    for level, slopes in (("sequence", [0.0, 0.0, 0.0]), ("token", [0.0, -1.0, -1.0])):
        terms = policy_loss(policy, old, tensor([1.0]), mask, level=level)
        (got,) = torch.autograd.grad(terms.values.sum(), policy)
        torch.testing.assert_close(got, tensor([slopes]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
@pytest.mark.parametrize("how", ["sequence_mean", "sequence_token_mean", "token_mean"])
def test_what_stands_under_the_padding_does_not_matter(level, surrogate, how):
    mask = tensor([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]])

    def run(padding: float):
        policy = torch.where(mask > 0, tensor([[-1.0, -2.0, 0, 0], [-0.5, -1.5, -0.1, 0]]), padding).requires_grad_()
        old = tensor([[-1.05, -2.05, 0.0, 0.0], [-0.6, -1.4, -0.2, 0.0]])
        terms = policy_loss(policy, old, tensor([1.0, -1.0]), mask, level=level, surrogate=surrogate)
        loss = aggregate(terms.values, mask, how)
        (gradient,) = torch.autograd.grad(loss, policy)
        return loss.detach(), gradient

    (loss, gradient), (other_loss, other_gradient) = run(0.0), run(-17.0)
    torch.testing.assert_close(loss, other_loss)
    torch.testing.assert_close(gradient, other_gradient)
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask == 1] != 0).all()


# -- sums

VALUES = [[1.0, 2.0, 50.0], [4.0, 50.0, 50.0], [8.0, 16.0, 32.0]]
MASK = [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [("sequence_mean", 3 + 4 + 56), ("sequence_token_mean", 1.5 + 4 + 56 / 3), ("token_mean", 3 + 4 + 56)],
)
def test_sums_of_token_losses(how, expected):
    assert aggregate(tensor(VALUES), tensor(MASK), how).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("sequence_mean", 11), ("sequence_token_mean", 11), ("token_mean", 2 * 1 + 1 * 3 + 3 * 7)],
)
def test_sums_of_sequence_losses(how, expected):
    assert aggregate(tensor([1.0, 3.0, 7.0]), tensor(MASK), how).item() == pytest.approx(expected)


def test_an_empty_completion_does_not_divide_by_zero():
    assert aggregate(tensor([[5.0], [1.0]]), tensor([[0.0], [1.0]]), "sequence_token_mean").item() == 1.0


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_another_split_into_micro_batches_gives_the_same_sum_and_gradient(data):
    rows, width = data.draw(st.integers(1, 6)), 4
    cuts = sorted(data.draw(st.sets(st.integers(1, rows - 1)))) if rows > 1 else []
    level = data.draw(st.sampled_from(LEVELS))
    how = data.draw(st.sampled_from(["sequence_mean", "sequence_token_mean", "token_mean"]))
    lengths = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64)
    start = old + 0.3 * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = tensor([[float(t < length) for t in range(width)] for length in lengths])

    def total(edges: list[int]):
        policy = start.clone().requires_grad_()
        sums = []
        for low, high in zip([0, *edges], [*edges, rows], strict=True):
            longest = max(1, max(lengths[low:high]))  # each micro-batch is padded to its own longest row
            part = (slice(low, high), slice(0, longest))
            terms = policy_loss(policy[part], old[part], advantages[low:high], mask[part], level=level)
            sums.append(aggregate(terms.values, mask[part], how))
        loss = torch.stack(sums).sum()
        return loss.detach(), torch.autograd.grad(loss, policy)[0]

    for one, other in zip(total([]), total(cuts), strict=True):
        torch.testing.assert_close(one, other)
