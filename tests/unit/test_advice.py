"""Hints: one line when a recommended range is left, none inside it, never an error."""

from __future__ import annotations

import logging

import pytest

from rloom import RLOOConfig, RLOOTrainer
from rloom.training.advice import RULES, hints

GOOD = {
    "num_generations": 4, "learning_rate": 1e-6, "beta": 0.05, "max_grad_norm": 1.0,
    "per_device_train_batch_size": 16, "gradient_accumulation_steps": 8, "mask_truncated_completions": True,
}  # fmt: skip


def config(**changes):
    return RLOOConfig("out", **{**GOOD, **changes}, report_to="none", use_cpu=True)


def test_recommended_options_get_no_hint():
    assert hints(config(), adapter=False) == []
    assert hints(config(learning_rate=1e-5), adapter=True) == []


@pytest.mark.parametrize(
    ("changes", "adapter", "words"),
    [
        ({"learning_rate": 1e-4}, False, "is high for all weights"),
        ({"learning_rate": 1e-5}, False, "is high for all weights"),
        ({"learning_rate": 1e-4}, True, "is high for an adapter"),
        ({"learning_rate": 1e-8}, False, "is low"),
        ({"num_generations": 2}, False, "the baseline is the mean of 1"),
        ({"num_generations": 32}, False, "returns diminish"),
        ({"beta": 0.0}, False, "gamed rewards"),
        ({"beta": 0.5}, False, "holds the policy close"),
        ({"max_grad_norm": 0.0}, False, "not clipped"),
        ({"max_grad_norm": 5.0}, False, "outside the usual"),
        ({"gradient_accumulation_steps": 1}, False, "16 completions per update"),
        ({"gradient_accumulation_steps": 64}, False, "more than the usual"),
        ({"mask_truncated_completions": False}, False, "truncated completions"),
    ],
)
def test_each_range_has_its_hint(changes, adapter, words):
    (hint,) = hints(config(**changes), adapter=adapter)
    assert words in hint
    assert "\n" not in hint


def test_a_penalty_answers_truncation_too():
    assert not hints(config(mask_truncated_completions=False, missing_eos_penalty=1.0), adapter=False)


def test_hints_are_logged_once_per_trainer_and_can_be_kept_back(model, tokenizer, rows, caplog, tmp_path):
    def make(**changes):
        args = RLOOConfig(str(tmp_path), per_device_train_batch_size=4, report_to="none", use_cpu=True, **changes)
        return RLOOTrainer(model, lambda completions: [0.0] * len(completions), args, rows, processing_class=tokenizer)

    with caplog.at_level(logging.WARNING, logger="rloom"):
        make()
        found = [r.message for r in caplog.records if r.message.startswith("hint:")]
        assert 1 < len(found) <= len(RULES)
        caplog.clear()
        make(advice=False)
        assert not [r for r in caplog.records if r.message.startswith("hint:")]
