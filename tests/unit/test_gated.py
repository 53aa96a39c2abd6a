"""Gate, up and activation as one product: the kernel in Triton's interpreter, and which blocks use it."""

from __future__ import annotations

import os

import pytest
import torch
import transformers as tf
from torch.nn import functional

from rloom.generation.native import gated
from rloom.generation.native.gated import GatedBlocks
from rloom.generation.native.joined import JoinedLayers
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
    from rloom.generation.native.gated_kernels import gated_product

    torch.manual_seed(0)
    x, weight = torch.randn(rows, depth), torch.randn(2 * columns, depth) / depth**0.5
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    found = gated_product(x, weight, programs=programs)
    torch.testing.assert_close(found.double(), functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


def make(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # float16: the interpreter has no bfloat16
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads, **changes)).to(torch.float16).eval()


@pytest.fixture
def with_kernel(monkeypatch):
    monkeypatch.setattr(gated, "has_kernel", lambda weight: True)


@pytest.fixture
def products(monkeypatch):
    """The rows of every product that the kernel was asked for."""
    from rloom.generation.native import gated_kernels

    asked = []
    run = gated_kernels.gated_product
    monkeypatch.setattr(gated_kernels, "gated_product", lambda x, weight: asked.append(len(x)) or run(x, weight))
    return asked


@torch.no_grad()
def test_steps_of_one_token_use_it_and_see_an_update(with_kernel, products):
    model = make()
    tokens = torch.tensor([[3], [5], [8]])
    blocks = GatedBlocks(JoinedLayers(model), model)
    for _ in range(2):
        expected = model(tokens).logits
        with forwards_replaced(blocks.forwards()):
            found = model(tokens).logits
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert products == [3, 3, 3, 3]
    with forwards_replaced(blocks.forwards()):
        model(torch.tensor([[3, 5, 8]]))
    assert products == [3, 3, 3, 3]  # a prompt takes the block's own forward


def test_many_rows_take_the_plain_product(products):
    x, weight = torch.randn(130, 16), torch.randn(24, 16)
    gate, up = functional.linear(x, weight).chunk(2, -1)
    assert torch.equal(torch.ops.rloom.gated_product(x, weight), functional.silu(gate) * up)
    assert products == []


def test_blocks_that_are_made_otherwise_are_left_alone(with_kernel):
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(make(), LoraConfig(target_modules=["gate_proj"], r=2))
    moved = make()
    blocks = GatedBlocks(JoinedLayers(moved), moved)
    assert len(blocks.forwards()) == 2
    moved.model.layers[0].mlp.up_proj.weight.data = moved.model.layers[0].mlp.up_proj.weight.data.clone()
    assert len(blocks.forwards()) == 1
    for model in (make(hidden_act="gelu"), make(mlp_bias=True), make().float(), adapted):
        assert GatedBlocks(JoinedLayers(model), model).forwards() == []
