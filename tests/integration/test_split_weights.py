"""float32 models that compute in bfloat16 and lose no bit: what a run does to them, saves and resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rloom import RLOOTrainer
from rloom.errors import ConfigError
from rloom.models.precision import MasterWeights, SplitAdamW
from tests.conftest import make_model, make_tokenizer


def length(completions, **kwargs):
    return [float(len(text)) for text in completions]


@pytest.fixture
def saved(tmp_path):
    """The folder of a float32 model, whose weights use all of their bits."""
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def trainer_for(model, rows, config, **changes):
    options = {"bf16": True, "split_weights": True, "max_steps": 3, "learning_rate": 1e-6, **changes}
    return RLOOTrainer(model, length, config(**options), rows, processing_class=make_tokenizer())


def weights_in(folder):
    return load_file(f"{folder}/model.safetensors")


def test_weights_are_saved_as_they_came(saved, rows, config, tmp_path):
    trainer = trainer_for(saved, rows, config)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    trainer.save_model(str(tmp_path / "copy"))
    before, after = weights_in(saved), weights_in(tmp_path / "copy")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.float32 for name in before)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "copy", dtype="auto").dtype == torch.float32
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}


def test_an_object_stays_the_object(model, rows, config):
    parameters = list(model.parameters())
    trainer = trainer_for(model, rows, config)
    trainer.train()
    assert trainer.model is model
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_updates_are_those_of_float32_weights(saved, rows, config, tmp_path, optim):
    """Every update is far below bfloat16's spacing; what is saved has moved by just what the gradients say."""
    trainer = trainer_for(saved, rows, config, optim=optim, max_steps=1, max_grad_norm=0.0, weight_decay=0.0)
    trainer.create_optimizer()
    assert isinstance(trainer.optimizer, SplitAdamW if optim == "adamw_torch" else MasterWeights)
    seen = {}
    step = trainer.optimizer.step
    names = {p: name for name, p in trainer.model.named_parameters()}

    def look(*args, **kwargs):
        seen.update({name: p.grad.clone() for p, name in names.items()})
        return step(*args, **kwargs)

    trainer.optimizer.step = look
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    before, after = weights_in(saved), weights_in(tmp_path / "after")
    exact = {name: torch.nn.Parameter(value.clone()) for name, value in before.items()}
    kind = torch.optim.AdamW if optim == "adamw_torch" else torch.optim.SGD
    reference = kind(exact.values(), lr=1e-6, weight_decay=0.0)
    for name, parameter in exact.items():
        parameter.grad = seen[name]
    reference.step()
    assert all(grad.dtype == torch.float32 for grad in seen.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    for name, parameter in exact.items():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd"])
def test_a_resumed_run_has_the_same_bits(saved, rows, config, tmp_path, optim):
    options = {"optim": optim, "save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 1e-4}
    whole = trainer_for(saved, rows, config, output_dir=str(tmp_path / "a"), **options)
    whole.train()
    whole.save_model(str(tmp_path / "whole"))
    part = trainer_for(saved, rows, config, output_dir=str(tmp_path / "a"), **options)
    part.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    part.save_model(str(tmp_path / "part"))
    one, other = weights_in(tmp_path / "whole"), weights_in(tmp_path / "part")
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], one[name].bfloat16().float()) for name in one)


def test_the_best_checkpoint_comes_back_with_all_bits(saved, rows, config, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward"}
    trainer = RLOOTrainer(
        saved, length, config(bf16=True, split_weights=True, learning_rate=1e-4, **options), rows, rows[:2],
        processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "best"))
    best, kept = weights_in(trainer.state.best_model_checkpoint), weights_in(tmp_path / "best")
    assert all(torch.equal(best[name], kept[name]) for name in best)


def test_tied_and_frozen_weights(rows, config, tmp_path):
    model = make_model(tie_word_embeddings=True)
    model.model.layers[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trainer_for(model, rows, config)
    trainer.train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    trainer.save_model(str(tmp_path / "after"))
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after", dtype="auto").state_dict()
    frozen = [name for name in before if name.startswith("model.layers.0.")]
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_the_base_under_an_adapter_is_split_and_the_adapter_is_not(rows, config, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    base = copy.deepcopy(model.get_base_model().state_dict())
    trainer = trainer_for(model, rows, config, learning_rate=1e-3)
    kinds = {("lora" in name, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}
    trainer.train()
    assert trainer.precision.split is not None
    with trainer.precision.split.as_float32():
        for name, value in model.get_base_model().state_dict().items():
            if "lora" not in name:
                assert torch.equal(value, base[name])
    trainer.save_model(str(tmp_path / "adapter"))
    assert all(v.dtype == torch.float32 for v in load_file(tmp_path / "adapter/adapter_model.safetensors").values())


def test_the_first_kl_is_zero(saved, rows, config):
    trainer = trainer_for(saved, rows, config, max_steps=1, beta=0.1)
    trainer.train()
    assert [entry["kl"] for entry in trainer.state.log_history if "kl" in entry] == [0.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split_weights": None}, "on a CPU"),
        ({"split_weights": False}, "split_weights=False"),
        ({"split_weights": None, "model_init_kwargs": {"dtype": "float32"}}, "dtype float32 was asked for"),
        ({"split_weights": None, "bf16": False}, "weights and arithmetic in float32"),
        ({"split_weights": None, "model_init_kwargs": {"dtype": "bfloat16"}}, "weights in bfloat16"),
    ],
)
def test_what_was_decided_is_said(saved, rows, config, changes, words):
    trainer = trainer_for(saved, rows, config, **changes)
    assert trainer.precision.split is None
    assert words in trainer.precision.words


def test_an_optimizer_that_was_passed_in_keeps_float32_weights(model, rows, config):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = config(bf16=True, max_steps=1)
    trainer = RLOOTrainer(model, length, options, rows, processing_class=make_tokenizer(), optimizers=(optimizer, None))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "the optimizer that was passed in" in trainer.precision.words


def test_what_cannot_be_split_is_refused(model, rows, config):
    with pytest.raises(ConfigError, match="bf16 is off"):
        trainer_for(model, rows, config, bf16=False)
    with pytest.raises(ConfigError, match="no float32 weights"):
        trainer_for(make_model().bfloat16(), rows, config)
