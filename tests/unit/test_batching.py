"""Which rows share a micro-batch: all of them once, in order, as many as the budget holds and not one more."""

from __future__ import annotations

import random

import pytest
import torch

from rloom.data.batching import Batcher
from rloom.training.learner import merge
from rloom.types import Completion, Group, Prompt, Rollout, Share

CPU = torch.device("cpu")


def drawn(seed):
    """Groups of different sizes, ragged prompts and completions, some rows left out."""
    draw = random.Random(seed)
    prompts = [[1] * draw.randrange(1, 30) for _ in range(draw.randrange(1, 7))]
    groups = [group for group in range(len(prompts)) for _ in range(draw.randrange(1, 6))]
    rollout = Rollout(
        prompt_ids=[prompts[group] for group in groups],
        completion_ids=[[2] * draw.randrange(1, 20) for _ in groups],
        groups=torch.tensor(groups),
        scores=torch.zeros(len(groups), 1),
        score=torch.zeros(len(groups)),
        trained=[True] * len(groups),
    )
    return rollout, [row for row in range(len(groups)) if draw.random() < 0.8], draw.randrange(10, 150)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("whole_groups", [True, False])
def test_plans_are_full_and_no_fuller(packed, whole_groups):
    batcher = Batcher(packed=packed, pad_token_id=0)
    cut = 0
    for seed in range(200):
        rollout, rows, budget = drawn(seed)
        groups = rollout.groups.tolist()
        plans = batcher.plan(rollout, rows, budget, whole_groups=whole_groups)
        assert [row for plan in plans for row in plan] == rows
        for number, plan in enumerate(plans):
            batch = batcher.make(rollout, plan, CPU)
            tokens = batch.packed.input_ids.numel() if packed else batch.input_ids.numel()
            assert batcher.size(rollout, plan) == tokens  # what is counted is what is run
            one = len({groups[row] for row in plan}) == 1 if whole_groups else len(plan) == 1
            assert tokens <= budget or one
            if number + 1 < len(plans):
                first = plans[number + 1][0]
                unit = [row for row in rows if groups[row] == groups[first]] if whole_groups else [first]
                assert not set(unit) & set(plan)
                assert batcher.size(rollout, [*plan, *unit]) > budget
                cut += 1
    assert cut > 100


def test_only_neighbouring_shares_of_a_rollout_are_one():
    """Three parts of an update that straddles two passes: the third begins where the first did."""
    one, other = (drawn(seed)[0] for seed in (0, 1))
    shares = [Share(rollout=one, rows=rows) for rows in (range(2), range(2, 4), range(2))]
    assert [share.rows for share in merge(shares)] == [range(4), range(2)]
    apart = [Share(rollout=one, rows=range(2)), Share(rollout=other, rows=range(2, 4))]
    assert [share.rollout is one for share in merge(apart)] == [True, False]


@pytest.mark.parametrize("packed", [True, False])
def test_targets_are_the_tokens_that_the_policy_drew(packed):
    """Tokens of others are in the forward, and in no table: the column of a token counts drawn ones only."""
    completions = [
        Completion(token_ids=[11, 12, 13], stop_reason="eos", mask=[True, False, True]),
        Completion(token_ids=[14, 15], stop_reason="eos"),
        Completion(token_ids=[16], stop_reason="eos", mask=[False]),
    ]
    group = Group(prompt=Prompt(content="", token_ids=[7, 8]), completions=completions)
    rollout = Rollout.of([group], train_truncated=True)
    assert rollout.trained == [True, True, False]
    batch = Batcher(packed=packed, pad_token_id=0).make(rollout, [0, 1], CPU)
    assert batch.targets.tolist() == [11, 13, 14, 15]
    assert batch.lengths == [2, 2]
    assert batch.to_table(torch.arange(4.0)).tolist() == [[0, 1], [2, 3]]
    if packed:
        assert batch.packed.input_ids.tolist() == [[7, 8, 11, 12, 13, 14, 15]]
        assert batch.packed.source.tolist() == [1, 3, 1, 5]
    else:
        assert batch.input_ids.tolist() == [[7, 8, 11, 12, 13], [7, 8, 14, 15, 0]]
        assert (batch.width, batch.places.tolist()) == (3, [0, 2, 3, 4])


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match="mask of 1 entries"):
        Completion(token_ids=[1, 2], stop_reason="eos", mask=[True])
