"""On an NVIDIA GPU: the native engine's kernels and graphs against plain forwards."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import transformers as tf

from tests.gpu.test_learner_gpu import CONFIGS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def make(name):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    return model


def make_prompts(lengths=(5, 130, 70, 300)):
    from rloom.types import Prompt

    draw = random.Random(0)
    return [Prompt(content="", token_ids=[draw.randrange(3, 512) for _ in range(n)]) for n in lengths]


def engine_for(model, compiled=False, merged=None, tokenizer=None, **changes):
    from rloom.generation import NativeEngine, Sampling

    options = {"max_completion_length": 90, "eos_token_ids": (2,), "pad_token_id": 0, **changes}
    return NativeEngine(lambda: model, Sampling(**options), compiled=compiled, merged=merged, tokenizer=tokenizer)


def groups(engine, k=6, seed=0):
    return sorted(engine.generate(make_prompts(), k, seed=seed), key=lambda group: len(group.prompt.token_ids))


def plain(model, prompt, tokens, temperature=1.0):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + tokens], device="cuda")).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(-1, torch.tensor(tokens, device="cuda")[:, None])[:, 0].cpu()


def check_against_plain(model, found, close=0.05):
    for group in found:
        for completion in group.completions:
            truth = plain(model, group.prompt.token_ids, completion.token_ids)
            assert (torch.tensor(completion.logprobs) - truth).abs().mean() < close


def test_longer_prompts_that_come_later_are_captured_too():
    model = make("qwen2")
    engine = engine_for(model)
    for lengths in ((5, 9), (5, 130), (5, 700)):  # each wants larger tables, and graphs anew
        list(engine.generate(make_prompts(lengths), 6, seed=0))
        assert all(bucket.graph is not None and not bucket.failed for bucket in engine.runner.graphs.buckets.values())


@pytest.mark.parametrize(("name", "whole"), [*itertools.product(CONFIGS, [False]), *itertools.product(CONFIGS, [True])])
def test_sampling_logprobs_are_a_plain_forwards(name, whole, monkeypatch):
    if whole:  # rows in one program each, as in large batches with short prompts
        monkeypatch.setattr("rloom.generation.native.cache.paged.PROGRAMS", 1)
        monkeypatch.setattr("rloom.generation.native.cache.paged.SHORT", 0)
    model = make(name)
    exact = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).cuda().eval()
    exact.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    engine = engine_for(model)
    ours, theirs, count = 0.0, 0.0, 0
    for group in groups(engine):
        for completion in group.completions:
            truth = plain(exact, group.prompt.token_ids, completion.token_ids)
            ours += float((torch.tensor(completion.logprobs) - truth).abs().sum())
            theirs += float((plain(model, group.prompt.token_ids, completion.token_ids) - truth).abs().sum())
            count += len(truth)
    print(f"{name}: off by {ours / count:.2e}, a plain forward by {theirs / count:.2e}")
    print(f"captured in {engine.runner.graphs.capture_seconds:.1f} s")
    assert engine.runner.paged
    assert all(bucket.tables.whole == whole for bucket in engine.runner.graphs.buckets.values())
    assert ours < 1.3 * theirs + 1e-3 * count


@pytest.mark.parametrize("options", [{}, {"top_k": 20, "temperature": 0.7}, {"top_p": 0.8, "repetition_penalty": 1.2}])
def test_graphs_draw_what_eager_steps_draw(options, monkeypatch):
    from rloom.generation.native.graphs import Graphs
    from rloom.generation.native.runner import Runner

    model = make("qwen2")
    # Rows leave a step later where it was begun early: other batches, which round otherwise.
    monkeypatch.setattr(Runner, "can_run_ahead", lambda *_: False)
    engine = engine_for(model, **options)
    with_graphs = [[c.token_ids for c in g.completions] for g in groups(engine)]
    assert any(bucket.graph is not None for bucket in engine.runner.graphs.buckets.values())
    monkeypatch.setattr(Graphs, "is_worth_capturing", lambda *_: False)
    assert [[c.token_ids for c in g.completions] for g in groups(engine_for(model, **options))] == with_graphs


def test_rollouts_that_are_interleaved_do_not_mix():
    """Steps of one are under way while the other is asked for its next group."""
    model = make("qwen2")
    engine = engine_for(model)
    rollouts = [engine.generate(make_prompts(), 6, seed=seed) for seed in (0, 1)]
    found = [group for pair in itertools.zip_longest(*rollouts) for group in pair if group is not None]
    assert len(found) == 8
    check_against_plain(model, found)


def test_a_graph_sees_the_weights_of_the_last_update():
    model = make("qwen2")
    engine = engine_for(model)
    groups(engine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    buckets = engine.runner.graphs.buckets
    before = {size: bucket.graph for size, bucket in buckets.items()}
    check_against_plain(model, groups(engine, seed=1))
    assert any(graph is not None and buckets[size].graph is graph for size, graph in before.items())


def test_fused_weights_are_saved_whole_and_trained(tmp_path):
    from accelerate import Accelerator
    from safetensors.torch import load_file

    model = make("qwen2")
    engine = engine_for(model)
    groups(engine)
    assert len(engine.runner.layers.linears.forwards) == 5 * model.config.num_hidden_layers
    Accelerator().save_model(model, tmp_path)
    saved, state = load_file(tmp_path / "model.safetensors"), model.state_dict()
    assert all(torch.equal(saved[name], value.cpu()) for name, value in state.items() if name != "lm_head.weight")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    ids = torch.randint(3, 500, (2, 20), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    optimizer = None
    check_against_plain(model, groups(engine, seed=3))


def test_fused_weights_are_no_second_copy():
    from rloom.generation.native.layers.fused_linear import FusedLinears

    block = torch.nn.Module()
    block.gate_proj, block.up_proj = (torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    before = torch.cuda.memory_allocated()
    linears = FusedLinears(block)
    assert len(linears.forwards) == 2
    assert torch.cuda.memory_allocated() - before < 1 << 20  # of 64 MiB


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_lora(merged, compiled):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make("qwen2"), LoraConfig(r=8, target_modules="all-linear"))
    engine = engine_for(model.eval(), compiled=compiled, merged=merged)
    for seed in range(2):  # the second with weights that have changed, in the graphs of the first
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05 * (1 + seed))
        found = groups(engine, seed=seed)
        assert any(bucket.graph is not None for bucket in engine.runner.graphs.buckets.values())
        check_against_plain(model, found, 0.08)
    assert bool(engine.runner.layers.merged.copies) == merged
    assert bool(engine.runner.layers.linears.adapters) != merged


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("rows", [1, 6])  # one row has a kernel of its own
def test_four_bit_bases(rows, compiled, tmp_path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    from peft import LoraConfig, get_peft_model

    make("qwen2").save_pretrained(tmp_path)
    options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    model = tf.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=tf.BitsAndBytesConfig(**options), dtype=torch.bfloat16, device_map="cuda"
    )
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).eval()
    engine = engine_for(model, compiled=compiled)
    for seed in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.05 * (1 + seed))
        found = list(engine.generate(make_prompts((9,)), rows, seed=seed))
        assert any(bucket.graph is not None for bucket in engine.runner.graphs.buckets.values())
        check_against_plain(model, found, 0.1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_neox", "phi3", "gpt2", "mixtral"])
def test_greedy_in_float32_is_generates(name):
    from tests import architectures
    from tests.parity import test_native_engine as on_cpu

    model = architectures.make(name).cuda()
    prompts = on_cpu.make_prompts()
    for prompt, (completion, _) in zip(prompts, on_cpu.run(model, prompts, 2, temperature=0.0), strict=True):
        ids = torch.tensor([prompt.token_ids], device="cuda")
        options = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :]
        assert completion.token_ids == output.tolist()[: len(completion.token_ids)]
        assert len(completion.token_ids) == 14 or completion.token_ids[-1] == 2


def test_a_model_that_waits_inside_runs_without_graphs(caplog):
    """As some mixtures of experts do, which ask how many tokens each expert got."""

    def wait(module, args, out):
        assert not out.isnan().any().item()

    model = make("qwen2")
    model.model.norm.register_forward_hook(wait)
    engine = engine_for(model)
    for _ in range(2):
        check_against_plain(model, groups(engine))
        torch.nn.functional.dropout(torch.ones(9, device="cuda"))  # torch's generator goes on
    assert "cannot be captured in a CUDA graph, and runs without: CUDA error: operation not permitted" in caplog.text
    assert all(bucket.graph is None for bucket in engine.runner.graphs.buckets.values())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = engine_for(make("qwen2"))  # one that can be
    groups(other)
    assert any(bucket.graph is not None for bucket in other.runner.graphs.buckets.values())


def test_a_reward_that_draws_while_graphs_are_recorded(caplog):
    """Its calls may fail and are made again; the engine's steps are right whatever happens."""
    import threading

    import rloom
    from rloom.rewards import FunctionReward, RewardBatch, RewardSet

    calls = []

    @rloom.reward(threads=True)
    def draws(completions):
        calls.append(1)
        value = torch.rand(1000, device="cuda").sum().item()
        torch.cuda.synchronize()
        return [value] * len(completions)

    rewards, over, scored = RewardSet([FunctionReward(draws)], None), threading.Event(), []
    batch = RewardBatch(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={})

    def go_on():
        while not over.is_set():
            scored.append(rewards.score(batch).scores)

    model, thread = make("qwen2"), threading.Thread(target=go_on)
    engine = engine_for(model)
    thread.start()
    try:
        for seed in range(3):
            check_against_plain(model, groups(engine, seed=seed))
    finally:
        over.set()
        thread.join()
        rewards.close()
    print(f"{len(scored)} scores in {len(calls)} calls; {caplog.text}")
    assert "cannot be captured" not in caplog.text
    check_against_plain(model, groups(engine, seed=4))
    assert any(bucket.graph is not None for bucket in engine.runner.graphs.buckets.values())
    assert scored
    assert all(row.isfinite().all() for row in scored)
    torch.rand(9, device="cuda")


def test_pages_that_run_out(monkeypatch):
    model = make("qwen2")
    engine = engine_for(model, eos_token_ids=())
    # prompts take eleven, completions two each
    monkeypatch.setattr("rloom.generation.native.decode_loop.DecodeLoop._plan_pages", lambda *args: 20)
    found = groups(engine)
    check_against_plain(model, found)
    assert {len(c.token_ids) for group in found for c in group.completions} == {90}
    assert engine.requeued > 0


def test_stop_strings_are_found_while_steps_go_on(monkeypatch):
    from rloom.generation.native.runner import Runner

    class Words:
        def decode(self, tokens, **options):
            return " ".join(f"<{token}>" for token in tokens)

    begun, run_ahead = [], Runner.run_ahead
    monkeypatch.setattr(Runner, "run_ahead", lambda *args: begun.append(1) or run_ahead(*args))
    model = make("qwen2")
    stops = [f"<{token}>" for token in range(100, 110)]
    engine = engine_for(model, extra={"stop_strings": stops}, tokenizer=Words())
    found = groups(engine, k=8)
    check_against_plain(model, found)
    for group in found:
        for completion in group.completions:
            at = [index for index, token in enumerate(completion.token_ids) if 100 <= token < 110]
            assert at in ([], [len(completion.token_ids) - 1])
            assert (completion.stop_reason == "stop_string") == bool(at)
    assert begun


def test_engines_in_threads():
    """A reward's model generates, and captures, while the policy does."""
    from concurrent.futures import ThreadPoolExecutor

    models = [make("qwen2"), make("gemma2")]
    engines = [engine_for(model) for model in models]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(groups, engines * 3))
    for model, one in zip(models * 3, found, strict=True):
        check_against_plain(model, one)


def test_images():
    pytest.importorskip("PIL")
    from tests.integration.test_vision import encoded, mixed_rows

    model, _, prompts = encoded("qwen2.5-vl", mixed_rows())
    exact = [c.token_ids for g in _greedy(model, prompts) for c in g.completions]
    found = [c.token_ids for g in _greedy(model.cuda(), prompts) for c in g.completions]
    assert found == exact


def _greedy(model, prompts):
    from rloom.generation import NativeEngine, Sampling

    sampling = Sampling(max_completion_length=20, eos_token_ids=(2,), pad_token_id=0, temperature=0.0)
    return sorted(NativeEngine(lambda: model, sampling).generate(prompts, 2, seed=0), key=lambda g: g.prompt.token_ids)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt_neox"])
def test_compiled_steps(name, monkeypatch):
    from rloom.generation.native.runner import Runner

    model = make(name)
    engine = engine_for(model, compiled=True)
    begun, run_ahead = [], Runner.run_ahead
    monkeypatch.setattr(
        Runner, "run_ahead", lambda runner, cache, steps: begun.append(steps) or run_ahead(runner, cache, steps)
    )
    check_against_plain(model, groups(engine))
    assert engine.runner.compiled.wanted
    assert any(bucket.graph is not None for bucket in engine.runner.graphs.buckets.values())
    assert begun  # steps that did not wait for the readback of those before them


def test_memory_does_not_grow():
    model = make("qwen2")
    engine = engine_for(model, max_completion_length=20)
    sizes = []
    for step in range(300):
        list(engine.generate(make_prompts((5, 30)), 4, seed=step))
        sizes.append(torch.cuda.memory_allocated())
    assert max(sizes[100:]) <= max(sizes[:100])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 64, 100, 128, 130])
@pytest.mark.parametrize(("columns", "depth"), [(8960, 1536), (4864, 896), (200, 72), (14336, 256), (18944, 128)])
def test_gate_up_and_activation_as_one_product(rows, columns, depth, dtype):
    from rloom.generation.native.layers.swiglu import has_kernel

    torch.manual_seed(0)
    x = torch.randn(rows, depth, device="cuda", dtype=dtype)
    weight = torch.randn(2 * columns, depth, device="cuda", dtype=dtype) / depth**0.5
    if not has_kernel(weight):
        pytest.skip("the kernel was written for GPUs of compute capability 9")
    found = torch.ops.rloom.swiglu_product(x, weight).double()
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    truth = torch.nn.functional.silu(gate) * up
    gate, up = torch.nn.functional.linear(x, weight).chunk(2, -1)
    plain = (torch.nn.functional.silu(gate) * up).double()
    assert (found - truth).abs().mean() < 1.1 * (plain - truth).abs().mean()
    assert (found - truth).abs().max() < 2 * (plain - truth).abs().max()


def test_the_engine_uses_it(monkeypatch):
    from rloom.generation.native.kernels import swiglu_product as kernels
    from rloom.generation.native.layers.swiglu import has_kernel

    model = make("qwen2")
    mlp = model.model.layers[0].mlp
    if not has_kernel(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])):
        pytest.skip("the kernel was written for GPUs of compute capability 9")
    engine = engine_for(model)
    asked = []
    run = kernels.swiglu_product
    monkeypatch.setattr(kernels, "swiglu_product", lambda x, weight: asked.append(len(x)) or run(x, weight))
    groups(engine)
    assert len(engine.runner.layers.swiglu.forwards) == model.config.num_hidden_layers
    assert max(asked) == 100  # tried,
    assert asked.count(24) >= model.config.num_hidden_layers  # and captured for 24 rows


def attended(layer, device, *, whole, rotating):
    """What six rows of three prompts attend to, with random keys and values; rotated by the kernel or before."""
    from rloom.generation.native.cache.dense import rotated
    from rloom.generation.native.cache.geometry import Geometry
    from rloom.generation.native.cache.paged import PagedCache, make_tables, rows_at_once
    from rloom.generation.native.rows import Rows
    from tests.unit.test_native_kernels import make_sequences

    torch.manual_seed(0)
    geometry, limit = Geometry((layer,)), 128
    _, sequences = make_sequences(limit)
    count = len(sequences)
    addresses = torch.zeros(2, dtype=torch.int64, device=device)
    cache = PagedCache(geometry, 40, addresses)
    for kept in cache.layers[0]:
        kept.copy_(torch.randn(kept.shape))
    cache.tables = make_tables(geometry, count, count, rows_at_once(geometry, 3), 130, limit, device)
    cache.tables.whole = whole
    rows = Rows.empty(count, torch.tensor([-1], device=device), 9, with_seen=False)
    rows.load(sequences, limit, 1)
    cache.arrange(sequences, cache.tables, 1)
    heads = (layer.query_heads, layer.heads, layer.heads)
    q, k, v = (torch.randn(count, n, 1, layer.width).to(device, layer.dtype) for n in heads)
    angles = torch.randn(count, 1, layer.width)
    turn = [angles.cos().to(device, layer.dtype), angles.sin().to(device, layer.dtype)]
    if not rotating:
        q, k = (rotated(x.float(), *(t.float() for t in turn)).to(layer.dtype) for x in (q, k))
    options = {"scale": layer.width**-0.5, "window": 0, "softcap": 0.0, "sinks": None}
    out = cache.attend(0, q, k, v, rows, {**options, "rotation": turn if rotating else None})
    return out.float().cpu(), [kept.float().cpu() for kept in cache.layers[0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [((14, 2), 64), ((12, 2), 128), ((8, 8), 256)])
def test_attention_that_rotates_and_takes_whole_rows(heads, width, dtype):
    from rloom.generation.native.cache.geometry import Layer

    layer, device = Layer(heads[1], width, width, heads[0], dtype), torch.device("cuda")
    expected, kept = attended(layer, device, whole=False, rotating=False)
    for whole, rotating in ((False, True), (True, False), (True, True)):
        found, also = attended(layer, device, whole=whole, rotating=rotating)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        for one, other in zip(also, kept, strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def kept_by_definition(line, temperature, top_k, top_p, min_p):
    """In float64: fewer than k above a token's logit, and less than p of the probability that is left."""
    values, inverse, counts = line.double().unique(return_inverse=True, return_counts=True)  # ascending
    above = counts.flip(0).cumsum(0).flip(0) - counts
    left = above < (top_k or len(line))
    p = torch.where(left, counts * ((values - values[-1]) / temperature).exp(), 0.0)
    left &= p.flip(0).cumsum(0).flip(0) - p < top_p * p.sum()
    if min_p:
        left &= ((values - values[-1]) / temperature).exp() >= min_p
    return left[inverse], (p.flip(0).cumsum(0).flip(0) - p)[inverse] / p.sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options",
    [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7}],
)
def test_what_filters_leave_of_a_large_vocabulary(options, dtype):
    from rloom.generation import Sampling
    from rloom.generation.native.kernels.draw import _parts
    from rloom.generation.native.kernels.filter_bounds import bounds_of
    from rloom.generation.native.sampling.sampler import Sampler

    torch.manual_seed(0)
    logits = (torch.randn(8, 151_936, device="cuda") * 3 - 5).to(dtype)
    sampler = Sampler(Sampling(max_completion_length=4, eos_token_ids=(), pad_token_id=0, **options))
    scaled = logits.float() * torch.tensor(1 / sampler.temperature, device="cuda")
    kept = scaled >= bounds_of(logits, _parts(logits, 1 / sampler.temperature), sampler)[:, None]
    for line, found in zip(logits, kept, strict=True):
        expected, above = kept_by_definition(line, sampler.temperature, sampler.top_k, sampler.top_p, sampler.min_p)
        sure = (above - sampler.top_p).abs() > 1e-5
        assert torch.equal(found & sure, expected & sure)
        assert found.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 17, 130])
@pytest.mark.parametrize(("sizes", "rank"), [((1536, 256, 256), 16), ((8960, 8960), 64), ((896,), 144)])
def test_what_adapters_add(sizes, rank, rows, dtype):
    from rloom.generation.native.kernels.add_low_rank import add_low_rank
    from rloom.generation.native.layers.low_rank import COLUMNS

    torch.manual_seed(0)
    n = sum(sizes)
    product = torch.randn(rows, 1, n + len(sizes) * rank, device="cuda").to(dtype)
    up = torch.randn(rank, n, device="cuda").to(dtype) / rank
    owners = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes) // COLUMNS).int().cuda()
    base, *low = product.double().split([n, *[rank] * len(sizes)], -1)
    expected = base + torch.cat([a @ b for a, b in zip(low, up.double().split(sizes, 1), strict=True)], -1)
    found = add_low_rank(product[..., :n], product[..., n:], up, owners)
    torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.005)
