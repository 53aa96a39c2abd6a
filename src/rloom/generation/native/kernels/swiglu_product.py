"""Triton kernel of SwiGLU, silu(gate) · up, as one product, for the few rows of a decode step.

A program takes a strip of columns through all of the weights' depth. Strips are powers of two, so that one to each
processor seldom covers all columns: what is left goes to the first programs, `BX` columns more to each. A strip of the
gate's and one of up's weights come as one box, and are multiplied as one tile.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Of a tile.
DEPTH = 64

# Bytes of shared memory for tiles that are being loaded.
ROOM = 200 * 1024

# Tiles that are being loaded, at most.
STAGES = 5

# Columns to a program, at most: their sums lie in its registers.
MOST_COLUMNS = 144

# Rows that the kernel takes, at most.
MOST_ROWS = 128


@triton.jit
def _silu_times(gate, up):  # type: ignore[no-untyped-def]
    """In float32, of products that have been rounded as if they had been stored; rounded once more at the end."""
    dtype: tl.constexpr = gate.dtype
    gate = gate.to(tl.float32)
    return (gate * tl.sigmoid(gate) * up.to(tl.float32)).to(dtype)


@triton.jit
def _activated(both, dtype: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) · up of (BM, 2 · BN)."""
    gate, up = both.reshape([BM, 2, BN]).permute([0, 2, 1]).split()
    return _silu_times(gate.to(dtype), up.to(dtype))


@triton.jit(do_not_specialize=["M"])
def _swiglu_product(  # type: ignore[no-untyped-def]
    x, weight, more_weight, out, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """x (M, K), weight (2, N, K) → out (M, N). Grid (STRIPS,)."""
    strip = tl.program_id(0)
    dtype: tl.constexpr = out.dtype.element_ty
    m = tl.arange(0, BM)[:, None]
    first, more = strip * BN, STRIPS * BN + strip * BX
    both = tl.zeros([BM, 2 * BN], tl.float32)
    if BX > 0 and more < N:
        others = tl.zeros([BM, 2 * BX], tl.float32)
        for k in range(0, K, BK):
            rows = x.load([0, k])
            both = tl.dot(rows, weight.load([0, first, k]).reshape([2 * BN, BK]).T, both)
            others = tl.dot(rows, more_weight.load([0, more, k]).reshape([2 * BX, BK]).T, others)
        n = more + tl.arange(0, BX)[None, :]
        tl.store(out + m * N + n, _activated(others, dtype, BM, BX), mask=(m < M) & (n < N))
    else:
        for k in range(0, K, BK):
            both = tl.dot(x.load([0, k]), weight.load([0, first, k]).reshape([2 * BN, BK]).T, both)
    n = first + tl.arange(0, BN)[None, :]
    tl.store(out + m * N + n, _activated(both, dtype, BM, BN), mask=(m < M) & (n < N))


@triton.jit
def _swiglu(both, out, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """both (M, 2 · N) → out (M, N). Grid (M, blocks of N)."""
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * 2 * N + n, mask=n < N, other=0.0)
    up = tl.load(both + row * 2 * N + N + n, mask=n < N, other=0.0)
    tl.store(out + row * N + n, _silu_times(gate, up), mask=n < N)


def swiglu(both: Tensor) -> Tensor:
    """silu(gate) · up of (M, 2 · N)."""
    count, size = both.shape[0], both.shape[1] // 2
    out = both.new_empty((count, size))
    _swiglu[(count, triton.cdiv(size, 1024))](both, out, size, BLOCK=1024, num_warps=4)
    return out


def swiglu_product(x: Tensor, weight: Tensor, *, programs: int | None = None) -> Tensor:
    """silu(x · gateᵀ) · (x · upᵀ) for x (M, K), M up to 128, and weight (2 · N, K): the gate's, then up's."""
    count, depth = x.shape
    assert count <= MOST_ROWS
    size = len(weight) // 2
    strip, more, strips = plan(size, programs or _processors(x.device))
    tall = 64 if count <= 64 else 128
    box = lambda columns: TensorDescriptor(weight, [2, size, depth], [size * depth, depth, 1], [2, columns, DEPTH])  # noqa: E731
    out = x.new_empty((count, size))
    stage = (tall + 2 * strip + 2 * more) * DEPTH * x.element_size()
    _swiglu_product[(strips,)](
        TensorDescriptor(x, [count, depth], [depth, 1], [tall, DEPTH]), box(strip), box(more or strip), out, count,
        size, depth, BM=tall, BN=strip, BX=more, BK=DEPTH, STRIPS=strips, num_warps=tall // 16,
        num_stages=max(2, min(STAGES, ROOM // stage)),
    )  # fmt: skip
    return out


def holds(columns: int, device: torch.device) -> bool:
    """Whether the sums of a program's columns fit into its registers."""
    strip, more, _ = plan(columns, _processors(device))
    return strip + more <= MOST_COLUMNS


@functools.cache
def plan(columns: int, programs: int) -> tuple[int, int, int]:
    """Columns to a strip, columns more for some programs, and strips.

    >>> plan(8960, 132), plan(4864, 132), plan(14336, 132), plan(512, 132)
    ((64, 8, 132), (32, 8, 132), (64, 64, 132), (16, 0, 32))
    """
    strip = min(128, max(16, 1 << ((columns // programs).bit_length() - 1) if columns >= programs else 16))
    strips = min(programs, -(-columns // strip))
    left = max(0, columns - strips * strip)
    more = max(8, 1 << (-(-left // strips) - 1).bit_length()) if left else 0
    return strip, more, strips


@functools.cache
def _processors(device: torch.device) -> int:
    # Triton's interpreter runs on a CPU.
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
