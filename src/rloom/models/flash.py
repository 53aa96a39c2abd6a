"""Packed attention in two calls of torch's varlen flash attention: prompts on themselves; completions on [their prompt,
themselves], for which keys and values are gathered.

With sinks, both are scaled by their log-sum-exps afterwards, and the backward runs flash attention's own with the
output and log-sum-exp *after* that, which gives the exact gradient: p_ij = exp(s_ij − lse_i) holds once lse_i counts
the sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloom.types import PackedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashIndex:
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
    def of(cls, row: PackedRow, device: torch.device) -> FlashIndex:
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


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, index: FlashIndex, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """q (T, H, D), k and v (T, H_kv, D), sinks (H,) or None → output (T, H, D), log-sum-exp (H, T)."""
    on_prompt, on_both = index.calls()
    edge = index.edge
    out_p, lse_p = _flash(q[:edge], k[:edge], v[:edge], on_prompt, scale, window)
    out_c, lse_c = _flash(q[edge:], k[index.gathered], v[index.gathered], on_both, scale, window)
    out, lse = torch.cat([out_p, out_c]), torch.cat([lse_p, lse_c], 1)
    return (out, lse) if sinks is None else _with_sink(out, lse, sinks)


def flash_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    index: FlashIndex,
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
