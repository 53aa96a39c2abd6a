"""Rewards beside a GPU in use: worker processes start, and score."""

from __future__ import annotations

import pytest
import torch

import rloom
from rloom.rewards import FunctionReward, RewardBatch, RewardSet, math_accuracy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_a_closure_runs_in_workers_after_cuda_is_in_use():
    torch.ones(8, device="cuda").sum().item()
    offset = 1

    @rloom.reward(isolated=True, time_limit=30.0)
    def closure(completions):
        return [float(len(completions[0]) + offset)]

    assert scored(closure, ["four", "5"]) == [[5.0], [2.0]]


def test_math_verify_runs_in_workers_after_cuda_is_in_use():
    pytest.importorskip("math_verify", reason="needs math-verify")
    torch.ones(8, device="cuda").sum().item()
    assert scored(math_accuracy, [r"\boxed{2}", "3"], solution=["2", "2"]) == [[1.0], [0.0]]


def scored(function, completions, **columns):
    rewards = RewardSet([FunctionReward(function)], None)
    count = len(completions)
    batch = RewardBatch(prompts=["p"] * count, completions=completions, completion_ids=[[1]] * count, columns=columns)
    try:
        return rewards.score(batch).scores.tolist()
    finally:
        rewards.close()
