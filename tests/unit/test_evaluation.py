"""Estimates, pass@k, win rates: by hand, and against enumeration."""

from __future__ import annotations

import itertools
import math

import pytest

from rloom.evaluation.statistics import estimate, pass_at_k
from rloom.evaluation.win_rate import wins, wins_by_score


@pytest.mark.parametrize(("passed", "count", "k"), [(0, 5, 2), (2, 5, 1), (2, 5, 3), (5, 5, 5), (4, 6, 2)])
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed, count, k):
    completions = [i < passed for i in range(count)]
    subsets = list(itertools.combinations(completions, k))
    assert pass_at_k(passed, count, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_needs_k_completions():
    with pytest.raises(ValueError, match="needs at least 3"):
        pass_at_k(1, 2, 3)


def test_interval_is_that_of_the_normal_approximation():
    values = [float(i % 4 == 0) for i in range(400)]
    found = estimate(values)
    error = 1.96 * math.sqrt(0.25 * 0.75 / 400)
    assert found.value == 0.25
    assert found.low == pytest.approx(0.25 - error, abs=0.01)
    assert found.high == pytest.approx(0.25 + error, abs=0.01)
    assert estimate([math.nan, 1.0]).count == 1
    assert math.isnan(estimate([]).value)


def test_wins():
    def longer(prompts, completions):
        first, second = map(len, completions)
        if first == 3:
            return [None, None]
        return [0.5, 0.5] if first == second else [float(first > second), float(second > first)]

    found = wins(longer, ["p", "p", "p", "p"], ["aaaa", "a", "aa", "aaa"], ["b", "bb", "bb", "b"])
    assert found[:3] == [1.0, 0.0, 0.5]
    assert math.isnan(found[3])
    by_score = wins_by_score(
        lambda p, c: [len(x) if x else None for x in c], ["p"] * 4, ["aa", "a", "a", ""], ["b", "bb", "b", "b"]
    )
    assert by_score[:3] == [1.0, 0.0, 0.5]
    assert math.isnan(by_score[3])
