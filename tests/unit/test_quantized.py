"""4-bit weights through bitsandbytes, on the CPU: gradients are those of the weights that they stand for."""

from __future__ import annotations

import copy

import pytest
import torch

from rloom.errors import ConfigError
from rloom.models import load
from rloom.models.adapters import keep_differentiable, lora, quantization_config, save_merged
from rloom.models.load import wrap_peft
from tests.standins import save_llama

bnb = pytest.importorskip("bitsandbytes")


@pytest.fixture
def quantized(tmp_path):
    from transformers import AutoModelForCausalLM

    save_llama(tmp_path, hidden_size=64, intermediate_size=128)
    return AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=quantization_config(load_in_4bit=True), dtype=torch.float32
    )


def dequantized(model):
    """The same model with plain layers of the values that the 4-bit ones stand for."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain = torch.nn.Linear(*weight.shape[::-1], bias=False)
            plain.weight.data = weight.float()
            model.set_submodule(name, plain)
    return model


def gradients(model, ids):
    model.train()
    model(ids).logits.log_softmax(-1).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def test_gradients_after_generation_are_those_of_the_dequantized_model(quantized):
    ids = torch.randint(4, 40, (2, 6), generator=torch.Generator().manual_seed(0))
    config = lora(r=2, target_modules=["q_proj", "down_proj"])
    plain = dequantized(quantized)
    torch.manual_seed(1)
    ours = wrap_peft(quantized, config, gradient_checkpointing=False).float()
    torch.manual_seed(1)
    theirs = wrap_peft(plain, config, gradient_checkpointing=False)
    for model in (ours, theirs):
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # beyond the zeros that they begin with, and past bfloat16's rounding
                generator = torch.Generator().manual_seed(len(name))
                parameter.data = torch.randn(parameter.shape, generator=generator).float() * 0.1
    ours.eval()
    with torch.no_grad():
        ours(ids)  # where bitsandbytes would repack
    found, wanted = gradients(ours, ids), gradients(theirs, ids)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=2e-2, atol=2e-4)


def test_repacked_weights_are_put_back(quantized):
    layer = quantized.model.layers[0].self_attn.q_proj
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no bfloat16 instructions, for which bitsandbytes repacks")
    before = layer.weight.data.clone()
    quantized.eval()
    with torch.no_grad():
        quantized(torch.tensor([[5, 6, 7]]))
    assert layer.weight.quant_state.packing_format_for_cpu
    keep_differentiable(quantized)
    assert torch.equal(layer.weight.data.flatten(), before.flatten())
    assert not layer.weight.quant_state.packing_format_for_cpu


def test_contradictions_are_refused(model):
    with pytest.raises(ConfigError, match="exclude each other"):
        quantization_config(load_in_4bit=True, load_in_8bit=True)
    with pytest.raises(ConfigError, match="did you mean 'nf4'"):
        quantization_config(load_in_4bit=True, quant_type="nf5")
    with pytest.raises(ConfigError, match="no adapter to merge"):
        save_merged(model, None, "nowhere")


def test_it_is_loaded_where_it_is_trained(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(load, "load_model", lambda name, **kwargs: asked.append(kwargs.get("device_map")))
    options = {"trust_remote_code": False, "device": torch.device("cpu")}
    load.load_policy("m", None, **options)
    load.load_policy("m", None, quantization_config=quantization_config(load_in_4bit=True), **options)
    own = {"device_map": {"": 1}}
    load.load_policy("m", own, quantization_config=quantization_config(load_in_4bit=True), **options)
    assert asked == [None, {"": torch.device("cpu")}, {"": 1}]
