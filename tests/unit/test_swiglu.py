"""SwiGLU, gate, up and activation as one product: the kernel in Triton's interpreter, and which blocks use it."""

from __future__ import annotations

import os

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaMLP

from rloom.generation.native.layers import swiglu
from rloom.generation.native.layers.fused_linear import FusedLinears
from rloom.generation.native.layers.swiglu import SwigluBlocks
from rloom.models.attention import forwards_replaced

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels are compiled: tests/gpu"
)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "programs"),
    [(5, 40, 96, 3), (70, 100, 72, 2), (16, 600, 64, 4), (128, 50, 136, 132)],  # with columns left over, and without
)
def test_the_kernel_is_the_plain_product(rows, columns, depth, programs):
    from rloom.generation.native.kernels.swiglu_product import swiglu_product

    torch.manual_seed(0)
    x, weight = torch.randn(rows, depth), torch.randn(2 * columns, depth) / depth**0.5
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    found = swiglu_product(x, weight, programs=programs)
    torch.testing.assert_close(found.double(), functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


def make(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # float16: the interpreter has no bfloat16
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads, **changes)).to(torch.float16).eval()


def blocks_of(model):
    return SwigluBlocks(FusedLinears(model), model)


@pytest.fixture
def with_kernel(monkeypatch):
    monkeypatch.setattr(swiglu, "has_kernel", lambda weight: weight.dtype == torch.float16)
    monkeypatch.setattr(swiglu, "TRIED_ROWS", (4,))  # the interpreter is slow


@pytest.fixture
def products(monkeypatch):
    """The rows of every product that the kernel was asked for."""
    from rloom.generation.native.kernels import swiglu_product as kernels

    asked = []
    run = kernels.swiglu_product
    monkeypatch.setattr(kernels, "swiglu_product", lambda x, weight: asked.append(len(x)) or run(x, weight))
    return asked


@torch.no_grad()
def test_steps_of_one_token_use_it_and_see_an_update(with_kernel, products):
    model = make()
    tokens = torch.tensor([[3], [5], [8]])
    blocks = blocks_of(model)
    assert products == [4]  # tried once: all blocks are of one size
    for _ in range(2):
        expected = model(tokens).logits
        with forwards_replaced(blocks.forwards):
            found = model(tokens).logits
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert products[1:] == [3, 3, 3, 3]
    with forwards_replaced(blocks.forwards):
        model(torch.tensor([[3, 5, 8]]))
    assert products[1:] == [3, 3, 3, 3]  # a prompt takes the block's own forward


def test_many_rows_have_their_activation_apart(products):
    x, weight = torch.randn(130, 16), torch.randn(2072, 16)
    gate, up = functional.linear(x, weight).chunk(2, -1)
    torch.testing.assert_close(torch.ops.rloom.swiglu_product(x, weight), functional.silu(gate) * up)
    assert products == []


@pytest.mark.parametrize("target", [["gate_proj"], ["up_proj"], ["gate_proj", "up_proj"]])
def test_adapters_keep_their_part(with_kernel, target):
    model = get_peft_model(make(), LoraConfig(target_modules=target, r=2))
    assert blocks_of(model).forwards == []


def test_an_adapter_on_down_stays_in_use_and_nothing_is_drawn(with_kernel):
    model = get_peft_model(make(), LoraConfig(target_modules=["down_proj"], r=2, lora_dropout=0.5)).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    before = torch.get_rng_state()
    blocks = blocks_of(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(module.training for module in model.modules())
    assert len(blocks.forwards) == 2
    model.eval()
    tokens = torch.tensor([[3], [5]])
    with torch.no_grad():
        expected = model(tokens).logits
        with forwards_replaced(blocks.forwards):
            torch.testing.assert_close(model(tokens).logits, expected, rtol=0.01, atol=0.01)


def test_weights_that_were_moved(with_kernel):
    model = make()
    blocks = blocks_of(model)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.data = layer.weight.data.clone()
    assert len(blocks.forwards) == 1


class Clamped(LlamaMLP):
    """As some models do: no difference unless values are large."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=10) * self.up_proj(x))


class Asks(LlamaMLP):
    def forward(self, x, scale):
        return super().forward(x) * scale


def other(model, kind):
    """The second layer's block does something else."""
    block = model.model.layers[1].mlp
    if kind == "activation":
        block.act_fn = torch.nn.GELU()
    elif kind == "activation hidden by zeros":
        block.act_fn = torch.nn.GELU()
        block.down_proj.weight.data.zero_()
    elif kind == "hook":
        block.gate_proj.register_forward_hook(lambda module, inputs, output: None)
    elif kind == "hook before":
        block.act_fn.register_forward_pre_hook(lambda module, inputs: None)
    elif kind == "own forward":
        block.forward = block.forward
    else:
        block.__class__ = {"clamped": Clamped, "asks": Asks}[kind]
    return model


@pytest.mark.parametrize(
    "kind",
    ["activation", "activation hidden by zeros", "hook", "hook before", "own forward", "clamped", "asks"],
)
def test_each_block_is_looked_at(with_kernel, kind):
    model = other(make(), kind)
    assert [block for block, _ in blocks_of(model).forwards] == [model.model.layers[0].mlp]


@pytest.mark.parametrize("model", [lambda: make(mlp_bias=True), lambda: make().float()], ids=["bias", "float32"])
def test_blocks_that_the_kernel_does_not_hold(with_kernel, model):
    assert blocks_of(model()).forwards == []


@pytest.mark.parametrize("fault", ["fails", "is wrong"])
def test_a_kernel_that_does_not_work_is_not_used(with_kernel, monkeypatch, caplog, fault):
    from rloom.generation.native.kernels import swiglu_product as kernels

    def run(x, weight):
        if fault == "fails":
            raise RuntimeError("no such instruction")
        return torch.ones(len(x), len(weight) // 2)

    monkeypatch.setattr(kernels, "swiglu_product", run)
    assert blocks_of(make()).forwards == []
    assert caplog.text.count("are not run as one product") == 1


@torch.no_grad()
def test_other_arguments_go_to_the_blocks_own_forward(with_kernel, products):
    model = make()
    (block, forward), _ = blocks_of(model).forwards
    products.clear()
    with pytest.raises(TypeError, match="scale"):
        forward(torch.ones(1, 1, 64, dtype=torch.float16), scale=2.0)
    x = torch.ones(3, 64, dtype=torch.float16)  # as experts are called
    assert torch.equal(forward(x), block(x))
    assert products == []
