"""Decode steps whose layers are compiled: what is compiled, and whether it is right."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import transformers as tf

from rloom.generation.base import Sampling
from rloom.generation.native import NativeEngine, graphs, runner
from rloom.generation.native.layers import compiled
from rloom.types import Prompt

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels are compiled: tests/gpu"
)

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES)),  # rotates a part, norms otherwise
}


@pytest.mark.parametrize("name", ["llama", pytest.param("neox", marks=pytest.mark.slow)])
def test_a_compiled_step_draws_what_a_plain_one_draws(name):
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.float16).eval()
    sampling = Sampling(max_completion_length=6, eos_token_ids=(), pad_token_id=0)
    prompts = [Prompt(content="", token_ids=[5, 6, 7]), Prompt(content="", token_ids=[8, 9])]

    def drawn(compiled):
        engine = NativeEngine(lambda: model, sampling, compiled=compiled)
        groups = list(engine.generate(prompts, 2, seed=0))
        assert engine.runner.compiled.wanted == compiled
        return [completion for group in groups for completion in group.completions]

    fused, eager = drawn(True), drawn(False)
    assert [c.token_ids for c in fused] == [c.token_ids for c in eager]
    for ours, theirs in zip(fused, eager, strict=True):
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=0.01)


@pytest.mark.parametrize(
    ("kind", "said"), [("right", ""), ("wrong", "differs from the plain one"), ("broken", "cannot be compiled")]
)
def test_a_compiled_step_is_compared_with_the_plain_one(kind, said, monkeypatch, caplog):
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    engine = NativeEngine(lambda: model, Sampling(max_completion_length=9, eos_token_ids=(), pad_token_id=0))
    found, decode_ = [], runner.Runner.decode

    def other(own, *args, **kwargs):
        if kind == "broken":
            raise RuntimeError("no compiler")
        return own(*args, **kwargs).roll(int(kind == "wrong"), -1)

    def decode(self, sequences, cache, *others):
        readback = decode_(self, sequences, cache, *others)
        if found:
            return readback
        rows = self.graphs.current.rows
        self.compiled.wanted = True
        self.compiled.forwards = [(x, functools.partial(other, x.forward)) for x in model.model.layers]
        self.compiled.prove(rows, lambda: self.logits(rows, cache), self.noise)
        found.append(self.compiled.wanted)
        self.compiled.wanted = False
        return readback

    monkeypatch.setattr(runner.Runner, "decode", decode)
    list(engine.generate([Prompt(content="", token_ids=[5, 6, 7])], 2, seed=0))
    assert found == [kind == "right"]
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)


def test_a_single_row_is_compared_apart(monkeypatch):
    """It is compiled apart. And of many rows, only some are looked at."""
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    engine = NativeEngine(lambda: model, Sampling(max_completion_length=3, eos_token_ids=(), pad_token_id=0))
    found, shapes, decode_, turns = [], [], runner.Runner.decode, iter([0, 1, 1])

    def decode(self, sequences, cache, *others):
        readback = decode_(self, sequences, cache, *others)
        turn, rows = next(turns), self.graphs.current.rows
        rows.alive.fill_(1)
        self.compiled.wanted = True
        other = lambda f, *a, **k: f(*a, **k).roll(turn, -1)  # noqa: E731
        self.compiled.forwards = [(x, functools.partial(other, x.forward)) for x in layers]
        self.compiled.prove(rows, lambda: self.logits(rows, cache), self.noise)
        found.append(self.compiled.wanted)
        self.compiled.wanted = False
        return readback

    def difference(ours, theirs):
        shapes.append(len(ours))
        return difference_(ours, theirs)

    layers, difference_ = model.model.layers, compiled.difference
    monkeypatch.setattr(runner.Runner, "decode", decode)
    monkeypatch.setattr(compiled, "difference", difference)
    monkeypatch.setattr(compiled, "COMPARED_ROWS", 2)
    for count in (3, 3, 1):
        list(engine.generate([Prompt(content="", token_ids=[5, 6, 7])], count, seed=0))
    assert found == [True, True, False]  # what has proved right is not tried again
    assert shapes == [2, 1]


@pytest.mark.slow  # its parts have quicker tests; tests/gpu has it as it is
@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_with_the_kernels(whole, monkeypatch):
    """As on a GPU, but for graphs."""
    monkeypatch.setattr(runner.Runner, "paged", True)
    monkeypatch.setattr(graphs.Graphs, "is_worth_capturing", lambda *_: False)
    monkeypatch.setattr("rloom.generation.native.cache.paged.PROGRAMS", 1 if whole else 512)
    monkeypatch.setattr("rloom.generation.native.cache.paged.SHORT", 0)
    torch.manual_seed(0)
    model = MODELS["llama"]().to(torch.float16).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # else attention hardly shows in what is drawn
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    sampling = Sampling(max_completion_length=7, eos_token_ids=(), pad_token_id=0)
    engine = NativeEngine(lambda: model, sampling, compiled=True)
    prompts = [Prompt(content="", token_ids=[5 + i % 30 for i in range(70)]), Prompt(content="", token_ids=[8, 9])]
    exact = MODELS["llama"]().eval()
    exact.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    for group in engine.generate(prompts, 3, seed=0):
        for completion in group.completions:
            tokens = torch.tensor([group.prompt.token_ids + completion.token_ids])
            with torch.no_grad():
                logits = exact(input_ids=tokens).logits[0, -8:-1].log_softmax(-1)
            truth = logits.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.logprobs), truth, rtol=0, atol=0.02)
    assert engine.runner.compiled.wanted
    assert all(bucket.tables.whole == whole for bucket in engine.runner.graphs.buckets.values())


def test_another_runner_compiles_nothing_anew(monkeypatch):
    """Weights that have moved make a new one: after a few, the compiler would refuse."""
    found = []

    def compile_layer(graph, inputs, **options):
        found.append(graph)
        return graph.forward

    # the compiler's own equality of options decides, so that only what it then does is replaced
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_layer)
    torch._dynamo.reset()
    stack = MODELS["llama"]().model.layers
    for _ in range(3):
        for layer, forward in compiled.compiled_forwards(stack, on_gpu=False)[:1]:
            assert layer is stack[0]
            forward(torch.randn(3, 1, 32), position_embeddings=(torch.ones(3, 1, 8), torch.ones(3, 1, 8)))
    torch._dynamo.reset()
    assert len(found) == 1


def test_what_stacks_share_is_compiled_once():
    model = torch.nn.Module()
    model.first, model.second = (MODELS["llama"]().model for _ in range(2))
    model.second.rotary_emb = model.first.rotary_emb
    parts = compiled.beside(model)
    assert len(parts) == len(set(parts)) == 3
