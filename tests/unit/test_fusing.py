"""What is put together before a layer's decode step is compiled: found where it is, and nowhere else."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import transformers as tf
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from rloom.generation.base import Sampling
from rloom.generation.native import NativeEngine, attention, compiled, fusing, runner
from rloom.types import Prompt

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels are compiled: tests/gpu"
)


def graph_of(function, *inputs):
    """The function's graph of operations as the compiler has them, fused; and the names of our operators in it."""
    traced = make_fx(function, tracing_mode="fake", decomposition_table=select_decomp_table())(*inputs)
    fusing.Fusing()(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, [node.target._opname for node in traced.graph.nodes if "rloom" in str(node.target)]


# -- rotation


def half_turned(x):
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def turned(x, cos, sin):
    return x * cos.unsqueeze(1) + half_turned(x) * sin.unsqueeze(1)


def other_way_round(x, cos, sin):
    return sin.unsqueeze(1) * half_turned(x) + cos.unsqueeze(1) * x


def turned_back(x, cos, sin):  # the halves the other way
    half = torch.cat([x[..., x.shape[-1] // 2 :], -x[..., : x.shape[-1] // 2]], -1)
    return x * cos.unsqueeze(1) + half * sin.unsqueeze(1)


def in_pairs(x, cos, sin):  # neighbours, not halves
    both = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * cos.unsqueeze(1) + both * sin.unsqueeze(1)


def in_part(x, cos, sin):
    return torch.cat([turned(x[..., :4], cos[..., :4], sin[..., :4]), x[..., 4:]], -1)


def uneven(x, cos, sin):  # a third, not a half
    return x * cos.unsqueeze(1) + torch.cat([-x[..., 3:], x[..., :3]], -1) * sin.unsqueeze(1)


def scaled(x, cos, sin):
    return turned(x, cos, sin) * 1.5


def two_shares(x, cos, sin):  # numbers where there might be angles
    return x * cos[0, 0, 0] + x.flip(-1) * sin[0, 0, 0]


def decode(q, k, v):
    return torch.ops.rloom.native_decode(q, k, v, None, 0.3, 0, 0.0)


@pytest.fixture
def plain_attention(monkeypatch):
    """The operators as something simple that depends on all they are given."""

    def run(query, key, value, sinks, layer, scale, window, cap, rotation=None):
        from rloom.generation.native.dense import rotated

        if rotation is not None:
            query, key = (rotated(x, *rotation) for x in (query, key))
        return (query * key.sum() + value).transpose(1, 2) * scale

    monkeypatch.setattr(attention, "_run", run)
    monkeypatch.setattr(attention._active, "order", (0,))
    monkeypatch.setattr(attention._active, "calls", 0)


@pytest.mark.parametrize("form", [turned, other_way_round, turned_back, in_pairs, in_part, uneven, scaled, two_shares])
def test_a_rotation_is_left_to_the_attention_kernel(form, plain_attention):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 1, 8), torch.randn(3, 2, 1, 8), torch.randn(3, 2, 1, 8)
    cos, sin = torch.randn(2, 3, 1, 8)

    def layer(q, k, v, cos, sin):
        return decode(form(q, cos, sin), form(k, cos, sin), v)

    traced, ours = graph_of(layer, q, k, v, cos, sin)
    assert ours == ["native_decode_rotating" if form in (turned, other_way_round) else "native_decode"]
    torch.testing.assert_close(traced(q, k, v, cos, sin), layer(q, k, v, cos, sin))


@pytest.mark.parametrize("what", ["key not", "other angles", "angles of all rows", "in double precision"])
def test_a_rotation_that_is_another_stays(what, plain_attention):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3, 2, 1, 8)
    cos, sin, other = torch.randn(3, 3, 1, 8)
    if what == "angles of all rows":
        cos, sin = cos[:1], sin[:1]
    if what == "in double precision":
        cos, sin = cos.double(), sin.double()

    def layer(q, k, v, cos, sin, other):
        key = k if what == "key not" else turned(k, other if what == "other angles" else cos, sin)
        return decode(turned(q, cos, sin), key, v)

    traced, ours = graph_of(layer, q, k, v, cos, sin, other)
    assert ours == ["native_decode"]
    torch.testing.assert_close(traced(q, k, v, cos, sin, other), layer(q, k, v, cos, sin, other))


# -- residual


def norm(x, weight, epsilon=1e-5):
    exact = x.float()
    return weight * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def product(x, weight):
    return (x.view(-1, x.shape[-1]) @ weight).view(x.shape)


def plain(a, b, scale, weight):
    total = a + b
    return total + product(norm(total, scale).sigmoid(), weight)


def returned_too(a, b, scale, weight):
    total = a + b
    return total + product(norm(total, scale), weight), total


def read_later(a, b, scale, weight):
    total = a + b
    return total + product(norm(total, scale), weight) * 1.0, total.sum()


def seen_otherwise(a, b, scale, weight):
    total = a + b
    return total + product(norm(total, scale), weight), total.view(-1)


def of_the_input(a, b, scale, weight):
    return a + product(norm(a, scale), weight)


def other_norm(a, b, scale, weight):
    total = a + b
    return total + product((1 + scale) * norm(total, torch.ones_like(scale)), weight)


def over_rows(a, b, scale, weight):
    total = a + b
    exact = total.float()
    normed = scale * (exact * torch.rsqrt(exact.pow(2).mean(0, keepdim=True) + 1e-5)).to(total.dtype)
    return total + product(normed, weight)


def less(a, b, scale, weight):
    total = a + b
    return total - product(norm(total, scale), weight)


def broadcast(a, b, scale, weight):
    total = a + b[:1]
    return total + product(norm(total, scale), weight)


def one_row_for_all(a, b, scale, weight):
    total = a + b
    return total + (norm(total, scale)[:1].view(1, -1) @ weight).view(1, 1, -1)


FORMS = [
    plain, returned_too, read_later, seen_otherwise, of_the_input, other_norm, over_rows, less, broadcast,
    one_row_for_all,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_added_in_place(form):
    torch.manual_seed(0)
    inputs = [torch.randn(5, 1, 24), torch.randn(5, 1, 24), torch.rand(24) + 0.5, torch.randn(24, 24) / 5]
    inputs = [x.half() for x in inputs]
    before = [x.clone() for x in inputs]
    traced, ours = graph_of(form, *inputs)
    assert ours == (["add_norm", "add_product_"] if form is plain else [])
    torch.testing.assert_close(traced(*inputs), form(*inputs), rtol=4e-3, atol=4e-3)
    assert all(map(torch.equal, inputs, before))  # what came from outside is as it was


@pytest.mark.parametrize("what", ["one weight", "in double precision"])
def test_a_norm_that_the_kernel_does_not_have_stays(what):
    torch.manual_seed(0)
    inputs = [torch.randn(5, 1, 24), torch.randn(5, 1, 24), torch.rand(24) + 0.5, torch.randn(24, 24) / 5]
    inputs = [x.double() if what == "in double precision" else x.half() for x in inputs]
    inputs[2] = inputs[2][:1].clone() if what == "one weight" else inputs[2]

    def form(a, b, scale, weight):
        total = a + b
        exact = total.to(torch.float32)
        normed = scale * (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5)).to(total.dtype)
        return total + product(normed, weight)

    traced, ours = graph_of(form, *inputs)
    assert ours == []
    assert torch.equal(traced(*inputs), form(*inputs))


def test_the_compiler_knows_how_sum_and_norm_lie_in_memory():
    turned_round = torch.randn(24, 5).half().t().unsqueeze(1)
    inputs = (turned_round, torch.randn(5, 1, 24).half(), torch.rand(24).half(), None, 1e-5)
    torch.library.opcheck(torch.ops.rloom.add_norm.default, inputs, test_utils=("test_faketensor",))


@pytest.mark.parametrize("width", [24, 1536])
def test_sum_and_norm(width):
    from rloom.generation.native.norm_kernels import add_norm

    torch.manual_seed(0)
    a, b, weight = torch.randn(7, 1, width).half(), torch.randn(7, 2, width).half()[:, :1], torch.rand(width).half()
    total, normed = add_norm(a, b, weight, 1e-5)
    assert torch.equal(total, a + b)
    torch.testing.assert_close(normed, norm(a + b, weight), rtol=2e-3, atol=1e-3)


# -- in the engine

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "num_attention_heads": 4}
MODELS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES)),  # rotates a part, norms otherwise
}


@pytest.fixture
def operators(monkeypatch):
    """Layers are compiled with the pass, as on a GPU; the names of our operators that have come into their graphs."""
    found = set()

    class Seen(fusing.Fusing):
        def __call__(self, graph):
            super().__call__(graph)
            found.update(node.target._opname for node in graph.nodes if "rloom" in str(node.target))

        def uuid(self):
            return None  # nothing from the cache: the graph has to be seen

    compile_, options = torch.compile, {"post_grad_custom_pre_pass": Seen()}
    monkeypatch.setattr(runner.torch, "compile", lambda f, **kwargs: compile_(f, **{**kwargs, "options": options}))
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", {"native_decode_rotating", "add_norm", "add_product_"}), ("neox", {"native_decode"})],
)
def test_a_compiled_step_with_it(name, expected, operators):
    torch.manual_seed(0)
    model = MODELS[name]().to(torch.float16).eval()
    sampling = Sampling(max_completion_length=6, eos_token_ids=(), pad_token_id=0)
    prompts = [Prompt(content="", token_ids=[5, 6, 7]), Prompt(content="", token_ids=[8, 9])]

    def drawn(compiled):
        engine = NativeEngine(lambda: model, sampling, compiled=compiled)
        groups = list(engine.generate(prompts, 2, seed=0))
        return [completion for group in groups for completion in group.completions]

    fused, eager = drawn(True), drawn(False)
    assert operators == expected
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
        look = decode_(self, sequences, cache, *others)
        if found:
            return look
        self.compiled = True
        self.layers = [(layer, functools.partial(other, layer.forward)) for layer in model.model.layers]
        found.append(self.compiled_is_right(self.bucket.rows, cache))
        self.compiled = False
        return look

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
        look = decode_(self, sequences, cache, *others)
        turn = next(turns)
        self.bucket.rows.alive.fill_(1)
        self.compiled = True
        self.layers = [(x, functools.partial(lambda f, *a, **k: f(*a, **k).roll(turn, -1), x.forward)) for x in layers]
        found.append(self.compiled_is_right(self.bucket.rows, cache))
        self.compiled = False
        return look

    def difference(ours, theirs):
        shapes.append(len(ours))
        return difference_(ours, theirs)

    layers, difference_ = model.model.layers, runner.difference
    monkeypatch.setattr(runner.Runner, "decode", decode)
    monkeypatch.setattr(runner, "difference", difference)
    monkeypatch.setattr(runner, "COMPARED", 2, raising=False)
    for count in (3, 3, 1):
        list(engine.generate([Prompt(content="", token_ids=[5, 6, 7])], count, seed=0))
    assert found == [True, True, False]  # what has proved right is not tried again
    assert shapes == [2, 1]


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_with_the_kernels(whole, operators, monkeypatch):
    """As on a GPU, but for graphs: pages, attention that rotates, sums with their norm, products in place."""
    monkeypatch.setattr(runner.Runner, "paged", True)
    monkeypatch.setattr(runner.Runner, "_worth_a_graph", lambda *_: False)
    monkeypatch.setattr("rloom.generation.native.paged.PROGRAMS", 1 if whole else 512)
    monkeypatch.setattr("rloom.generation.native.paged.SHORT", 0)
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
    assert operators == {"native_decode_rotating", "add_norm", "add_product_"}
    assert engine.runner.compiled
    assert all(bucket.tables.whole == whole for bucket in engine.runner.buckets.values())


def test_another_runner_compiles_nothing_anew(monkeypatch):
    """Weights that have moved make a new one: after a few, the compiler would refuse."""
    found = []

    def compile_layer(graph, inputs, **options):
        found.append(graph)
        return graph.forward

    # the compiler's own equality of options decides, so that only what it then does is replaced
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_layer)
    torch._dynamo.reset()
    layer = torch.nn.LayerNorm(8)
    for _ in range(3):
        options = {"post_grad_custom_pre_pass": compiled._fusing()}
        torch.compile(layer.forward, dynamic=True, options=options)(torch.randn(3, 8))
    torch._dynamo.reset()
    assert len(found) == 1


@pytest.mark.parametrize("module", [fusing, attention])
def test_compiled_code_is_not_kept_when_an_operator_becomes_another(module, tmp_path, monkeypatch):
    before = fusing.Fusing().uuid()
    changed = tmp_path / "changed.py"
    changed.write_text("another")
    monkeypatch.setattr(module, "__file__", str(changed))
    assert fusing.Fusing().uuid() != before


def test_what_stacks_share_is_compiled_once():
    model = torch.nn.Module()
    model.first, model.second = (MODELS["llama"]().model for _ in range(2))
    model.second.rotary_emb = model.first.rotary_emb
    parts = compiled.beside(model)
    assert len(parts) == len(set(parts)) == 3
