"""The engine's kernels in Triton's interpreter, against their plain forms. On a GPU: tests/gpu."""

from __future__ import annotations

import os
import types

import pytest
import torch

from rloom.generation.base import Sampling
from rloom.generation.native.cache.allocator import PageAllocator
from rloom.generation.native.cache.dense import DenseCache, rotated
from rloom.generation.native.cache.geometry import Geometry, Layer
from rloom.generation.native.cache.paged import PagedCache, make_tables
from rloom.generation.native.rows import Rows
from rloom.generation.native.runner import prompt_row
from rloom.generation.native.sampling.noise import key_of
from rloom.generation.native.sampling.sampler import Drawn, Sampler
from rloom.generation.native.scheduler import SampledSequence, Scheduler, SharedPrompt

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels are compiled: tests/gpu"
)
CPU = torch.device("cpu")


def make_sequences(limit):
    """Three prompts of 3, 1 and 2 sequences, with some tokens each, and pages for them."""
    prompts = [SharedPrompt([1] * n) for n in (70, 3, 130)]
    for prompt, lengths in zip(prompts, ([1, 66, 9], [4], [100, 2]), strict=True):
        prompt.sequences = [SampledSequence(prompt, 0, 0, 0, tokens=[1] * n) for n in lengths]
    scheduler = Scheduler(
        prompts, pages=PageAllocator(total=40, size=64), max_new_tokens=limit, max_sequences=9, prefill_tokens=999
    )
    scheduler.next_prefill()
    scheduler.ready.extend(s for prompt in prompts for s in prompt.sequences)
    scheduler.fill(1)
    return prompts, scheduler.running


@pytest.mark.parametrize(
    ("heads", "widths", "window", "softcap", "sinks", "rotating"),
    [
        ((4, 2), (16, 16), 90, 0.0, True, True),
        ((4, 2), (16, 16), 0, 0.0, False, False),
        ((6, 2), (24, 8), 33, 0.0, True, True),
        ((2, 2), (16, 16), 0, 4.0, False, True),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_paged_attention_is_dense_attention(heads, widths, window, softcap, sinks, rotating, whole):
    torch.manual_seed(0)
    limit = 128
    geometry = Geometry((Layer(heads[1], *widths, heads[0], torch.float32),))
    prompts, sequences = make_sequences(limit)
    count = len(sequences)
    paged = PagedCache(geometry, 40, torch.zeros(2, dtype=torch.int64))
    dense = DenseCache(geometry, limit, CPU)
    row = prompt_row([p.token_ids for p in prompts], CPU)
    size = row.input_ids.shape[1]
    k, v = torch.randn(1, heads[1], size, widths[0]), torch.randn(1, heads[1], size, widths[1])
    for cache in (paged, dense):
        cache.begin_prefill(prompts)
        cache.keep(0, k, v, row)
    rows = {True: Rows.empty(count + 2, torch.tensor([-1]), 9, with_seen=False)}  # two rows do nothing
    rows[False] = Rows.empty(count, torch.tensor([-1]), 9, with_seen=False)
    tables = make_tables(geometry, count + 2, count + 1, 3, 130, limit, CPU)
    tables.whole = whole
    for is_paged, cache in ((True, paged), (False, dense)):
        rows[is_paged].load(sequences, limit, 1)
        cache.arrange(sequences, tables if is_paged else None, 1)
    # what the rows have drawn before
    old_k = torch.randn(count, heads[1], limit, widths[0])
    old_v = torch.randn(count, heads[1], limit, widths[1])
    for index, sequence in enumerate(sequences):
        for t in range(sequence.cached):
            page = sequence.pages[t // 64]
            paged.layers[0][0][page, t % 64] = old_k[index, :, t]
            paged.layers[0][1][page, t % 64] = old_v[index, :, t]
        dense.own[0][0][index, :, : sequence.cached] = old_k[index, :, : sequence.cached]
        dense.own[0][1][index, :, : sequence.cached] = old_v[index, :, : sequence.cached]
    options = {
        "scale": 0.4,
        "window": window,
        "softcap": softcap,
        "sinks": torch.randn(heads[0]) if sinks else None,
    }
    new = [
        torch.randn(count + 2, n, 1, w)
        for n, w in ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    ]
    new_key = new[1]
    if rotating:  # by the kernel, against a plain rotation before
        angles = torch.randn(count + 2, 1, widths[0])
        turn = [angles.cos(), angles.sin()]
        options["rotation"] = [x[:count] for x in turn]
        new_key = rotated(new[1], *turn)
    expected = dense.attend(0, *(x[:count] for x in new), rows[False], options)
    found = paged.attend(0, *new, rows[True], {**options, "rotation": turn if rotating else None})
    torch.testing.assert_close(found[:count], expected, rtol=1e-5, atol=1e-5)
    assert found[count:].isfinite().all()
    for index, sequence in enumerate(sequences):  # the new key is in its page
        page = sequence.pages[sequence.cached // 64]
        torch.testing.assert_close(paged.layers[0][0][page, sequence.cached % 64], new_key[index, :, 0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 5},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.1, "temperature": 1.3},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 1.4, "top_k": 300, "top_p": 0.7, "never": (3, 8999)},
        {"never": (3, 8999)},
        {"top_k": 99_999},
        {"min_p": 1.0, "temperature": 0.7},
        {"min_p": 1.0, "temperature": 1.3, "top_k": 9},
        {"top_p": 1e-50},
    ],
)
def test_the_draw(options):
    from rloom.generation.native.kernels.draw import draw

    torch.manual_seed(0)
    options = dict(options)
    never = options.pop("never", ())
    sampler = Sampler(Sampling(max_completion_length=4, eos_token_ids=(), pad_token_id=0, **options), never)
    seen = torch.rand(6, 9000) < 0.3
    logits = torch.randn(6, 9000) * 4
    keys, positions = torch.tensor([key_of(3, 0, i) for i in range(6)]), torch.arange(6) + 4
    plain = sampler(logits, keys, positions, seen)
    found = draw(logits, sampler.changed(logits, seen), keys, positions, sampler)
    assert torch.equal(found.tokens, plain.tokens)
    for name in ("logprobs", "drawn_logprobs", "entropies"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_k": 37}, {"top_p": 0.3}, {"top_p": 0.999}, {"top_k": 50, "top_p": 0.8}]
)
@pytest.mark.parametrize("shift", [0.0, -40.0])  # of both signs, and all below zero
def test_what_filters_leave(options, dtype, shift, monkeypatch):
    """Against a plain definition in float64: a token stays if fewer than k, or less than p, are above its logit."""
    from rloom.generation.native.kernels import filter_bounds as bound_kernels
    from rloom.generation.native.kernels.draw import _parts

    monkeypatch.setattr(bound_kernels, "BLOCK", 1024)
    torch.manual_seed(0)
    logits = ((torch.randn(4, 3000) * 3) + shift).to(dtype)
    logits[:, 2000:] = -torch.inf
    logits[1, :2000] = logits[1, 0]  # all alike
    logits[2, 7:] = -torch.inf  # fewer than k
    sampler = Sampler(Sampling(max_completion_length=4, eos_token_ids=(), pad_token_id=0, temperature=0.9, **options))
    scaled = logits.float() * torch.tensor(1 / 0.9)
    kept = scaled >= bound_kernels.bounds_of(logits, _parts(logits, 1 / 0.9), sampler)[:, None]
    for line, found in zip(logits.double(), kept, strict=True):
        left = torch.ones_like(found)
        if "top_k" in options:
            left &= (line[None] > line[:, None]).sum(1) < options["top_k"]
        if "top_p" in options:
            p = (line / 0.9).masked_fill(~left, -torch.inf).softmax(-1)
            above = torch.where(line[None] > line[:, None], p[None], 0.0).sum(1)
            left &= above < options["top_p"] * p.sum()
        doubtful = torch.zeros_like(found)
        if "top_p" in options:  # rounding decides
            doubtful = (above - options["top_p"]).abs() < 1e-5
        real = line > -torch.inf
        assert torch.equal((found & real & ~doubtful), (left & real & ~doubtful))
        assert (found & real).any()


def test_rows_advance():
    from rloom.generation.native.kernels.draw import advance_rows

    pair = [Rows.empty(5, torch.tensor([7, 8]), 20, with_seen=False) for _ in range(2)]
    prompt = SharedPrompt([1, 2, 3])
    sequences = [SampledSequence(prompt, 0, i, key=i, tokens=[4] * (i + 1)) for i in range(4)]
    for rows in pair:
        rows.load(sequences, max_new_tokens=6, steps=3)
    for tokens in ([5, 7, 6, 8, 99], [7, 6, 6, 6, 99], [5, 5, 5, 5, 99]):
        numbers = torch.randn(3, 5)
        drawn = Drawn(tokens=torch.tensor(tokens), logprobs=numbers[0], drawn_logprobs=numbers[1], entropies=numbers[2])
        pair[0]._advance(drawn)
        advance_rows(pair[1], drawn)
    for name in ("tokens", "positions", "cached", "counts", "remaining", "alive", "step", "out_tokens"):
        assert torch.equal(getattr(pair[0], name), getattr(pair[1], name)), name
    assert pair[0].out_tokens[:, :3].tolist() == [[5, 7, -1], [7, -1, -1], [6, 6, 5], [8, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize(
    ("rows", "longest_prompt", "longest_completion", "whole"),
    [(128, 128, 1024, True), (128, 256, 256, False), (96, 128, 1024, False), (512, 64, 256, True)],
)
def test_rows_in_one_program_each(rows, longest_prompt, longest_completion, whole):
    """Where they fill a GPU, and reading a prompt once for each of them costs little beside their own tokens."""
    geometry = Geometry((Layer(2, 16, 16, 4, torch.float32),))
    assert make_tables(geometry, rows, 4, 4, longest_prompt, longest_completion, CPU).whole is whole


@pytest.mark.parametrize("whole", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_in_graphs_draw_what_steps_without_draw(whole, monkeypatch):
    """As on a GPU, but for the recording itself: a graph is the step that was to be recorded, with its tables."""
    from rloom.generation import NativeEngine
    from rloom.generation.native import graphs
    from rloom.generation.native.runner import Runner
    from rloom.types import Prompt
    from tests.conftest import make_model

    model = make_model(num_hidden_layers=1).eval()
    prompts = [Prompt(content="", token_ids=[5 + i % 30 for i in range(n)]) for n in (70, 3)]
    sampling = Sampling(max_completion_length=18, eos_token_ids=(2, 7), pad_token_id=0, repetition_penalty=1.1)

    def drawn():
        engine = NativeEngine(lambda: model, sampling, max_sequences=4)
        for seed in range(2):
            groups = sorted(engine.generate(prompts, 3, seed=seed), key=lambda group: len(group.prompt.token_ids))
            yield [(c.token_ids, c.stop_reason) for group in groups for c in group.completions]
        captures.append([bucket.graph is not None for bucket in engine.runner.graphs.buckets.values()])

    def arrange(cache, *args):
        arranged[:] = [cache]
        arrange_(cache, *args)

    def captured(step, pool):
        cache, tables = arranged[0], arranged[0].tables
        return types.SimpleNamespace(replay=lambda: setattr(cache, "tables", tables) or step())

    captures, ahead, run_ahead = [], [], Runner.run_ahead
    arranged, arrange_ = [], PagedCache.arrange
    expected = list(drawn())
    monkeypatch.setattr(Runner, "paged", True)
    monkeypatch.setattr("rloom.generation.native.cache.paged.PROGRAMS", 2)
    monkeypatch.setattr("rloom.generation.native.cache.paged.SHORT", 0 if whole else 1000)
    monkeypatch.setattr(graphs, "_warm_up", lambda step: (step(), step()))
    monkeypatch.setattr(graphs, "captured", captured)
    monkeypatch.setattr(PagedCache, "arrange", arrange)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(Runner, "run_ahead", lambda *args: ahead.append(1) or run_ahead(*args))
    assert list(drawn()) == expected
    assert not any(captures[0])
    assert any(captures[1])
    assert ahead
