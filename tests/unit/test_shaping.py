"""What happens to scores: weights, penalties, returns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.algo import length_penalty, missing_eos, reward_to_go, weighted_sum

NAN = math.nan


def test_weighted_sum_over_the_functions_that_answered():
    scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, NAN, 3.0], [NAN, NAN, 3.0], [NAN, NAN, NAN], [0.0, NAN, 0.0]])
    got = weighted_sum(scores, torch.tensor([2.0, 10.0, -1.0]))
    # The weights are not scaled up for a function that did not answer.
    torch.testing.assert_close(got, torch.tensor([19.0, -1.0, -3.0, NAN, 0.0]), equal_nan=True)


def test_weight_zero_is_not_the_same_as_no_answer():
    got = weighted_sum(torch.tensor([[NAN, 5.0], [NAN, NAN]]), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(got, torch.tensor([0.0, NAN]), equal_nan=True)


def test_missing_eos_costs_the_penalty():
    scores, ended = torch.tensor([1.0, 2.0, NAN]), torch.tensor([True, False, False])
    torch.testing.assert_close(missing_eos(scores, ended, 1.5), torch.tensor([1.0, 0.5, NAN]), equal_nan=True)
    for off in (None, 0.0):
        torch.testing.assert_close(missing_eos(scores, ended, off), scores, equal_nan=True)


def test_linear_length_penalty():
    got = length_penalty(torch.tensor([0, 25, 100]), "linear", coefficient=0.5, max_length=100, margin=7)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.125, 0.5]))


def test_soft_overlong_penalty():
    lengths = torch.tensor([0, 59, 60, 70, 90, 100, 120])
    got = length_penalty(lengths, "soft_overlong", coefficient=2.0, max_length=100, margin=40)
    torch.testing.assert_close(got, torch.tensor([0.0, 0.0, 0.0, 0.5, 1.5, 2.0, 2.0]))


def test_no_length_penalty():
    got = length_penalty(torch.tensor([3, 900]), None, coefficient=2.0, max_length=100, margin=40)
    assert got.tolist() == [0, 0]


def test_reward_to_go_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    torch.testing.assert_close(reward_to_go(rewards, mask), torch.tensor([[7.0, 6.0, 4.0], [24.0, 16.0, 0.0]]))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.floats(-10, 10), st.booleans()), min_size=4, max_size=4),
        min_size=1,
        max_size=3,
    )
)
def test_reward_to_go_is_a_sum_over_what_is_left(rows):
    rewards = torch.tensor([[value for value, _ in row] for row in rows], dtype=torch.float64)
    mask = torch.tensor([[float(kept) for _, kept in row] for row in rows], dtype=torch.float64)
    got = reward_to_go(rewards, mask)
    for i, row in enumerate(rows):
        for t, (_, kept) in enumerate(row):
            expected = sum(value for value, counts in row[t:] if counts) if kept else 0.0
            assert got[i, t].item() == pytest.approx(expected, abs=1e-9)
