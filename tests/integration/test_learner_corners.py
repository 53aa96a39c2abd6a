"""Corners of the learner that a review found wrong: each compares with what must agree, or is refused."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from peft import LoraConfig

from rloom import RLOOTrainer
from rloom.errors import ConfigError, EngineError
from rloom.generation import NativeEngine, Sampling
from rloom.models.model_checks import check_head, why_not_packed
from tests.conftest import make_model, make_tokenizer


def by_length(completions, **kwargs):
    return [float(len(text)) for text in completions]


def make_trainer(config, rows, model=None, **changes):
    options = {"max_steps": 1, "max_completion_length": 8, "logging_steps": 1, **changes}
    peft_config = options.pop("peft_config", None)
    model = make_model() if model is None else model
    return RLOOTrainer(
        model, by_length, config(**options), rows, processing_class=make_tokenizer(), peft_config=peft_config
    )


def falcon_h1(**changes):
    return tf.FalconH1ForCausalLM(tf.FalconH1Config(
        vocab_size=46, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, **changes,
    ))  # fmt: skip


def test_falcon_h1_multiplies_its_logits():
    check_head(falcon_h1(lm_head_multiplier=0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_does_not_show_in_logits_is_known_all_the_same(dtype):
    """With weights as small as these, packed rows had nearly the numbers of padded ones."""
    model = falcon_h1().to(dtype)
    assert "keeps other state" in why_not_packed(model)
    sampling = Sampling(max_completion_length=4, eos_token_ids=(), pad_token_id=0)
    with pytest.raises(EngineError, match="keeps other state"):
        NativeEngine(lambda: model, sampling)


def test_a_head_that_does_something_unknown_is_refused(config, rows):
    model = make_model()
    forward = type(model).forward

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.__class__ = type("Scaled", (type(model),), {"forward": scaled})
    with pytest.raises(ConfigError, match="does something to its logits"):
        make_trainer(config, rows, model)


@pytest.mark.parametrize("where", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_the_exact_kl_is_of_the_references_own_head(config, rows, where):
    adapter = LoraConfig(r=4, **{"target_modules": ["q_proj"], **where})
    trainer = make_trainer(config, rows, beta=0.1, kl_estimator="full", peft_config=adapter)
    with torch.no_grad():  # far from where it began, in the head alone
        for name, parameter in trainer.model.named_parameters():
            if "lm_head" in name and parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    trainer.train()
    assert trainer.state.log_history[0]["kl"] > 0.05


@pytest.mark.parametrize("budget", [None, 24])
def test_dropout_does_not_make_a_first_update_off_policy(config, rows, budget):
    """Its ratios are 1 whatever the budget; with a KL in the reward a small one takes two passes."""
    model = make_model()
    model.config.attention_dropout = 0.3
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    changes = {} if budget is None else {"max_tokens_per_micro_batch": budget}
    trainer = make_trainer(config, rows, model, beta=0.1, **changes)
    trainer.train()
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] == 0.0
    assert abs(trainer.state.log_history[0]["loss"]) < 1e-5


def test_out_of_memory_forgets_what_the_failed_attempt_drew(config, rows, monkeypatch):
    model = make_model()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_tokens_per_micro_batch": 24}
    trainer = make_trainer(config, rows, model, beta=0.0, **sizes)
    backward, calls = trainer._backward, []

    def fails_once(loss, last):
        calls.append(last)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("injected")
        backward(loss, last)

    monkeypatch.setattr(trainer, "_backward", fails_once)
    trainer.train()
    assert len(calls) > 2
    assert trainer.state.log_history[0]["clip_ratio/region_mean"] == 0.0
    assert abs(trainer.state.log_history[0]["loss"]) < 1e-5


def test_a_load_balancing_loss_without_gradient_is_refused(config, rows):
    torch.manual_seed(0)
    shape = {"vocab_size": 46, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = tf.MixtralForCausalLM(tf.MixtralConfig(**shape, **heads, output_router_logits=True))
    checkpoints = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ConfigError, match="'use_reentrant': False"):
        make_trainer(config, rows, model, router_aux_loss_coef=0.1, **checkpoints).train()


def test_only_the_head_is_trained(config, rows, caplog):
    model = make_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    before = model.lm_head.weight.detach().clone()
    trainer = make_trainer(config, rows, model, packing=True, learning_rate=1e-3)
    trainer.train()
    assert not torch.equal(before, model.lm_head.weight)


def test_eight_bit_adamw_keeps_32_bits_for_embeddings_in_a_run(config, rows):
    model = make_model(hidden_size=96).bfloat16()  # weights of 4,096 numbers or more: smaller ones always keep 32 bits
    trainer = make_trainer(config, rows, model, optim="adamw_8bit")
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    masters = {id(p): master for p, master in optimizer.masters.items()}
    bits = {n: optimizer.state[masters[id(p)]]["state1"].dtype for n, p in model.named_parameters()}
    assert bits["model.embed_tokens.weight"] == torch.float32
    assert bits["lm_head.weight"] == torch.uint8


def test_a_budget_that_was_learnt_is_kept_in_the_checkpoint(config, rows, tmp_path):
    changes = {"output_dir": str(tmp_path), "max_steps": 2, "max_tokens_per_micro_batch": 64}
    changes |= {"save_strategy": "steps", "save_steps": 1}
    trainer = make_trainer(config, rows, **changes)
    trainer.learner.budget.tokens = 32  # as after running out of memory
    trainer.train()
    resumed = make_trainer(config, rows, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert resumed.learner.budget.tokens == 32
    for a, b in zip(trainer.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    other = make_trainer(config, rows, **{**changes, "max_tokens_per_micro_batch": 48})
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert other.learner.budget.tokens == 48  # asked for anew


@pytest.mark.parametrize("tokens", [16, 10_000])
def test_the_kl_is_without_dropout_whatever_fits_a_micro_batch(rows, config, tokenizer, tokens):
    """The reference has no dropout either: at the first update the two are the same model."""
    model = make_model(attention_dropout=0.5)
    trainer = RLOOTrainer(
        model, lambda completions, **kwargs: [float(len(text)) for text in completions],
        config(max_steps=1, beta=0.1, max_tokens_per_micro_batch=tokens), rows, processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "kl" in entry]
    assert logged["kl"] == pytest.approx(0.0, abs=1e-6)
    assert logged["clip_ratio/region_mean"] == 0.0  # the update's own forward is the old policy: its ratio is 1
