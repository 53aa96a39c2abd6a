"""Which engine is chosen, how completions end, and the engine that forks the library's cache."""

from __future__ import annotations

import logging
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as tf

from rloom.errors import ConfigError, EngineError
from rloom.generation import ForkedEngine, NativeEngine, Sampling, TransformersEngine, choose_engine
from rloom.generation.native import proof
from rloom.generation.native.runner import Runner
from rloom.types import Prompt
from tests.conftest import make_model, make_tokenizer


def sampling(**changes):
    return Sampling(**{"max_completion_length": 12, "eos_token_ids": (2,), "pad_token_id": 0, **changes})


def prompts(*lengths):
    return [Prompt(content="", token_ids=[5 + i % 9 for i in range(n)]) for n in lengths]


def gptj():
    torch.manual_seed(0)
    config = tf.GPTJConfig(vocab_size=46, n_embd=32, n_layer=2, n_head=4, rotary_dim=8, n_positions=64)
    model = tf.GPTJForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def bloom():
    torch.manual_seed(0)
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=46, hidden_size=32, n_layer=2, n_head=4))


def mamba():
    torch.manual_seed(0)
    return tf.MambaForCausalLM(tf.MambaConfig(vocab_size=46, hidden_size=32, num_hidden_layers=2, state_size=4))


@pytest.mark.parametrize(
    ("make", "expected"),
    [(make_model, NativeEngine), (gptj, ForkedEngine), (bloom, ForkedEngine), (mamba, TransformersEngine)],
)
def test_the_first_engine_that_proves_right_is_used(make, expected, caplog):
    model = make()
    with caplog.at_level(logging.WARNING):
        engine = choose_engine(lambda: model, sampling())
    assert type(engine) is expected
    assert ("the native engine does not fit" in caplog.text) == (expected is not NativeEngine)


def test_an_engine_asked_for_by_name_is_had_or_an_error_says_why():
    model = make_model()
    for name, cls in (("native", NativeEngine), ("forked", ForkedEngine), ("transformers", TransformersEngine)):
        assert type(choose_engine(lambda: model, sampling(), wanted=name)) is cls
    other = gptj()
    with pytest.raises(EngineError, match="engine='native': 0 of 2 layers of GPTJ"):
        choose_engine(lambda: other, sampling(), wanted="native")


def test_options_of_generate_lead_to_generate(caplog):
    model = make_model()
    with caplog.at_level(logging.INFO):
        engine = choose_engine(lambda: model, sampling(extra={"no_repeat_ngram_size": 2}))
    assert type(engine) is TransformersEngine
    assert "because of no_repeat_ngram_size" in caplog.text
    with pytest.raises(ConfigError, match=r"does not know the generation option.*no_repeat_ngram_size"):
        choose_engine(lambda: model, sampling(extra={"no_repeat_ngram_size": 2}), wanted="native")


def test_a_generate_that_somebody_wrote_is_called(caplog):
    class Mine(tf.LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)

    model = Mine(make_model().config)
    with caplog.at_level(logging.INFO):
        assert type(choose_engine(lambda: model, sampling())) is TransformersEngine
    assert "the model's own `generate`" in caplog.text
    replaced = make_model()
    replaced.generate = lambda *args, **kwargs: None
    assert type(choose_engine(lambda: replaced, sampling())) is TransformersEngine


@pytest.mark.parametrize("make", [gptj, bloom])
def test_forked_greedy_is_generate(make):
    model = make().eval()
    engine = ForkedEngine(lambda: model, sampling(temperature=0.0))
    for group in engine.generate(prompts(7, 2, 11), 2, seed=0):
        ids = torch.tensor([group.prompt.token_ids])
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)[
            0, ids.shape[1] :
        ].tolist()
        expected = output[: output.index(2) + 1] if 2 in output else output
        assert [c.token_ids for c in group.completions] == [expected, expected]


def test_forked_draws_the_same_noise_as_native():
    model = make_model().eval()
    tokens = [
        [
            [c.token_ids for c in group.completions]
            for group in sorted(engine.generate(asked, 3, seed=4), key=asked_order)
        ]
        for asked in [prompts(7, 2, 11)]
        for asked_order in [lambda group: len(group.prompt.token_ids)]
        for engine in (NativeEngine(lambda: model, sampling()), ForkedEngine(lambda: model, sampling()))
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("cls", [NativeEngine, ForkedEngine])
def test_a_prompts_number_decides_its_noise(cls):
    """Whatever else is asked for in the same call: here or in another process."""
    model = make_model().eval()
    engine, tokens = cls(lambda: model, sampling()), [4, 5, 6]

    def draw(asked, seed=4):
        return [[c.token_ids for c in group.completions] for group in engine.generate(asked, 2, seed=seed)]

    first, second = draw([Prompt(content="", token_ids=tokens) for _ in range(2)])
    again = Prompt(content="", token_ids=tokens, number=1)
    assert draw([again]) == [second] != [first]
    assert draw([again], seed=5) != [second]


@pytest.mark.parametrize("cls", [NativeEngine, ForkedEngine])
def test_how_completions_end(cls):
    """Several end tokens, a stop string in the middle of a chunk, the limit; whatever ends it belongs to it."""
    model, tokenizer = make_model().eval(), make_tokenizer()
    options = sampling(eos_token_ids=(2, 9, 11), max_completion_length=30, extra={"stop_strings": ["ab", "z"]})
    engine = cls(lambda: model, options, tokenizer=tokenizer)
    reasons = set()
    for group in engine.generate(prompts(3, 5, 8), 16, seed=1):
        for completion in group.completions:
            ids, text = completion.token_ids, tokenizer.decode(completion.token_ids)
            reasons.add(completion.stop_reason)
            assert not {2, 9, 11} & set(ids[:-1])
            if completion.stop_reason == "eos":
                assert ids[-1] in (2, 9, 11)
            elif completion.stop_reason == "stop_string":
                assert text.endswith(("ab", "z"))
            else:
                assert len(ids) == 30
            before = tokenizer.decode(ids[:-1])
            assert "ab" not in before
            assert "z" not in before
            assert len(completion.logprobs) == len(ids)
    assert reasons >= {"eos", "stop_string"}


def test_a_limit_of_one_token_and_one_completion():
    model = make_model().eval()
    groups = list(NativeEngine(lambda: model, sampling(max_completion_length=1)).generate(prompts(3), 1, seed=0))
    assert [len(c.token_ids) for c in groups[0].completions] == [1]
    assert list(NativeEngine(lambda: model, sampling()).generate([], 3, seed=0)) == []


def test_groups_are_handed_over_as_they_finish(monkeypatch):
    model = make_model().eval()
    engine = NativeEngine(
        lambda: model, sampling(max_completion_length=60, eos_token_ids=(2, 5, 6, 7)), max_sequences=4
    )
    asked = prompts(3, 4, 5, 6, 7, 8)
    steps, decode = [], Runner.decode
    monkeypatch.setattr(Runner, "decode", lambda *args: steps.append(1) or decode(*args))
    after = [len(steps) for _ in engine.generate(asked, 2, seed=0)]
    assert len(after) == len(asked)
    assert after[0] < after[2] < after[4] < len(steps) + 1  # not all at the end


def test_rollouts_may_be_interleaved_and_abandoned():
    model = make_model().eval()
    engine = NativeEngine(lambda: model, sampling(max_completion_length=40), max_sequences=4)
    tokens = lambda group: [c.token_ids for c in group.completions]  # noqa: E731
    asked = prompts(3, 4, 5, 6)
    alone = {len(g.prompt.token_ids): tokens(g) for g in engine.generate(asked, 3, seed=5)}
    first, second = engine.generate(asked, 3, seed=5), engine.generate(asked, 3, seed=6)
    found = [next(first)]
    next(second)  # and never asked again
    found += list(first)
    assert {len(g.prompt.token_ids): tokens(g) for g in found} == alone
    assert not model.training


@pytest.mark.parametrize("extra", [{}, {"stop_strings": ["ab", "z"]}])
def test_steps_begun_before_a_readback_draw_the_same(monkeypatch, extra):
    """As on a GPU, where graphs of the next steps run while the host still reads: ends, limits and hand-overs."""
    model = make_model()
    options = sampling(max_completion_length=30, eos_token_ids=(2, 7), extra=extra)
    engine = lambda: NativeEngine(lambda: model, options, tokenizer=make_tokenizer())  # noqa: E731
    draw = lambda: {  # noqa: E731
        (seed, len(g.prompt.token_ids)): [(c.token_ids, c.stop_reason) for c in g.completions]
        for seed in range(6)
        for g in engine().generate(prompts(3, 5, 9), 4, seed=seed)
    }
    expected = draw()
    ahead = []

    def run_ahead(runner, cache, steps):
        rows = runner.graphs.current.rows
        rows.run_ahead(steps)
        ahead.append(steps)
        for _ in range(steps):
            runner.step(rows, cache)
            cache.stepped()
        return rows.read_back(steps)

    monkeypatch.setattr(Runner, "chunk", 16)  # as on a GPU: more than what is begun early
    monkeypatch.setattr(Runner, "can_run_ahead", lambda self, rows: self.graphs.current.rows.loaded == rows)
    monkeypatch.setattr(Runner, "run_ahead", run_ahead)
    assert draw() == expected
    assert len(ahead) > 5
    reasons = {stop for found in expected.values() for _, stop in found}
    assert reasons == {"eos", "length"} | ({"stop_string"} if extra else set())


def test_the_engine_runs_on_its_own_device_and_hands_over_on_the_callers(monkeypatch):
    """A thread that asks is on another GPU, say: kernels and graphs are for the current one."""
    inside, seen = [], []

    @contextmanager
    def on_device(runner):
        inside.append(runner)
        try:
            yield
        finally:
            inside.pop()

    def noting(function):
        return lambda *args, **kwargs: seen.append(len(inside) > 0) or function(*args, **kwargs)

    monkeypatch.setattr(Runner, "on_device", on_device)
    monkeypatch.setattr(proof, "plain_logits", noting(proof.plain_logits))
    for name in ("prefill", "decode", "make_cache"):
        monkeypatch.setattr(Runner, name, noting(getattr(Runner, name)))
    model = make_model().eval()
    engine = NativeEngine(lambda: model, sampling(max_completion_length=20), max_sequences=2)
    for _ in engine.generate(prompts(3, 4), 2, seed=0):
        assert not inside
    assert len(seen) > 8
    assert all(seen)


@pytest.mark.parametrize(("place", "entered"), [("cuda:1", ["cuda:1"]), ("cpu", [])])
def test_the_device_of_a_runner_is_its_models(place, entered, monkeypatch):
    found = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: found.append(str(device)) or nullcontext())
    with Runner.on_device(SimpleNamespace(device=torch.device(place))):
        assert found == entered


def test_weights_that_are_broken_are_told():
    model = make_model().eval()
    engine = NativeEngine(lambda: model, sampling())
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="the model's logits are not finite"):
        list(engine.generate(prompts(3), 2, seed=0))


def test_a_prompt_without_tokens_is_refused():
    model = make_model().eval()
    engine = NativeEngine(lambda: model, sampling())
    with pytest.raises(EngineError, match="prompt 1 has no tokens"):
        list(engine.generate(prompts(3, 0), 2, seed=0))


@pytest.mark.parametrize(
    "config",
    [
        tf.LlamaConfig(
            vocab_size=46, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=16, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        tf.GPT2Config(vocab_size=46, n_embd=32, n_layer=2, n_head=4, n_positions=16),
    ],
)  # fmt: skip
def test_positions_at_which_rows_would_influence_each_other_are_refused(config):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    engine = NativeEngine(lambda: model, sampling(max_completion_length=10))
    assert len(list(engine.generate(prompts(3, 6), 2, seed=0))) == 2
    with pytest.raises(EngineError, match="pass the 16 positions"):
        list(engine.generate(prompts(3, 7), 2, seed=0))


@pytest.mark.parametrize("cls", [NativeEngine, ForkedEngine])
def test_what_was_drawn_from_is_recorded_where_filters_are_on(cls):
    model = make_model().eval()
    for options, recorded in (({}, False), ({"top_k": 3}, True)):
        (group,) = cls(lambda: model, sampling(**options)).generate(prompts(4), 2, seed=0)
        for completion in group.completions:
            assert (completion.drawn_logprobs is not None) == recorded
            if recorded:
                pairs = zip(completion.drawn_logprobs, completion.logprobs, strict=True)
                assert all(drawn > plain for drawn, plain in pairs)


def test_a_stop_string_of_several_bytes_a_character():
    """A token may be a single byte of a character: the tail that is looked at counts bytes."""
    from rloom.generation.base import is_end

    class Bytes:
        def decode(self, tokens, **options):
            return bytes(tokens).decode(errors="ignore")

    stop = "🙂🙃🛑🔚"
    options = sampling(max_completion_length=99, extra={"stop_strings": [stop]})
    tokens = list(f"so {stop}".encode())
    assert is_end(tokens, options, Bytes()) == "stop_string"
    assert is_end(tokens[:-1], options, Bytes()) is None


def test_texts_are_looked_at_once_for_several_tokens():
    model, tokenizer = make_model().eval(), make_tokenizer()
    calls = []

    class Counting:
        def decode(self, tokens, **options):
            calls.append(1)
            return tokenizer.decode(tokens, **options)

    options = sampling(max_completion_length=41, eos_token_ids=(), extra={"stop_strings": ["no such text"]})
    engine = NativeEngine(lambda: model, options, tokenizer=Counting())
    list(engine.generate(prompts(3), 1, seed=0))
    assert len(calls) <= 2 * (1 + 40 // 4)  # what is new, and its end


@pytest.mark.parametrize("chunk", [1, 4, 16])
@pytest.mark.parametrize("tail", [[240, 98], [240, 159, 152, 128], [98, 98]])
def test_bytes_that_are_no_character_hide_no_stop_string(chunk, tail):
    """Some decoders make a run of bytes that is none unreadable as a whole, with the line's end in it."""
    from rloom.generation.native.decode_loop import DecodeLoop
    from rloom.generation.native.scheduler import SampledSequence, SharedPrompt

    class Fallback:
        def decode(self, tokens, **options):
            runs = "".join(chr(t) if t in (97, 98) else f"<{t}>" for t in tokens).replace("><", ",")
            read = lambda found: bytes(map(int, found[1].split(","))).decode(errors="replace")  # noqa: E731
            whole = lambda found: "\ufffd" if "\ufffd" in read(found) else read(found)  # noqa: E731
            return re.sub(r"<([0-9,]+)>", whole, runs)

    tokens = [97, 98, 10, *tail, *[98] * 12]
    options = sampling(max_completion_length=99, eos_token_ids=(), extra={"stop_strings": ["\n"]})
    prompt = SharedPrompt([5])
    prompt.sequences = [sequence] = [SampledSequence(prompt, 0, 0, key=0)]
    runner = NativeEngine(make_model, options, tokenizer=Fallback(), prove=False)._current_runner()
    with runner.ready():
        loop = DecodeLoop(runner, [prompt], options, Fallback(), 1)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        loop._append(sequence, part, torch.zeros(len(part), 3).numpy())
        if sequence.stop_reason:
            break
    assert (sequence.tokens, sequence.stop_reason) == (tokens[:3], "stop_string")


@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=pytest.mark.slow) for how in ("model", "wrapper")), "layers"]
)
def test_models_that_somebody_compiled(how):
    expected = [c.token_ids for g in _drawn(make_model().eval()) for c in g.completions]
    model = make_model().eval()
    torch._dynamo.reset()
    if how == "model":
        model.compile(backend="eager")
    elif how == "layers":
        for layer in model.model.layers:
            layer.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    assert [c.token_ids for g in _drawn(model) for c in g.completions] == expected
    torch._dynamo.reset()


def _drawn(model):
    engine = NativeEngine(lambda: model, sampling())
    return sorted(engine.generate(prompts(1, 3, 9), 2, seed=3), key=lambda group: len(group.prompt.token_ids))


def test_an_engine_made_while_another_thread_generates():
    model = make_model().eval()
    options = sampling(max_completion_length=60)
    engine = NativeEngine(lambda: model, options)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(lambda: [list(engine.generate(prompts(3, 9, 20), 8, seed=s)) for s in range(4)])
        made = [choose_engine(lambda: model, options) for _ in range(4)]
        running.result()
    assert {type(one) for one in made} == {NativeEngine}


def test_engines_of_one_model_leave_each_other_alone():
    model = make_model(hidden_size=64).eval()
    engines = [NativeEngine(lambda: model, sampling()) for _ in range(2)]
    runners = []
    for seed in range(3):
        for engine in engines:
            list(engine.generate(prompts(3, 9), 2, seed=seed))
            runners.append(engine.runner)
    assert len(set(map(id, runners[2:]))) == 2
    assert runners[-1].layers.linears.forwards


def test_first_tokens_are_drawn_some_at_a_time(monkeypatch):
    from rloom.generation.native import decode_loop as module

    model = make_model().eval()
    draw = lambda: [  # noqa: E731
        [(c.token_ids, c.logprobs) for c in g.completions]
        for g in NativeEngine(lambda: model, sampling(repetition_penalty=1.3)).generate(prompts(3, 4, 5), 4, seed=2)
    ]
    together = draw()
    monkeypatch.setattr(module, "FIRST_AT_ONCE", 5)
    assert draw() == together


def test_engines_in_several_threads():
    """Rewards run in threads while the policy generates, and may have a model that generates too."""
    one, other = make_model().eval(), make_model(seed=1).eval()
    engines = [NativeEngine(lambda m=m: m, sampling(max_completion_length=30)) for m in (one, other, one)]
    engines.append(engines[0])  # one engine in two threads, too
    tokens = lambda engine: {  # noqa: E731
        len(g.prompt.token_ids): [c.token_ids for c in g.completions]
        for g in engine.generate(prompts(3, 14, 6, 20), 4, seed=1)
    }
    alone = [tokens(engine) for engine in engines]
    with ThreadPoolExecutor(len(engines)) as threads:
        found = list(threads.map(tokens, engines * 8))
    assert found == alone * 8


def test_a_forward_beside_generation_is_told():
    model = make_model().eval()
    engine = NativeEngine(lambda: model, sampling())
    runner = engine._current_runner()
    ids = torch.tensor([[5, 6, 7]])
    with runner.ready(), ThreadPoolExecutor(1) as thread, pytest.raises(EngineError, match="give a reward that runs"):
        thread.submit(model, input_ids=ids).result()
    assert model(input_ids=ids).logits.isfinite().all()


def test_weights_on_several_devices_are_another_engines():
    model = make_model().eval()
    model.model.norm.to("meta")
    with pytest.raises(EngineError, match="lie on several devices"):
        NativeEngine(lambda: model, sampling())


def test_adapters_that_compute_otherwise_are_seen():
    """Graphs hold the numbers that they were captured with."""
    from peft import LoraConfig, get_peft_model

    from rloom.generation.native.engine import _addresses

    model = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    seen = [_addresses(model)]
    layers = [m for m in model.modules() if hasattr(m, "scaling")]
    layers[-1].scaling["default"] *= 3
    seen.append(_addresses(model))
    layers[1].enable_adapters(False)
    seen.append(_addresses(model))
    assert len(set(seen)) == 3
    assert _addresses(model) == seen[2]


def test_a_capture_without_memory_is_tried_once_in_a_rollout(monkeypatch, caplog):
    from rloom.generation.native.graphs import Bucket

    model = make_model().eval()
    runner = NativeEngine(lambda: model, sampling())._current_runner()
    graphs = runner.graphs
    bucket = graphs.buckets[2, 0] = Bucket(rows=graphs.make_rows(2), tables=object())

    def full(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "Stream", full)
    assert graphs.is_worth_capturing(bucket, 100)
    graphs.capture(bucket, lambda: None, nullcontext())
    assert "runs without a graph" in caplog.text
    assert not graphs.is_worth_capturing(bucket, 100)
    with runner.ready():
        runner.prefill([[5, 6]])
        runner.make_cache(1, 8)
    assert graphs.is_worth_capturing(bucket, 100)


@pytest.mark.parametrize("fails", [False, True])
def test_a_compiled_step_on_a_cpu(monkeypatch, caplog, fails):
    """The same tokens, whether it is compiled or falls back."""
    from rloom.generation.native import runner

    if not fails and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("needs a compiler of C++")
    model = make_model(num_hidden_layers=1).eval()
    prompts = [Prompt(content="", token_ids=[5, 6, 7]), Prompt(content="", token_ids=[8, 9])]

    def drawn(compiled):
        engine = NativeEngine(lambda: model, sampling(max_completion_length=7), compiled=compiled)
        groups = sorted(engine.generate(prompts, 3, seed=1), key=lambda group: len(group.prompt.token_ids))
        return [c.token_ids for g in groups for c in g.completions], engine.runner

    expected, _ = drawn(False)
    compiled = []
    make = torch.compile

    def compile(forward, **options):
        if fails:
            raise RuntimeError("no compiler")
        compiled.append(forward)
        return make(forward, **options)

    monkeypatch.setattr(runner.torch, "compile", compile)
    found, made = drawn(True)
    assert found == expected
    assert (len(compiled), made.compiled.wanted) == ((0, False) if fails else (1, True))
    assert ("cannot be compiled" in caplog.text) == fails


def test_hooks_on_layers_survive_compiled_forwards():
    from rloom.models.attention import forwards_replaced

    layer = torch.nn.Linear(2, 2)
    mine = lambda x: x  # noqa: E731
    layer.forward = mine
    plain = torch.nn.Linear(2, 2)
    with forwards_replaced([(layer, None), (plain, None)]):
        pass
    assert layer.forward is mine
    assert "forward" not in plain.__dict__


def test_graphs_that_are_let_go_take_their_pool_along(model):
    """torch refuses another graph in a pool whose graphs are all gone: every later capture would fail."""
    engine = NativeEngine(lambda: model, Sampling(max_completion_length=2, eos_token_ids=(2,), pad_token_id=0))
    runner = engine._current_runner()
    runner.graphs.pool = object()
    runner.graphs.drop()
    assert runner.graphs.pool is None


def test_buffers_are_made_for_the_longest_prompt_that_is_expected(model):
    sampling = Sampling(max_completion_length=2, eos_token_ids=(2,), pad_token_id=0)
    engine = NativeEngine(lambda: model, sampling, longest_prompt=90)
    list(engine.generate([Prompt(content="", token_ids=[5, 6])], 2, seed=0))
    assert engine.runner.graphs.max_prompt == 128


@pytest.mark.parametrize("penalty", [1.0, 3.0])
def test_padding_is_no_token_that_was_seen(penalty):
    """Beside a long prompt a short one is padded: what it draws is what it draws alone, and what the native engine
    draws."""
    model = make_model().eval()
    short, long = prompts(3, 20)
    options = sampling(temperature=0.0, repetition_penalty=penalty, eos_token_ids=(45,), max_completion_length=12)
    for pad in range(4, 40):  # tokens that are drawn too
        engine = TransformersEngine(lambda: model, replace(options, pad_token_id=pad))
        alone, together = list(engine.generate([short], 1, seed=0)), list(engine.generate([short, long], 1, seed=0))
        assert together[0].completions[0].token_ids == alone[0].completions[0].token_ids
    (native,) = NativeEngine(lambda: model, options).generate([short], 1, seed=0)
    assert native.completions[0].token_ids == alone[0].completions[0].token_ids
