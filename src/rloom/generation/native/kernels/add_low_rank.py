"""Triton kernel that adds what LoRA adapters add to a product, for the few rows of a decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RANKS = 64
"""Of large adapters, so many at a time."""


@triton.jit(do_not_specialize=["rows"])
def _add_low_rank(  # type: ignore[no-untyped-def]
    base, low, up, layer_of, out, rows, base_b, low_b, N: tl.constexpr, RANK: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = base + low · up: of `low` each layer has RANK columns."""
    part = tl.program_id(0)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < rows)[:, None]
    line = m.to(tl.int64)[:, None]
    low += tl.load(layer_of + part) * RANK
    k = tl.arange(0, AT_ONCE)
    total = tl.load(base + line * base_b + n[None, :], mask=inside, other=0.0).to(tl.float32)
    for start in range(0, RANK, AT_ONCE):
        a = tl.load(low + line * low_b + (start + k)[None, :], mask=inside & (start + k < RANK)[None, :], other=0.0)
        b = tl.load(up + (start + k)[:, None] * N + n[None, :], mask=(start + k < RANK)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out + line * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)


def add_low_rank(base: Tensor, low: Tensor, up: Tensor, layer_of: Tensor) -> Tensor:
    """base (B, 1, N) + low (B, 1, layers · R) · up (R, N). `layer_of` says which layer's R columns of `low` a program
    takes: each program has an equal part of the N columns."""
    rank, n = up.shape
    columns = n // len(layer_of)
    out = torch.empty(base.shape, dtype=base.dtype, device=base.device)
    base, low = (x.flatten(0, -2) if x.stride(-1) == 1 else x.flatten(0, -2).contiguous() for x in (base, low))
    at_once = min(RANKS, triton.next_power_of_2(rank))
    block = 16 if len(base) <= 16 else 32
    _add_low_rank[(len(layer_of), triton.cdiv(len(base), block))](
        base, low, up, layer_of, out, len(base), base.stride(0), low.stride(0), N=n, RANK=rank, AT_ONCE=at_once,
        ROWS=block, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return out
