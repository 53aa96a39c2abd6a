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
OFTEN = ["trl", "paper", "verl", "exact KL in the loss", "k3 in the loss, token level", "masked truncation, token mean"]
"""What `make test` runs of these."""


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


SPLITS = [
    {"per_device_train_batch_size": 24},
    {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 24, "max_tokens_per_micro_batch": 90},  # a group or two
    {"per_device_train_batch_size": 24, "max_tokens_per_micro_batch": 20},  # less than a group: two passes
    {"per_device_train_batch_size": 24, "max_tokens_per_micro_batch": 1},  # every completion on its own
    {"per_device_train_batch_size": 24, "keep_logits": True},
    {"per_device_train_batch_size": 24, "packing": False},
    {"per_device_train_batch_size": 24, "packing": False, "max_tokens_per_micro_batch": 120},
]


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES]
)
def test_gradient_does_not_depend_on_the_split(name, config, rows):
    """24 completions an update, in one micro-batch and in many, packed and padded."""
    results = [first_gradient(config, rows, logging_steps=1, **(OBJECTIVES[name] | split)) for split in SPLITS]
    expected, loss = results[0]
    scale = max(g.abs().max() for g in expected.values())
    assert scale > 1e-3
    for (grads, other_loss), split in zip(results[1:], SPLITS[1:], strict=True):
        assert other_loss == pytest.approx(loss, abs=1e-5)
        if "packing" not in split:
            distance = torch.stack([(grads[n] - g).norm() for n, g in expected.items()]).norm()
            assert distance / torch.stack([g.norm() for g in expected.values()]).norm() < 1e-6, split
        for parameter, gradient in expected.items():
            error = (grads[parameter] - gradient).abs().max() / scale
            allowed = 1e-5 if "packing" in split else 2e-6  # padded attention adds up in another order
            assert error < allowed, (split, parameter, error)


def test_one_forward_is_enough_for_one_update(config, rows):
    """On-policy single updates pay for one policy forward per completion, also with a KL in the reward."""
    calls = []

    def policy_rows(**options):
        model = make_model()
        engine = FakeEngine(lambda prompt, k, seed: [4 + k, *[5] * k, 2], eos_token_ids=[2])
        args = config(num_generations=4, max_steps=1, **({"beta": 0.1} | options), packing=False)
        trainer = RLOOTrainer(model, reward, args, rows, processing_class=make_tokenizer(), engine=engine)
        calls.clear()
        model.register_forward_hook(lambda m, a, kwargs, out: calls.append(len(kwargs["input_ids"])), with_kwargs=True)
        trainer.train()
        return sum(calls)

    assert policy_rows(per_device_train_batch_size=8) == 8
    assert policy_rows(per_device_train_batch_size=8, steps_per_generation=2) == 16 + 8  # two updates: first pass too
    assert policy_rows(per_device_train_batch_size=8, max_tokens_per_micro_batch=20) == 8 + 8  # groups do not fit
    assert policy_rows(per_device_train_batch_size=8, normalize_advantages=True) == 8 + 8  # a statistic over all
    assert policy_rows(per_device_train_batch_size=8, beta=0.0, normalize_advantages=True) == 4
    # … where scores are enough, and half of the completions have advantage 0: unscored, or just the mean


def test_groups_without_signal_cost_nothing(config, rows):
    """Equal scores and no KL: neither forward nor backward for that group."""
    calls = []
    model = make_model()
    engine = FakeEngine(lambda prompt, k, seed: [4 + k, 5, 2], eos_token_ids=[2])
    args = config(num_generations=4, per_device_train_batch_size=8, beta=0.0, max_steps=1, packing=False)

    def first_prompt_only(prompts, completion_ids):
        return [float(ids[0]) if p == prompts[0] else 1000.1 for p, ids in zip(prompts, completion_ids, strict=True)]

    trainer = RLOOTrainer(model, first_prompt_only, args, rows, processing_class=make_tokenizer(), engine=engine)
    model.register_forward_hook(lambda m, a, kwargs, out: calls.append(len(kwargs["input_ids"])), with_kwargs=True)
    trainer.train()
    assert sum(calls) == 4
    assert trainer.state.log_history[0]["completions/skipped"] == 4
    assert trainer.state.log_history[0]["frac_reward_zero_std"] == 0.5


def test_dynamic_sampling_replaces_groups_without_signal(config, rows):
    """Prompts of odd length give equal scores; they are replaced by others until the rollout is full of signal."""

    def reward(prompts, completion_ids):
        return [float(ids[0]) if len(p) % 2 == 0 else 1.0 for p, ids in zip(prompts, completion_ids, strict=True)]

    engine = FakeEngine(lambda prompt, k, seed: [4 + k, 5, 2], eos_token_ids=[2])
    args = config(num_generations=4, per_device_train_batch_size=24, beta=0.0, max_steps=1, dynamic_sampling=20)
    trainer = RLOOTrainer(make_model(), reward, args, rows, processing_class=make_tokenizer(), engine=engine)
    taken = []
    take = trainer.buffer.take
    trainer.buffer.take = lambda plan: taken.append(take(plan)) or taken[-1]
    trainer.train()
    (share,) = taken[0]
    assert len(share.rollout) == 24
    assert not any(share.rollout.degenerate())
    assert trainer.state.log_history[0]["completions/replaced_groups"] == sum(len(r["prompt"]) % 2 for r in rows)
    assert len(engine.calls) > 1


@pytest.mark.parametrize("lost", [0, 2])
def test_dynamic_sampling_replaces_groups_without_completions(lost, config, rows):
    """Also where it is the last of its rollout; and where a draw brings nothing at all, another round is made."""

    def script(prompt, sample, seed):
        fails = prompt.content == rows[lost]["prompt"] or len(engine.calls) == 2  # the first draw, all of it
        return None if fails else [4 + sample, 5, 2]

    def by_token(completion_ids, **kwargs):
        return [float(ids[0]) for ids in completion_ids]

    engine = FakeEngine(script, eos_token_ids=[2])
    sizes = {"num_generations": 4, "per_device_train_batch_size": 12, "max_steps": 1}
    args = config(**sizes, beta=0.0, dynamic_sampling=9, shuffle_dataset=False)
    trainer = RLOOTrainer(make_model(), by_token, args, rows, processing_class=make_tokenizer(), engine=engine)
    taken, take = [], trainer.buffer.take
    trainer.buffer.take = lambda plan: taken.append(take(plan)) or taken[-1]
    trainer.train()
    (share,) = taken[0]
    assert share.rollout.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert trainer.state.log_history[0]["completions/replaced_groups"] == 1
    assert len(engine.calls) > 2


def test_dynamic_sampling_gives_up_at_its_cap(config, rows):
    engine = FakeEngine(lambda prompt, k, seed: [4 + k, 5, 2], eos_token_ids=[2])
    args = config(num_generations=4, per_device_train_batch_size=8, beta=0.0, max_steps=1, dynamic_sampling=2)

    def equal(completions):
        return [1.0] * len(completions)

    trainer = RLOOTrainer(make_model(), equal, args, rows, processing_class=make_tokenizer(), engine=engine)
    trainer.train()
    assert len(engine.calls) == 3  # the rollout, and two rounds
    assert trainer.state.log_history[0]["completions/skipped"] == 8


def test_same_seed_same_weights(config, rows):
    def weights(seed):
        trainer = RLOOTrainer(make_model(), reward, config(seed=seed), rows, processing_class=make_tokenizer())
        trainer.train()
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    first = weights(3)
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))
