"""Attention over a packed row ([`PackedRow`]): prompts causal among themselves, completions see [prompt, themselves].

It stands in for a model's own attention through transformers' attention interface, so that any architecture that goes
through that interface can be trained on packed rows unchanged. Two forms, chosen per call:

- `flash`: three calls of torch's varlen flash attention per layer (prompt on prompt, completions on their prompt,
  completions on themselves), merged by their log-sum-exps. The backward runs flash attention's own backward for each
  call with the *merged* output and log-sum-exp, which gives the exact gradient: p_ij = exp(s_ij − lse_i) holds for
  each part once lse_i is that of the whole row. No key is copied, and a prompt's keys are read once per group.
- `two_part`: scaled dot-product attention, block by block; for CPUs, float32, windows, soft-caps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from rloom.types import PackedRow

NAME = "rloom_shared_prefix"


@dataclass(slots=True)
class _Active:
    """The row that is being run. A plain global: with gradient checkpointing, layers run again inside the backward,
    which torch may do in a thread of its own, where context variables are not seen."""

    row: PackedRow | None = None
    flash: _FlashIndex | None = None
    calls: int = 0


_active = _Active()


@contextmanager
def packed_attention(models: list[Any]) -> Iterator[None]:
    """Let `models` attend over packed rows meanwhile. Stays set until the backward is done (checkpointing)."""
    before = [model.config._attn_implementation for model in models]
    for model in models:
        model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        for model, name in zip(models, before, strict=True):
            model.set_attn_implementation(name)


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
    row = _active.row
    assert row is not None, "packed attention was called outside of a packed forward"
    _active.calls += 1
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    dropout = dropout if module.training else 0.0
    window = sliding_window if sliding_window and sliding_window < _longest(row) else None
    if _fits_flash(query) and window is None and softcap is None and not dropout:
        if _active.flash is None:
            _active.flash = _FlashIndex.of(row, query.device)
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (T, H, D)
        out = _SharedPrefixFlash.apply(q, k, v, s_aux, _active.flash, scale)
    else:
        options: dict[str, Any] = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": s_aux,
            "dropout": dropout,
        }
        out = two_part(query[0], key[0], value[0], row, **options).transpose(0, 1)
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, shared_prefix_attention)


def _longest(row: PackedRow) -> int:
    return max(block.prompt + max(block.completions, default=0) for block in row.blocks)


def _fits_flash(query: Tensor) -> bool:
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0


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


# -- flash attention in three calls


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlashIndex:
    """Where sequences begin and end in each call, on the device."""

    edge: int  # prompts before, completions from here on
    prompt_ends: Tensor  # cumulative lengths, int32: of prompts,
    group_ends: Tensor  # of each prompt's completions together,
    completion_ends: Tensor  # of each completion
    longest_prompt: int
    longest_group: int
    longest_completion: int

    @classmethod
    def of(cls, row: PackedRow, device: torch.device) -> _FlashIndex:
        lengths = [length for b in row.blocks for length in b.completions]
        return cls(
            edge=row.num_prompt_tokens,
            prompt_ends=_ends([b.prompt for b in row.blocks], device),
            group_ends=_ends([sum(b.completions) for b in row.blocks], device),
            completion_ends=_ends(lengths, device),
            longest_prompt=max(b.prompt for b in row.blocks),
            longest_group=max(sum(b.completions) for b in row.blocks),
            longest_completion=max(lengths),
        )

    def calls(self) -> tuple[tuple[Any, ...], ...]:
        """(cum_q, cum_k, max_q, max_k, causal) of: prompt on prompt, completions on prompt, on themselves."""
        p, g, c = self.longest_prompt, self.longest_group, self.longest_completion
        return (
            (self.prompt_ends, self.prompt_ends, p, p, True),
            (self.group_ends, self.prompt_ends, g, p, False),
            (self.completion_ends, self.completion_ends, c, c, True),
        )


def _ends(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)


def _flash(q: Tensor, k: Tensor, v: Tensor, call: tuple[Any, ...], scale: float) -> tuple[Tensor, Tensor]:
    """Output (Tq, H, D) and log-sum-exp (H, Tq)."""
    ends_q, ends_k, max_q, max_k, causal = call
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, ends_q, ends_k, max_q, max_k, 0.0, causal, return_debug_mask=False, scale=scale
    )
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: tuple[Any, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    ends_q, ends_k, max_q, max_k, causal = call
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, of which there is none
    return torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, 0.0, causal, state, state, scale=scale
    )


class _SharedPrefixFlash(torch.autograd.Function):
    """See the module's docstring. q (T, H, D), k and v (T, H_kv, D), sinks (H,) or None → (T, H, D)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: _FlashIndex, scale: float
    ) -> Tensor:
        on_prompt, to_prompt, to_self = index.calls()
        (qp, qc), (kp, kc), (vp, vc) = (x.tensor_split([index.edge]) for x in (q, k, v))
        out_p, lse_p = _flash(qp, kp, vp, on_prompt, scale)
        out_1, lse_1 = _flash(qc, kp, vp, to_prompt, scale)
        out_2, lse_2 = _flash(qc, kc, vc, to_self, scale)
        lse_c = torch.logaddexp(lse_1, lse_2)
        out_c = _merge(out_1, lse_1, out_2, lse_2, lse_c)
        if sinks is not None:
            out_p, lse_p = _with_sink(out_p, lse_p, sinks)
            out_c, lse_c = _with_sink(out_c, lse_c, sinks)
        out = torch.cat([out_p, out_c])
        ctx.save_for_backward(q, k, v, out, lse_p, lse_c, sinks)
        ctx.index, ctx.scale = index, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse_p, lse_c, sinks = ctx.saved_tensors
        index, scale = ctx.index, ctx.scale
        on_prompt, to_prompt, to_self = index.calls()
        (qp, qc), (kp, kc), (vp, vc), (out_p, out_c), (grad_p, grad_c) = (
            x.tensor_split([index.edge]) for x in (q, k, v, out, grad.contiguous())
        )
        dq_p, dk_p, dv_p = _flash_backward(grad_p, qp, kp, vp, out_p, lse_p, on_prompt, scale)
        dq_1, dk_1, dv_1 = _flash_backward(grad_c, qc, kp, vp, out_c, lse_c, to_prompt, scale)
        dq_2, dk_2, dv_2 = _flash_backward(grad_c, qc, kc, vc, out_c, lse_c, to_self, scale)
        dsinks = None
        if sinks is not None:
            dsinks = _sink_grad(grad_p, out_p, lse_p, sinks) + _sink_grad(grad_c, out_c, lse_c, sinks)
            dsinks = dsinks.to(sinks.dtype)
        return (
            torch.cat([dq_p, dq_1 + dq_2]),
            torch.cat([dk_p + dk_1, dk_2]),
            torch.cat([dv_p + dv_1, dv_2]),
            dsinks,
            None,
            None,
        )


def _merge(out_1: Tensor, lse_1: Tensor, out_2: Tensor, lse_2: Tensor, lse: Tensor) -> Tensor:
    """Two attentions over disjoint keys as the one over both. Outputs (T, H, D), log-sum-exps (H, T)."""
    weight_1 = (lse_1 - lse).exp().transpose(0, 1).unsqueeze(-1)
    weight_2 = (lse_2 - lse).exp().transpose(0, 1).unsqueeze(-1)
    return (weight_1 * out_1 + weight_2 * out_2).to(out_1.dtype)


def _with_sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more key that takes exp(sink) of the probability and gives nothing."""
    total = torch.logaddexp(lse, sinks.float().unsqueeze(1))
    return (out * (lse - total).exp().transpose(0, 1).unsqueeze(-1)).to(out.dtype), total


def _sink_grad(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """∂/∂sink_h = −Σ_i p_sink,i · (grad_i · out_i)"""
    share = (sinks.float().unsqueeze(1) - lse).exp()  # (H, T)
    return -(share * (grad.float() * out.float()).sum(-1).transpose(0, 1)).sum(1)
