"""The engine's attention, through transformers' attention interface: prompts as packed rows whose keys and values are
kept, then one token per row over what was kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from rloom.errors import EngineError
from rloom.generation.native.cache.dense import DenseCache
from rloom.generation.native.cache.geometry import Layer
from rloom.generation.native.cache.paged import PagedCache
from rloom.generation.native.operators import define_operator
from rloom.generation.native.rows import Rows
from rloom.models.attention import attend_packed, attention_for_text, attention_of, in_one_dtype, running
from rloom.types import PackedRow

NAME = "rloom_native"

Cache = DenseCache | PagedCache
"""Where keys and values are kept for one rollout: both have the same methods."""


class _Active(threading.local):
    """What a thread's attention calls are about: rewards may generate, with other models, while the policy does."""

    def __init__(self) -> None:
        self.cache: Cache | None = None
        self.prompts: PackedRow | None = None  # set: a prefill
        self.rows: Rows | None = None  # set: a decode step
        self.found: dict[int, Layer] = {}  # what each layer keeps, as seen in prefills
        self.calls = 0
        self.order: tuple[int, ...] = ()  # the layers in the order of their calls
        # Cosines and sines by which the next call's query and key are still to be rotated.
        self.rotation: tuple[Tensor, Tensor] | None = None


_active = _Active()


@contextmanager
def prefilling(cache: Cache | None, row: PackedRow) -> Iterator[dict[int, Layer]]:
    """Attention calls are about these prompts; yields what each layer keeps, filled as they come."""
    _active.cache, _active.prompts, _active.rows = cache, row, None
    _active.found, _active.calls, _active.order = {}, 0, ()
    try:
        with running(row):
            yield _active.found
    finally:
        _active.cache, _active.prompts = None, None


@contextmanager
def decoding(cache: Cache, rows: Rows, *, order: tuple[int, ...] = ()) -> Iterator[None]:
    """Attention calls are about one token of each row; `order`: the layers as they are called, for compiled ones."""
    _active.cache, _active.prompts, _active.rows, _active.calls = cache, None, rows, 0
    _active.order, _active.rotation = order, None
    try:
        yield
    finally:
        _active.cache, _active.rows = None, None


@contextmanager
def native_attention(model: Any) -> Iterator[None]:
    """Let `model` attend as the engine does meanwhile."""
    before = attention_of(model.config)
    model.set_attn_implementation(attention_for_text(model.config, NAME))
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def rotate_in_attention(cos: Tensor, sin: Tensor) -> None:
    """Query and key of the next attention call come as they are: the kernel rotates them."""
    _active.rotation = (cos, sin)


def num_calls() -> int:
    """Attention calls since the prefill or step began: one per layer, or the model does not use the interface."""
    return _active.calls


def _attention(
    module: Any,
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, H_kv, T, D)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls. Returns (B, T, H, E)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = (scale, sliding_window or 0, softcap or 0.0)
    # Here: compiled code is run with autocast off.
    query, key, value = in_one_dtype(query, key, value)
    if torch.compiler.is_compiling() and query.shape[2] == 1:
        # One operator: a layer's number in here would have every layer compiled anew. (Prompts are run by compiled
        # layers only where somebody else compiled them.)
        return torch.ops.rloom.native_decode(query, key, value, s_aux, *options), None
    rotation, _active.rotation = _active.rotation, None
    if rotation is not None and rotation[0].shape[-1] != query.shape[-1]:
        raise EngineError("what is rotated is a part of the heads that attend")
    return _run(query, key, value, s_aux, int(module.layer_idx), *options, rotation), None


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    cap: float,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    _active.calls += 1
    if _active.rows is not None and _active.cache is not None:
        options = {"scale": scale, "window": window, "softcap": cap, "sinks": sinks, "rotation": rotation}
        return _active.cache.attend(layer, query, key, value, _active.rows, options)
    row = _active.prompts
    if row is None:
        raise EngineError(
            "the model was run in one thread while it generates in another: give a reward that runs the policy a copy "
            "of it, or generate there too, with an engine"
        )
    _active.found[layer] = Layer(key.shape[1], key.shape[-1], value.shape[-1], query.shape[1], key.dtype)
    if _active.cache is not None:
        _active.cache.keep(layer, key, value, row)
    return attend_packed(query, key, value, scale, 0.0, window or None, cap or None, sinks)


def _run_next(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *options: Any) -> Tensor:
    """The layer whose turn it is: they come in the same order each time."""
    layer = _active.order[_active.calls] if _active.order else _active.calls
    return _run(query, key, value, sinks, layer, *options)


AttentionInterface.register(NAME, _attention)

define_operator(
    "native_decode(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window, float softcap) -> Tensor",
    _run_next,
    lambda q, k, v, *options: q.new_empty((q.shape[0], 1, q.shape[1], v.shape[-1])),
)
