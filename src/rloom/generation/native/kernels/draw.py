"""Drawing a token per row in two Triton kernels that read the logits once: sums per block of the vocabulary, then the
block in which the summed probability passes the noise. A third takes the tokens in and moves the rows on.

They do what `Sampler` and `Rows._advance` do in plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from rloom.generation.native.kernels.filter_bounds import bounds_of
from rloom.generation.native.sampling.sampler import Drawn, Sampler

if TYPE_CHECKING:
    from rloom.generation.native.rows import Rows

# Logits that one program sums up.
VOCABULARY_BLOCK = 4096


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
    logits, parts, bounds, stride, width, blocks, inverse, BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of one block of one row: maximum, Σ exp, Σ exp·z; parts (B, blocks, 3)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offset = part * BLOCK + tl.arange(0, BLOCK)
    z = _scaled(logits + row * stride, offset, width, inverse, bounds, row, BOUNDED)
    top = tl.max(z, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    e = tl.exp(z - safe)
    where = parts + (row * blocks + part) * 3
    tl.store(where, top)
    tl.store(where + 1, tl.sum(e, 0))
    tl.store(where + 2, tl.sum(tl.where(e > 0, e * z, 0.0), 0))


@triton.jit
def pick(  # type: ignore[no-untyped-def]
    logits, parts, bounds, plain, plain_parts, keys, positions, tokens, logprobs, drawn, entropies,
    stride, plain_stride, width, blocks, inverse,
    GREEDY: tl.constexpr, FILTERED: tl.constexpr, BOUNDED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: the block, the token, and what is remembered of them."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, PARTS)
    there = index < blocks
    where = parts + (row * blocks + index) * 3
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
    # Where no logit is a number, no token is found.
    token = tl.minimum(token, width - 1)
    normalizer = top + tl.log(total)
    chosen = tl.load(logits + row * stride + token).to(tl.float32) * inverse
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(drawn + row, chosen - normalizer)
    if FILTERED:
        where = plain_parts + (row * blocks + index) * 3
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
    blocks = triton.cdiv(width, VOCABULARY_BLOCK)
    parts = torch.empty((rows, blocks, 3), dtype=torch.float32, device=logits.device)
    sums[(rows, blocks)](
        logits, parts, parts if bounds is None else bounds, logits.stride(0), width, blocks, inverse,
        BOUNDED=bounds is not None, BLOCK=VOCABULARY_BLOCK, num_warps=4,
    )  # fmt: skip
    return parts


def draw(logits: Tensor, changed: Tensor | None, keys: Tensor, positions: Tensor, sampler: Sampler) -> Drawn:
    """From what the sampler's bounds leave of the logits, or of `changed` ones if given."""
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
    blocks = parts.shape[1]
    pick[(rows,)](
        source, parts, parts if bounds is None else bounds, logits, plain_parts, keys, positions, tokens, logprobs,
        drawn, entropies, source.stride(0), logits.stride(0), width, blocks, inverse,
        GREEDY=sampler.greedy, FILTERED=parts is not plain_parts, BOUNDED=bounds is not None,
        PARTS=triton.next_power_of_2(blocks), BLOCK=VOCABULARY_BLOCK, num_warps=8,
    )  # fmt: skip
    return Drawn(tokens=tokens, logprobs=logprobs, drawn_logprobs=drawn, entropies=entropies)


@triton.jit(do_not_specialize=["num_ends", "vocabulary"])
def _advance(  # type: ignore[no-untyped-def]
    tokens, positions, cached, counts, remaining, alive, step, out_tokens, out_stats, ends, drawn, logprobs,
    drawn_logprobs, entropies, num_ends, vocabulary, CHUNK: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """Rows._advance, for one row."""
    row = tl.program_id(0)
    living = tl.load(alive + row)
    # A row without a sequence draws from whatever its memory holds.
    token = tl.minimum(tl.load(drawn + row), vocabulary - 1)
    at = tl.load(step)
    e = tl.arange(0, ENDS)
    ended = tl.sum((tl.load(ends + e, mask=e < num_ends, other=-1) == token).to(tl.int32), 0)
    left = tl.load(remaining + row)
    goes_on = tl.where((living > 0) & (ended == 0) & (left > 1), 1, 0)
    tl.store(out_tokens + row * CHUNK + at, tl.where(living > 0, token, -1))
    where = out_stats + (row * CHUNK + at) * 3
    tl.store(where, tl.load(logprobs + row))
    tl.store(where + 1, tl.load(drawn_logprobs + row))
    tl.store(where + 2, tl.load(entropies + row))
    tl.store(tokens + row, tl.where(goes_on > 0, token, tl.load(tokens + row)))
    tl.store(positions + row, tl.load(positions + row) + goes_on)
    tl.store(cached + row, tl.load(cached + row) + goes_on)
    tl.store(counts + row, tl.load(counts + row) + goes_on)
    tl.store(remaining + row, left - goes_on)
    tl.store(alive + row, goes_on)


def advance_rows(rows: Rows, drawn: Drawn) -> None:
    """One step of the rows' state, on the device."""
    _advance[(len(rows),)](
        rows.tokens, rows.positions, rows.cached, rows.counts, rows.remaining, rows.alive, rows.step, rows.out_tokens,
        rows.out_stats, rows.ends, drawn.tokens, drawn.logprobs, drawn.drawn_logprobs, drawn.entropies,
        len(rows.ends), rows.vocabulary, CHUNK=rows.out_tokens.shape[1], ENDS=triton.next_power_of_2(len(rows.ends)),
        num_warps=1,
    )  # fmt: skip
    rows.step += 1
