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


def test_workers_start_after_cuda_is_in_use():
    torch.ones(8, device="cuda").sum().item()
    offset = 1

    @rloom.reward(isolated=True, time_limit=30.0)
    def closure(completions):
        return [float(len(completions[0]) + offset)]

    rewards = RewardSet([FunctionReward(closure), FunctionReward(math_accuracy)], None)
    batch = RewardBatch(
        prompts=["p"] * 2, completions=[r"\boxed{2}", "3"], completion_ids=[[1]] * 2, columns={"solution": ["2", "2"]}
    )
    assert rewards.score(batch).tolist() == [[10.0, 1.0], [2.0, 0.0]]
    rewards.close()
