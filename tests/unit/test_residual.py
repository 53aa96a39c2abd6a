"""Layers whose products add themselves to the residual: which layers those are, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rloom.generation.native.layers.residual import ResidualLayers
from rloom.models.fused import forwards_replaced
from tests.architectures import ARCHITECTURES, make

ADDED = {"llama", "llama, tied head", "qwen2", "qwen2, window", "qwen3", "mistral, window", "gemma", "phi3", "granite",
         "stablelm", "smollm3", "nemotron"}  # fmt: skip
"""Architectures whose layers add two products of one weight each, and nothing else."""


@torch.no_grad()
def logits(model, length):
    torch.manual_seed(1)
    return model(input_ids=torch.randint(64, (5, length)), use_cache=False).logits


def additions(monkeypatch):
    """The sums in place that were asked for."""
    found, own = [], torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda self, *parts: found.append(len(self)) or own(self, *parts))
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_steps_are_those_of_the_model(name, monkeypatch):
    model = make(name)
    step, prompt = logits(model, 1), logits(model, 3)
    residual = ResidualLayers(model)
    assert len(residual.layers) == (2 if name in ADDED else 0)
    found = additions(monkeypatch)
    with forwards_replaced(residual.forwards):
        torch.testing.assert_close(logits(model, 1), step)
        assert found == [5] * 2 * len(residual.layers)
        assert torch.equal(logits(model, 3), prompt)
    assert len(found) == 2 * len(residual.layers)
    assert torch.equal(logits(model, 1), step)


def test_a_factor_is_noticed():
    assert not ResidualLayers(make("granite", residual_multiplier=0.5)).layers


def test_a_factor_is_not_hidden_by_zeros():
    model = make("granite", residual_multiplier=0.5)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    assert not ResidualLayers(model).layers


def test_products_with_bias_hooks_or_adapters_are_left_alone():
    assert not ResidualLayers(make("llama", mlp_bias=True)).layers
    hooked = make("llama")
    hooked.model.layers[0].mlp.down_proj.register_forward_hook(lambda *call: None)
    assert len(ResidualLayers(hooked).layers) == 1
    adapted = get_peft_model(make("llama"), LoraConfig(target_modules=["o_proj"], layers_to_transform=[1]))
    assert len(ResidualLayers(adapted).layers) == 1


def test_a_step_that_fails_leaves_nothing_behind():
    model = make("llama")
    step, prompt = logits(model, 1), logits(model, 3)
    residual = ResidualLayers(model)
    attention = model.model.layers[1].self_attn
    with forwards_replaced(residual.forwards):
        own, attention.forward = attention.forward, lambda **named: 1 / 0
        with pytest.raises(ZeroDivisionError):
            logits(model, 1)
        attention.forward = own
        assert torch.equal(logits(model, 3), prompt)
        torch.testing.assert_close(logits(model, 1), step)


def test_autocast_runs_the_layer_itself(monkeypatch):
    model = make("llama")
    found = additions(monkeypatch)
    with forwards_replaced(ResidualLayers(model).forwards), torch.autocast("cpu", torch.bfloat16):
        logits(model, 1)
    assert not found
