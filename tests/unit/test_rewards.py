"""What rewards may be, how they are called, and what happens when they return nonsense."""

from __future__ import annotations

import asyncio
import functools
import math

import pytest
import torch

from rloom.errors import RewardError
from rloom.rewards import FunctionReward, ObjectReward, RewardBatch, RewardSet


def batch(**changes) -> RewardBatch:
    options = {
        "prompts": ["p", "q"],
        "completions": ["one", "three"],
        "completion_ids": [[1], [2]],
        "columns": {"answer": [1, 2]},
    }
    return RewardBatch(**(options | changes))


def score(*functions, weights=None) -> torch.Tensor:
    return RewardSet([FunctionReward(f) for f in functions], weights).score(batch())


def lengths(completions):
    return [len(c) for c in completions]


@pytest.mark.parametrize(
    "function",
    [
        lengths,
        lambda completions, prompts: [len(c) for c in completions],
        lambda completions, prompts=None: [float(len(c)) for c in completions],
        lambda prompts, completions, completion_ids, **kwargs: torch.tensor([3.0, 5.0]),
        lambda **kwargs: [torch.tensor(3.0), 5],
        lambda *, completions, trainer_state, log_extra, log_metric: (3, 5),
        lambda completions, /: [len(c) for c in completions],
        functools.partial(lambda completions, offset: [len(c) + offset for c in completions], offset=0),
    ],
)
def test_any_subset_of_the_documented_arguments(function):
    assert score(function).tolist() == [[3.0], [5.0]]


def test_columns_reach_the_function():
    assert score(lambda completions, answer: answer).tolist() == [[1.0], [2.0]]


def test_async_functions_run_side_by_side():
    started = []

    async def slow(completions, **kwargs):
        started.append(1)
        while len(started) < 2:  # waits for the other one: never ends if they run one after the other
            await asyncio.sleep(0.001)
        return [1.0, None]

    async def other(completions):
        return await slow(completions)

    result = score(slow, lengths, other)
    assert result[0].tolist() == [1.0, 3.0, 1.0]
    assert result[1, 0].isnan()
    assert result[1, 1] == 5.0


def test_objects_with_get_rewards():
    class Scorer:
        def get_rewards(self, prompts, completions):
            return [len(p + c) for p, c in zip(prompts, completions, strict=True)]

    reward = ObjectReward(Scorer())
    assert reward.name == "Scorer"
    assert RewardSet([reward], None).score(batch()).tolist() == [[4.0], [6.0]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], "'bad' returned 1 rewards, but 2 were expected"),
        ([1.0, 2.0, 3.0], "'bad' returned 3 rewards"),
        ("1.0", "'bad' returned str"),
        (1.0, "'bad' returned float"),
        (None, "'bad' returned None.*is a `return` missing"),
        ([1.0, "2.0"], "'bad' returned str '2.0' for sample 1"),
        ([1.0, math.nan], "'bad' returned NaN for sample 1"),
        ([math.inf, 1.0], "'bad' returned infinity for sample 0"),
        (torch.tensor([1.0, math.nan]), "'bad' returned NaN for sample 1"),
        ([[1.0], [2.0]], "'bad' returned list"),
        ({"a": 1.0, "b": 2.0}, "'bad' returned dict"),
        (torch.zeros(2, 2), "'bad' returned an array of shape"),
        (torch.tensor(1.0), "'bad' returned an array of shape"),
    ],
)
def test_a_return_value_that_is_no_score(value, message):
    def bad(completions):
        return value

    with pytest.raises(RewardError, match=message):
        score(bad)


def test_an_argument_that_does_not_exist_names_the_nearest():
    with pytest.raises(RewardError, match=r"wants an argument 'anwser'.*did you mean 'answer'"):
        score(lambda completions, anwser: [0, 0])


def test_names_and_weights():
    rewards = RewardSet([FunctionReward(lengths), FunctionReward(lengths)], [1.0, 0.5])
    assert rewards.names == ["lengths", "lengths_2"]
    with pytest.raises(RewardError, match=r"weights \(1\) must match number of reward functions \(2\)"):
        RewardSet([FunctionReward(lengths)] * 2, [1.0])
    with pytest.raises(RewardError, match="no reward function"):
        RewardSet([], None)
