"""Linear layers that are laid together: the same products, the same parameters, the same files."""

from __future__ import annotations

import copy

import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch import nn

from rloom.generation.native.joined import join_layers
from rloom.models.attention import forwards_replaced

CONFIG = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
IDS = torch.arange(12).view(2, 6)


def make():
    torch.manual_seed(0)
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**CONFIG, num_attention_heads=4, num_key_value_heads=2)).eval()


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


@torch.no_grad()
def test_one_product_gives_the_same_logits():
    model = make()
    expected = model(IDS, use_cache=False).logits
    pairs = join_layers(model)
    assert len(pairs) == 3 * 5
    with forwards_replaced(pairs):
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)
    torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)


def test_weights_stay_parameters_of_their_own_and_take_no_more_memory():
    model, before = make(), copy.deepcopy(make().state_dict())
    total = sum(storages(model).values())
    pairs = join_layers(model)
    assert sum(storages(model).values()) == total
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    where = storages(model)
    join_layers(model)  # a second engine finds them laid together
    assert storages(model) == where
    assert len(where) < len(list(model.parameters()))

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    optimizer.step()
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        with forwards_replaced(pairs):  # what was made before the update
            torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)


def test_saved_and_copied_as_before(tmp_path):
    model = make()
    join_layers(model)
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.zero_()
    assert model.model.layers[0].self_attn.q_proj.weight.abs().sum() > 0


@torch.no_grad()
def test_under_an_adapter_the_base_is_joined():
    model = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    expected = model(IDS, use_cache=False).logits
    pairs = join_layers(model)
    assert len(pairs) == 3 * 5
    with forwards_replaced(pairs):
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)


class Odd(nn.Module):
    """Reads its value from elsewhere, and its key not at all at times."""

    def __init__(self, out=32, bias=(True, True, True)):
        super().__init__()
        torch.manual_seed(0)
        for name, has in zip(("q_proj", "k_proj", "v_proj"), bias, strict=True):
            setattr(self, name, nn.Linear(32, out, bias=has))

    def forward(self, x):
        first = self.q_proj(x) + self.v_proj(x * 2)
        return first + self.q_proj(x + 1) + self.k_proj(x + 1) + self.k_proj(x)


@torch.no_grad()
def test_a_module_that_reads_other_inputs_is_answered_right():
    module, x = Odd(), torch.randn(3, 32)
    expected = module(x)
    pairs = join_layers(module)
    assert len(pairs) == 3
    with forwards_replaced(pairs):
        torch.testing.assert_close(module(x), expected)


def test_what_does_not_fit_is_left_alone():
    assert join_layers(Odd(bias=(True, False, True))) == []
    assert join_layers(Odd(out=33)) == []  # the next weight would begin at an odd address
    moved = Odd()
    moved.k_proj.forward = moved.k_proj.forward  # as accelerate does where weights are moved about
    assert join_layers(moved) == []
    flat = Odd()  # as DeepSpeed keeps weights: it writes to its own buffer, and they must stay views of that
    buffer = torch.cat([p.detach().flatten() for p in flat.parameters()])
    for p, part in zip(flat.parameters(), buffer.split([p.numel() for p in flat.parameters()]), strict=True):
        p.data = part.view(p.shape)
    assert join_layers(flat) == []
    mixed = Odd()
    mixed.v_proj.to(torch.bfloat16)
    assert join_layers(mixed) == []


@torch.no_grad()
def test_compiled_layers_are_compiled_once():
    from torch._dynamo.testing import CompileCounter

    model, counter = make(), CompileCounter()
    expected = model(IDS, use_cache=False).logits
    pairs = join_layers(model)
    layers = [
        (layer, torch.compile(layer.forward, backend=counter, dynamic=True, fullgraph=True))
        for layer in model.model.layers
    ]
    with forwards_replaced(pairs), forwards_replaced(layers):
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)
    assert counter.frame_count == 1
