"""Packed = padded = plain: the same log-probabilities and gradients for many architectures, from tiny random models.

Plain is each completion on its own, through the model's ordinary forward and torch's log_softmax: no packing, no
padding, no chunked head.
"""

from __future__ import annotations

import random

import pytest
import torch
import transformers as tf

from rloom.data.batching import Batcher
from rloom.models import head
from rloom.models.attention import CompiledLayers, packed_attention, running
from rloom.models.logprobs import Forward
from rloom.models.model_checks import why_not_packed
from rloom.types import Rollout
from tests.architectures import ARCHITECTURES, GQA, VOCAB, make


@pytest.fixture(scope="module")
def rollout() -> Rollout:
    """Groups of unequal size, ragged prompts and completions, longer than the windows."""
    draw = random.Random(0)
    sizes = [(12, [5, 9, 1]), (3, [7]), (20, [2, 11, 4, 6])]
    prompts, completions, groups = [], [], []
    for group, (prompt, lengths) in enumerate(sizes):
        tokens = [draw.randrange(VOCAB) for _ in range(prompt)]
        for length in lengths:
            prompts.append(tokens)
            completions.append([draw.randrange(VOCAB) for _ in range(length)])
            groups.append(group)
    count = len(groups)
    return Rollout(
        prompt_ids=prompts,
        completion_ids=completions,
        groups=torch.tensor(groups),
        scores=torch.zeros(count, 1),
        score=torch.zeros(count),
        trained=[True] * count,
    )


def weights_of(rollout: Rollout) -> list[torch.Tensor]:
    """A different upstream gradient for each token."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(len(c), generator=generator) for c in rollout.completion_ids]


def plain(model, rollout, temperature=1.3):
    """Log-probabilities of each completion, one forward each, and their gradient."""
    model.zero_grad()
    rows = []
    for prompt, completion in zip(rollout.prompt_ids, rollout.completion_ids, strict=True):
        ids = torch.tensor([prompt + completion])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
        rows.append(logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None]).squeeze(-1))
    loss = sum((row * w).sum() for row, w in zip(rows, weights_of(rollout), strict=True))
    loss.backward()
    return torch.cat(rows).detach(), gradients(model)


def ours(model, rollout, packed: bool, temperature=1.3):
    """The same through a micro-batch."""
    model.zero_grad()
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    batch = Batcher(packed=packed, pad_token_id=0).make(rollout, range(len(rollout)), torch.device("cpu"))
    forward = Forward(model, temperature)

    def run():
        stats = forward(model, batch)
        flat = stats.logprobs.flatten()[batch.flat]
        (flat * torch.cat(weights_of(rollout))).sum().backward()
        return flat.detach(), gradients(model)

    if not packed:
        return run()
    with packed_attention([base]), running(batch.packed):
        return run()


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(left, right):
    torch.testing.assert_close(left[0], right[0], rtol=1e-5, atol=2e-5)
    assert left[1].keys() == right[1].keys()
    scale = max(float(g.abs().max()) for g in right[1].values())
    for name, gradient in right[1].items():
        error = float((left[1][name] - gradient).abs().max()) / scale
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_is_padded_is_plain(name, rollout):
    model = make(name)
    expected = plain(model, rollout)
    assert_same(ours(model, rollout, packed=True), expected)
    assert_same(ours(model, rollout, packed=False), expected)
    assert model.config._attn_implementation == "eager"  # given back
    assert why_not_packed(model) is None


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_gradient_checkpointing(name, reentrant, rollout):
    model = make(name)
    expected = plain(model, rollout)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    assert_same(ours(model, rollout, packed=True), expected)


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["v_proj", "lm_head"], ["embed_tokens", "o_proj"]])
def test_lora(targets, rollout):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=targets)
    model = peft.get_peft_model(make("llama"), config)
    expected = plain(model, rollout)
    assert any("lora" in name for name in expected[1])
    assert_same(ours(model, rollout, packed=True), expected)
    assert_same(ours(model, rollout, packed=False), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_compiled_layers(name, rollout):
    """The operator that stands for attention in compiled layers, and its backward."""
    model = make(name)
    expected = plain(model, rollout)
    compiled = CompiledLayers([model])
    batch = Batcher(packed=True, pad_token_id=0).make(rollout, range(len(rollout)), torch.device("cpu"))
    model.zero_grad()
    with packed_attention([model], compiled), running(batch.packed):
        flat = Forward(model, 1.3)(model, batch).logprobs.flatten()[batch.flat]
        (flat * torch.cat(weights_of(rollout))).sum().backward()
    assert_same((flat.detach(), gradients(model)), expected)
    assert_same(ours(model, rollout, packed=True), expected)  # and not used afterwards


def test_small_chunks_of_the_head(rollout, monkeypatch):
    model = make("gemma2")
    expected = plain(model, rollout)
    monkeypatch.setattr(head, "rows_at_a_time", lambda *_: 3)
    assert_same(ours(model, rollout, packed=True), expected)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "0 of 2 layers"),
        (
            tf.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=64),
            "0 of 2 layers",
        ),
        (
            tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
            "keeps other state",
        ),
    ],
    ids=["bloom", "gptj", "mamba"],
)
def test_what_does_not_fit_is_found(config, reason, caplog):
    import re

    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config)
    assert re.search(reason, why_not_packed(model))
    from rloom.models.model_checks import proves_packing

    assert not proves_packing(model)
    assert "training uses padded micro-batches" in caplog.text


@pytest.mark.parametrize("window", [40, 1500])
def test_a_window_that_does_not_arrive_is_found(window, monkeypatch):
    from rloom.models import attention

    sizes = {"sliding_window": window, "max_position_embeddings": 4096, "initializer_range": 0.5}
    torch.manual_seed(0)
    model = tf.MistralForCausalLM(tf.MistralConfig(**{**GQA, **sizes}))
    assert why_not_packed(model) is None
    original = attention.attend_packed
    monkeypatch.setattr(attention, "attend_packed", lambda *args: original(*args[:5], None, *args[6:]))
    assert "packed and padded forwards" in why_not_packed(model)
