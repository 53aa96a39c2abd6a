"""float32 models that compute in bfloat16 and lose no bit: what a run does to them, saves and resumes."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rloom import RLOOTrainer
from rloom.errors import ConfigError
from rloom.models.master_weights import MasterWeights
from rloom.models.optimizers import SplitAdamW
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


@pytest.mark.parametrize("optim", ["adamw_torch", "sgd", "adafactor"])
def test_weights_that_were_loaded_stay_when_training_goes_on(saved, rows, config, tmp_path, optim):
    """The best checkpoint comes back at the end; a second `train()` that changes nothing leaves it as it is."""
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "optim": optim}
    trainer = RLOOTrainer(
        saved, length, config(bf16=True, split_weights=True, learning_rate=1e-3, weight_decay=0.0, **options), rows,
        rows[:2], processing_class=make_tokenizer(),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "best"))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        for group in trainer.optimizer.param_groups:
            group["lr"] = 0.0
        trainer.optimizer.step()
    trainer.save_model(str(tmp_path / "after"))
    best, after = weights_in(tmp_path / "best"), weights_in(tmp_path / "after")
    assert all(torch.equal(best[name], after[name]) for name in best)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_a_run_goes_on_with_and_without_split_weights(saved, rows, config, tmp_path, optim):
    """An optimizer that ran on float32 weights knows of no dropped bits, or of old ones: those of the file hold."""
    options = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "a"), "optim": optim}
    options |= {"lr_scheduler_type": "constant", "weight_decay": 0.0}
    trainer_for(saved, rows, config, max_steps=1, learning_rate=1e-4, **options).train()
    for step, split in ((2, False), (3, True)):
        folder = tmp_path / "a" / f"checkpoint-{step - 1}"
        changes = {"max_steps": step, "split_weights": split, "learning_rate": 1e-4}
        trainer_for(saved, rows, config, **options, **changes).train(resume_from_checkpoint=str(folder))
    before, after = (weights_in(tmp_path / "a" / f"checkpoint-{step}") for step in (2, 3))
    if optim != "adafactor":  # which steps by a share of the weights
        moved = max(float((after[name] - before[name]).abs().max()) for name in before)
        assert 0 < moved < 3e-4  # one step; old bits would be off by up to a hundredth


def test_the_bits_of_a_file_hold_over_an_optimizers(saved, rows, config, tmp_path):
    trainer = trainer_for(saved, rows, config)
    trainer.create_optimizer()
    state = trainer.optimizer.state_dict()
    for index in range(len(list(trainer.model.parameters()))):
        state["state"][index] = {"step": torch.ones(()), "rest": torch.full((1,), 7.0)}  # of another optimizer, float32
    trainer.optimizer.load_state_dict(state)
    trainer.save_model(str(tmp_path / "copy"))
    before, after = weights_in(saved), weights_in(tmp_path / "copy")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_trainer_of_the_same_model_has_its_bits(model, rows, config, tmp_path):
    first = trainer_for(model, rows, config)
    first.train()
    first.save_model(str(tmp_path / "first"))
    second = trainer_for(model, rows, config, split_weights=None)
    assert second.precision.split is None  # on a CPU float32 weights stay
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    kept = weights_in(tmp_path / "first")
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items() if name in kept)
    third, fourth = trainer_for(model, rows, config), trainer_for(model, rows, config)
    assert third.precision.split is fourth.precision.split
    fourth.save_model(str(tmp_path / "fourth"))
    assert all(torch.equal(kept[name], value) for name, value in weights_in(tmp_path / "fourth").items())


def test_what_is_unfrozen_later_is_saved_with_its_bits(rows, config, tmp_path):
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.copy_(model.model.norm.weight.bfloat16().float())  # drops nothing yet
    model.model.norm.requires_grad_(False)
    trainer = trainer_for(model, rows, config, learning_rate=1e-5)
    model.model.norm.requires_grad_(True)
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    norm = weights_in(tmp_path / "after")["model.norm.weight"]
    assert not torch.equal(norm, norm.bfloat16().float())


def test_biases_that_are_trained_beside_an_adapter_keep_their_bits(rows, config, tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], bias="all")
    model = peft.get_peft_model(make_model(attention_bias=True), lora)
    trainer = trainer_for(model, rows, config, learning_rate=1e-4)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    biases = {n: v for n, v in load_file(tmp_path / "adapter/adapter_model.safetensors").items() if n.endswith("bias")}
    assert biases
    assert any(not torch.equal(value, value.bfloat16().float()) for value in biases.values())


def test_a_merged_model_has_the_bits_of_its_base(rows, config, tmp_path):
    peft = pytest.importorskip("peft")
    from rloom.models.adapters import save_merged

    base = make_model()
    kept = {name: value.clone() for name, value in base.state_dict().items()}
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    trainer_for(model, rows, config)
    save_merged(model, None, tmp_path / "merged")  # an adapter that adds nothing yet
    merged = weights_in(tmp_path / "merged")
    assert all(torch.equal(merged[name], kept[name]) for name in merged)


def test_a_reference_that_follows_begins_with_all_bits(saved, rows, config):
    trainer = trainer_for(saved, rows, config, sync_ref_model=True, beta=0.1)
    before = weights_in(saved)
    found = {name: trainer.reference.weights.value(name) for name in trainer.reference.weights.weights}
    assert all(torch.equal(found[name], value) for name, value in before.items())


def test_reward_models_run_under_autocast_as_before(saved, rows, config):
    """The policy needs none; a classifier with a float32 head on bfloat16 layers does."""
    from transformers import LlamaForSequenceClassification

    shape = make_model().config
    shape.num_labels = 1
    judge = LlamaForSequenceClassification(shape).bfloat16()
    judge.config.pad_token_id, judge.score = 0, judge.score.float()
    trainer = RLOOTrainer(
        saved, judge, config(bf16=True, split_weights=True, max_steps=1), rows, processing_class=make_tokenizer(),
        reward_processing_classes=make_tokenizer(),
    )  # fmt: skip
    assert trainer.accelerator.autocast_handler.enabled is False
    trainer.train()


def test_a_model_with_a_float32_table_of_positions_is_left_alone(rows, config):
    """Its hidden states are float32, which bfloat16 norms refuse on a CPU, under autocast too."""
    from transformers import XGLMConfig, XGLMForCausalLM

    sizes = {"vocab_size": 46, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    model = XGLMForCausalLM(XGLMConfig(**sizes, max_position_embeddings=64, pad_token_id=0, dropout=0.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match="does not run with bfloat16 weights"):
        trainer_for(model, rows, config, max_steps=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_parameters_that_an_architecture_keeps_in_float32_stay():
    from rloom.models.split_weights import kept_in_float32

    model = make_model()
    names = {id(p): name for name, p in model.named_parameters()}
    model._keep_in_fp32_modules_strict = {"norm", "q_proj.weight"}
    found = sorted(names[id(p)] for p in kept_in_float32(model))
    assert found == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.norm.weight",
    ]


@pytest.fixture
def in_bfloat16(tmp_path):
    """The folder of a checkpoint in bfloat16, as most are."""
    make_model().bfloat16().save_pretrained(tmp_path / "half")
    make_tokenizer().save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dithered_run_begins_with_the_same_model_and_resumes_to_the_same_bits(
    in_bfloat16, rows, config, tmp_path, dtype
):
    split = {} if dtype == "float32" else {"split_weights": None}
    options = {"model_init_kwargs": {"dtype": dtype}, "dither_weights": True, "save_strategy": "steps", **split}
    options |= {"save_steps": 1, "learning_rate": 1e-3}

    def run(name, **changes):
        trainer = trainer_for(in_bfloat16, rows, config, output_dir=str(tmp_path / name), **options)
        trainer.train(**changes)
        trainer.save_model()
        return trainer

    whole = run("whole")
    resumed = trainer_for(in_bfloat16, rows, config, output_dir=str(tmp_path / "whole"), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(whole.optimizer.state[p]["rest"], resumed.optimizer.state[q]["rest"])


def test_without_a_learning_rate_a_dithered_model_rounds_to_what_it_was(in_bfloat16, rows, config, tmp_path):
    changes = {"model_init_kwargs": {"dtype": "float32"}, "dither_weights": True, "learning_rate": 0.0, "max_steps": 1}
    trainer = trainer_for(in_bfloat16, rows, config, **changes)
    trainer.train()
    trainer.save_model(str(tmp_path / "copy"))
    before, after = weights_in(in_bfloat16), weights_in(tmp_path / "copy")
    assert all(torch.equal(before[name], after[name].bfloat16()) for name in before)
    assert not any(torch.equal(before[name].float(), after[name]) for name in before if before[name].dim() > 1)


def test_dither_is_refused_where_it_does_nothing(saved, rows, config):
    for changes in ({"optim": "sgd"}, {"bf16": False, "split_weights": None}):
        trainer = trainer_for(saved, rows, config, dither_weights=True, **changes)
        with pytest.raises(ConfigError, match="dither_weights=True: AdamW updates no bfloat16 weights"):
            trainer.train()
