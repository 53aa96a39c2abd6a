"""How a batch is split changes speed and memory, never the gradient; equal seeds give equal runs."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import TrainerCallback

from rloom import FakeEngine, RLOOTrainer
from tests.conftest import LETTERS, make_model, make_tokenizer

OBJECTIVES = {
    "trl": {},
    "no KL": {"beta": 0.0},
    "paper": {"objective": "paper"},
    "openrlhf": {"objective": "openrlhf"},
    "verl": {"objective": "verl"},
    "reinforce++": {"objective": "reinforce++"},
    "exact KL in the reward": {"kl_estimator": "full"},
    "exact KL in the loss": {"kl_estimator": "full", "kl_placement": "loss"},
    "k3 in the loss, token level": {
        "kl_estimator": "k3",
        "kl_placement": "loss",
        "ratio_level": "token",
        "loss_aggregation": "token_mean",
    },
    "per-token KL, sequence token mean": {
        "kl_placement": "reward_tokens",
        "ratio_level": "token",
        "loss_aggregation": "sequence_token_mean",
    },
    "moving average": {"advantage_estimator": "moving_average"},
    "excluded truncation": {"truncated_completions": "exclude"},
    "masked truncation, token mean": {"truncated_completions": "mask", "loss_aggregation": "token_mean"},
    "shaped": {
        "missing_eos_penalty": 1.0,
        "length_regularization": "soft_overlong",
        "normalize_rewards": "running",
        "reward_clip_range": (-1.0, 1.0),
    },
}


def script(prompt, sample, seed):
    """Ragged completions; some prompts lose one, some are cut off, one is empty."""
    draw = random.Random(f"{prompt.content} {sample}")
    if draw.random() < 0.15:
        return None
    length = draw.choice([0, 1, 2, 5, 7, 9])
    words = [draw.randrange(4, 4 + len(LETTERS)) for _ in range(length)]
    return [*words, 2] if length < 7 else words[:7]


def reward(completions, **kwargs):
    return [None if text.startswith("a") else float(len(text)) + text.count("e") for text in completions]


class FirstGradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
        control.should_training_stop = True


def first_gradient(config, rows, model=None, **options):
    keep = FirstGradient()
    defaults = {"num_generations": 4, "max_completion_length": 7, "beta": 0.1, "max_grad_norm": 0.0, "optim": "sgd"}
    args = config(**(defaults | options))
    engine = FakeEngine(script, eos_token_ids=[2])
    model = model or make_model()
    with torch.no_grad():  # a reference that differs from the policy, so that the KL is not zero
        trainer = RLOOTrainer(
            model, reward, args, rows, processing_class=make_tokenizer(), callbacks=[keep], engine=engine
        )
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.sin(torch.arange(parameter.numel()).view_as(parameter).float()))
    trainer.train()
    return keep.grads, trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_does_not_depend_on_the_split(name, config, rows):
    """24 completions an update: in one micro-batch, in two, by the group, and by less than a group."""
    splits = [(24, 1), (12, 2), (4, 6), (3, 8), (1, 24)]
    results = [
        first_gradient(config, rows, per_device_train_batch_size=size, gradient_accumulation_steps=steps,
                       logging_steps=1, **OBJECTIVES[name])
        for size, steps in splits
    ]  # fmt: skip
    expected, loss = results[0]
    scale = max(g.abs().max() for g in expected.values())
    assert scale > 1e-3
    for (grads, other_loss), split in zip(results[1:], splits[1:], strict=True):
        assert other_loss == pytest.approx(loss, abs=1e-5)
        for parameter, gradient in expected.items():
            error = (grads[parameter] - gradient).abs().max() / scale
            assert error < 1e-6, (split, parameter, error)


def test_one_forward_is_enough_for_one_update(config, rows):
    """On-policy single updates pay for one policy forward per completion, also with a KL in the reward."""
    calls = []

    def count(module, args, kwargs, output):
        calls.append((module.training, kwargs["input_ids"].shape[0]))

    def policy_rows(**options):
        calls.clear()
        model = make_model()
        model.register_forward_hook(count, with_kwargs=True)
        engine = FakeEngine(lambda prompt, k, seed: [4 + k, 5, 2], eos_token_ids=[2])
        args = config(num_generations=4, max_steps=1, beta=0.1, **options)
        trainer = RLOOTrainer(model, reward, args, rows, processing_class=make_tokenizer(), engine=engine)
        trainer.ref_model._forward_hooks.clear()
        trainer.train()
        return sum(n for _, n in calls)

    assert policy_rows(per_device_train_batch_size=8) == 8
    assert policy_rows(per_device_train_batch_size=8, steps_per_generation=2) == 16 + 8  # two updates: first pass too
    assert policy_rows(per_device_train_batch_size=2, gradient_accumulation_steps=4) == 8 + 8  # groups do not fit
    assert policy_rows(per_device_train_batch_size=8, normalize_advantages=True) == 8 + 8  # a statistic over all


def test_same_seed_same_weights(config, rows):
    def weights(seed):
        trainer = RLOOTrainer(make_model(), reward, config(seed=seed), rows, processing_class=make_tokenizer())
        trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    first = weights(3)
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))
