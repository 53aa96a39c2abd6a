"""A reward that runs for long is said to be running, by name, however it is called."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import rloom
from rloom.rewards import FunctionReward, RewardBatch, RewardSet
from rloom.rewards.calling import still_running


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(still_running, "SAID_AFTER", 0.1)


def wait_until(condition):
    """Give the watching thread the time that it needs, on a machine that is busy."""
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


@pytest.fixture
def said(caplog):
    return lambda: [r.getMessage() for r in caplog.records if "has been running" in r.getMessage()]


def score(*functions):
    rewards = RewardSet([FunctionReward(function) for function in functions], None)
    batch = RewardBatch(prompts=["p"] * 3, completions=["a", "b", "c"], completion_ids=[[1]] * 3)
    try:
        return rewards.score(batch).scores
    finally:
        rewards.close()


@pytest.mark.parametrize("how", ["plain", "async", "streaming"])
def test_it_is_named_however_it_is_called(how, said):
    def plain(completions, **kwargs):
        wait_until(said)
        return [1.0] * len(completions)

    async def coroutine(completions, **kwargs):
        while not said():
            await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    function = {"plain": plain, "async": coroutine, "streaming": rloom.reward(streaming=True)(plain)}[how]
    assert score(function).flatten().tolist() == [1.0] * 3
    assert f"the reward '{function.__name__}' has been running for 0 s, on 3 completions" in said()[0]


def test_it_says_how_many_are_scored_and_never_names_one_that_is_done(said):
    @rloom.reward(per_sample=True, threads=True)
    def slow(completions, **kwargs):
        if completions == ["b"]:
            wait_until(said)
        return [1.0]

    @rloom.reward(threads=True)
    def quick(completions, **kwargs):
        return [0.0] * len(completions)

    score(quick, slow)
    assert said()
    assert all("'slow'" in line and "2 of 3 completions are scored" in line for line in said())


def test_a_quick_one_is_not_named_and_no_thread_is_left(said):
    score(lambda completions, **kwargs: [1.0] * len(completions))
    wait_until(lambda: not any(thread.name == "rloom-still-running" for thread in threading.enumerate()))
    assert not any(thread.name == "rloom-still-running" for thread in threading.enumerate())
    assert not said()


def test_it_is_said_again_when_the_time_has_doubled(caplog):
    running = still_running.Running(count=8, began=time.monotonic() - 31, said_at=30)
    watch = still_running.StillRunning(30)
    watch._say("slow", running)
    watch._say("slow", running)
    running.began -= 40
    watch._say("slow", running)
    assert [record.getMessage() for record in caplog.records] == [
        "the reward 'slow' has been running for 31 s, on 8 completions",
        "the reward 'slow' has been running for 71 s, on 8 completions",
    ]
