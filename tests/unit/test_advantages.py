"""Baselines against numbers worked out by hand, and against what they are proved to do."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.algo import (
    MovingAverage,
    batch_mean,
    clip_advantages,
    comparable,
    group_mean,
    leave_one_out,
    no_baseline,
)

NAN = math.nan
REWARDS = st.floats(-100, 100)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def against_siblings(rewards: list[float], groups: list[int]) -> list[float]:
    """Leave-one-out by its definition, one completion at a time."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [
            r
            for j, (r, g) in enumerate(zip(rewards, groups, strict=True))
            if j != i and g == group and not math.isnan(r)
        ]
        result.append(0.0 if math.isnan(reward) or not others else reward - sum(others) / len(others))
    return result


@st.composite
def scored_groups(draw, *, smallest: int = 1, missing: bool = False):
    """Groups of mixed sizes, their completions shuffled together; perhaps some without a score."""
    sizes = draw(st.lists(st.integers(smallest, 5), min_size=1, max_size=4))
    groups = draw(st.permutations([g for g, size in enumerate(sizes) for _ in range(size)]))
    reward = st.one_of(REWARDS, st.just(NAN)) if missing else REWARDS
    return draw(st.lists(reward, min_size=len(groups), max_size=len(groups))), groups


# -- leave-one-out


def test_leave_one_out_by_hand():
    # 1 against (2+5+8)/3 = 5, 2 against 14/3, 5 against 11/3, 8 against 8/3
    expected = tensor(-4, -8 / 3, 4 / 3, 16 / 3)
    torch.testing.assert_close(leave_one_out(tensor(1, 2, 5, 8), ids(0, 0, 0, 0)), expected)


def test_leave_one_out_of_two_is_the_difference():
    torch.testing.assert_close(leave_one_out(tensor(3, -1), ids(0, 0)), tensor(4, -4))


def test_the_example_of_the_older_documents():
    """Three prompts with four completions each, laid out with one row per sample and one column per prompt."""
    table = [[1, 2, 3], [2, 3, 4], [5, 6, 7], [8, 9, 10]]
    flat = tensor(*(value for row in table for value in row))
    columns = ids(*([0, 1, 2] * 4))
    got = leave_one_out(flat, columns).reshape(4, 3)

    assert got[0, 0].item() == pytest.approx(1 - (2 + 5 + 8) / 3)
    assert got[2, 1].item() == pytest.approx(6 - (2 + 3 + 9) / 3)
    for prompt in range(3):
        column = [row[prompt] for row in table]
        for sample in range(4):
            others = column[:sample] + column[sample + 1 :]
            assert got[sample, prompt].item() == pytest.approx(column[sample] - sum(others) / 3)
    # The columns differ by a constant, which a baseline removes.
    torch.testing.assert_close(got[:, 0], tensor(-4, -8 / 3, 4 / 3, 16 / 3))
    torch.testing.assert_close(got[:, 1], got[:, 0])
    torch.testing.assert_close(got[:, 2], got[:, 0])


def test_groups_of_unequal_size():
    rewards = tensor(1, 10, 3, 20, 8, 7)
    groups = ids(0, 1, 0, 1, 0, 2)
    # group 0: 1, 3, 8; group 1: 10, 20; group 2: 7 alone
    expected = tensor(1 - 5.5, -10, 3 - 4.5, 10, 8 - 2, 0)
    torch.testing.assert_close(leave_one_out(rewards, groups), expected)


def test_an_unscorable_sibling_is_in_nobodys_baseline():
    got = leave_one_out(tensor(1, NAN, 5, 9), ids(0, 0, 0, 0))
    torch.testing.assert_close(got, tensor(1 - 7, 0, 5 - 5, 9 - 3))


def test_the_last_scorable_completion_has_nothing_to_be_compared_with():
    rewards, groups = tensor(4, NAN, NAN, NAN, NAN, 1, 2), ids(0, 0, 0, 1, 1, 2, 2)
    assert leave_one_out(rewards, groups).tolist() == [0, 0, 0, 0, 0, -1, 1]
    assert group_mean(rewards, groups).tolist() == [0, 0, 0, 0, 0, -0.5, 0.5]
    assert comparable(rewards, groups).tolist() == [False] * 5 + [True] * 2


def test_a_group_of_one_has_no_advantage():
    assert leave_one_out(tensor(7), ids(0)).tolist() == [0]
    assert group_mean(tensor(7), ids(0)).tolist() == [0]
    assert group_mean(tensor(7), ids(0), divide_by_std=True).tolist() == [0]


def test_no_completions_at_all():
    empty = torch.zeros(0, dtype=torch.long)
    assert leave_one_out(tensor(), empty).shape == (0,)
    assert group_mean(tensor(), empty).shape == (0,)


@settings(max_examples=100, deadline=None)
@given(scored_groups(missing=True))
def test_leave_one_out_is_its_definition(case):
    rewards, groups = case
    got = leave_one_out(tensor(*rewards), ids(*groups))
    torch.testing.assert_close(got, tensor(*against_siblings(rewards, groups)), rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(scored_groups(missing=True))
def test_advantages_of_a_group_sum_to_zero(case):
    rewards, groups = case
    for advantages in (
        leave_one_out(tensor(*rewards), ids(*groups)),
        group_mean(tensor(*rewards), ids(*groups)),
        group_mean(tensor(*rewards), ids(*groups), divide_by_std=True),
    ):
        for group in set(groups):
            members = [a for a, g in zip(advantages.tolist(), groups, strict=True) if g == group]
            assert sum(members) == pytest.approx(0, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(scored_groups(smallest=2))
def test_leave_one_out_is_a_multiple_of_the_distance_to_the_group_mean(case):
    rewards, groups = case
    sizes = tensor(*(groups.count(group) for group in groups))
    scaled = group_mean(tensor(*rewards), ids(*groups)) * sizes / (sizes - 1)
    torch.testing.assert_close(leave_one_out(tensor(*rewards), ids(*groups)), scaled, rtol=1e-9, atol=1e-9)


@settings(max_examples=25, deadline=None)
@given(scored_groups(smallest=2), REWARDS)
def test_a_constant_per_prompt_changes_nothing(case, constant):
    rewards, groups = case
    moved = [r + constant * (group + 1) for r, group in zip(rewards, groups, strict=True)]
    before, after = leave_one_out(tensor(*rewards), ids(*groups)), leave_one_out(tensor(*moved), ids(*groups))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9 * (1 + abs(constant)))


# -- the group's mean


def test_group_mean_by_hand():
    got = group_mean(tensor(1, 2, 6, 4, 8), ids(0, 0, 0, 1, 1))
    torch.testing.assert_close(got, tensor(-2, -1, 3, -2, 2))


def test_group_mean_over_the_standard_deviation():
    # deviations −2, −1, 3: variance 14/2 = 7; deviations −2, 2: variance 8
    got = group_mean(tensor(1, 2, 6, 4, 8), ids(0, 0, 0, 1, 1), divide_by_std=True, eps=0.5)
    first, second = math.sqrt(7) + 0.5, math.sqrt(8) + 0.5
    torch.testing.assert_close(got, tensor(-2 / first, -1 / first, 3 / first, -2 / second, 2 / second))


def test_group_standard_deviation_passes_over_the_unscorable():
    got = group_mean(tensor(1, NAN, 5), ids(0, 0, 0), divide_by_std=True, eps=0.0)
    torch.testing.assert_close(got, tensor(-math.sqrt(0.5), 0, math.sqrt(0.5)))


def test_equal_rewards_do_not_divide_by_zero():
    assert group_mean(tensor(3, 3, 3), ids(0, 0, 0), divide_by_std=True).tolist() == [0, 0, 0]


# -- baselines over the batch


def test_batch_mean_mixes_prompts_and_passes_over_the_unscorable():
    torch.testing.assert_close(batch_mean(tensor(1, 2, NAN, 6)), tensor(-2, -1, 0, 3))
    assert batch_mean(tensor(NAN, NAN)).tolist() == [0, 0]


def test_no_baseline_is_the_reward():
    assert no_baseline(tensor(1.5, NAN, -2)).tolist() == [1.5, 0, -2]


def test_moving_average_over_four_batches():
    average = MovingAverage(momentum=0.75)
    torch.testing.assert_close(average.advantages(tensor(1, 3)), tensor(-1, 1))  # no past: the batch's own mean, 2
    assert average.value == pytest.approx(2)
    torch.testing.assert_close(average.advantages(tensor(10, NAN, 2)), tensor(8, 0, 0))  # mean 6
    assert average.value == pytest.approx(0.75 * 2 + 0.25 * 6)
    torch.testing.assert_close(average.advantages(tensor(NAN, NAN)), tensor(0, 0))
    assert average.value == pytest.approx(3)
    torch.testing.assert_close(average.advantages(tensor(7)), tensor(4))
    assert average.value == pytest.approx(0.75 * 3 + 0.25 * 7)


def test_moving_average_stands_still_in_evaluation():
    average = MovingAverage(momentum=0.5, value=1.0)
    torch.testing.assert_close(average.advantages(tensor(5, 9), update=False), tensor(4, 8))
    assert average.value == 1.0
    fresh = MovingAverage()
    torch.testing.assert_close(fresh.advantages(tensor(5, 9), update=False), tensor(-2, 2))
    assert fresh.value is None


# -- clip


def test_clip_advantages():
    assert clip_advantages(tensor(-12, -3, 0, 11), 10.0).tolist() == [-10, -3, 0, 10]
    assert clip_advantages(tensor(-12, 11), None).tolist() == [-12, 11]
