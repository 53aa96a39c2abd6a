"""A document written for Unsloth and TRL runs with the imports changed; load_model, add_lora, limits, merging."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from rloom import (
    FastLanguageModel,
    RLOOConfig,
    RLOOTrainer,
    add_lora,
    is_bf16_supported,
    load_model,
)
from rloom.errors import ConfigError, DataError, UnknownOptionError
from rloom.models.adapters import save_merged
from tests.standins import save_llama

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which the model of the document is a small local one."""
    monkeypatch.chdir(tmp_path)
    save_llama(
        tmp_path / "unsloth" / "Qwen3-4B-unsloth-bnb-4bit",
        hidden_size=64, intermediate_size=128, max_position_embeddings=1024,
    )  # fmt: skip
    return tmp_path


def medium_length(completions, prompts=None):
    """Half a point off for short answers, one for those of ten words and more, half a point for a full stop."""
    words = [len(completion.split()) for completion in completions]
    stops = [completion.strip().endswith(".") for completion in completions]
    return [
        (1.0 if 10 <= n <= 50 else -0.5 if n < 10 else 0.0) + 0.5 * stop for n, stop in zip(words, stops, strict=True)
    ]


class Scorer:
    """A reward model as the document calls it."""

    def get_rewards(self, prompts, completions):
        return [len(completion) - len(prompt) for prompt, completion in zip(prompts, completions, strict=True)]


scorer = Scorer()


def trained_reward(completions, prompts):
    return scorer.get_rewards(prompts, completions)


@pytest.mark.parametrize("reward", [medium_length, trained_reward, scorer], ids=["function", "asks a model", "object"])
def test_the_document_with_its_imports_changed(here, reward):
    model, tokenizer = FastLanguageModel.from_pretrained(
        "unsloth/Qwen3-4B-unsloth-bnb-4bit",
        max_seq_length=512,
        load_in_4bit=True,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=16,
        lora_dropout=0,
        target_modules=LAYERS,
        use_gradient_checkpointing="unsloth",
    )
    dataset = Dataset.from_dict(
        {
            "prompt": [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": "Explain recursion."}], tokenize=False, add_generation_prompt=True
                )
            ]
        }
    )
    rloo_config = RLOOConfig(
        output_dir="./rloo_output",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_steps=2,  # the document's 100, shortened
        learning_rate=1e-5,
        fp16=not is_bf16_supported(),
        bf16=is_bf16_supported(),
        optim="adamw_8bit",
        num_generations=4,
        max_completion_length=128,
        kl_coef=0.05,
        logging_steps=1,
    )
    trainer = RLOOTrainer(
        model=model, args=rloo_config, train_dataset=dataset, processing_class=tokenizer, reward_model=reward
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_B.default" in n}
    trainer.train()
    assert trainer.args.beta == 0.05
    assert trainer.args.bf16 == is_bf16_supported()
    after = dict(model.named_parameters())
    if reward is not medium_length:  # random weights write answers that it finds equally short
        assert any(not torch.equal(before[name], after[name]) for name in before)
    assert all(layer in {n.split(".")[-4] for n in before} for layer in LAYERS)
    trainer.save_model()
    assert (here / "rloo_output" / "adapter_config.json").exists()
    # As Unsloth's scripts end.
    model.save_pretrained_merged("merged", tokenizer, save_method="merged_16bit")
    assert AutoModelForCausalLM.from_pretrained("merged").dtype == torch.bfloat16


def test_loading_in_the_trainer_s_own_names(here):
    model, tokenizer = load_model("unsloth/Qwen3-4B-unsloth-bnb-4bit", max_seq_length=20)
    assert model.dtype == torch.float32
    model = add_lora(model, r=4, target_modules=["q_proj"], use_gradient_checkpointing=False)
    config = RLOOConfig("out", max_steps=1, per_device_train_batch_size=2, max_completion_length=8, report_to="none")

    def reward(completions):
        return [float(len(c)) for c in completions]

    RLOOTrainer(model, reward, config, [{"prompt": "x" * 12}], processing_class=tokenizer).train()
    with pytest.raises(DataError, match=r"max_seq_length\): set it to 7 or less"):
        RLOOTrainer(model, reward, config, [{"prompt": "x" * 13}], processing_class=tokenizer)
    other = RLOOConfig("out", max_steps=1, per_device_train_batch_size=2, max_completion_length=8, max_seq_length=16)
    with pytest.raises(DataError, match="max_seq_length"):
        RLOOTrainer(model, reward, other, [{"prompt": "x" * 9}], processing_class=tokenizer)
    with pytest.raises(ConfigError, match="room for a prompt"):
        RLOOConfig("out", max_completion_length=8, max_seq_length=8)


def test_merged_model_is_what_the_adapter_made_of_the_base(here):
    from transformers import AutoModelForCausalLM

    model, tokenizer = load_model("unsloth/Qwen3-4B-unsloth-bnb-4bit")
    model = add_lora(model, r=4, use_gradient_checkpointing=False)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    ids = torch.tensor([[5, 6, 7, 8]])
    save_merged(model, tokenizer, here / "merged")
    merged = AutoModelForCausalLM.from_pretrained(here / "merged")
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_is_not_supported_is_said(here):
    with pytest.raises(UnknownOptionError, match="`fast_inference` is not supported"):
        FastLanguageModel.from_pretrained("unsloth/Qwen3-4B-unsloth-bnb-4bit", fast_inference=True)
    with pytest.raises(ConfigError, match="did you mean 'unsloth'"):
        add_lora(load_model("unsloth/Qwen3-4B-unsloth-bnb-4bit")[0], use_gradient_checkpointing="unslot")
    with pytest.raises(ConfigError, match="at least 2"):
        load_model("unsloth/Qwen3-4B-unsloth-bnb-4bit", max_seq_length=0)
