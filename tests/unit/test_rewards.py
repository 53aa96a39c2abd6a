"""What rewards may be, how they are called, and what happens when they return nonsense."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import functools
import math
import sys
import time

import numpy as np
import pytest
import torch

import rloom
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
    return RewardSet([FunctionReward(f) for f in functions], weights).score(batch()).scores


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
    assert RewardSet([reward], None).score(batch()).scores.tolist() == [[4.0], [6.0]]


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


# -- what must not get past `on_reward_error`


class Unspeakable:
    def __str__(self):
        raise ValueError("no")

    __repr__ = __str__


class Deceptive:
    def __len__(self):
        raise KeyError("no")


class UnspeakableError(Exception):
    def __str__(self):
        raise ValueError("no")


def leaves(completions):
    sys.exit(0)


async def leaves_later(completions):
    await asyncio.sleep(0)
    sys.exit(0)


async def leaves_in_a_task(completions):
    await asyncio.gather(leaves_later(completions))


def is_cancelled(completions):
    raise concurrent.futures.CancelledError


async def cancels_itself(completions):
    raise asyncio.CancelledError


def raises_unspeakably(completions):
    raise UnspeakableError


BAD = {
    "a huge whole number": lambda completions: [10**400, 1.0],
    "a tensor of several": lambda completions: [torch.ones(2), 1.0],
    "an array of several": lambda completions: [np.ones(2), 1.0],
    "no text": lambda completions: [Unspeakable(), 1.0],
    "too large for float32": lambda completions: [1e39, 1.0],
    "no text in place of a list": lambda completions: Unspeakable(),
    "no length": lambda completions: Deceptive(),
    "leaves": leaves,
    "leaves in a thread": rloom.reward(leaves, streaming=True),
    "leaves in a worker": rloom.reward(leaves, isolated=True),
    "leaves on the loop": leaves_later,
    "leaves in a task": leaves_in_a_task,
    "leaves behind a lambda": lambda completions: leaves_later(completions),
    "is cancelled": rloom.reward(is_cancelled, streaming=True),
    "cancels itself": cancels_itself,
    "an exception without text": raises_unspeakably,
    "an exception without text, in a worker": rloom.reward(raises_unspeakably, isolated=True),
}


@pytest.mark.parametrize("bad", BAD)
def test_whatever_a_function_does_costs_its_samples_alone(bad):
    rewards = RewardSet([FunctionReward(BAD[bad])], None, on_error="none", workers=1)
    try:
        scored = rewards.score(batch())
        assert scored.scores[0, 0].isnan()
        assert dict(scored.costs)[f"rewards/{rewards.names[0]}/errors"] >= 1
        assert scored.failed[0, 0]
        rewards.on_error = -1.0
        assert rewards.score(batch()).scores[0, 0] == -1.0
        rewards.on_error = "raise"
        with pytest.raises((RewardError, UnspeakableError, concurrent.futures.CancelledError)) as caught:
            rewards.score(batch())
        assert rewards.names[0] in " ".join([*getattr(caught.value, "__notes__", [])])
    finally:
        rewards.close()
    assert score(lengths).tolist() == [[3.0], [5.0]]  # the loop and all else go on
    assert RewardSet([FunctionReward(later)], None).score(batch()).scores.tolist() == [[3.0], [5.0]]


async def later(completions):
    return lengths(completions)


def test_a_function_may_do_to_its_arguments_what_it_likes():
    def greedy(prompts, completions, answer, log_extra):
        sizes = [float(len(c[0]["content"])) for c in completions]
        log_extra("sizes", sizes)
        for prompt, completion in zip(prompts, completions, strict=True):
            prompt[-1]["content"] = completion[0]["content"] = "z"
        answer[0].append(9)
        completions.pop()
        prompts.clear()
        return sizes

    seen = []

    def looks(prompts, completions, answer):
        seen.append((prompts, completions, answer))
        return [0.0] * len(completions)

    data = batch(
        prompts=[[{"role": "user", "content": "p"}], [{"role": "user", "content": "q"}]],
        completions=[[{"role": "assistant", "content": "one"}], [{"role": "assistant", "content": "three"}]],
        columns={"answer": [[1], [2]]},
    )
    before = copy.deepcopy(data)
    for marks in ({}, {"streaming": True}):
        functions = [FunctionReward(rloom.reward(greedy, **marks)), FunctionReward(looks)]
        assert RewardSet(functions, None).score(data).scores.tolist() == [[3.0, 0.0], [5.0, 0.0]]
        assert seen.pop() == (before.prompts, before.completions, before.columns["answer"])
        assert data == before


def test_what_was_streamed_is_used_only_for_what_it_was():
    calls = []

    @rloom.reward(streaming=True)
    def counted(completions, answer):
        calls.append(completions)
        return [len(c) + a for c, a in zip(completions, answer, strict=True)]

    rewards = RewardSet([FunctionReward(counted)], None)
    for changes, expected in (
        ({}, [[4.0], [7.0]]),
        ({"completions": ["", ""]}, [[1.0], [2.0]]),
        ({"columns": {"answer": [0, 0]}}, [[3.0], [5.0]]),
        ({"prompts": ["other", "q"]}, [[4.0], [7.0]]),
    ):
        calls.clear()
        whole = batch()
        scoring = rewards.begin()
        for position in (1, 0):
            scoring.add(position, whole.take([position]))
        assert scoring.score(batch(**changes)).scores.tolist() == expected
        assert (["", ""] in calls) == ("completions" in changes)
    rewards.close()


def test_a_streaming_failure_is_seen_before_all_is_generated():
    @rloom.reward(streaming=True)
    def fails(completions):
        raise KeyError("x")

    rewards = RewardSet([FunctionReward(fails)], None)
    scoring = rewards.begin()
    with pytest.raises(KeyError) as caught:  # noqa: PT012
        for position in range(100):
            scoring.add(position, batch())
            time.sleep(0.05)
    assert position < 50
    assert "in the reward 'fails'" in caught.value.__notes__[-1]
    rewards.close()
    patient = RewardSet([FunctionReward(fails)], None, on_error="none")
    scoring = patient.begin()
    for position in range(3):
        scoring.add(position, batch())
        time.sleep(0.05)
    patient.close()


@pytest.mark.parametrize("isolated", [False, True])
def test_a_column_that_is_missing_is_named_also_to_functions_that_take_any(isolated):
    def mine(completions, solutoin, **kwargs):
        return [1.0] * len(completions)

    batch = RewardBatch(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={"solution": ["2"], "n": [1]})
    rewards = RewardSet([FunctionReward(rloom.reward(mine, isolated=isolated))], None, workers=1)
    with pytest.raises(
        RewardError, match=r"wants an argument 'solutoin'.*did you mean 'solution'.*The columns are: n, sol"
    ):
        rewards.score(batch)
    rewards.close()


@pytest.mark.parametrize("failing", [0, 3, 9])
def test_a_call_that_meets_with_a_graph_being_recorded_is_made_again(failing):
    calls = []

    def judged(completions, log_metric):
        calls.append(1)
        log_metric("judged", 1.0)
        if len(calls) <= failing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return lengths(completions)

    rewards = RewardSet([FunctionReward(rloom.reward(judged, threads=True))], None)
    if failing == 9:
        with pytest.raises(RuntimeError, match="capturing"):
            rewards.score(batch())
        assert len(calls) == 5
        return
    assert rewards.score(batch()).scores.tolist() == [[3.0], [5.0]]
    assert len(calls) == failing + 1
