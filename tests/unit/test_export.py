"""`save_pretrained_merged` and `save_pretrained_gguf` write the model with its adapter, or say what is missing."""

from __future__ import annotations

import copy
import os
import pickle
import stat

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rloom import FastLanguageModel, RLOOTrainer, add_lora, load_model
from rloom.errors import ConfigError, RloomError
from rloom.models.adapters import lora
from rloom.models.export import merged_16bit
from tests.conftest import make_model, make_tokenizer

IDS = torch.tensor([[1, 5, 6, 7, 8, 9, 20, 21]])


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model(hidden_size=64, intermediate_size=128, initializer_range=0.05).save_pretrained("base")
    make_tokenizer().save_pretrained("base")
    return "base"


def adapted(base, **options):
    model, tokenizer = FastLanguageModel.from_pretrained(base, **options)
    model = FastLanguageModel.get_peft_model(model, r=4, random_state=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval(), tokenizer


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits.float()


@pytest.mark.parametrize("options", [{}, {"load_in_4bit": True}, {"load_in_8bit": True}], ids=["whole", "4bit", "8bit"])
def test_the_merged_model_is_the_adapted_one(base, options):
    model, tokenizer = adapted(base, **options)
    expected, plain = logits(model), logits(copy.deepcopy(model).unload())
    model.save_pretrained_merged("merged", tokenizer, save_method="merged_16bit")
    torch.testing.assert_close(logits(model), expected)  # the model in memory stays as it was
    found = AutoModelForCausalLM.from_pretrained("merged")
    assert found.dtype == torch.bfloat16
    assert getattr(found.config, "quantization_config", None) is None
    AutoTokenizer.from_pretrained("merged")
    assert (logits(found.float()) - expected).abs().mean() < 0.05 * (plain - expected).abs().mean()


def test_an_adapter_alone(base):
    model, tokenizer = adapted(base)
    model.save_pretrained_merged("adapter", tokenizer, save_method="lora")
    torch.testing.assert_close(logits(PeftModel.from_pretrained(load_model(base)[0], "adapter")), logits(model))


def test_a_model_without_an_adapter(base):
    model, tokenizer = load_model(base)
    model.save_pretrained_merged("whole", tokenizer)
    assert (logits(AutoModelForCausalLM.from_pretrained("whole").float()) - logits(model)).abs().max() < 0.05
    with pytest.raises(ConfigError, match="the model has none"):
        model.save_pretrained_merged("x", tokenizer, save_method="lora")
    with pytest.raises(ConfigError, match="save_method"):
        model.save_pretrained_merged("x", tokenizer, save_method="merged_4bit")


def test_the_methods_go_with_their_model(base, config, rows):
    """Copied, pickled, under an adapter of a trainer: never the base's, which would save it without."""
    model, tokenizer = load_model(base)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), add_lora(copy.deepcopy(model))):
        assert other.save_pretrained_merged.args[0] is other
    trainer = RLOOTrainer(
        model, lambda completions: [0.0] * len(completions), config(), rows, processing_class=tokenizer,
        peft_config=lora(r=2),
    )  # fmt: skip
    assert trainer.model.save_pretrained_merged.args[0] is trainer.model
    with pytest.raises(ConfigError, match="call it on the model that has the adapter"):
        merged_16bit(model)


def test_dora_on_a_quantized_base_is_refused(base):
    model, _ = load_model(base, load_in_4bit=True)
    with pytest.raises(ConfigError, match="DoRA"):
        merged_16bit(add_lora(model, r=2, use_dora=True))


CONVERTER = """
import pathlib, sys
source, _, target, _, kind = sys.argv[1:]
assert (pathlib.Path(source) / "model.safetensors").exists() and (pathlib.Path(source) / "tokenizer.json").exists()
pathlib.Path(target).write_text(kind)
"""
QUANTIZER = '#!/bin/sh\necho "$3 of $(cat "$1")" > "$2"\n'


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Stand-ins for llama.cpp's two programs, which write down what they were asked for."""
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    (folder / "llama-quantize").write_text(QUANTIZER)
    (folder / "llama-quantize").chmod(stat.S_IRWXU)
    monkeypatch.setenv("LLAMA_CPP", str(folder))
    return folder


def test_gguf_by_the_programs_of_llama_cpp(base, programs, monkeypatch):
    model, tokenizer = adapted(base)
    files = model.save_pretrained_gguf("out", tokenizer, quantization_method=["q8_0", "q4_k_m", "bf16"])
    assert [(file.name, file.read_text().strip()) for file in files] == [
        ("out.Q8_0.gguf", "q8_0"), ("out.Q4_K_M.gguf", "Q4_K_M of bf16"), ("out.BF16.gguf", "bf16"),
    ]  # fmt: skip
    assert sorted(os.listdir("out")) == sorted(file.name for file in files)
    # On the PATH they are found too.
    monkeypatch.delenv("LLAMA_CPP")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    [file] = model.save_pretrained_gguf("again", tokenizer, quantization_method="fast_quantized")
    assert file.name == "again.Q8_0.gguf"


def test_gguf_is_refused_before_anything_is_merged(base, programs, monkeypatch):
    model, tokenizer = load_model(base)
    with pytest.raises(ConfigError, match=r"quantization_method.*q4_k_m"):
        model.save_pretrained_gguf("out", tokenizer, quantization_method="q4_k_n")
    with pytest.raises(ConfigError, match="tokenizer"):
        model.save_pretrained_gguf("out")
    (programs / "llama-quantize").unlink()
    with pytest.raises(ConfigError, match="llama-quantize is not installed"):
        model.save_pretrained_gguf("out", tokenizer, quantization_method="q4_k_m")
    monkeypatch.delenv("LLAMA_CPP")
    with pytest.raises(ConfigError, match=r"convert_hf_to_gguf\.py is not installed"):
        model.save_pretrained_gguf("out", tokenizer)
    assert not os.path.exists("out")


def test_a_converter_that_fails_is_quoted_harmlessly(base, programs):
    (programs / "convert_hf_to_gguf.py").write_text("import sys; sys.exit('no \\x1b[31m such model')")
    model, tokenizer = load_model(base)
    with pytest.raises(RloomError, match=r"convert_hf_to_gguf\.py failed: no \\x1b\[31m such model"):
        model.save_pretrained_gguf("out", tokenizer)
