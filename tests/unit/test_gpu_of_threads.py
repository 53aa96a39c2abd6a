"""Whatever runs in a thread of ours is on the GPU of the thread that asked for it.

There is no GPU here: a stand-in keeps a current device for each thread, which begins at 0, as CUDA does.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import rloom
from rloom.evaluation.win_rate import wins
from rloom.gpu_of_threads import on_this_gpu
from rloom.rewards import FunctionReward, RewardBatch, RewardSet, http_reward
from rloom.rewards.calling import caller
from rloom.rewards.calling import http_reward as http_reward_file
from rloom.rewards.calling.event_loop import BackgroundLoop
from rloom.rewards.library.judging.judge_client import JudgeClient
from rloom.rewards.serve import RewardServer
from tests.unit.test_http_rewards import send


class Devices(threading.local):
    """The current GPU of each thread."""

    gpu = 0


@pytest.fixture
def current(monkeypatch):
    """Three GPUs in use, of which this thread is on the last."""
    devices = Devices()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.gpu)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(devices, "gpu", gpu))
    devices.gpu = 2
    return torch.cuda.current_device


def in_another_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_the_stand_in_begins_at_the_first_gpu(current):
    assert (current(), in_another_thread(current), in_another_thread(on_this_gpu(current))) == (2, 0, 2)


def test_neither_torch_nor_cuda_is_started_to_find_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("CUDA was started"))
    assert on_this_gpu(len) is len
    monkeypatch.delitem(sys.modules, "torch")
    assert on_this_gpu(len) is len
    assert "torch" not in sys.modules


def scored(function):
    rewards = RewardSet([FunctionReward(function)], None)
    count = 3
    try:
        batch = RewardBatch(prompts=["p"] * count, completions=["c"] * count, completion_ids=[[1]] * count)
        return rewards.score(batch).scores[:, 0].tolist()
    finally:
        rewards.close()


@pytest.mark.parametrize("options", [{"threads": True}, {"streaming": True}, {"per_sample": True, "threads": True}])
def test_rewards_in_threads(current, options):
    assert scored(rloom.reward(lambda completions: [current()] * len(completions), **options)) == [2.0] * 3


def test_what_a_reward_loads_at_the_start_of_a_thread(current):
    loaded = []

    def load():
        loaded.append(current())

    assert scored(rloom.reward(lambda completions: loaded[:1] * 3, threads=True, at_start=load)) == [2.0] * 3


def test_rewards_on_the_event_loop_and_what_they_send_to_threads(current, monkeypatch):
    # The process' own may run already.
    monkeypatch.setattr(caller, "reward_loop", BackgroundLoop("test-rewards"))

    async def on_the_loop(completions):
        return [current()] * len(completions)

    async def beside_it(completions):
        return [await asyncio.to_thread(current)] * len(completions)

    assert scored(on_the_loop) == [2.0] * 3
    assert scored(beside_it) == [2.0] * 3


def test_questions_to_a_judge(current, monkeypatch):
    client = JudgeClient(None, {}, None, 2, None)  # made when a script is read, perhaps before any GPU is in use
    monkeypatch.setattr(client, "_ask_twice", lambda question, parse: current())
    assert client.ask_all(["a", "b"], float) == [2, 2]


def test_requests_for_rewards(current, monkeypatch):
    monkeypatch.setattr(http_reward_file, "_scores", lambda service, payload: [current()])
    reward = http_reward("http://127.0.0.1:9/score", batch_size=1)
    assert reward(prompts=["p"] * 2, completions=["c"] * 2) == [2, 2]


def test_a_judge_that_compares(current):
    def judge(prompts, completions):
        return [float(current()), 0.0]

    assert wins(judge, ["p"] * 3, ["a"] * 3, ["b"] * 3) == [2.0] * 3


def test_a_service_of_rewards(current):
    rewards = RewardSet([FunctionReward(lambda completions, **_: [current()] * len(completions))], None)
    server = RewardServer(rewards, port=0)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        assert send(server, b'{"completions": ["a", "b"]}') == (200, {"scores": [2.0, 2.0]})
    finally:
        server.shutdown()
        server.server_close()
        rewards.close()
