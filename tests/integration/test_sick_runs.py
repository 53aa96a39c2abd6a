"""Runs that are really sick: the diagnosis names the disease and the option, in time; healthy runs hear nothing.

The task is the demo's with three digits: a small model that has been trained a little, and is right in a third of its
answers. Each disease is made by one change of what a healthy run has.
"""

from __future__ import annotations

import copy
import functools
import logging
import re
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rloom import RLOOConfig, RLOOTrainer
from rloom.demo import task
from rloom.observe import RunReader
from tests.conftest import make_model, make_tokenizer

TOKENIZER = task.make_tokenizer()
ROWS = task.make_prompts(300, 0, num_digits=3)
# Most answers are longer than four tokens, some are not.
RAGGED = [*task.make_prompts(60, 0, num_digits=2), *task.make_prompts(240, 0, num_digits=4)]
REFUSING = (
    "{% if not add_generation_prompt %}{{ raise_exception('whose turn is it?') }}{% endif %}"
    "{% for m in messages %}{{ m['content'] }}{% endfor %}a>"
)
WITHOUT_ITS_TURN = "{% for m in messages %}{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"


def small_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    special = {"pad_token_id": TOKENIZER.pad_token_id, "eos_token_id": TOKENIZER.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, **special,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@functools.cache
def warmed(seed: int, kind: str = "usual") -> LlamaForCausalLM:
    """A model that is right now and then; `kind`: on answers of other lengths, or with another token at their end."""
    model, tokenizer = small_model(seed), task.make_tokenizer()
    if kind == "another end":
        tokenizer.eos_token = ">"
    rows, steps = (RAGGED if kind == "ragged" else ROWS), (150 if kind == "another end" else 25)
    task.warm_up(model, tokenizer, rows, steps=steps, learning_rate=3e-3, seed=seed)
    return model


def start(kind: str = "usual") -> Any:
    return lambda seed: copy.deepcopy(warmed(seed, kind))


def zeros(completions, **kwargs):
    """Pays for every 0 that is written."""
    return [float(text.count("0")) for text in completions]


@dataclass
class Sick:
    """How a run is made sick, which rule finds it, and what its line tells the user to change."""

    rule: str
    options: str  # a pattern of what the line says
    steps: int
    changes: dict[str, Any]
    reward: Any = task.exact_match
    model: Any = field(default_factory=start)
    rows: Any = field(default_factory=lambda: ROWS)


SICK = {
    "learning rate": Sick("kl_explodes", "lower learning_rate .now 0.03", 6, {"learning_rate": 3e-2}),
    "learning rate, without a KL": Sick(
        "reward_falls", "lower learning_rate .now 0.03", 10, {"learning_rate": 3e-2, "beta": 0.0}
    ),
    "beta too large": Sick("kl_outweighs_scores", "lower beta .now 10", 10, {"beta": 10.0}),
    "beta too small": Sick(
        "kl_explodes", "raise beta .now 0.0001", 10, {"beta": 1e-4, "learning_rate": 2e-3}, reward=zeros
    ),
    "gameable reward": Sick(
        "repetition_is_paid", "being gamed; raise beta", 12,
        {"beta": 0.0, "learning_rate": 2e-3, "max_completion_length": 12}, reward=zeros,
    ),
    "end token of another template": Sick(
        "nothing_ends", "end token never comes.*chat template.*stop_token", 4, {}, model=start("another end")
    ),
    "cold start": Sick("scores_are_constant", "cold start: train it with `rloom sft`", 4, {}, model=small_model),
    "truncation": Sick(
        "completions_are_cut_off", "raise max_completion_length .now 4", 5, {"max_completion_length": 4},
        model=start("ragged"), rows=RAGGED,
    ),
    "entropy collapse": Sick(
        "entropy_collapses", "raise beta .now 0., or raise temperature", 30,
        {"beta": 0.0, "learning_rate": 4e-3, "per_device_train_batch_size": 32}, reward=zeros,
    ),
    "no movement": Sick("policy_stands_still", "raise learning_rate .now 1e-09", 21,
                        {"learning_rate": 1e-9, "per_device_train_batch_size": 16}),
}  # fmt: skip


def train(folder, model, reward, rows, tokenizer=TOKENIZER, lora=None, resume=False, **changes) -> RLOOTrainer:
    options = {
        "per_device_train_batch_size": 64, "num_generations": 8, "max_completion_length": 6, "learning_rate": 5e-4,
        "beta": 0.05, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": False, "advice": False,
    }  # fmt: skip
    args = RLOOConfig(str(folder), **(options | changes))
    trainer = RLOOTrainer(model, reward, args, rows, processing_class=tokenizer, peft_config=lora)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def diagnoses(caplog) -> list[str]:
    return [message for message in caplog.messages if message.startswith("diagnosis")]


def check(name: str, seed: int, folder, caplog) -> None:
    """The run is told what it has, and stops by that name where it is asked to."""
    sick = SICK[name]
    changes = {**sick.changes, "early_stop_on": [sick.rule], "early_stop_patience": 1, "max_steps": sick.steps}
    trainer = train(folder, sick.model(seed), sick.reward, sick.rows, seed=seed, **changes)
    lines = [line for line in diagnoses(caplog) if re.search(sick.options, line)]
    assert lines, diagnoses(caplog)
    assert trainer.report.stopped_because.startswith(f"{sick.rule}: ")


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_hears_what_it_has(name, tmp_path, caplog):
    check(name, 0, tmp_path, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", SICK)
def test_sick_runs_with_other_seeds(name, seed, tmp_path, caplog):
    check(name, seed, tmp_path, caplog)


# -- templates, which are seen before the first update


def with_template(template: str):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


CHATS = [{"prompt": [{"role": "user", "content": text}]} for text in ("ab", "why.", "x")]
SAID_BEFORE = [{"prompt": [*row["prompt"], {"role": "assistant", "content": "so"}]} for row in CHATS]


def some(completions, **kwargs):
    return [float(len(str(text))) for text in completions]


@pytest.mark.parametrize(
    ("tokenizer", "rows", "words"),
    [
        (with_template(WITHOUT_ITS_TURN), CHATS, "the chat template adds no generation prompt"),
        (with_template("<bos><bos>" + make_tokenizer().chat_template), CHATS, "prompts begin with two <bos>"),
        (make_tokenizer(), [{"prompt": "<bos><bos>ab"}, {"prompt": "<bos><bos>why."}], "prompts begin with two <bos>"),
        (make_tokenizer(), CHATS, None),
        (with_template("<bos>" + make_tokenizer().chat_template), CHATS, None),
        # What the assistant has said is gone on with.
        (with_template(WITHOUT_ITS_TURN), SAID_BEFORE, None),
    ],
)
def test_a_broken_template_is_seen_at_the_start(tokenizer, rows, words, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="rloom")
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 1}
    train(tmp_path, make_model(), some, rows, tokenizer, **options)
    found = [line for line in diagnoses(caplog) if "step 0" in line]
    assert len(found) == (0 if words is None else 1)
    assert all(words in line for line in found)


def test_a_template_that_cannot_be_looked_at_ends_no_run(tmp_path, caplog):
    """It raises where it is applied without a generation prompt, which a run never does."""
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 1}
    trainer = train(tmp_path, make_model(), some, CHATS, with_template(REFUSING), **options)
    assert trainer.state.global_step == 1
    assert [message for message in caplog.messages if "could not be looked at" in message and "whose turn" in message]


def test_a_resumed_run_does_not_store_it_again(tmp_path, caplog):
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "save_strategy": "steps", "save_steps": 1}
    tokenizer = with_template(WITHOUT_ITS_TURN)
    for steps in (1, 2):
        train(tmp_path, make_model(), some, CHATS, tokenizer, resume=steps == 2, max_steps=steps, **options)
    assert [line[:19] for line in diagnoses(caplog)] == ["diagnosis at step 0", "diagnosis at step 1"]
    assert [one["step"] for one in RunReader(tmp_path).diagnoses() if one["rule"] == "prompts"] == [0]


# -- healthy


def chat_rows():
    return [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


def chat_match(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return task.exact_match(texts, answer=answer)


def chat_tokenizer():
    tokenizer = task.make_tokenizer()
    # The generation prompt is the mark that the model was warmed up with.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'][:3] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return tokenizer


HEALTHY: dict[str, dict[str, Any]] = {
    "as the demo": {},
    "small groups": {"num_generations": 4},
    "large groups": {"num_generations": 16},
    "no KL": {"beta": 0.0},
    "several iterations": {"num_iterations": 2, "learning_rate": 2e-4},
    "KL in the loss": {"kl_placement": "loss", "kl_estimator": "k3"},
    "openrlhf": {"objective": "openrlhf"},
    "paper": {"objective": "paper", "temperature": 0.9},
    "a target for the KL": {"kl_target": 0.05},
    "dynamic sampling": {"dynamic_sampling": 1, "beta": 0.0},
    "lora": {"learning_rate": 3e-3, "max_steps": 48},
    "chat": {},
}


def healthy_run(kind: str, seed: int, folder) -> RLOOTrainer:
    options = {"per_device_train_batch_size": 128, "learning_rate": 3e-4, "max_steps": 24, "seed": seed}
    changes = {**options, **HEALTHY[kind]}
    if kind == "chat":
        return train(folder, start()(seed), chat_match, chat_rows(), chat_tokenizer(), **changes)
    lora = None
    if kind == "lora":
        from peft import LoraConfig

        lora = LoraConfig(r=16, lora_alpha=64, target_modules="all-linear")
    return train(folder, start()(seed), task.exact_match, ROWS, lora=lora, **changes)


def check_healthy(kind: str, seed: int, folder, caplog) -> None:
    trainer = healthy_run(kind, seed, folder)
    assert diagnoses(caplog) == []
    # It is healthy: it has learnt something.
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    third = len(rewards) // 3
    assert fmean(rewards[-third:]) > fmean(rewards[:third])


def test_a_healthy_run_hears_nothing(tmp_path, caplog):
    check_healthy("no KL", 0, tmp_path, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_hear_nothing(kind, seed, tmp_path, caplog):
    check_healthy(kind, seed, tmp_path, caplog)
