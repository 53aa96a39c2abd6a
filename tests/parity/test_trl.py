"""Against TRL 1.16 itself: its real scoring and loss code, on the very completions that ours gets.

Both trainers are transformers Trainers, so one callback reads the gradients of both, update by update. Replaced in
TRL's trainer: what is random and not under test (sampling, and the shuffle of rows inside a rollout).
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from transformers import TrainerCallback

from rloom import FakeEngine, RLOOConfig, RLOOTrainer
from tests.conftest import LETTERS, make_model, make_tokenizer

trl = pytest.importorskip("trl")

EOS = 2
PROMPTS = ["ab", "hello there", "1+1=", "a long prompt, longer than others.", "x", "sort 3 1 2>", "ok", "why."]


def script(rollout: int, prompt: str, sample: int) -> list[int]:
    """The completion for a prompt in a rollout: sometimes ended by EOS, sometimes cut off at 7 tokens."""
    draw = random.Random(f"{rollout} {prompt} {sample}")
    length = draw.randint(1, 10)
    tokens = [draw.randrange(4, 4 + len(LETTERS)) for _ in range(length)]
    return [*tokens, EOS] if length < 7 else tokens[:7]


class Gradients(TrainerCallback):
    """Keeps the gradients of every update."""

    def __init__(self):
        self.updates = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.updates.append({n: p.grad.detach().clone() for n, p in named if p.grad is not None and ".ref." not in n})


def length_reward(completions, **kwargs):
    return [len(text) / 3 for text in completions]


def vowels(completions, prompts, **kwargs):
    """Applies to some prompts only; the second sample of 'x' gets no score from anybody."""
    return [
        None if len(p) % 2 else float(sum(c in "aeiou" for c in text))
        for p, text in zip(prompts, completions, strict=True)
    ]


def sometimes(completions, **kwargs):
    """No score for completions with an even number of characters."""
    return [None if len(text) % 2 == 0 else float(text.count("a") + len(text)) for text in completions]


def run_trl(tmp_path, options, rewards, lora, monkeypatch):
    model = make_model()
    model.save_pretrained(tmp_path / "model")  # TRL loads its reference by name
    model = type(model).from_pretrained(tmp_path / "model")
    monkeypatch.setattr("trl.trainer.rloo_trainer.shuffle_sequence_dict", lambda batch: batch)
    grads = Gradients()
    config = trl.RLOOConfig(**options, bf16=False)
    trainer = trl.RLOOTrainer(
        model, rewards, config, dataset(), processing_class=make_tokenizer(), callbacks=[grads], peft_config=lora
    )
    rollouts = []

    def generate(prompt_ids, images, multimodal_fields):
        rollouts.append(1)
        decode = trainer.processing_class.decode
        seen: dict[str, int] = {}
        result = []
        for ids in prompt_ids:
            text = decode(ids)
            sample = seen.get(text, 0)
            seen[text] = sample + 1
            result.append(script(len(rollouts), text, sample))
        return result

    trainer._generate_single_turn = generate
    advantages = spy_advantages(trainer)
    trainer.train()
    return trainer, grads, advantages


def spy_advantages(trainer):
    """TRL's advantages, rollout by rollout."""
    kept = []
    score = trainer._generate_and_score_completions

    def wrapped(inputs):
        output = score(inputs)
        kept.append(output["advantages"].clone())
        return output

    trainer._generate_and_score_completions = wrapped
    return kept


def run_rloom(options, rewards, lora):
    grads = Gradients()
    engine = FakeEngine(lambda prompt, k, seed: script(len(engine.calls), prompt.content, k), eos_token_ids=[EOS])
    trainer = RLOOTrainer(
        make_model(),
        rewards,
        RLOOConfig(**options),
        dataset(),
        processing_class=make_tokenizer(),
        callbacks=[grads],
        peft_config=lora,
        engine=engine,
    )
    kept = []
    first_used = trainer._first_used

    def wrapped(rollouts):
        for rollout in {id(r): r for r in rollouts}.values():
            if rollout.records:
                kept.append(torch.stack([a.float() for a in rollout.advantages]))
        return first_used(rollouts)

    trainer._first_used = wrapped
    trainer.train()
    return trainer, grads, kept


def dataset():
    from datasets import Dataset

    return Dataset.from_dict({"prompt": PROMPTS})


def options(tmp_path, **changes):
    defaults = {
        "output_dir": str(tmp_path / "out"),
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 7,
        "learning_rate": 0.02,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "shuffle_dataset": False,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "beta": 0.1,
    }
    return defaults | changes


CASES = {
    "default": {},
    "no KL": {"beta": 0.0},
    "K larger than the micro-batch": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
    "two passes over each rollout": {"num_iterations": 2},
    "two passes, no KL": {"num_iterations": 2, "beta": 0.0},
    "rollout = two updates": {"steps_per_generation": 2},
    "rollout = half an update": {"gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "straddling": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
        "num_iterations": 2,
    },
    "temperature": {"temperature": 0.7},
    "asymmetric clip": {"num_iterations": 3, "epsilon": 0.05, "epsilon_high": 0.3},
    "masked truncation": {"mask_truncated_completions": True},
    "masked truncation, no KL, two passes": {"mask_truncated_completions": True, "beta": 0.0, "num_iterations": 2},
    "reward clip": {"reward_clip_range": (0.2, 1.5)},
    "normalised advantages": {"normalize_advantages": True},
    "normalised advantages, no KL": {"normalize_advantages": True, "beta": 0.0},
    "synced reference": {"sync_ref_model": True, "ref_model_sync_steps": 2, "num_train_epochs": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_same_advantages_loss_and_gradient(name, tmp_path, monkeypatch):
    compare(tmp_path, monkeypatch, options(tmp_path, **CASES[name]), [length_reward])


def test_with_rewards_that_do_not_apply(tmp_path, monkeypatch):
    compare(
        tmp_path, monkeypatch, options(tmp_path, reward_weights=[1.0, 0.5]), [sometimes, vowels]
    )  # some completions are scored by none


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_with_lora(beta, tmp_path, monkeypatch):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    compare(tmp_path, monkeypatch, options(tmp_path, beta=beta, num_iterations=2), [length_reward], lora)


def compare(tmp_path, monkeypatch, chosen, rewards, lora=None):
    theirs, their_grads, their_advantages = run_trl(
        tmp_path, copy.deepcopy(chosen), list(rewards), copy.deepcopy(lora), monkeypatch
    )
    ours, our_grads, our_advantages = run_rloom(copy.deepcopy(chosen), list(rewards), copy.deepcopy(lora))
    assert ours.state.global_step == theirs.state.global_step > 0
    assert len(our_advantages) == len(their_advantages) > 0
    for mine, other in zip(our_advantages, their_advantages, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    for step, (mine, other) in enumerate(zip(our_grads.updates, their_grads.updates, strict=True)):
        assert mine.keys() == other.keys()
        scale = max(1.0, *(float(g.abs().max()) for g in other.values()))
        for parameter in mine:
            error = float((mine[parameter] - other[parameter]).abs().max()) / scale
            assert error < 1e-5, f"update {step}, {parameter}: {error}"
    assert any(g.abs().max() > 1e-3 for update in our_grads.updates for g in update.values())
    compare_logs(ours, theirs)
    if chosen.get("num_iterations", 1) > 1:
        assert any(log.get("clip_ratio/region_mean") for log in ours.state.log_history), "no ratio was ever clipped"


def compare_logs(ours, theirs):
    """The same keys in every log, and the same values where they mean the same (timings aside)."""
    for mine, other in zip(ours.state.log_history[:-1], theirs.state.log_history[:-1], strict=True):
        assert set(other) <= set(mine)
        for key in ("loss", "reward", "reward_std", "kl", "learning_rate", "num_tokens"):
            if other.get(key) is not None:
                assert mine[key] == pytest.approx(other[key], rel=1e-3, abs=1e-5), key
        assert mine["epoch"] == pytest.approx(other["epoch"], abs=0.12)  # TRL counts micro-batches, we count updates
        # TRL averages per-micro-batch means; ours is the mean over the update's tokens.
        assert mine["entropy"] == pytest.approx(other["entropy"], rel=0.05)
        for key in other:
            if key.startswith(("completions/", "rewards/")):
                assert (mine[key] is None) == (other[key] is None), key
                assert mine[key] is None or mine[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
        if not ours.args.mask_truncated_completions:  # TRL counts masked completions as not clipped, ours not at all
            for key in ("clip_ratio/region_mean", "clip_ratio/low_mean", "clip_ratio/high_mean"):
                assert mine[key] == pytest.approx(other[key], abs=1e-5), key
