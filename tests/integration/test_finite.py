"""Gradients and weights that are no numbers: what is not applied, and not written."""

from __future__ import annotations

import pytest
import torch
from transformers import TrainerCallback

from rloom import RLOOTrainer
from rloom.errors import DivergedError
from rloom.training import finite


def huge_at(steps):
    """A reward whose scores overflow any sum at some rollouts."""
    calls = []

    def reward(completions, **kwargs):
        calls.append(1)
        if len(calls) in steps:
            return [3e38 * (-1) ** i for i in range(len(completions))]
        return [float(len(text)) for text in completions]

    return reward


def skipped(trainer):
    return {e["step"]: e["updates/skipped"] for e in trainer.state.log_history if "updates/skipped" in e}


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
@pytest.mark.parametrize("split", [None, True])
@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_an_update_that_is_not_finite_is_skipped(model, rows, config, tokenizer, caplog, optim, split, clip):
    precision = {"bf16": True, "split_weights": True} if split else {}
    options = config(max_steps=3, optim=optim, max_grad_norm=clip, beta=0.0, **precision)
    trainer = RLOOTrainer(model, huge_at({2}), options, rows, processing_class=tokenizer)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            seen.append(torch.cat([p.detach().flatten().float() for p in model.parameters()]))

    trainer.add_callback(Look())
    trainer.train()
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    assert bool(torch.isfinite(seen[2]).all())
    assert skipped(trainer) == {2: 1.0}
    assert "update 2 is skipped: its gradient is not finite. The largest score in it is 3e+38" in caplog.text


def test_several_in_a_row_end_the_run(model, rows, config, tokenizer):
    trainer = RLOOTrainer(
        model, huge_at(range(2, 100)), config(max_steps=50, beta=0.0), rows, processing_class=tokenizer
    )
    with pytest.raises(DivergedError, match=r"5 updates in a row.*reward_clip_range"):
        trainer.train()
    assert trainer.state.global_step == finite.IN_A_ROW
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_a_checkpoint_never_holds_what_is_no_number(model, rows, config, tokenizer, tmp_path):
    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                model.model.norm.weight.data[0] = float("inf")

    options = config(max_steps=4, save_strategy="steps", save_steps=1)
    trainer = RLOOTrainer(model, huge_at(()), options, rows, processing_class=tokenizer, callbacks=[Break()])
    with pytest.raises(DivergedError, match=r"1 of 21 weights .* model.norm.weight: checkpoint-2 is not written"):
        trainer.train()
    assert [folder.name for folder in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-1"]


def test_what_the_device_decides_is_read_at_the_next_update():
    from rloom.observe.metrics import Metrics

    metrics = Metrics()
    updates = finite.FiniteUpdates(metrics)
    for number, flag in enumerate([1.0, 0.0, 1.0], start=1):
        updates._flag = torch.tensor([flag])
        updates.begin([], number + 1)
    assert updates.in_a_row == 1
    assert metrics.values["train"]["updates/skipped"] == [1.0, 1.0]
