"""Triton kernel that adds what LoRA adapters add to a product, for the few rows of a decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 64
"""To a program. Each belongs to one layer: their sizes are multiples of it."""

RANKS = 64
"""At a time, of large adapters."""


@triton.jit
def _add_low_rank(  # type: ignore[no-untyped-def]
    product, up, owners, out, rows, product_b, N: tl.constexpr, RANK: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = product[:, :N] + low · up: `low` stands behind the N columns, RANK of it for each layer."""
    part = tl.program_id(0)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < rows)[:, None]
    line = product + m.to(tl.int64)[:, None] * product_b
    low = line + N + tl.load(owners + part) * RANK
    k = tl.arange(0, AT_ONCE)
    total = tl.load(line + n[None, :], mask=inside, other=0.0).to(tl.float32)
    for start in range(0, RANK, AT_ONCE):
        a = tl.load(low + (start + k)[None, :], mask=inside & (start + k < RANK)[None, :], other=0.0)
        b = tl.load(up + (start + k)[:, None] * N + n[None, :], mask=(start + k < RANK)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=inside)


def add_low_rank(product: Tensor, up: Tensor, owners: Tensor) -> Tensor:
    """(B, 1, N) of (B, 1, N + layers · R), `up` (R, N), and the layer of every `COLUMNS` columns."""
    rank, n = up.shape
    rows = product.numel() // product.shape[-1]
    product = product.contiguous()
    out = torch.empty((*product.shape[:-1], n), dtype=product.dtype, device=product.device)
    at_once = min(RANKS, triton.next_power_of_2(rank))
    block = 16 if rows <= 16 else 32
    _add_low_rank[(n // COLUMNS, triton.cdiv(rows, block))](
        product, up, owners, out, rows, product.shape[-1], N=n, RANK=rank, AT_ONCE=at_once, ROWS=block,
        COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip
    return out
