"""The native engine against `model.generate` and plain forwards, for many architectures, on tiny random models."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as tf

from rloom.errors import EngineError
from rloom.generation.base import Sampling
from rloom.generation.native import NativeEngine
from rloom.generation.native.decode_loop import DecodeLoop
from rloom.generation.native.runner import Runner
from rloom.types import Prompt
from tests.architectures import ARCHITECTURES, GQA, VOCAB, make

LENGTHS = [12, 3, 20, 1]


def make_prompts(lengths=LENGTHS, vocab=VOCAB, start=3):
    draw = random.Random(0)
    return [Prompt(content="", token_ids=[draw.randrange(start, vocab) for _ in range(n)]) for n in lengths]


def sampling(**changes):
    options = {"max_completion_length": 14, "eos_token_ids": (2,), "pad_token_id": 0, **changes}
    return Sampling(**options)


def run(model, prompts, k, seed=0, max_sequences=512, **changes):
    engine = NativeEngine(lambda: model, sampling(**changes), max_sequences=max_sequences)
    found = {id(group.prompt): group.completions for group in engine.generate(prompts, k, seed=seed)}
    return [found[id(prompt)] for prompt in prompts]


def greedy(model, prompt, limit=14):
    """`model.generate`, one prompt at a time, up to and including the end token."""
    options = {"max_new_tokens": limit, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    with torch.no_grad():
        ids = torch.tensor([prompt.token_ids])
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    tokens = output[0, len(prompt.token_ids) :].tolist()
    return tokens[: tokens.index(2) + 1] if 2 in tokens else tokens


def plain_logprobs(model, prompt, tokens, temperature):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt.token_ids + tokens])).logits[0].float() / temperature
    start = len(prompt.token_ids) - 1
    return logits.log_softmax(-1)[start : start + len(tokens)].gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_is_generate_and_logprobs_are_a_plain_forwards(name):
    model = make(name)
    prompts = make_prompts()
    for prompt, (completion, _) in zip(prompts, run(model, prompts, 2, temperature=0.0), strict=True):
        assert completion.token_ids == greedy(model, prompt)
    for prompt, group in zip(prompts, run(model, prompts, 3, temperature=1.3), strict=True):
        assert len({tuple(c.token_ids) for c in group}) == 3  # the completions of a group are independent
        for completion in group:
            expected = plain_logprobs(model, prompt, completion.token_ids, 1.3)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [False, True])
def test_lora_unmerged(head):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "down_proj", *(["lm_head"] if head else [])]
    model = get_peft_model(make("llama"), LoraConfig(r=4, target_modules=targets)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    for prompt, group in zip(make_prompts(), run(model, make_prompts(), 2), strict=True):
        for completion in group:
            expected = plain_logprobs(model, prompt, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_the_same_noise_whatever_the_batch_is_made_of():
    model, prompts = make("llama"), make_prompts()
    tokens = lambda groups: [[c.token_ids for c in group] for group in groups]  # noqa: E731
    together = tokens(run(model, prompts, 4, seed=7))
    assert tokens(run(model, prompts, 4, seed=7, max_sequences=3)) == together  # in threes, refilled as they finish
    assert [group[:2] for group in together] == tokens(run(model, prompts, 2, seed=7))
    assert tokens(run(model, prompts, 4, seed=8)) != together


def test_equal_prompts_are_prefilled_once_and_drawn_apart(monkeypatch):
    from rloom.generation.native import runner

    rows = []
    original = runner.prompt_row
    monkeypatch.setattr(runner, "prompt_row", lambda prompts, device: rows.append(prompts) or original(prompts, device))
    model = make("llama")
    a, b = make_prompts([9])[0], make_prompts([9])[0]
    (one,), (other,) = run(model, [a, b], 1)
    assert rows[-1] == [a.token_ids]
    assert one.token_ids != other.token_ids


def test_memory_that_runs_out_sends_sequences_back_and_loses_none(monkeypatch):
    model, prompts = make("llama"), make_prompts()
    expected = run(model, prompts, 4, seed=3, eos_token_ids=())
    longest = max(len(prompt.token_ids) for prompt in prompts)
    monkeypatch.setattr(Runner, "page_size", 4)
    monkeypatch.setattr(DecodeLoop, "_plan_pages", lambda *args: -(-longest // 4) + 12)
    engine = NativeEngine(lambda: model, sampling(eos_token_ids=()))
    found = {id(g.prompt): g.completions for g in engine.generate(prompts, 4, seed=3)}
    assert [[c.token_ids for c in found[id(p)]] for p in prompts] == [[c.token_ids for c in g] for g in expected]
    assert engine.requeued > 0
    for mine, other in zip([c for p in prompts for c in found[id(p)]], [c for g in expected for c in g], strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)  # nothing is left of the first attempt


@pytest.mark.parametrize("free", [300_000, 600_000, 2_000_000])
def test_rows_wait_where_padded_memory_is_short(monkeypatch, free):
    """Without pages rows are padded to the longest, prompts are kept twice, and rows are moved."""
    from rloom.generation.native import decode_loop as module
    from rloom.generation.native.cache.dense import DenseCache

    model, prompts = make("llama"), make_prompts([400] + [4] * 11)
    options = {"max_completion_length": 60, "eos_token_ids": (2, 5, 6)}
    expected = run(model, prompts, 4, seed=3, **options)
    held, move = [], DenseCache._move

    def measured(cache, *args):
        before = cache.own
        move(cache, *args)
        prompts = [*cache.stacked, *(pair for kept in cache.prompts.values() for pair in kept)]
        held.append(sum(x.numel() * x.element_size() for pair in [*before, *cache.own, *prompts] for x in pair))

    monkeypatch.setattr(DenseCache, "_move", measured)
    monkeypatch.setattr(module, "free_memory", lambda device: free)
    found = run(model, prompts, 4, seed=3, **options)
    assert [[c.token_ids for c in g] for g in found] == [[c.token_ids for c in g] for g in expected]
    assert max(held) < free


def test_no_room_for_a_single_completion_is_an_error(monkeypatch):
    from rloom.generation.native import decode_loop as module

    monkeypatch.setattr(module, "free_memory", lambda device: 1)
    engine = NativeEngine(lambda: make("llama"), sampling(), prove=False)
    model = make("llama")
    engine.get_model = lambda: model
    with pytest.raises(EngineError, match="lower max_completion_length"):
        list(engine.generate(make_prompts(), 2, seed=0))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (tf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4), "go through the attention interface"),
        (tf.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, rotary_dim=8), "go through the attention"),
        (
            tf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
            "keeps other state",
        ),
    ],
)
def test_what_does_not_fit_is_found(config, reason):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(EngineError, match=reason):
        NativeEngine(lambda: model, sampling())
    assert model.training  # put back as it was


@pytest.mark.parametrize("window", [None, 1500])
def test_a_wrong_window_is_found_by_trying(monkeypatch, window):
    """A model whose window does not arrive would decode fluent nonsense: the proof must see it."""
    from rloom.generation.native.cache import attention

    config = {"sliding_window": window, "max_position_embeddings": 4096, "initializer_range": 0.5}
    model = make("mistral, window") if window is None else tf.MistralForCausalLM(tf.MistralConfig(**{**GQA, **config}))
    original = attention._run
    monkeypatch.setattr(
        attention, "_run", lambda q, k, v, s, layer, scale, window, *more: original(q, k, v, s, layer, scale, 0, *more)
    )
    with pytest.raises(EngineError, match="differs from its plain forward"):
        NativeEngine(lambda: model, sampling())


def test_logits_that_are_no_numbers_are_found_in_any_row(monkeypatch):
    """Python's `max` forgets a NaN that is not the first."""
    from rloom.generation.native import proof

    decoded = proof._decoded

    def with_one(*args):
        ours, calls = decoded(*args)
        ours[-1][-1, 0] = float("nan")
        return ours, calls

    model = make("llama")
    monkeypatch.setattr(proof, "_decoded", with_one)
    with pytest.raises(EngineError, match="differs from its plain forward by nan"):
        NativeEngine(lambda: model, sampling())


def test_broken_weights_are_called_that():
    model = make("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(EngineError, match="its weights are broken"):
        NativeEngine(lambda: model, sampling())


def test_a_token_that_the_model_rules_out_is_no_difference():
    model = make("llama")
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x).index_fill(-1, torch.tensor([5]), -torch.inf)
    NativeEngine(lambda: model, sampling())


def test_the_model_is_left_as_it_was():
    model = tf.LlamaForCausalLM(tf.LlamaConfig(**GQA, attention_dropout=0.5)).train()
    model.gradient_checkpointing_enable()
    before = model.config._attn_implementation
    engine = NativeEngine(lambda: model, sampling())
    for _ in engine.generate(make_prompts(), 2, seed=0):
        assert model.training  # also while a group is being handed over
        assert model.config._attn_implementation == before
    assert model.is_gradient_checkpointing


def test_an_update_is_seen_at_once():
    model, prompts = make("llama"), make_prompts()
    engine = NativeEngine(lambda: model, sampling(temperature=0.0))
    list(engine.generate(prompts, 1, seed=0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for group in engine.generate(prompts, 1, seed=0):
        assert group.completions[0].token_ids == greedy(model, group.prompt)


def test_a_four_bit_base_with_lora(tmp_path):
    pytest.importorskip("bitsandbytes")
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    options = GQA | {"hidden_size": 128, "intermediate_size": 128, "initializer_range": 0.2}
    torch.manual_seed(0)
    tf.LlamaForCausalLM(tf.LlamaConfig(**options)).save_pretrained(tmp_path)
    quantized = tf.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantized, device_map="cpu")
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    for prompt, group in zip(make_prompts(), run(model, make_prompts(), 2), strict=True):
        for completion in group:
            expected = plain_logprobs(model, prompt, completion.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0.02, atol=0.05)
