"""That it learns, and that a broken update would not pass for learning."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from rloom.demo import task
from rloom.demo.show import demo, make_trainer

BAR = 0.12
"""The rise of the mean reward that the correct update clears with room, and broken ones do not come near."""


def rise(tmp_path, break_it=None) -> float:
    """Mean reward of the last ten of 40 updates over that of the first ten, on the demo's task."""
    torch.manual_seed(0)
    tokenizer = task.make_tokenizer()
    model = task.make_model(tokenizer, seed=0)
    rows = task.make_prompts(2048, seed=0)
    task.warm_up(model, tokenizer, rows, seed=0)
    trainer = make_trainer(
        model, tokenizer, rows, seed=0, steps=40, output=str(tmp_path / "out"), console=Console(quiet=True)
    )
    if break_it is not None:
        advantages = trainer.credit.advantages
        trainer.credit.advantages = lambda *args, **kwargs: break_it(advantages(*args, **kwargs))
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == 40
    return sum(rewards[-10:]) / 10 - sum(rewards[:10]) / 10


@pytest.mark.slow  # test_demo shows more; this one is beside those that must not
def test_reward_rises(tmp_path):
    assert rise(tmp_path) > BAR


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_it",
    [lambda advantages: -advantages, lambda advantages: advantages[torch.randperm(len(advantages))]],
    ids=["sign", "shuffled"],
)
def test_broken_updates_stay_below_the_bar(tmp_path, break_it):
    assert rise(tmp_path, break_it) < BAR / 2


@pytest.mark.parametrize(("steps", "gain"), [(60, 0.2), pytest.param(200, 0.5, marks=pytest.mark.slow)])
def test_demo(tmp_path, capsys, steps, gain):
    """What `make demo` runs: sampled accuracy on held-out prompts rises from 0.25, after 200 steps to above 0.75."""
    console = Console(width=100, force_terminal=False)
    result = demo(seed=0, steps=steps, output=str(tmp_path / "demo"), console=console)
    assert result.after["sampled"] - result.before["sampled"] >= gain
    out = capsys.readouterr().out
    assert out.count("exact_match") == 3  # the three tables
    assert "held-out prompts" in out
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "demo", padding_side="left")
    rows = task.make_prompts(512, 0, split="held_out")
    assert task.accuracy(model, tokenizer, rows, sampled=True) == pytest.approx(result.after["sampled"], abs=0.05)
