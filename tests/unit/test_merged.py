"""LoRA adapters merged into copies of their layers' weights, for generation."""

from __future__ import annotations

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoraConfig, VeraConfig, get_peft_model

from rloom import RLOOConfig
from rloom.errors import ConfigError, EngineError
from rloom.generation import NativeEngine, Sampling
from rloom.generation.native.layers import merged
from rloom.generation.native.layers.lora import is_lora_on_linear
from rloom.generation.native.layers.merged import MergedLayers
from rloom.types import Prompt
from tests.architectures import make

PROMPTS = [Prompt(content="", token_ids=[5 + i % 9 for i in range(n)]) for n in (3, 20, 7)]


def adapted(name="qwen2", dtype=torch.float32, size=0.3, **changes):
    torch.manual_seed(0)
    options = {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"], **changes}
    model = get_peft_model(make(name), LoraConfig(**options)).to(dtype).eval()
    disturb(model, size)
    return model


def merges(model, asked):
    return bool(MergedLayers(model, asked).copies)


@torch.no_grad()
def disturb(model, size=0.3):
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.add_(torch.randn_like(parameter) * size)


def draw(model, **options):
    sampling = Sampling(max_completion_length=20, eos_token_ids=(2,), pad_token_id=0)
    engine = NativeEngine(lambda: model, sampling, **options)
    return engine, lambda: [g.completions for g in engine.generate(PROMPTS, 4, seed=3)]


def same(found, expected, close=1e-4):
    for one, other in zip(found, expected, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        logprobs = [torch.tensor([x for c in group for x in c.logprobs]) for group in (one, other)]
        torch.testing.assert_close(*logprobs, rtol=0, atol=close)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "lm_head"]},
        {"use_rslora": True, "lora_alpha": 32},
        {"use_dora": True},  # left as it is
        {"lora_dropout": 0.5},
        {"bias": "all"},
    ],
)
def test_draws_what_the_unmerged_adapter_draws(changes):
    model = adapted(**changes)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine, merging = draw(model)
    same(merging(), draw(model, merged=False)[1]())
    assert bool(engine.runner.layers.merged.copies) != bool(changes.get("use_dora"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with model.disable_adapter():
        bare = draw(model, merged=False)[1]()
    assert [c.token_ids for c in merging()[0]] != [c.token_ids for c in bare[0]]  # or nothing would be shown


def test_copies_follow_the_adapter():
    model = adapted()
    engine, merging = draw(model)
    merging()
    runner = engine.runner
    disturb(model)
    same(merging(), draw(model, merged=False)[1]())
    assert engine.runner is runner  # its graphs, on a GPU, too
    with model.disable_adapter():
        same(merging(), draw(model, merged=False)[1]())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]))
    model.set_adapter("second")
    disturb(model)
    same(merging(), draw(model, merged=False)[1]())
    model.base_model.set_adapter(["default", "second"])
    same(merging(), draw(model, merged=False)[1]())


def test_siblings_of_copies_are_joined_with_plain_ones():
    model = adapted()
    runner = draw(model)[0]._current_runner()
    layer = model.base_model.model.model.layers[0]
    owners = [group.owners for group in runner.layers.linears.groups]
    assert [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj] in owners
    assert [layer.mlp.gate_proj, layer.mlp.up_proj] in owners


def test_where_it_rounds_it_is_asked_for(monkeypatch):
    model = adapted(dtype=torch.bfloat16, size=0.02)
    assert not merges(model, None)
    assert merges(model, True)
    found, expected = draw(model, merged=True)[1](), draw(model)[1]()
    first = [torch.tensor([c.logprobs[0] for group in groups for c in group]) for groups in (found, expected)]
    assert (first[0] - first[1]).abs().mean() < 0.05  # of different draws, mostly the same
    exact = adapted()
    assert merges(exact, None)
    with torch.autocast("cpu", torch.bfloat16):
        assert not merges(exact, None)
    monkeypatch.setattr(merged, "free_memory", lambda device: 1000)
    assert not merges(exact, None)
    assert merges(exact, True)


def test_what_rounds_too_much_away_is_left_unmerged(monkeypatch, caplog):
    from rloom.generation.native import engine as engines

    why = engines.why_not_native
    monkeypatch.setattr(engines, "why_not_native", lambda m, r: "it differs" if r.layers.merged.copies else why(m, r))
    engine, merging = draw(adapted(), merged=True)
    merging()
    assert not engine.runner.layers.merged.copies
    assert "adapters are not merged into copies of their layers: with those, it differs" in caplog.text


def test_nothing_to_merge_is_told(caplog):
    model = make("qwen2").eval()
    draw(model, merged=True)[1]()
    assert "there is nothing to merge" in caplog.text
    assert MergedLayers(model).copies == {}


def test_hooks_of_others_are_heard():
    model = adapted()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert is_lora_on_linear(layer)
    heard = []
    layer.base_layer.register_forward_hook(lambda *args: heard.append(1))
    assert not is_lora_on_linear(layer)
    draw(model)[1]()
    assert heard


@pytest.mark.parametrize(
    "config",
    [
        AdaLoraConfig(init_r=4, target_r=2, total_step=9, target_modules=["q_proj", "v_proj"]),
        LoHaConfig(r=4, target_modules=["q_proj", "v_proj"]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        VeraConfig(r=4, target_modules=["q_proj", "o_proj"]),
        LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]),
        LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_kinds_of_adapters_are_left_as_they_are(config):
    torch.manual_seed(0)
    model = get_peft_model(make("qwen2"), config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    same(draw(model)[1](), draw(model, merged=False)[1]())


def test_hooks_that_come_later_are_heard():
    model = adapted()
    engine, merging = draw(model)
    merging()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    heard = []
    layer.lora_B["default"].register_forward_hook(lambda *args: heard.append(1))
    merging()
    assert heard
    assert layer not in engine.runner.layers.merged.copies


def test_adapters_in_half_precision_are_left_beside():
    model = adapted(size=0.1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    assert not merges(model, None)


@pytest.mark.parametrize("merging", [False, True])
def test_an_adapter_that_adds_nothing_yet_is_tried_too(merging):
    """Of one that changes what a layer does nothing would be seen while it adds nothing."""
    targets = ["q_proj.weight", "k_proj.weight", "v_proj.weight"]
    config = LoraConfig(r=4, target_modules=[], target_parameters=targets)
    model = get_peft_model(make("qwen2"), config).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine, _ = draw(model, merged=merging)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    disturb(model)
    for group in engine.generate(PROMPTS, 2, seed=1):
        for completion in group.completions:
            ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
            with torch.no_grad():
                logprobs = model(input_ids=ids).logits[0].log_softmax(-1)[len(group.prompt.token_ids) - 1 : -1]
            truth = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), truth, rtol=0, atol=1e-4)


def test_an_adapter_that_looks_at_the_prompt_is_refused():
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")
    model = get_peft_model(make("qwen2"), config).eval()
    with pytest.raises(EngineError):
        draw(model)


def test_other_engines_refuse_the_option(tmp_path):
    with pytest.raises(ConfigError, match="`merge_generation` has no effect with engine='forked'"):
        RLOOConfig(output_dir=str(tmp_path), engine="forked", merge_generation=True)
