"""What top-k, top-p and min-p leave of a row of logits, as the least logit that is kept.

Each of the three keeps the tokens from some logit upwards. That logit is found digit by digit, in a few passes over the
row; sorting a vocabulary would take as long as the rest of a decode step. Equal logits are kept or taken out together.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rloom.generation.native.sampling.sampler import Sampler

# Logits that are read at a time.
BLOCK = 8192

DIGITS = {torch.bfloat16: 16, torch.float16: 20, torch.float32: 32}
"""Bits of a float32 in which logits of a type differ."""

LEAST_TOP_P = 1e-30
"""Less would be 0 in float32, and keep no token; this keeps the likeliest."""


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """float32 → uint32, in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    """And back. Keys up to that of −∞ are no numbers: they are below all."""
    bits = tl.where((key >> 31) != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return tl.where(key <= 0x007FFFFF, -float("inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _weights(line, start, width, least, top, inverse, COUNTED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of a block and what they weigh: one each, or their probability if they are at least `least`."""
    offset = start + tl.arange(0, BLOCK)
    inside = offset < width
    x = tl.load(line + offset, mask=inside, other=-float("inf")).to(tl.float32)
    key = _ordered(x)
    if COUNTED:
        weight = tl.where(inside, 1.0, 0.0)
    else:
        weight = tl.where(inside & (key >= least), tl.exp(x * inverse - top), 0.0)
    return key, weight


@triton.jit
def _search(  # type: ignore[no-untyped-def]
    line, width, least, wanted, top, inverse, COUNTED: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The least key such that all keys above it weigh less than `wanted`, to so many bits; two at a time."""
    found = tl.full((), 0, tl.uint32)
    one = tl.full((), 1, tl.uint32)
    shift = tl.full((), 30, tl.uint32)
    for _ in range(BITS // 2):
        rest = (one << shift) - 1
        first, second, third = found | rest, found | (one << shift) | rest, found | (one << (shift + 1)) | rest
        above_first = tl.zeros((BLOCK,), tl.float32)
        above_second = tl.zeros((BLOCK,), tl.float32)
        above_third = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            key, weight = _weights(line, start, width, least, top, inverse, COUNTED, BLOCK)
            above_first += tl.where(key > first, weight, 0.0)
            above_second += tl.where(key > second, weight, 0.0)
            above_third += tl.where(key > third, weight, 0.0)
        digit = tl.where(tl.sum(above_third, 0) < wanted, one + one, one + one + one)
        digit = tl.where(tl.sum(above_second, 0) < wanted, one, digit)
        digit = tl.where(tl.sum(above_first, 0) < wanted, one ^ one, digit)
        found = found | (digit << shift)
        shift = shift - 2
    rest = (one << (32 - BITS)) - 1 if BITS < 32 else one - one
    # Bits that were not looked at are 0, and in the keys of negative numbers 1.
    return tl.where((found >> 31) != 0, found, found | rest)


@triton.jit
def _bound(  # type: ignore[no-untyped-def]
    logits, parts, bounds, stride, width, blocks, inverse, top_k, top_p, log_min_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the least logit that top-k leaves, then top-p of those, then min-p."""
    row = tl.program_id(0).to(tl.int64)
    line = logits + row * stride
    index = tl.arange(0, PARTS)
    tops = tl.load(parts + (row * blocks + index) * 3, mask=index < blocks, other=-float("inf"))
    top = tl.max(tops, 0)
    least = tl.full((), 0, tl.uint32)
    if TOP_K:
        least = _search(line, width, least, top_k * 1.0, top, inverse, True, BITS, BLOCK)
    if TOP_P:
        held = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            _, weight = _weights(line, start, width, least, top, inverse, False, BLOCK)
            held += weight
        nucleus = _search(line, width, least, top_p * tl.sum(held, 0), top, inverse, False, BITS, BLOCK)
        least = tl.maximum(least, nucleus)
    bound = _value(least) * inverse
    if MIN_P:
        bound = tl.maximum(bound, tl.minimum(top + log_min_p, top))
    tl.store(bounds + row, bound)


def bounds_of(logits: Tensor, parts: Tensor, sampler: Sampler) -> Tensor:
    """(B,): the least of each row's logits, over the temperature, that may be drawn. `parts`: the sums of the rows."""
    rows, width = logits.shape
    blocks = parts.shape[1]
    bounds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    log_min_p = math.log(sampler.min_p) if sampler.min_p else 0.0
    _bound[(rows,)](
        logits, parts, bounds, logits.stride(0), width, blocks, 1.0 / sampler.temperature,
        min(sampler.top_k or 0, width), max(sampler.top_p, LEAST_TOP_P), log_min_p,
        TOP_K=bool(sampler.top_k), TOP_P=sampler.top_p < 1.0, MIN_P=bool(sampler.min_p),
        BITS=DIGITS.get(logits.dtype, 32), PARTS=triton.next_power_of_2(blocks), BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    return bounds
