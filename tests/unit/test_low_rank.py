"""LoRA adapters beside their layers in decode steps: one product and one kernel for layers that read the same input."""

from __future__ import annotations

import os

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from rloom.generation.native.kernels.add_low_rank import add_low_rank
from rloom.generation.native.layers import low_rank
from rloom.generation.native.layers.fused_linear import FusedLinears
from rloom.generation.native.layers.low_rank import LowRankLayers
from rloom.models.attention import forwards_replaced
from tests.unit.test_fused_linear import IDS, counted
from tests.unit.test_merged import PROMPTS, disturb, draw, same

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="the kernel runs on a GPU"
)
SIZES = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
ALL = {"r": 4, "target_modules": "all-linear"}


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    """As if it were a GPU, and float32 a type that is not merged."""
    monkeypatch.setattr(low_rank, "has_kernel", lambda device, dtype: True)
    monkeypatch.setattr("rloom.generation.native.layers.merged._worth_merging", lambda layers, asked: bool(asked))


def adapted(config=tf.Qwen2Config, **options):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config(**SIZES, num_attention_heads=2, num_key_value_heads=1))
    model = get_peft_model(model, LoraConfig(**{**ALL, **options})).eval()
    disturb(model)
    return model


@pytest.mark.parametrize("rows", [1, 17, 40])
@pytest.mark.parametrize("rank", [16, 48, 144])
def test_the_kernel(rows, rank):
    torch.manual_seed(0)
    product, up = torch.randn(rows, 1, 192 + 2 * rank), torch.randn(rank, 192)
    base, low = product.split([192, 2 * rank], -1)
    found = add_low_rank(base, low, up, torch.tensor([0, 0, 1], dtype=torch.int32))
    base, first, second = product.split([192, rank, rank], -1)
    expected = base + torch.cat([first @ up[:, :128], second @ up[:, 128:]], -1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "products"),
    [
        ({}, 2 * 4 + 1),  # as without adapters
        ({"target_modules": ["q_proj", "v_proj", "down_proj"]}, 2 * 4 + 1),
        ({"rank_pattern": {"k_proj": 24}, "use_rslora": True, "lora_alpha": 3}, 2 * 4 + 1),
        ({"target_modules": ["q_proj"], "use_dora": True}, None),  # left as it is
        ({"target_modules": ["o_proj"], "lora_bias": True}, None),
    ],
)
@torch.no_grad()
def test_one_product_has_what_adapters_add(options, products):
    model = adapted(**options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(IDS, use_cache=False).logits
    linears = FusedLinears(model)
    assert bool(linears.adapters) == (products is not None)
    with forwards_replaced(linears.forwards), counted() as seen:
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert products is None or seen.count == products
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    prompts = IDS.view(2, 6)  # longer inputs run as they are
    expected = model(prompts, use_cache=False).logits
    with forwards_replaced(linears.forwards):
        torch.testing.assert_close(model(prompts, use_cache=False).logits, expected)


@torch.no_grad()
def test_several_adapters_and_switches():
    model = adapted()
    model.add_adapter("other", LoraConfig(r=20, target_modules=["q_proj", "o_proj"]))
    disturb(model)
    for active in (["default"], ["default", "other"], ["other"]):
        model.base_model.set_adapter(active)
        expected = model(IDS, use_cache=False).logits
        linears = FusedLinears(model)
        with forwards_replaced(linears.forwards):
            torch.testing.assert_close(model(IDS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"target_modules": ["q_proj", "v_proj"]},
        pytest.param({"lora_dropout": 0.5}, marks=pytest.mark.slow),
    ],
)
def test_draws_what_the_adapter_draws(options, monkeypatch):
    model = adapted(**options)
    engine, drawing = draw(model)
    found = drawing()
    assert engine.runner.layers.linears.adapters
    disturb(model)  # an update, which the next rollout sees
    after = drawing()
    assert [c.token_ids for c in after[0]] != [c.token_ids for c in found[0]]
    monkeypatch.setattr(low_rank, "has_kernel", lambda device, dtype: False)
    plain, drawing = draw(model)
    same(after, drawing())
    assert not plain.runner.layers.linears.adapters


@torch.no_grad()
def test_layers_that_cannot_be_fused_are_run_by_themselves():
    model = adapted()
    for module in model.modules():  # as DeepSpeed has them
        if type(module) is torch.nn.Linear and module.out_features >= 64:
            module.weight.data = torch.cat([module.weight.data, module.weight.data])[: module.out_features]
    linears, by_themselves = FusedLinears(model), LowRankLayers(model)
    assert not linears.groups
    assert len(by_themselves.forwards) == 2 * 7
    for ids in (IDS, IDS.view(2, 6)):
        expected = model(ids, use_cache=False).logits
        with forwards_replaced(by_themselves.forwards):
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_four_bit_base(tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    torch.manual_seed(0)
    options = {**SIZES, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    tf.LlamaForCausalLM(tf.LlamaConfig(**options)).save_pretrained(tmp_path)
    quantized = tf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantized, device_map="cpu")
    model = get_peft_model(model, LoraConfig(**ALL)).eval()
    disturb(model)
    engine, drawing = draw(model)
    found = drawing()
    assert len(engine.runner.layers.low_rank.forwards) == 2 * 7
    monkeypatch.setattr(low_rank, "has_kernel", lambda device, dtype: False)
    plain, drawing = draw(model)
    same(found, drawing(), close=1e-3)
    assert not plain.runner.layers.low_rank.forwards


def test_engines_of_one_model_leave_weights_where_they_are():
    model = adapted()
    engine, drawing = draw(model)
    with_adapter, weights = drawing(), [p.data_ptr() for p in model.parameters()]
    with model.disable_adapter():
        other, drawing_without = draw(model)
        without = drawing_without()
    assert [c.token_ids for c in without[0]] != [c.token_ids for c in with_adapter[0]]
    assert not other.runner.layers.linears.adapters
    runner = engine.runner
    same(drawing(), with_adapter)
    assert engine.runner is runner
    assert [p.data_ptr() for p in model.parameters()] == weights


def test_a_new_runner_has_them_behind_the_weights_again():
    model = adapted()
    model.add_adapter("other", LoraConfig(r=20, target_modules=["q_proj", "o_proj"]))
    engine, drawing = draw(model)
    for adapter in ("default", "other", "default"):
        model.set_adapter(adapter)
        drawing()
        assert engine.runner.layers.linears.adapters
        assert not engine.runner.layers.low_rank.adapters


def test_a_group_that_has_become_smaller_overwrites_no_sibling():
    model = adapted(target_modules=["q_proj", "o_proj"])
    _, drawing = draw(model)
    drawing()
    before = {name: value.clone() for name, value in model.base_model.model.state_dict().items()}
    model.add_adapter("two", LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["v_proj"]))
    drawing()
    after = model.base_model.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items() if name in after)


@pytest.mark.slow
def test_rollouts_of_two_adapters_that_are_interleaved_do_not_mix():
    model = adapted()
    model.add_adapter("other", LoraConfig(r=20, target_modules="all-linear"))
    disturb(model)
    engine, drawing = draw(model, max_sequences=4)
    expected = drawing()
    found = []
    for group in engine.generate(PROMPTS, 4, seed=3):
        found.append(group.completions)
        model.set_adapter("other")
        draw(model)[1]()
        model.set_adapter("default")
    same(found, expected)


@torch.no_grad()
def test_layers_that_share_their_weights_have_adapters_of_their_own():
    model = adapted()
    first, second = (layer.self_attn.o_proj for layer in model.base_model.model.model.layers)
    second.base_layer.weight = first.base_layer.weight
    expected = model(IDS, use_cache=False).logits
    linears = FusedLinears(model)
    by_themselves = LowRankLayers(model, linears.owners)
    assert [layer for layer, _ in by_themselves.forwards] == [second]
    with forwards_replaced([*linears.forwards, *by_themselves.forwards]):
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_was_behind_the_weights_need_not_be_numbers():
    model = adapted(r=16)
    layer = model.base_model.model.model.layers[0].self_attn.o_proj
    linears = FusedLinears(model)
    layer.lora_A["default"].weight.fill_(torch.nan)
    linears.refresh()
    linears = None  # and with it the right to what lies there
    model.add_adapter("fresh", LoraConfig(r=4, target_modules="all-linear"))
    model.set_adapter("fresh")
    disturb(model)
    linears = FusedLinears(model)
    assert linears.adapters
    with forwards_replaced(linears.forwards):
        assert model(IDS, use_cache=False).logits.isfinite().all()


@pytest.mark.slow
def test_a_runner_that_was_made_in_inference_mode_goes_on_outside():
    model = adapted()
    with torch.inference_mode():
        _, drawing = draw(model)
        found = drawing()
    same(drawing(), found)


def test_a_kernel_that_fails_leaves_adapters_to_peft(monkeypatch, caplog):
    def broken(*args):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(low_rank, "has_kernel", lambda device, dtype: low_rank._kernel_works(device, dtype))
    monkeypatch.setattr("rloom.generation.native.kernels.add_low_rank.add_low_rank", broken)
    low_rank._kernel_works.cache_clear()
    engine, drawing = draw(adapted())
    drawing()
    assert not engine.runner.layers.linears.adapters
    assert "LoRA adapters are run as they are: the kernel fails (no such instruction)" in caplog.text
    low_rank._kernel_works.cache_clear()
    monkeypatch.undo()
    assert low_rank._kernel_works(torch.device("cpu"), torch.float32)
    monkeypatch.setattr("rloom.generation.native.kernels.add_low_rank.add_low_rank", lambda base, *_: base)
    low_rank._kernel_works.cache_clear()
    assert not low_rank._kernel_works(torch.device("cpu"), torch.float32)
    low_rank._kernel_works.cache_clear()


def test_weights_take_only_the_adapters_more():
    model = adapted()
    linears = FusedLinears(model)
    assert len(linears.adapters) == 2 * 4
    for group in linears.groups:
        assert len(group.weight) == sum(layer.out_features for layer in group.layers) + 16 * len(group.layers)
    base = model.base_model.model.model.layers[0].mlp.down_proj.base_layer.weight
    assert base.untyped_storage().nbytes() == base.nbytes  # and are saved as what they are
