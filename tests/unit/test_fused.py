"""Kernels between a layer's products, in Triton's interpreter, against the library's own. On a GPU: tests/gpu."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
import transformers as tf
from torch import nn

from rloom.models import fused
from tests.conftest import make_model

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels are compiled: tests/gpu"
)
KINDS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "gemma2": {"head_dim": 16},
}


def make(kind, **changes):
    torch.manual_seed(0)
    options = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **KINDS[kind]}
    options |= {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2, **changes}
    if kind != "gpt_neox":
        options["num_key_value_heads"] = 2
    model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(kind, **options), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def run(model):
    model.zero_grad()
    ids = torch.arange(14).view(2, 7)
    logits = model(input_ids=ids, use_cache=False).logits
    (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_has_the_values_and_gradients_that_it_has_by_itself(kind, checkpointed):
    model = make(kind)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    logits, gradients = run(model)
    layers = fused.FusedLayers([model])
    with layers.used():
        ours, our_gradients = run(model)
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, rtol=1e-3, atol=1e-4, msg=name)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.equal(run(model)[0], logits)  # by itself again


def test_what_is_replaced():
    names = lambda kind, **changes: sorted(  # noqa: E731
        {type(module).__name__ for module, _ in fused.FusedLayers([make(kind, **changes)]).forwards}
    )
    assert names("llama") == ["LlamaMLP", "LlamaRMSNorm"]
    assert names("qwen3") == ["Qwen3MLP", "Qwen3RMSNorm"]
    assert names("llama", hidden_act="gelu") == ["LlamaRMSNorm"]
    assert names("gemma2") == []  # its norms multiply by 1 + weight, its blocks have another activation
    assert names("gpt_neox") == []


def test_modules_that_somebody_listens_to_are_left_alone():
    model = make("llama")
    model.model.norm.register_forward_hook(lambda *args: None)
    replaced = [module for module, _ in fused.FusedLayers([model]).forwards]
    assert model.model.norm not in replaced
    assert model.model.layers[0].input_layernorm in replaced


def test_rotation_is_replaced_for_those_who_ask_alone():
    model = make("llama")
    layers = fused.FusedLayers([model])
    assert layers.rotates
    rotate = getattr(sys.modules[type(model).__module__], fused.ROTATION)
    q, angles = torch.randn(1, 4, 5, 8), torch.randn(1, 5, 8)
    with layers.used():
        rotate(q, q, angles, angles)
    assert rotate.rloom_kinds == {True: True}
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused._Rotate, "apply", lambda *inputs: calls.append(1))
        rotate(q, q, angles, angles)
        assert not calls
        with layers.used(), torch.no_grad():
            other = threading.Thread(target=lambda: torch.no_grad()(rotate)(q, q, angles, angles))
            other.start()
            other.join()
            assert not calls  # a reward's model in another thread
            rotate(q, q, angles, angles)
            assert calls == [1]
            again = threading.Thread(target=lambda: rotate(q, q, angles, angles))  # as the backward of a checkpoint
            again.start()
            again.join()
            assert calls == [1, 1]
        rotate(q, q, angles, angles)
        assert calls == [1, 1]


def test_who_rotates_later_is_told_by_what():
    model = make("llama")
    fused.FusedLayers([model])
    rotate = getattr(sys.modules[type(model).__module__], fused.ROTATION)
    q, cos, sin = torch.randn(1, 4, 1, 8), torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    told = []
    with fused.rotating(lambda *angles: told.append(angles)):
        found = rotate(q, q, cos, sin)
        assert found[0] is q
        assert told[0][0] is cos
    assert rotate(q, q, cos, sin)[0] is not q
    assert len(told) == 1


def test_compiled_code_sees_the_models_own_rotation():
    model = make("llama")
    layers = fused.FusedLayers([model])
    rotate = getattr(sys.modules[type(model).__module__], fused.ROTATION)
    q, angles = torch.randn(1, 4, 5, 8), torch.randn(1, 5, 8)
    compiled = torch.compile(rotate, fullgraph=True, backend="eager")
    with layers.used():
        assert torch.equal(compiled(q, q, angles, angles)[0], _own(rotate)(q, q, angles, angles)[0])


def _own(rotate):
    cells = dict(zip(rotate.__code__.co_freevars, rotate.__closure__, strict=True))
    return cells["own"].cell_contents


def test_parts_of_another_kind_do_not_pass():
    class OtherRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-6

        def forward(self, x):
            return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps)

    assert fused.FusedLayers([nn.Sequential(OtherRMSNorm())]).forwards == []


def test_the_engine_decodes_with_them(monkeypatch):
    """On a CPU, with the kernels in the interpreter: what is drawn is what is drawn without."""
    from rloom.generation import NativeEngine, Sampling
    from rloom.types import Prompt

    model = make_model(num_hidden_layers=1).eval()
    sampling = Sampling(max_completion_length=4, eos_token_ids=(2,), pad_token_id=0)
    prompts = [Prompt(content="", token_ids=[5, 6, 7, 8]), Prompt(content="", token_ids=[9, 10])]

    def drawn():
        engine = NativeEngine(lambda: model, sampling)
        groups = list(engine.generate(prompts, 2, seed=3))
        return engine, {tuple(g.prompt.token_ids): [c.token_ids for c in g.completions] for g in groups}

    _, plain = drawn()
    monkeypatch.setattr("rloom.generation.native.runner.runs_kernels", lambda device: True)
    monkeypatch.setattr("rloom.generation.native.runner.fits_kernels", lambda geometry: False)
    engine, ours = drawn()
    assert engine.runner.layers.fused is not None
    assert engine.runner.layers.fused.rotates
    assert ours == plain


@pytest.mark.parametrize("kind", ["gptj", "codegen"])
def test_rotations_of_another_kind_are_left_alone(kind):
    """Some take one tensor at a time: what is put in their place must not be called for them."""
    names = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8, "n_positions": 64, "vocab_size": 40}
    model = tf.AutoModelForCausalLM.from_config(tf.AutoConfig.for_model(kind, **names), dtype=torch.float32).eval()
    ids = torch.arange(6).unsqueeze(0)
    before = model(input_ids=ids).logits
    with fused.FusedLayers([model]).used():
        torch.testing.assert_close(model(input_ids=ids).logits, before)


def test_blocks_that_drop_are_left_alone():
    config = tf.SeedOssConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        vocab_size=40, head_dim=8, residual_dropout=0.5, attention_dropout=0.0,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert "SeedOssMLP" not in {type(module).__name__ for module, _ in fused.FusedLayers([model]).forwards}


def test_norms_of_other_layouts_and_by_name():
    model = make("llama")
    layers = fused.FusedLayers([model])
    norm, x = model.model.norm, torch.randn(32, 5).T
    with layers.used():
        torch.testing.assert_close(norm(hidden_states=x), type(norm).forward(norm, x), rtol=1e-4, atol=1e-5)


def test_heads_of_which_a_part_is_rotated_before_they_are_joined(monkeypatch):
    """The attention kernel rotates whole heads: such models rotate by themselves, and the engine says nothing."""
    from rloom.generation import NativeEngine, Sampling
    from rloom.types import Prompt

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = tf.PhiConfig(**sizes, num_attention_heads=4, partial_rotary_factor=0.5, max_position_embeddings=64)
    model = tf.PhiForCausalLM(config).eval()
    monkeypatch.setattr("rloom.generation.native.runner.runs_kernels", lambda device: True)
    monkeypatch.setattr("rloom.generation.native.runner.fits_kernels", lambda geometry: False)
    sampling = Sampling(max_completion_length=3, eos_token_ids=(2,), pad_token_id=0)
    engine = NativeEngine(lambda: model, sampling)
    assert (engine.fused, engine.late_rotation) == (True, False)
    list(engine.generate([Prompt(content="", token_ids=[5, 6, 7])], 2, seed=0))
