"""The learner's attention, over a packed row ([`PackedRow`]): prompts are causal among themselves, completions see
their prompt and themselves. (The native engine's attention, over its cache, is `generation/native/cache/attention.py`.)

It stands in for a model's own attention through transformers' attention interface, so that any architecture that goes
through that interface can be trained on packed rows unchanged. Two forms, chosen per call:

- `prefix.py`: Triton kernels made for such rows; on CUDA.
- `block_attention.py`: scaled dot-product attention, block by block; for CPUs, dropout, heads that are too wide.

For `torch.compile` the whole of it is one opaque operator, `rloom::shared_prefix`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from rloom.models.block_attention import attend_blocks
from rloom.models.fused import FusedLayers, forwards_replaced
from rloom.models.prefix import (
    Options,
    Tiles,
    effective_window,
    fits,
    launch,
    longest_sequence,
    prefix_forward,
    prefix_grads,
)
from rloom.types import PackedRow

NAME = "rloom_shared_prefix"


@dataclass(slots=True)
class _Running:
    """A row that is being run."""

    row: PackedRow | None = None
    tiles: dict[int, Tiles] = field(default_factory=dict)
    calls: int = 0


@dataclass(slots=True)
class _Active:
    """What holds for all threads: one of them trains."""

    trained: _Running = field(default_factory=_Running)  # the row that is run for its gradients
    replaced: list[tuple[Any, Any]] = field(default_factory=list)  # models, and the attention that is their own
    compiled: CompiledLayers | None = None
    opaque: bool = False  # layers are compiled: attention must be one operator


class _Here(threading.local):
    """What holds for this thread: a reward may have an engine of its own in another."""

    running: _Running | None = None


_active = _Active()
_here = _Here()


def _current() -> _Running:
    """What this thread runs; the row that is trained on, if it runs none.

    With gradient checkpointing layers run again inside the backward, which torch may do in a thread of its own.
    """
    return _here.running or _active.trained


def attention_of(config: PretrainedConfig) -> Any:
    """The attention in use, in the form that `set_attn_implementation` takes: a vision tower may have its own."""
    inner = {name: attention_of(part) for name in config.sub_configs if (part := getattr(config, name)) is not None}
    return {"": config._attn_implementation, **inner} if inner else config._attn_implementation


def attention_for_text(config: PretrainedConfig, ours: str = NAME) -> Any:
    """Our attention for the text; a tower of images keeps the one that it has, since its rows are not packed."""

    def within(part: PretrainedConfig) -> Any:
        if part is config.get_text_config():
            return ours
        inner = {name: within(p) for name in part.sub_configs if (p := getattr(part, name)) is not None}
        own = ours if part is config else part._attn_implementation
        return {"": own, **inner} if inner else own

    return within(config)


@contextmanager
def packed_attention(models: list[Any], layers: CompiledLayers | FusedLayers | None = None) -> Iterator[None]:
    """Let `models` attend over packed rows until the backward is done: checkpointing runs layers again in it.

    `layers`: a faster form of the models' layers, which is in use meanwhile.
    """
    before = [(model, attention_of(model.config)) for model in models]
    for model in models:
        model.set_attn_implementation(attention_for_text(model.config))
    _active.replaced, _active.compiled = before, layers if isinstance(layers, CompiledLayers) else None
    _active.opaque = _active.compiled is not None
    try:
        with nullcontext() if layers is None else layers.used():
            yield
    finally:
        _active.replaced, _active.compiled, _active.opaque = [], None, False
        for model, own in before:
            model.set_attn_implementation(own)


@contextmanager
def own_attention() -> Iterator[None]:
    """Inside of [`packed_attention`]: the models as they are, for a micro-batch that is not packed."""
    replaced, compiled = _active.replaced, _active.compiled
    for model, own in replaced:
        model.set_attn_implementation(own)
    try:
        with nullcontext() if compiled is None else compiled.unused():
            yield
    finally:
        for model, _ in replaced:
            model.set_attn_implementation(attention_for_text(model.config))


class CompiledLayers:
    """The decoder layers of some models, compiled for packed rows, and in use only while those are run.

    Layers of one kind share their code, so that it is compiled once; sizes are dynamic. Sampling keeps the layers as
    they are: it runs them with another attention and other shapes.
    """

    def __init__(self, models: list[Any]) -> None:
        # The decoders' layers alone: a tower of images stays as it is.
        decoders = [model.get_decoder() for model in models]
        layers = [m for decoder in decoders for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.plain = [(layer, layer.forward) for layer in layers]
        options = _compile_options()
        self.layers = [(layer, torch.compile(layer.forward, dynamic=True, options=options)) for layer in layers]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the compiled forms meanwhile."""
        # Activations that cost a pass over memory are made again in the backward: a third less is kept.
        with forwards_replaced(self.layers), functorch_config.patch(ban_recompute_materialized_backward=False):
            yield

    def unused(self) -> AbstractContextManager[None]:
        """Inside of `used`: run the layers as they are."""
        return forwards_replaced(self.plain)


def _compile_options() -> dict[str, Any]:
    """One form for rows of all lengths: mixed-order reductions have rows above and below 4,096 tokens compiled apart.

    An update with both took 0.58 s and 24.0 GiB with them, and takes 0.40 s and 21.4 GiB without (bench/RESULTS.md).
    """
    # Here, so that only who compiles waits for the import.
    import torch._inductor.config as inductor_config

    known = hasattr(inductor_config.triton, "mix_order_reduction")
    return {"triton.mix_order_reduction": False} if known else {}


@contextmanager
def running(row: PackedRow) -> Iterator[None]:
    """The row that attention calls are about, from its forward to the end of its backward."""
    before, trained = _here.running, _active.trained
    _here.running = _Running(row)
    if torch.is_grad_enabled():
        _active.trained = _here.running
    try:
        yield
    finally:
        if _active.trained is _here.running:
            _active.trained = trained
        _here.running = before


def num_calls() -> int:
    """Attention calls since the row began to run: one per layer, or the model does not use the interface."""
    return _current().calls


def shared_prefix_attention(
    module: Any,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, H_kv, T, D)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls. Returns (1, T, H, D)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    drop = float(dropout) if module.training else 0.0
    query, key, value = in_one_dtype(query, key, value)
    if _active.opaque and not drop and fits(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        out, _ = torch.ops.rloom.shared_prefix(q, k, v, s_aux, scale, sliding_window or 0, softcap or 0.0)
        return out.unsqueeze(0), None
    return attend_packed(query, key, value, scale, drop, sliding_window, softcap, s_aux), None


def in_one_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As the library's attention takes them: under autocast in its dtype (rotations leave float32), else the query's.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     [x.dtype for x in in_one_dtype(torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.bfloat16))]
    [torch.bfloat16, torch.bfloat16, torch.bfloat16]
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


@torch.compiler.disable
def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention over the row that is running: (1, H, T, D) → (1, T, H, D)."""
    now = _current()
    row = now.row
    assert row is not None, "packed attention was called outside of a packed forward"
    now.calls += 1
    if not dropout and fits(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        options = Options(scale=scale, window=window, softcap=softcap)
        return _SharedPrefix.apply(q, k, v, sinks, _tiles(q, v), options).unsqueeze(0)
    window = effective_window(window, longest_sequence(row))
    out = attend_blocks(
        query[0], key[0], value[0], row, scale=scale, window=window, softcap=softcap, sinks=sinks, dropout=dropout
    )
    return out.transpose(0, 1).unsqueeze(0)


AttentionInterface.register(NAME, shared_prefix_attention)


def _tiles(q: Tensor, v: Tensor) -> Tiles:
    """The active row in tiles, cut once for all layers."""
    now, size = _current(), launch(q, v).tile
    assert now.row is not None
    if size not in now.tiles:
        now.tiles[size] = Tiles.of(now.row, q.device, size)
    return now.tiles[size]


class _SharedPrefix(torch.autograd.Function):
    """The kernels, differentiable."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: Tiles, options: Options
    ) -> Tensor:
        out, lse = prefix_forward(q, k, v, sinks, tiles, options)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.options = (tiles, options)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        return (*prefix_grads(grad, q, k, v, out, lse, sinks, *ctx.options), None, None)


# -- The same as one operator, for torch.compile, which must not look inside: what it does depends on the row.


# Registered by hand rather than with `torch.library.custom_op`, whose checks cost half a millisecond per call.
_library = torch.library.Library("rloom", "DEF")
_library.define(
    "shared_prefix(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window, float softcap) "
    "-> (Tensor, Tensor)"
)
_library.define(
    "shared_prefix_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, "
    "float scale, int window, float softcap) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _options(scale: float, window: int, softcap: float) -> Options:
    return Options(scale=scale, window=window or None, softcap=softcap or None)


def _operator(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    _current().calls += 1
    return prefix_forward(q, k, v, sinks, _tiles(q, v), _options(*options))


def _operator_shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    count, heads, _ = q.shape
    return q.new_empty((count, heads, v.shape[-1])), q.new_empty((heads, count), dtype=torch.float32)


def _operator_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dsinks = prefix_grads(grad, q, k, v, out, lse, sinks, _tiles(q, v), _options(*options))
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _operator_backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


_library.impl("shared_prefix", _operator, "CUDA")
_library.impl("shared_prefix_backward", _operator_backward, "CUDA")
torch.library.register_fake("rloom::shared_prefix", _operator_shapes)
torch.library.register_fake("rloom::shared_prefix_backward", _operator_backward_shapes)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, *options = inputs
    ctx.save_for_backward(q, k, v, *output, sinks)
    ctx.options = options


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, sinks = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.rloom.shared_prefix_backward(grad, q, k, v, out, lse, sinks, *ctx.options)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None


torch.library.register_autograd("rloom::shared_prefix", _backward, setup_context=_setup)
