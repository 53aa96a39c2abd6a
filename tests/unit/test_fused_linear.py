"""Linear layers that are fused: the same products, the same parameters, the same files."""

from __future__ import annotations

import copy
import pickle

import safetensors.torch
import torch
import transformers as tf
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.overrides import TorchFunctionMode

from rloom.generation import NativeEngine, Sampling
from rloom.generation.native.layers.fused_linear import FusedLinears
from rloom.models.attention import forwards_replaced
from rloom.types import Prompt

CONFIG = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
IDS = torch.arange(12).view(12, 1)  # one token a row, as in a decode step


def make():
    torch.manual_seed(0)
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**CONFIG, num_attention_heads=4, num_key_value_heads=2)).eval()


class counted(TorchFunctionMode):
    """Counts matrix products."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.nn.functional.linear
        return function(*args, **(kwargs or {}))


def storages(model):
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


@torch.no_grad()
def test_one_product_gives_the_same_logits():
    model = make()
    expected = model(IDS, use_cache=False).logits
    linears = FusedLinears(model)
    assert len(linears.forwards) == 3 * 5
    with forwards_replaced(linears.forwards), counted() as products:
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)
    assert products.count == 3 * 4 + 1  # query with key and value, output, gate with up, down; and the head
    assert not any(group.waiting for group in linears.groups)
    torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)
    prompts = IDS.view(2, 6)  # longer inputs run apart
    expected = model(prompts, use_cache=False).logits
    with forwards_replaced(linears.forwards), counted() as products:
        torch.testing.assert_close(model(prompts, use_cache=False).logits, expected)
    assert products.count == 3 * 7 + 1


def test_weights_stay_parameters_of_their_own_and_take_no_more_memory():
    model, before = make(), copy.deepcopy(make().state_dict())
    total = sum(storages(model).values())
    for _ in range(2):  # a second engine lays them together anew
        linears = FusedLinears(model)
        assert sum(storages(model).values()) == total
        assert len(linears.forwards) == 3 * 5
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert linears.groups[0].weight.data_ptr() == model.model.layers[0].self_attn.q_proj.weight.data_ptr()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS.T, labels=IDS.T, use_cache=False).loss.backward()
    optimizer.step()
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
        with forwards_replaced(linears.forwards):  # what was made before the update
            torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)


def test_saved_and_copied_as_before(tmp_path):
    model = make()
    FusedLinears(model)
    state = model.state_dict()
    model.save_pretrained(tmp_path / "a")
    Accelerator(cpu=True).save_model(model, tmp_path / "b")
    safetensors.torch.save_model(model, str(tmp_path / "c.safetensors"))
    for path in ("a/model.safetensors", "b/model.safetensors", "c.safetensors"):
        saved = safetensors.torch.load_file(tmp_path / path)
        assert saved.keys() == state.keys() - {"lm_head.weight"} or saved.keys() == state.keys()
        assert all(torch.equal(value, state[name]) for name, value in saved.items())
    torch.save(model.model.layers[0].self_attn.k_proj.weight, tmp_path / "k.pt")
    assert (tmp_path / "k.pt").stat().st_size < 12_000  # 32 × 64 numbers, and no more
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.model.layers[0].self_attn.q_proj.weight.zero_()
        assert model.model.layers[0].self_attn.q_proj.weight.abs().sum() > 0


@torch.no_grad()
def test_under_an_adapter_the_base_is_joined():
    model = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    expected = model(IDS, use_cache=False).logits
    pairs = FusedLinears(model).forwards
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
    module, x = Odd(), torch.randn(3, 1, 32)
    expected = module(x)
    linears = FusedLinears(module)
    assert len(linears.forwards) == 3
    with forwards_replaced(linears.forwards), counted() as products:
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(module(x), expected)
    assert products.count == 2 * 5  # nothing is computed for nobody
    assert linears.groups[0].waiting == []


def test_what_does_not_fit_is_left_alone():
    linears = lambda module: FusedLinears(module).groups  # noqa: E731
    assert linears(Odd(bias=(True, False, True))) == []
    assert linears(Odd(out=33)) == []  # the next weight would begin at an odd address
    moved = Odd()
    moved.k_proj.forward = moved.k_proj.forward  # as accelerate does where weights are moved about
    assert linears(moved) == []
    flat = Odd()  # as DeepSpeed keeps weights: it writes to its own buffer, and they must stay views of that
    buffer = torch.cat([p.detach().flatten() for p in flat.parameters()])
    for p, part in zip(flat.parameters(), buffer.split([p.numel() for p in flat.parameters()]), strict=True):
        p.data = part.view(p.shape)
    assert linears(flat) == []
    seen = Odd().share_memory()  # by other processes
    assert linears(seen) == []
    mixed = Odd()
    mixed.v_proj.to(torch.bfloat16)
    assert linears(mixed) == []
    tied = Odd()
    tied.v_proj.weight = tied.k_proj.weight
    assert linears(tied) == []
    same = Odd()
    same.v_proj = same.k_proj
    assert linears(same) == []


@torch.no_grad()
def test_weights_that_are_replaced_are_used():
    """Between rollouts, and between two groups of one."""
    model = get_peft_model(make(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    sampling = Sampling(max_completion_length=6, eos_token_ids=(), pad_token_id=0)
    engine = NativeEngine(lambda: model, sampling, max_sequences=2)
    prompts = [Prompt(content="", token_ids=[3 + i, 5, 7]) for i in range(4)]
    for rollout in range(2):
        for count, group in enumerate(engine.generate(prompts, 2, seed=rollout)):
            for completion in group.completions:
                ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
                logprobs = model(ids, use_cache=False).logits[0, 2:-1].log_softmax(-1)
                plain = logprobs.gather(-1, ids[0, 3:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(completion.logprobs), plain, atol=1e-4, rtol=0)
            if count == 1:  # the same function, in other memory
                model.unmerge_adapter() if rollout else model.merge_adapter(safe_merge=True)
        assert engine.runner is not None
    total = sum(storages(model).values())
    list(engine.generate(prompts, 2, seed=5))
    assert len(engine.runner.layers.linears.forwards) == 3 * 5  # fused again
    assert sum(storages(model).values()) <= total


def test_in_inference_mode_weights_stay_trainable():
    model = make()
    with torch.inference_mode():
        FusedLinears(model)
    model(IDS.T, labels=IDS.T, use_cache=False).loss.backward()


@torch.no_grad()
def test_compiled_layers_are_compiled_once():
    from torch._dynamo.testing import CompileCounter

    model, counter = make(), CompileCounter()
    expected = model(IDS, use_cache=False).logits
    pairs = FusedLinears(model).forwards
    layers = [
        (layer, torch.compile(layer.forward, backend=counter, dynamic=True, fullgraph=True))
        for layer in model.model.layers
    ]
    with forwards_replaced(pairs), forwards_replaced(layers):
        torch.testing.assert_close(model(IDS, use_cache=False).logits, expected)
    assert counter.frame_count == 1
