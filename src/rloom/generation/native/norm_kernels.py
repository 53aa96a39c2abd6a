"""Triton kernel of a residual's sum and its root-mean-square norm, for the few rows of a decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(  # type: ignore[no-untyped-def]
    residual, more, weight, total, out, residual_b, more_b, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: total = residual + more; out = weight · total / rms(total), rounded where transformers rounds."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = n < WIDTH
    a = tl.load(residual + row * residual_b + n, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(more + row * more_b + n, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    x = (a + b).to(total.dtype.element_ty)
    tl.store(total + row * WIDTH + n, x, mask=inside)
    x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)).to(total.dtype.element_ty)
    tl.store(out + row * WIDTH + n, (normed.to(tl.float32) * scale).to(total.dtype.element_ty), mask=inside)


def add_norm(residual: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(residual + more, its norm) of (B, 1, N)."""
    width = residual.shape[-1]
    residual, more = (x if x.stride(-1) == 1 else x.contiguous() for x in (residual, more))
    total, out = (torch.empty(residual.shape, dtype=residual.dtype, device=residual.device) for _ in range(2))
    _add_norm[(len(residual),)](
        residual, more, weight, total, out, residual.stride(0), more.stride(0), eps, WIDTH=width,
        BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 4096 else 8,
    )  # fmt: skip
    return total, out
