"""The metrics of older documents: every name, the formulas, and the axis that their plots are drawn over."""

from __future__ import annotations

import math
import re

import pytest
import torch
from transformers.integrations.integration_utils import rewrite_logs

from rloom import RLOOTrainer
from rloom.errors import RewardError
from rloom.observe.metric_table import OLDER_METRICS
from rloom.observe.older_metrics import RolloutFacts, rollout_metrics
from rloom.types import Rollout

FILTERS = (  # of the older document's plotting command
    "?we=huggingface&wpn=trl&xaxis=train/episode&ceik=output_dir&cen=sft_model_path&metrics=train/objective/rlhf_reward"
    "&metrics=train/objective/scores&metrics=train/objective/kl&metrics=train/objective/non_score_reward"
    "&metrics=train/objective/entropy&metrics=train/policy/approxkl_avg&metrics=train/policy/clipfrac_avg"
    "&metrics=train/loss/policy_avg&metrics=train/policy/entropy_avg&metrics=train/val/ratio&metrics=train/val/ratio_var"
    "&metrics=train/val/num_eos_tokens&metrics=train/lr&metrics=train/eps"
)

OLDER_NAMES = {name for metric in OLDER_METRICS for name in metric.names}


def spread(completions, **kwargs):
    return [float(len(set(c))) for c in completions]


@pytest.fixture
def history(model, tokenizer, rows, config):
    args = config(log_older_metrics=True, num_iterations=2, max_steps=4, beta=0.1, per_device_train_batch_size=8)
    trainer = RLOOTrainer(model, spread, args, rows, processing_class=tokenizer)
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_every_name_is_there_and_the_plotting_command_finds_its_metrics(history):
    assert set(history[0]) >= OLDER_NAMES
    sent = rewrite_logs(history[0])  # as W&B and TensorBoard get them
    assert set(re.findall(r"(?:metrics|xaxis)=([^&]+)", FILTERS)) <= set(sent)
    assert not any(name.startswith("val/clipfrac") for name in history[0])  # there is no value function


def test_formulas_agree_with_the_present_names(history):
    for entry in history[::2]:  # with the update that collected the rollout
        assert entry["objective/rlhf_reward"] == pytest.approx(
            entry["objective/scores"] - entry["objective/non_score_reward"], abs=1e-5
        )
        assert entry["objective/non_score_reward"] == pytest.approx(0.1 * entry["objective/kl"], abs=1e-6)
        assert entry["objective/kl"] == pytest.approx(
            entry["kl"] * entry["completions/mean_length"], rel=1e-4, abs=1e-6
        )
        assert entry["objective/scores"] == pytest.approx(entry["reward"])
        assert entry["val/num_eos_tokens"] == round(8 * (1 - entry["completions/clipped_ratio"]))
    for entry in history:
        assert entry["policy/entropy_avg"] == entry["entropy"]
        assert entry["policy/clipfrac_avg"] == entry["clip_ratio/region_mean"]
        assert entry["loss/policy_avg"] == pytest.approx(entry["loss"], abs=1e-5)
        assert entry["lr"] == entry["learning_rate"]
        assert entry["eps"] > 0


def test_ratio_is_one_on_the_first_pass_and_moves_on_the_second(history):
    assert [entry["val/ratio"] for entry in history[::2]] == pytest.approx([1.0, 1.0], abs=1e-4)
    assert all(entry["policy/approxkl_avg"] > 1e-8 and entry["val/ratio_var"] > 0 for entry in history[1::2])
    assert [entry["episode"] for entry in history] == [8, 8, 16, 16]


def test_by_hand():
    rollout = Rollout(
        prompt_ids=[[1]] * 4, completion_ids=[[5], [6, 7], [8], [9]], groups=torch.tensor([0, 0, 1, 1]),
        scores=torch.zeros(4, 1), score=torch.tensor([1.0, 3.0, 2.0, float("nan")]), trained=[True] * 4,
        ended=[True, False, True, True],
    )  # fmt: skip
    rollout.kl = [torch.tensor([1.0]), torch.tensor([1.0, 2.0]), torch.tensor([0.0]), torch.tensor([4.0])]
    rollout.policy_logprobs = [torch.tensor([-1.0]), torch.tensor([-1.0, -2.0]), None, None]
    found = {name: float(value) for name, value in rollout_metrics(RolloutFacts.of(rollout), 0.5).items()}
    assert found["objective/kl"] == 2.0  # (1 + 3 + 0 + 4) / 4
    assert found["objective/non_score_reward"] == 1.0
    assert found["objective/scores"] == 2.0
    assert found["objective/rlhf_reward"] == 1.0  # as docs/metrics.md has it: one taken from the other
    assert found["rlhf_reward_var_per_prompt"] == pytest.approx(0.5)  # of 0.5 and 1.5; the other group has one score
    assert found["objective/entropy"] == 2.0
    assert found["val/num_eos_tokens"] == 3.0


def test_completions_that_are_not_trained_on_have_no_kl():
    rollout = Rollout(
        prompt_ids=[[1]] * 3, completion_ids=[[5], [6, 7], [8]], groups=torch.tensor([0, 0, 0]),
        scores=torch.zeros(3, 1), score=torch.tensor([1.0, 3.0, float("nan")]), trained=[True, False, False],
    )  # fmt: skip
    rollout.kl = [torch.tensor([4.0]), None, None]
    found = {name: float(value) for name, value in rollout_metrics(RolloutFacts.of(rollout), 0.5).items()}
    assert (found["objective/kl"], found["objective/non_score_reward"]) == (4.0, 2.0)
    assert (found["objective/scores"], found["objective/rlhf_reward"]) == (2.0, 0.0)


def test_off_by_default_and_names_are_taken(model, tokenizer, rows, config):
    def logs_a_taken_name(completions, log_metric, **kwargs):
        log_metric("val/ratio", 1.0)
        return [0.0] * len(completions)

    trainer = RLOOTrainer(model, spread, config(max_steps=1), rows, processing_class=tokenizer)
    trainer.train()
    assert not OLDER_NAMES & set(trainer.state.log_history[0])
    trainer = RLOOTrainer(model, logs_a_taken_name, config(max_steps=1), rows, processing_class=tokenizer)
    with pytest.raises(RewardError, match="the trainer's own"):
        trainer.train()


@pytest.mark.parametrize("name", ["mismatch/mean", "updates/skipped", "clip_ratio/own"])
def test_names_of_the_trainers_own_are_refused(name, model, tokenizer, rows, config):
    def logs_it(completions, log_metric, **kwargs):
        log_metric(name, 1.0)
        return [0.0] * len(completions)

    trainer = RLOOTrainer(model, logs_it, config(max_steps=1), rows, processing_class=tokenizer)
    with pytest.raises(RewardError, match="the trainer's own"):
        trainer.train()


def test_at_the_level_of_tokens(model, tokenizer, rows, config):
    args = config(log_older_metrics=True, num_iterations=2, max_steps=2, ratio_level="token", beta=0.0)
    trainer = RLOOTrainer(model, spread, args, rows, processing_class=tokenizer)
    trainer.train()
    second = trainer.state.log_history[1]
    assert math.isfinite(second["val/ratio"])
    assert second["val/ratio_var"] > 0
