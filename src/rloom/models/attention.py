"""Attention over a packed row ([`PackedRow`]): prompts causal among themselves, completions see [prompt, themselves].

It stands in for a model's own attention through transformers' attention interface, so that any architecture that goes
through that interface can be trained on packed rows unchanged. Two forms, chosen per call:

- `flash`: two calls of torch's varlen flash attention per layer: prompts on themselves; completions on [their prompt,
  themselves], for which keys and values are gathered. With sinks, both are scaled by their log-sum-exps afterwards, and
  the backward runs flash attention's own with the output and log-sum-exp *after* that, which gives the exact gradient:
  p_ij = exp(s_ij − lse_i) holds once lse_i counts the sink.
- `two_part`: scaled dot-product attention, block by block; for CPUs, float32, soft-caps.

For `torch.compile` the whole of it is one opaque operator, `rloom::shared_prefix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from rloom.types import PackedRow

NAME = "rloom_shared_prefix"


@dataclass(slots=True)
class _Active:
    """The row that is being run. A plain global: with gradient checkpointing, layers run again inside the backward,
    which torch may do in a thread of its own, where context variables are not seen."""

    row: PackedRow | None = None
    flash: _FlashIndex | None = None
    calls: int = 0
    opaque: bool = False  # layers are compiled: attention must be one operator


_active = _Active()


@contextmanager
def packed_attention(models: list[Any], compiled: CompiledLayers | None = None) -> Iterator[None]:
    """Let `models` attend over packed rows meanwhile. Stays set until the backward is done (checkpointing)."""
    before = [model.config._attn_implementation for model in models]
    for model in models:
        model.set_attn_implementation(NAME)
    _active.opaque = compiled is not None
    try:
        with nullcontext() if compiled is None else compiled.used():
            yield
    finally:
        _active.opaque = False
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)


class CompiledLayers:
    """The decoder layers of some models, compiled for packed rows, and in use only while those are run.

    Layers of one kind share their code, so that it is compiled once; sizes are dynamic. Sampling keeps the layers as
    they are: it runs them with another attention and other shapes.
    """

    def __init__(self, models: list[nn.Module]) -> None:
        layers = [m for model in models for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self.layers = [(layer, torch.compile(layer.forward, dynamic=True)) for layer in layers]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the compiled forms meanwhile."""
        for layer, forward in self.layers:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self.layers:
                del layer.forward  # uncovers the class' own


@contextmanager
def running(row: PackedRow) -> Iterator[None]:
    """The row that attention calls are about, from its forward to the end of its backward."""
    previous = (_active.row, _active.flash, _active.calls)
    _active.row, _active.flash, _active.calls = row, None, 0
    try:
        yield
    finally:
        _active.row, _active.flash, _active.calls = previous


def num_calls() -> int:
    """Attention calls since the row began to run: one per layer, or the model does not use the interface."""
    return _active.calls


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
    key, value = key.to(query.dtype), value.to(query.dtype)  # under autocast they may differ
    if _active.opaque and _fits_flash(query, softcap, drop):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        out, _ = torch.ops.rloom.shared_prefix(q, k, v, s_aux, scale, sliding_window or 0)
        return out.unsqueeze(0), None
    return _eager(query, key, value, scale, drop, sliding_window, softcap, s_aux), None


@torch.compiler.disable
def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    row = _active.row
    assert row is not None, "packed attention was called outside of a packed forward"
    _active.calls += 1
    window = _window(row, sliding_window)
    if _fits_flash(query, softcap, dropout):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _SharedPrefixFlash.apply(q, k, v, sinks, _flash_index(row, query.device), scale, window).unsqueeze(0)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    return two_part(query[0], key[0], value[0], row, **options).transpose(0, 1).unsqueeze(0)


AttentionInterface.register(NAME, shared_prefix_attention)


def _window(row: PackedRow, window: int | None) -> int | None:
    """The window if any sequence is long enough to feel it."""
    longest = max(block.prompt + max(block.completions, default=0) for block in row.blocks)
    return window if window and window < longest else None


def _fits_flash(query: Tensor, softcap: float | None, dropout: float) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0 and not (softcap or dropout)


# -- scaled dot-product attention, block by block


def two_part(
    query: Tensor,  # (H, T, D)
    key: Tensor,  # (H_kv, T, D)
    value: Tensor,
    row: PackedRow,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """(H, T, D). The completions of a block are padded to one length among themselves: no prompt is."""
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    prompts: list[Tensor] = []
    completions: list[Tensor] = []
    for block in row.blocks:
        q, k, v = (x[:, block.start : block.start + block.prompt].unsqueeze(0) for x in (query, key, value))
        prompts.append(_attend(q, k, v, _causal(block.prompt, 0, window, q.device), **options)[0])  # (H, P, D)
        end = block.first + sum(block.completions)
        own = [_stack(x[:, block.first : end], block.completions) for x in (query, key, value)]  # (K, H, C, D)
        count, _, width, _ = own[0].shape
        keys = torch.cat([k.expand(count, -1, -1, -1), own[1]], 2)  # (K, H, P + C, D)
        values = torch.cat([v.expand(count, -1, -1, -1), own[2]], 2)
        mask = _causal(width, block.prompt, window, q.device)
        out = _attend(own[0], keys, values, mask, **options)
        completions += [out[i, :, :length] for i, length in enumerate(block.completions)]
    return torch.cat(prompts + completions, 1)


def _stack(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(H, ΣC, D) → (K, H, C, D), zero-padded at the end, which a causal mask never looks at."""
    width = max(lengths)
    pieces = x.split(list(lengths), 1)
    return torch.stack([F.pad(piece, (0, 0, 0, width - piece.shape[1])) for piece in pieces])


def _causal(queries: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Who sees whom, (Q, before + Q): all that came before, within the window."""
    own = torch.arange(before, before + queries, device=device).unsqueeze(1)
    other = torch.arange(before + queries, device=device).unsqueeze(0)
    seen = other <= own
    return seen if window is None else seen & (other > own - window)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """(B, H, Q, D). The library's kernel, or plain arithmetic where it knows no soft-cap or sink."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:  # one more column that takes probability and gives nothing
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return F.dropout(weights, dropout).to(q.dtype) @ v


# -- flash attention in two calls


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlashIndex:
    """Where sequences begin and end in each call, on the device."""

    edge: int  # prompts before, completions from here on
    gathered: Tensor  # positions of [prompt, completion] of each completion, one after the other
    prompt_ends: Tensor  # cumulative lengths, int32: of prompts,
    completion_ends: Tensor  # of completions,
    gathered_ends: Tensor  # of prompt and completion together
    longest_prompt: int
    longest_completion: int
    longest: int

    @classmethod
    def of(cls, row: PackedRow, device: torch.device) -> _FlashIndex:
        positions: list[Tensor] = []
        lengths: list[tuple[int, int]] = []
        for block in row.blocks:
            prompt = torch.arange(block.start, block.start + block.prompt)
            first = block.first
            for length in block.completions:
                positions += [prompt, torch.arange(first, first + length)]
                lengths.append((block.prompt, length))
                first += length
        return cls(
            edge=row.num_prompt_tokens,
            gathered=torch.cat(positions).to(device, non_blocking=True),
            prompt_ends=_ends([b.prompt for b in row.blocks], device),
            completion_ends=_ends([c for _, c in lengths], device),
            gathered_ends=_ends([p + c for p, c in lengths], device),
            longest_prompt=max(b.prompt for b in row.blocks),
            longest_completion=max(c for _, c in lengths),
            longest=max(p + c for p, c in lengths),
        )

    def calls(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """(cum_q, cum_k, max_q, max_k) of: prompts on themselves, completions on [prompt, themselves]."""
        p, c = self.longest_prompt, self.longest_completion
        return (
            (self.prompt_ends, self.prompt_ends, p, p),
            (self.completion_ends, self.gathered_ends, c, self.longest),
        )


def _flash_index(row: PackedRow, device: torch.device) -> _FlashIndex:
    if _active.flash is None:
        _active.flash = _FlashIndex.of(row, device)
    return _active.flash


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)


def _reach(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash(
    q: Tensor, k: Tensor, v: Tensor, call: tuple[Any, ...], scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Output (Tq, H, D) and log-sum-exp (H, Tq); causal, aligned at the sequences' ends."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *call, 0.0, True, return_debug_mask=False, scale=scale, **_reach(window)
    )
    return out, lse


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: tuple[Any, ...],
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *call, 0.0, True, state, state, scale=scale, **_reach(window)
    )


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: _FlashIndex, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """q (T, H, D), k and v (T, H_kv, D), sinks (H,) or None → output (T, H, D), log-sum-exp (H, T)."""
    on_prompt, on_both = index.calls()
    edge = index.edge
    out_p, lse_p = _flash(q[:edge], k[:edge], v[:edge], on_prompt, scale, window)
    out_c, lse_c = _flash(q[edge:], k[index.gathered], v[index.gathered], on_both, scale, window)
    out, lse = torch.cat([out_p, out_c]), torch.cat([lse_p, lse_c], 1)
    return (out, lse) if sinks is None else _with_sink(out, lse, sinks)


def _flash_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    index: _FlashIndex,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    on_prompt, on_both = index.calls()
    edge, grad = index.edge, grad.contiguous()
    dq_p, dk_p, dv_p = _flash_backward(
        grad[:edge], q[:edge], k[:edge], v[:edge], out[:edge], lse[:, :edge].contiguous(), on_prompt, scale, window
    )
    dq_c, dk_c, dv_c = _flash_backward(
        grad[edge:], q[edge:], k[index.gathered], v[index.gathered], out[edge:], lse[:, edge:].contiguous(), on_both,
        scale, window,
    )  # fmt: skip
    dk, dv = k.new_zeros(k.shape, dtype=torch.float32), v.new_zeros(v.shape, dtype=torch.float32)
    for total, prompts, gathered in ((dk, dk_p, dk_c), (dv, dv_p, dv_c)):
        total[:edge] += prompts
        total.index_add_(0, index.gathered, gathered.float())  # a prompt's keys hear from all its completions
    dsinks = None
    if sinks is not None:
        share = (sinks.float().unsqueeze(1) - lse).exp()  # (H, T): what the sink takes
        dsinks = -(share * (grad.float() * out.float()).sum(-1).transpose(0, 1)).sum(1).to(sinks.dtype)
    return torch.cat([dq_p, dq_c]), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _with_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more key that takes exp(sink) of the probability and gives nothing."""
    total = torch.logaddexp(lse, sinks.float().unsqueeze(1))
    return (out * (lse - total).exp().transpose(0, 1).unsqueeze(-1)).to(out.dtype), total


class _SharedPrefixFlash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: Any, scale: float, window: Any
    ) -> Tensor:
        out, lse = _flash_forward(q, k, v, sinks, index, scale, window)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.options = (index, scale, window)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        return (*_flash_grads(grad, q, k, v, out, lse, sinks, *ctx.options), None, None, None)


# -- the same as one operator, for torch.compile, which must not look inside: what it does depends on the row


# Registered by hand rather than with `torch.library.custom_op`, whose checks cost half a millisecond per call.
_library = torch.library.Library("rloom", "DEF")
_library.define(
    "shared_prefix(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window) -> (Tensor, Tensor)"
)
_library.define(
    "shared_prefix_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? sinks, "
    "float scale, int window) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _operator(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    row = _active.row
    assert row is not None
    _active.calls += 1
    return _flash_forward(q, k, v, sinks, _flash_index(row, q.device), scale, _window(row, window))


def _operator_shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Any, scale: float, window: int) -> Any:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _operator_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    scale: float, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    row = _active.row
    assert row is not None
    index = _flash_index(row, q.device)
    dq, dk, dv, dsinks = _flash_grads(grad, q, k, v, out, lse, sinks, index, scale, _window(row, window))
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


def _operator_backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Any, scale: float, window: int
) -> Any:
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
    return dq, dk, dv, None if sinks is None else dsinks, None, None


torch.library.register_autograd("rloom::shared_prefix", _backward, setup_context=_setup)
