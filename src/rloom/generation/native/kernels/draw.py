"""Drawing a token per row in two Triton kernels that read the logits once: sums per stretch of the vocabulary, then
the stretch in which the summed probability passes the noise. Does what `sampler.py` does in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _uniform(key, position):  # type: ignore[no-untyped-def]
    """noise.uniform"""
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = ((key >> 31) & 0xFFFFFFFF).to(tl.uint32)
    at = ((position + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32)
    x = _mixed(_mixed(low ^ _mixed(at)) ^ high)
    return (x >> 9).to(tl.float32) * (1.0 / 8388608.0) + (1.0 / 16777216.0)


@triton.jit
def _scaled(line, offset, width, inverse, bounds, row, BOUNDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Logits over the temperature, −∞ for those below the row's bound."""
    z = tl.load(line + offset, mask=offset < width, other=-float("inf")).to(tl.float32) * inverse
    if BOUNDED:
        z = tl.where(z >= tl.load(bounds + row), z, -float("inf"))
    return z


@triton.jit
def sums(  # type: ignore[no-untyped-def]
    logits, parts, bounds, stride, width, stretches, inverse, BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one stretch of one row: maximum, Σ exp, Σ exp·z; parts (B, stretches, 3)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = part * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(logits + row * stride, offset, width, inverse, bounds, row, BOUNDED)
    top = tl.max(z, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    e = tl.exp(z - safe)
    where = parts + (row * stretches + part) * 3
    tl.store(where, top)
    tl.store(where + 1, tl.sum(e, 0))
    tl.store(where + 2, tl.sum(tl.where(e > 0, e * z, 0.0), 0))


@triton.jit
def pick(  # type: ignore[no-untyped-def]
    logits, parts, bounds, plain, plain_parts, keys, positions, tokens, logprobs, drawn, entropies,
    stride, plain_stride, width, stretches, inverse,
    GREEDY: tl.constexpr, FILTERED: tl.constexpr, BOUNDED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the stretch, the token, and what is remembered of them."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PARTS)
    there = index < stretches
    where = parts + (row * stretches + index) * 3
    tops = tl.load(where, mask=there, other=-float("inf"))
    totals = tl.load(where + 1, mask=there, other=0.0)
    top = tl.max(tops, 0)
    totals = totals * tl.exp(tops - top)
    total = tl.sum(totals, 0)
    upto = tl.cumsum(totals, 0)
    target = _uniform(tl.load(keys + row), tl.load(positions + row)) * total
    likeliest = tl.min(tl.where(tops == top, index, PARTS), 0)
    passed = tl.min(tl.where((upto > target) & (totals > 0), index, PARTS), 0)
    part = tl.where(passed == PARTS, likeliest, passed)
    if GREEDY:
        part = likeliest
    before = tl.sum(tl.where(index < part, totals, 0.0), 0)
    offset = part * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(logits + row * stride, offset, width, inverse, bounds, row, BOUNDED)
    e = tl.exp(z - top)
    best = tl.min(tl.where(z == tl.max(z, 0), offset, width), 0)
    found = tl.min(tl.where((before + tl.cumsum(e, 0) > target) & (e > 0), offset, width), 0)
    token = tl.where(found == width, best, found)
    if GREEDY:
        token = best
    token = tl.minimum(token, width - 1)  # where no logit is a number, none is found
    normalizer = top + tl.log(total)
    chosen = tl.load(logits + row * stride + token).to(tl.float32) * inverse
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(drawn + row, chosen - normalizer)
    if FILTERED:
        where = plain_parts + (row * stretches + index) * 3
        tops = tl.load(where, mask=there, other=-float("inf"))
        top = tl.max(tops, 0)
        total = tl.sum(tl.load(where + 1, mask=there, other=0.0) * tl.exp(tops - top), 0)
        normalizer = top + tl.log(total)
        chosen = tl.load(plain + row * plain_stride + token).to(tl.float32) * inverse
    weighted = tl.sum(tl.load(where + 2, mask=there, other=0.0) * tl.exp(tops - top), 0)
    tl.store(logprobs + row, chosen - normalizer)
    tl.store(entropies + row, normalizer - weighted / total)


def _parts(logits: Tensor, inverse: float, bounds: Tensor | None = None) -> Tensor:
    rows, width = logits.shape
    stretches = triton.cdiv(width, STRETCH)
    parts = torch.empty((rows, stretches, 3), dtype=torch.float32, device=logits.device)
    sums[(rows, stretches)](
        logits, parts, parts if bounds is None else bounds, logits.stride(0), width, stretches, inverse,
        BOUNDED=bounds is not None, BLOCK=STRETCH, num_warps=4,
    )  # fmt: skip
    return parts


def draw(logits: Tensor, changed: Tensor | None, keys: Tensor, positions: Tensor, sampler: Any) -> Any:
    """A [`Drawn`]: from what the sampler's bounds leave of the logits, or of `changed` ones if given."""
    from rloom.generation.native.kernels.filter_bounds import bounds_of
    from rloom.generation.native.sampling.sampler import Drawn

    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, width = logits.shape
    inverse = 1.0 / sampler.temperature
    plain_parts = _parts(logits, inverse)
    source, parts = (logits, plain_parts) if changed is None else (changed, _parts(changed, inverse))
    bounds = bounds_of(source, parts, sampler) if sampler.bounded else None
    if bounds is not None:
        parts = _parts(source, inverse, bounds)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs, drawn, entropies = torch.empty((3, rows), dtype=torch.float32, device=logits.device)
    stretches = parts.shape[1]
    pick[(rows,)](
        source, parts, parts if bounds is None else bounds, logits, plain_parts, keys, positions, tokens, logprobs,
        drawn, entropies, source.stride(0), logits.stride(0), width, stretches, inverse,
        GREEDY=sampler.greedy, FILTERED=parts is not plain_parts, BOUNDED=bounds is not None,
        PARTS=triton.next_power_of_2(stretches), BLOCK=STRETCH, num_warps=8,
    )  # fmt: skip
    return Drawn(tokens=tokens, logprobs=logprobs, drawn_logprobs=drawn, entropies=entropies)
