"""Triton kernels of what stands between a layer's products: root-mean-square norm, rotation, gated activation.

Forward and backward, one launch each; torch runs six to ten for each of them. Arithmetic is float32, and results are
rounded where transformers rounds them (a rotation once, at its end).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264
"""Of the norm's backward: each sums the weight's gradient over its own rows."""


@triton.jit
def _norm(  # type: ignore[no-untyped-def]
    x, weight, out, scales, x_t, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """One row: weight · x / rms(x)."""
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = n < WIDTH
    own = tl.load(x + row * x_t + n, mask=inside, other=0.0)
    wide = own.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(scales + row, scale)
    normed = (wide * scale).to(own.dtype)
    weights = tl.load(weight + n, mask=inside, other=0.0)
    result = normed.to(tl.float32) * weights.to(tl.float32)
    tl.store(out + row * WIDTH + n, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _norm_grads(  # type: ignore[no-untyped-def]
    grad, x, weight, scales, dx, partial, x_t, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows in turns: dx, and this program's part of the weight's gradient, in a fixed order."""
    program, n = tl.program_id(0), tl.arange(0, BLOCK)
    inside = n < WIDTH
    weights = tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(program, count, tl.num_programs(0)):
        line = tl.cast(row, tl.int64)
        own = tl.load(x + line * x_t + n, mask=inside, other=0.0)
        g = tl.load(grad + line * WIDTH + n, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + line)
        normed = own.to(tl.float32) * scale
        total += g * normed.to(own.dtype).to(tl.float32)
        g = g * weights
        result = scale * (g - normed * (tl.sum(g * normed, 0) / WIDTH))
        tl.store(dx + line * WIDTH + n, result.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program * WIDTH + n, total, mask=inside)


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (…, N) → its norm, and what each row was scaled by."""
    width = x.shape[-1]
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    _norm[(len(rows),)](
        rows, weight, out, scales, rows.stride(0), eps, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width),
    )  # fmt: skip
    return out, scales


def norm_grads(grad: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    width = x.shape[-1]
    rows, grad = _rows(x), grad.contiguous()
    programs = min(len(rows), PROGRAMS)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    partial = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    _norm_grads[(programs,)](
        grad, rows, weight, scales, dx, partial, rows.stride(0), len(rows), WIDTH=width,
        BLOCK=triton.next_power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8


@triton.jit
def _turn_heads(  # type: ignore[no-untyped-def]
    x, out, c1, c2, s1, s2, HEADS: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
    REST: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr, x_h,
):  # fmt: skip
    """One token's heads, from `x` on and to `out`; the first 2 · HALF numbers of each are turned, the others copied."""
    h, d = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    there = (h < HEADS) & (d < HALF)
    first = tl.load(x + h * x_h + d, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + h * x_h + HALF + d, mask=there, other=0.0).to(tl.float32)
    if BACK:
        one, two = first * c1 + second * s2, second * c2 - first * s1
    else:
        one, two = first * c1 - second * s1, second * c2 + first * s2
    line = out + h * (2 * HALF + REST)
    tl.store(line + d, one.to(out.dtype.element_ty), mask=there)
    tl.store(line + HALF + d, two.to(out.dtype.element_ty), mask=there)
    if REST > 0:
        r = 2 * HALF + tl.arange(0, BR)[None, :]
        there = (h < HEADS) & (r < 2 * HALF + REST)
        tl.store(line + r, tl.load(x + h * x_h + r, mask=there, other=0.0), mask=there)


@triton.jit(do_not_specialize=["tokens", "cos_b", "sin_b"])
def _turn(  # type: ignore[no-untyped-def]
    q, k, q_out, k_out, cos, sin, q_b, q_h, q_t, k_b, k_h, k_t, cos_b, cos_t, sin_b, sin_t, tokens,
    HEADS: tl.constexpr, KV: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr, BD: tl.constexpr,
    REST: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Queries and keys of one token turned by its angles, or (BACK) their gradients turned back, to (B, T, H, D)."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BD)[None, :]
    known = d < HALF
    cos, sin = cos + batch * cos_b + token * cos_t + d, sin + batch * sin_b + token * sin_t + d
    c1 = tl.load(cos, mask=known, other=0.0).to(tl.float32)
    c2 = tl.load(cos + HALF, mask=known, other=0.0).to(tl.float32)
    s1 = tl.load(sin, mask=known, other=0.0).to(tl.float32)
    s2 = tl.load(sin + HALF, mask=known, other=0.0).to(tl.float32)
    line = (batch * tokens + token) * (2 * HALF + REST)
    _turn_heads(
        q + batch * q_b + token * q_t, q_out + line * HEADS, c1, c2, s1, s2, HEADS, BH, HALF, BD, REST, BR, BACK, q_h
    )
    _turn_heads(k + batch * k_b + token * k_t, k_out + line * KV, c1, c2, s1, s2, KV, BK, HALF, BD, REST, BR, BACK, k_h)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> tuple[Tensor, Tensor]:
    """q (B, H, T, D) and k (B, H_kv, T, D) turned by angles (B or 1, T, up to D), as views of (B, T, ·, D)."""
    batch, heads, tokens, width = q.shape
    shared, turned = k.shape[1], cos.shape[-1]
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    outs = [x.new_empty((batch, tokens, x.shape[1], width)) for x in (q, k)]
    wide = lambda angles: angles.stride(0) if len(angles) > 1 else 0  # noqa: E731
    _turn[(tokens, batch)](
        q, k, *outs, cos, sin, *q.stride()[:3], *k.stride()[:3], wide(cos), cos.stride(1), wide(sin), sin.stride(1),
        tokens, HEADS=heads, KV=shared, BH=triton.next_power_of_2(heads), BK=triton.next_power_of_2(shared),
        HALF=turned // 2, BD=max(16, triton.next_power_of_2(turned // 2)), REST=width - turned,
        BR=max(16, triton.next_power_of_2(max(width - turned, 1))), BACK=back, num_warps=4,
    )  # fmt: skip
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


@triton.jit
def _gate(gate, up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) · up of a part of a row."""
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + n
    g = tl.load(gate + at, mask=n < WIDTH, other=0.0)
    u = tl.load(up + at, mask=n < WIDTH, other=0.0)
    wide = g.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(g.dtype)
    tl.store(out + at, (silu.to(tl.float32) * u.to(tl.float32)).to(g.dtype), mask=n < WIDTH)


@triton.jit
def _gate_grads(grad, gate, up, dgate, dup, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * WIDTH + n
    d = tl.load(grad + at, mask=n < WIDTH, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=n < WIDTH, other=0.0)
    u = tl.load(up + at, mask=n < WIDTH, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    s = tl.sigmoid(wide)
    silu = (wide * s).to(g.dtype).to(tl.float32)
    tl.store(dup + at, (d * silu).to(g.dtype), mask=n < WIDTH)
    tl.store(dgate + at, (d * u * s * (1 + wide * (1 - s))).to(g.dtype), mask=n < WIDTH)


GATE_BLOCK = 1024


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of two tensors of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    out, width = torch.empty_like(gate), gate.shape[-1]
    grid = (gate.numel() // width, triton.cdiv(width, GATE_BLOCK))
    _gate[grid](gate, up, out, WIDTH=width, BLOCK=GATE_BLOCK, num_warps=4)
    return out


def gate_grads(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of both."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup, width = torch.empty_like(gate), torch.empty_like(up), gate.shape[-1]
    grid = (gate.numel() // width, triton.cdiv(width, GATE_BLOCK))
    _gate_grads[grid](grad, gate, up, dgate, dup, WIDTH=width, BLOCK=GATE_BLOCK, num_warps=4)
    return dgate, dup
