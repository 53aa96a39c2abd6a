"""Rewards beside a GPU in use: worker processes start, and score."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

import rloom
from rloom.rewards import FunctionReward, RewardBatch, RewardSet, format, math_accuracy
from rloom.rewards.isolation import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(autouse=True)
def _cuda_in_use():
    torch.ones(8, device="cuda").sum().item()


def scores(*functions):
    batch = RewardBatch(
        prompts=["p"] * 2, completions=[r"\boxed{2}", "3"], completion_ids=[[1]] * 2, columns={"solution": ["2", "2"]}
    )
    rewards = RewardSet([FunctionReward(function) for function in functions], None)
    try:
        return rewards.score(batch).tolist()
    finally:
        rewards.close()


def test_a_worker_is_a_process_of_its_own():
    """Without cloudpickle, which brings functions that have no name to import them by."""
    worker = Worker()
    try:
        worker.load(0, pickle.dumps(os.getpid))
        worker.ask({"key": 0, "samples": [{}]}, 60.0)
        (answer,) = worker.answers(60.0)
        assert answer["value"] == worker.process.pid
    finally:
        worker.kill()


def test_workers_start_after_cuda_is_in_use():
    pytest.importorskip("cloudpickle")
    offset = 1

    @rloom.reward(isolated=True, time_limit=60.0)
    def closure(completions):
        return [float(len(completions[0]) + offset)]

    assert scores(closure, format(r"\d")) == [[10.0, 0.0], [2.0, 1.0]]


def test_math_verify_in_workers():
    pytest.importorskip("cloudpickle")
    pytest.importorskip("math_verify")
    assert scores(math_accuracy) == [[1.0], [0.0]]
