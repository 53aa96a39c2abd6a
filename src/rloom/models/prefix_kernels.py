"""Triton kernels of packed attention: a prompt's completions read its keys where they lie, nothing is gathered.

A row is cut into tiles of at most TILE tokens, none across the end of a prompt or completion. One table says of each
tile (FIELDS numbers): its first token; the end and the start of its segment; the start and length of the segment's
prompt (length 0 for a prompt itself); the first token and the end of the completions that follow it, for a prompt. A
query tile so has two ranges of keys: the prompt (all of it) and its own segment (causal); a key tile two ranges
of queries: its own segment and the completions after it. Keys' gradients are summed over those in one program: no
atomics, the same bits each time.

The table begins with the prompts. Their tiles have by far the most queries, so that the keys' kernel goes from its top
down; the others go from its bottom up, since late tokens see the most keys. What is light comes last: no program of
many steps is left over when the others are done. Heads are the grid's first axis, so that this holds for all of them.

Positions (for windows) count from the prompt's first token.
"""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(7)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(base, rows, inside, stride, D: tl.constexpr, BD: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.arange(0, BD)
    where = base + rows[:, None].to(tl.int64) * stride + d[None, :]
    return tl.load(where, mask=inside[:, None] & (d[None, :] < D), other=0.0)


@triton.jit
def capped(s, cap):  # type: ignore[no-untyped-def]
    return cap * (2 * tl.sigmoid(2 * s / cap) - 1)  # tanh


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    a,
    b,
    a_rows,
    b_rows,
    keep,
    scale,
    cap,
    window,
    BY_WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """a·bᵀ, scaled and capped, −inf where it must not look. Rows are positions; `keep` is all else that hides."""
    s = tl.dot(a, tl.trans(b), input_precision="ieee") * scale
    if CAPPED:
        s = capped(s, cap)
    if BY_WINDOW:
        if KEYS_FIRST:
            keep = keep & (b_rows[None, :] - a_rows[:, None] < window)
        else:
            keep = keep & (a_rows[:, None] - b_rows[None, :] < window)
    return tl.where(keep, s, -float("inf"))


@triton.jit
def fold(s, v, top, total, acc):  # type: ignore[no-untyped-def]
    """One more tile of scores into a running softmax."""
    higher = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    shrink = tl.exp2((top - safe) * LOG2E)
    p = tl.exp2((s - safe[:, None]) * LOG2E)
    acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return higher, total * shrink + tl.sum(p, 1), acc


@triton.jit(do_not_specialize=["count", "window"])
def forward(  # type: ignore[no-untyped-def]
    q, k, v, sinks, out, lse, table, q_t, q_h, k_t, k_h, v_t, v_h, count, scale, cap, window,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    TILE: tl.constexpr, BN: tl.constexpr, BY_WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Output (T, H, E) and log-sum-exp (H, T) of one tile of queries and one head."""
    entry = table + (tl.num_programs(1) - 1 - tl.program_id(1)) * FIELDS
    head = tl.program_id(0)
    start, end, own = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    prompt, length = tl.load(entry + 3), tl.load(entry + 4)
    rows = start + tl.arange(0, TILE)
    inside = rows < end
    position = rows - own + length
    kv = head // REPEAT
    keys, values = k + kv * k_h, v + kv * v_h
    queries = _tile(q + head * q_h, rows, inside, q_t, D, BD)
    top = tl.full([TILE], -float("inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, BE], tl.float32)
    # First the prompt's keys, all of them.
    first = 0
    if BY_WINDOW:
        first = tl.maximum(0, start - own + length - window + 1) // BN * BN
    for n in range(first, length, BN):
        at = n + tl.arange(0, BN)
        seen = at < length
        tile = _tile(keys, prompt + at, seen, k_t, D, BD)
        keep = seen[None, :] & inside[:, None]
        s = _scores(queries, tile, position, at, keep, scale, cap, window, BY_WINDOW, CAPPED, False)
        top, total, acc = fold(s, _tile(values, prompt + at, seen, v_t, E, BE), top, total, acc)
    # Then those of the segment itself. (One loop over both needs more registers, and spills in float32.)
    first = 0
    if BY_WINDOW:
        first = tl.maximum(0, start - own - window + 1) // BN * BN
    last = tl.minimum(start + TILE, end) - own
    for n in range(first, last, BN):
        at = own + n + tl.arange(0, BN)
        seen = at < end
        tile = _tile(keys, at, seen, k_t, D, BD)
        keep = (at[None, :] <= rows[:, None]) & seen[None, :] & inside[:, None]
        s = _scores(queries, tile, position, at - own + length, keep, scale, cap, window, BY_WINDOW, CAPPED, False)
        top, total, acc = fold(s, _tile(values, at, seen, v_t, E, BE), top, total, acc)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(top, sink)
        shrink = tl.exp2((top - higher) * LOG2E)
        total = total * shrink + tl.exp2((sink - higher) * LOG2E)
        acc = acc * shrink[:, None]
        top = higher
    total = tl.where(inside, total, 1.0)
    e = tl.arange(0, BE)
    where = (rows[:, None].to(tl.int64) * HEADS + head) * E + e[None, :]
    tl.store(out + where, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None] & (e[None, :] < E))
    tl.store(lse + head * count + rows, top + tl.log(total), mask=inside)


@triton.jit
def _slopes(p, s, grad_p, delta, scale, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """d loss / d (q·k) from probabilities, capped scores and d loss / d p."""
    ds = p * (grad_p - delta) * scale
    if CAPPED:
        t = tl.where(p > 0, s, 0.0) / cap
        ds = ds * (1 - t * t)
    return ds


@triton.jit(do_not_specialize=["count", "window"])
def backward_queries(  # type: ignore[no-untyped-def]
    grad, q, k, v, out, lse, dq, delta, table, q_t, q_h, k_t, k_h, v_t, v_h, count, scale, cap, window,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    TILE: tl.constexpr, BN: tl.constexpr, BY_WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """dq (T, H, D) of one tile of queries, and delta = Σ grad·out (H, T), which the keys' kernel needs."""
    entry = table + (tl.num_programs(1) - 1 - tl.program_id(1)) * FIELDS
    head = tl.program_id(0)
    start, end, own = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    prompt, length = tl.load(entry + 3), tl.load(entry + 4)
    rows = start + tl.arange(0, TILE)
    inside = rows < end
    position = rows - own + length
    kv = head // REPEAT
    keys, values = k + kv * k_h, v + kv * v_h
    queries = _tile(q + head * q_h, rows, inside, q_t, D, BD)
    grads = _tile(grad + head * E, rows, inside, HEADS * E, E, BE)
    outs = _tile(out + head * E, rows, inside, HEADS * E, E, BE)
    per_row = tl.sum(grads.to(tl.float32) * outs.to(tl.float32), 1)
    tl.store(delta + head * count + rows, per_row, mask=inside)
    normalizer = tl.load(lse + head * count + rows, mask=inside, other=0.0)
    acc = tl.zeros([TILE, BD], tl.float32)
    # First the prompt's keys, all of them.
    first = 0
    if BY_WINDOW:
        first = tl.maximum(0, start - own + length - window + 1) // BN * BN
    for n in range(first, length, BN):
        at = n + tl.arange(0, BN)
        seen = at < length
        tile = _tile(keys, prompt + at, seen, k_t, D, BD)
        keep = seen[None, :] & inside[:, None]
        s = _scores(queries, tile, position, at, keep, scale, cap, window, BY_WINDOW, CAPPED, False)
        p = tl.exp2((s - normalizer[:, None]) * LOG2E)
        grad_p = tl.dot(grads, tl.trans(_tile(values, prompt + at, seen, v_t, E, BE)), input_precision="ieee")
        ds = _slopes(p, s, grad_p, per_row[:, None], scale, cap, CAPPED)
        acc += tl.dot(ds.to(tile.dtype), tile, input_precision="ieee")
    # Then those of the segment itself. (One loop over both needs more registers, and spills in float32.)
    first = 0
    if BY_WINDOW:
        first = tl.maximum(0, start - own - window + 1) // BN * BN
    last = tl.minimum(start + TILE, end) - own
    for n in range(first, last, BN):
        at = own + n + tl.arange(0, BN)
        seen = at < end
        tile = _tile(keys, at, seen, k_t, D, BD)
        keep = (at[None, :] <= rows[:, None]) & seen[None, :] & inside[:, None]
        s = _scores(queries, tile, position, at - own + length, keep, scale, cap, window, BY_WINDOW, CAPPED, False)
        p = tl.exp2((s - normalizer[:, None]) * LOG2E)
        grad_p = tl.dot(grads, tl.trans(_tile(values, at, seen, v_t, E, BE)), input_precision="ieee")
        ds = _slopes(p, s, grad_p, per_row[:, None], scale, cap, CAPPED)
        acc += tl.dot(ds.to(tile.dtype), tile, input_precision="ieee")
    d = tl.arange(0, BD)
    where = (rows[:, None].to(tl.int64) * HEADS + head) * D + d[None, :]
    tl.store(dq + where, acc.to(dq.dtype.element_ty), mask=inside[:, None] & (d[None, :] < D))


@triton.jit(do_not_specialize=["count", "window"])
def backward_keys(  # type: ignore[no-untyped-def]
    grad, q, k, v, lse, delta, dk, dv, table, positions, q_t, q_h, k_t, k_h, v_t, v_h, count, scale, cap, window,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    TILE: tl.constexpr, BM: tl.constexpr, BY_WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """dk (T, H, D) and dv (T, H, E) of one tile of keys, from one query head: its segment's queries, then those of the
    completions that follow."""
    entry = table + tl.program_id(1) * FIELDS
    head = tl.program_id(0)
    start, end, own = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    length, after, after_end = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
    at = start + tl.arange(0, TILE)
    seen = at < end
    kv = head // REPEAT
    keys = _tile(k + kv * k_h, at, seen, k_t, D, BD)
    values = _tile(v + kv * v_h, at, seen, v_t, E, BE)
    position = at - own + length
    queries, grads = q + head * q_h, grad + head * E
    dk_acc = tl.zeros([TILE, BD], tl.float32)
    dv_acc = tl.zeros([TILE, BE], tl.float32)
    for part in tl.static_range(2):
        if part == 0:
            first, last = start, end
            if BY_WINDOW:
                last = tl.minimum(last, start + TILE + window)
        else:
            first, last = after, after_end
            # The first completion token may be too far already.
            if BY_WINDOW and end - (start + TILE - 1) >= window:
                last = first
        for n in range(first, last, BM):
            rows = n + tl.arange(0, BM)
            inside = rows < last
            if part == 0:
                keep = (rows[None, :] >= at[:, None]) & inside[None, :] & seen[:, None]
            else:
                keep = inside[None, :] & seen[:, None]
            where = tl.load(positions + rows, mask=inside, other=0)
            tile = _tile(queries, rows, inside, q_t, D, BD)
            s = _scores(keys, tile, position, where, keep, scale, cap, window, BY_WINDOW, CAPPED, True)
            normalizer = tl.load(lse + head * count + rows, mask=inside, other=0.0)
            p = tl.exp2((s - normalizer[None, :]) * LOG2E)  # (keys, queries)
            g = _tile(grads, rows, inside, HEADS * E, E, BE)
            dv_acc += tl.dot(p.to(g.dtype), g, input_precision="ieee")
            grad_p = tl.dot(values, tl.trans(g), input_precision="ieee")
            per_row = tl.load(delta + head * count + rows, mask=inside, other=0.0)
            ds = _slopes(p, s, grad_p, per_row[None, :], scale, cap, CAPPED)
            dk_acc += tl.dot(ds.to(tile.dtype), tile, input_precision="ieee")
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    line = at[:, None].to(tl.int64) * HEADS + head
    tl.store(dk + line * D + d[None, :], dk_acc.to(dk.dtype.element_ty), mask=seen[:, None] & (d[None, :] < D))
    tl.store(dv + line * E + e[None, :], dv_acc.to(dv.dtype.element_ty), mask=seen[:, None] & (e[None, :] < E))
