"""Triton kernels of a decode step's attention over paged keys and values.

Flash decoding (split-KV) in two launches. `attend_splits` has two kinds of programs: some take a split of a prompt and
all rows that share it, (rows · repeat) queries at once; the others a split of one row's own tokens. Each leaves a
partial sum; `merge_splits` adds up a row's. The program of a row's first own split also writes the new key and value
into their page. Queries and the new key may come before their rotation: every program rotates what it loads, which
costs less than a launch that does it for all.

Where there are rows enough to fill the GPU and prompts are short beside completions, `attend_whole` does all of a row
in one program, and reads the prompt once for each.

The addresses of the pages are read from a table: a captured graph outlives the memory it was captured with.

Numbers that change from batch to batch, or from layer to layer, are arguments of which Triton makes nothing special
(`do_not_specialize`): it would compile a kernel anew for each that turns 1, odd or divisible by 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rloom.models.prefix_kernels import LOG2E, capped, fold


@triton.jit
def keep_prompts(  # type: ignore[no-untyped-def]
    key, value, where, k, v, k_h, k_t, v_h, v_t,
    KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One token of a prefill: its keys (H, T, D) and values (H, T, E), all heads, into line `where` of the pages."""
    t = tl.program_id(0).to(tl.int64)
    line = tl.load(where + t)
    h, d, e = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :], tl.arange(0, BE)[None, :]
    there = (h < KV) & (d < D)
    new = tl.load(key + h * k_h + t * k_t + d, mask=there, other=0.0)
    tl.store(k + (line * KV + h) * D + d, new.to(k.dtype.element_ty), mask=there)
    there = (h < KV) & (e < E)
    new = tl.load(value + h * v_h + t * v_t + e, mask=there, other=0.0)
    tl.store(v + (line * KV + h) * E + e, new.to(v.dtype.element_ty), mask=there)


@triton.jit
def _load_rotated(  # type: ignore[no-untyped-def]
    x, cos, sin, d, there, known, D: tl.constexpr, ROTATED: tl.constexpr
):  # fmt: skip
    """Lines of queries or keys, rotated by their positions' angles if they come without: halves are turned as pairs.

    `known`: where there are angles, in a shape of its own, since all of a row's heads share them.
    """
    own = tl.load(x + d, mask=there, other=0.0)
    if ROTATED:
        first = d < D // 2
        other = tl.load(x + tl.where(first, d + D // 2, d - D // 2), mask=there, other=0.0).to(tl.float32)
        cos, sin = tl.load(cos + d, mask=known, other=0.0), tl.load(sin + d, mask=known, other=0.0)
        turned = own.to(tl.float32) * cos.to(tl.float32) + tl.where(first, -other, other) * sin.to(tl.float32)
        own = turned.to(own.dtype)
    return own


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
    queries, k, v, table, first, last, offset, position, scale, cap, window, kv, top, total, acc,
    KV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, BY_WINDOW: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend to tokens first … last of a paged sequence; `offset` is the position of its token 0."""
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    following = tl.load(table + first // PAGE, mask=first < last, other=0)
    for n in range(first, last, BN):
        at = n + tl.arange(0, BN)
        seen = at < last
        page = following.to(tl.int64)
        # One ahead: keys and values wait for the number of their page, which must not wait for them.
        following = tl.load(table + (n + BN) // PAGE, mask=n + BN < last, other=0)
        line = (page * PAGE + n % PAGE + tl.arange(0, BN)) * KV + kv
        keys = tl.load(k + line[:, None] * D + d[None, :], mask=seen[:, None] & (d[None, :] < D), other=0.0)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:
            s = capped(s, cap)
        keep = seen[None, :]
        if BY_WINDOW:
            keep = keep & (position[:, None] - (offset + at)[None, :] < window)
        s = tl.where(keep, s, -float("inf"))
        values = tl.load(v + line[:, None] * E + e[None, :], mask=seen[:, None] & (e[None, :] < E), other=0.0)
        top, total, acc = fold(s, values, top, total, acc)
    return top, total, acc


@triton.jit
def _attend_prompt_split(  # type: ignore[no-untyped-def]
    g, split, prompt_splits, splits, kv, q, k, v, cos, sin, sums, tops, positions, members, lengths, table, q_b, q_h,
    cos_b, sin_b, table_width, scale, cap, window,
    HEADS: tl.constexpr, KV: tl.constexpr, REPEAT: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    BY_WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """A split of a prompt, for all the rows that share it."""
    r = tl.arange(0, ROWS)
    row = tl.load(members + g * MOST + r // REPEAT, mask=r < MOST * REPEAT, other=-1)
    there = row >= 0
    head = kv * REPEAT + r % REPEAT
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    line = row[:, None].to(tl.int64)
    queries = _load_rotated(
        q + line * q_b + head[:, None] * q_h, cos + line * cos_b, sin + line * sin_b, d[None, :],
        there[:, None] & (d[None, :] < D), there[:, None] & (d[None, :] < D), D, ROTATED,
    )  # fmt: skip
    position = tl.load(positions + row, mask=there, other=0)
    length = tl.load(lengths + g)
    each = tl.cdiv(tl.cdiv(length, prompt_splits), BN) * BN
    first = split * each
    last = tl.minimum(first + each, length)
    # What no row sees any more is not read.
    if BY_WINDOW:
        nearest = tl.min(tl.where(there, position, 1 << 40), 0)
        first = tl.maximum(first, (tl.maximum(nearest - window + 1, 0) // BN * BN).to(tl.int32))
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BE], tl.float32)
    top, total, acc = _attend_split(
        queries, k, v, table + g * table_width, first, last, 0, position, scale, cap, window, kv, top, total, acc,
        KV, D, BD, E, BE, PAGE, BN, BY_WINDOW, CAPPED,
    )  # fmt: skip
    line = (row.to(tl.int64) * HEADS + head) * splits + split
    tl.store(sums + line[:, None] * E + e[None, :], acc, mask=there[:, None] & (e[None, :] < E))
    tl.store(tops + line * 2, top, mask=there)
    tl.store(tops + line * 2 + 1, total, mask=there)


@triton.jit
def _attend_own_split(  # type: ignore[no-untyped-def]
    row, split, prompt_splits, own_splits, splits, kv, q, key, value, k, v, cos, sin, sums, tops, positions, cached,
    table, q_b, q_h, k_b, k_h, v_b, v_h, cos_b, sin_b, table_width, scale, cap, window,
    HEADS: tl.constexpr, KV: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    BY_WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """A split of a row's own tokens; the first also stores the new token, and attends to it."""
    r = tl.arange(0, ROWS)
    there = r < REPEAT
    head = kv * REPEAT + r
    d, e = tl.arange(0, BD)[None, :], tl.arange(0, BE)[None, :]
    row = row.to(tl.int64)
    cos, sin = cos + row * cos_b, sin + row * sin_b
    queries = _load_rotated(
        q + row * q_b + head[:, None] * q_h, cos, sin, d, there[:, None] & (d < D), d < D, D, ROTATED
    )
    length = tl.load(cached + row)
    here = tl.load(positions + row)
    each = tl.cdiv(tl.cdiv(length, own_splits), BN) * BN
    first = split * each
    last = tl.minimum(first + each, length)
    if BY_WINDOW:
        first = tl.maximum(first, tl.maximum(length - window + 1, 0) // BN * BN)
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BE], tl.float32)
    pages = table + row * table_width
    if split == 0:
        new_k = _load_rotated(key + row * k_b + kv * k_h, cos, sin, d, d < D, d < D, D, ROTATED)
        new_v = tl.load(value + row * v_b + kv * v_h + e, mask=e < E, other=0.0)
        at = (tl.load(pages + length // PAGE).to(tl.int64) * PAGE + length % PAGE) * KV + kv
        tl.store(k + at * D + d, new_k, mask=d < D)
        tl.store(v + at * E + e, new_v, mask=e < E)
        top = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), 1) * scale
        if CAPPED:
            top = capped(top, cap)
        total = total + 1.0
        acc = acc + new_v.to(tl.float32)
    top, total, acc = _attend_split(
        queries, k, v, pages, first, last, here - length, tl.zeros([ROWS], tl.int64) + here, scale, cap, window, kv,
        top, total, acc, KV, D, BD, E, BE, PAGE, BN, BY_WINDOW, CAPPED,
    )  # fmt: skip
    line = (row * HEADS + head) * splits + prompt_splits + split
    tl.store(sums + line[:, None] * E + e, acc, mask=there[:, None] & (e < E))
    tl.store(tops + line * 2, top, mask=there)
    tl.store(tops + line * 2 + 1, total, mask=there)


@triton.jit
def _page_of(  # type: ignore[no-untyped-def]
    number, turn, folds, prompt_pages, pages, BN: tl.constexpr, PAGE: tl.constexpr
):
    """The page that a fold is in."""
    on_prompt = number < turn
    which = tl.where(on_prompt, number, number - turn) * BN // PAGE
    return tl.load(tl.where(on_prompt, prompt_pages, pages) + which, mask=number < folds, other=0)


@triton.jit(do_not_specialize=["layer", "own_width", "prompt_width", "window"])
def attend_whole(  # type: ignore[no-untyped-def]
    q, key, value, cos, sin, sinks, out, addresses, layer, positions, cached, own_table, group_of, prompt_lengths,
    prompt_table, q_b, q_h, k_b, k_h, v_b, v_h, cos_b, sin_b, own_width, prompt_width, scale, cap, window,
    HEADS: tl.constexpr, KV: tl.constexpr, REPEAT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    E: tl.constexpr, BE: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BY_WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, ROTATED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """All that a row attends to, prompt and own, in one program: nothing is left to be merged. Grid (rows, KV).

    All that the loop needs is loaded before it, and stores come after it: for a short row, that is most of the time.
    """
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length, here, prompt = tl.load(cached + row), tl.load(positions + row), tl.load(prompt_lengths + row)
    prompt_pages = prompt_table + tl.load(group_of + row) * prompt_width
    pages = own_table + row * own_width
    k = tl.multiple_of(tl.load(addresses + 2 * layer).to(tl.pointer_type(key.dtype.element_ty)), 16)
    v = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(tl.pointer_type(value.dtype.element_ty)), 16)
    # One loop over both: the own tokens begin to load before the prompt's end is attended to.
    # `turn` is the first fold of the row's own tokens.
    turn = tl.cdiv(prompt, BN)
    folds = turn + tl.cdiv(length, BN)
    start = 0
    # What is not seen any more is not read.
    if BY_WINDOW:
        seen_from = tl.maximum(here - window + 1, 0).to(tl.int32)
        own_from = tl.maximum(length - window + 1, 0)
        start = tl.where(seen_from < prompt, seen_from // BN, turn + own_from // BN)
    following = _page_of(start, turn, folds, prompt_pages, pages, BN, PAGE)
    new_page = tl.load(pages + length // PAGE).to(tl.int64)
    r = tl.arange(0, ROWS)
    there = r < REPEAT
    head = kv * REPEAT + r
    d, e = tl.arange(0, BD)[None, :], tl.arange(0, BE)[None, :]
    cos, sin = cos + row * cos_b, sin + row * sin_b
    new_k = _load_rotated(key + row * k_b + kv * k_h, cos, sin, d, d < D, d < D, D, ROTATED)
    new_v = tl.load(value + row * v_b + kv * v_h + e, mask=e < E, other=0.0)
    queries = _load_rotated(
        q + row * q_b + head[:, None] * q_h, cos, sin, d, there[:, None] & (d < D), d < D, D, ROTATED
    )
    top = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), 1) * scale
    if CAPPED:
        top = capped(top, cap)
    total = tl.zeros([ROWS], tl.float32) + 1.0
    acc = tl.zeros([ROWS, BE], tl.float32) + new_v.to(tl.float32)
    for number in range(start, folds):
        on_prompt = number < turn
        n = tl.where(on_prompt, number, number - turn) * BN
        at = n + tl.arange(0, BN)
        seen = at < tl.where(on_prompt, prompt, length)
        page = following.to(tl.int64)
        following = _page_of(number + 1, turn, folds, prompt_pages, pages, BN, PAGE)
        line = (page * PAGE + n % PAGE + tl.arange(0, BN)) * KV + kv
        keys = tl.load(k + line[:, None] * D + d, mask=seen[:, None] & (d < D), other=0.0)
        s = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if CAPPED:
            s = capped(s, cap)
        keep = seen[None, :]
        if BY_WINDOW:
            where = at + tl.where(on_prompt, 0, here - length)
            keep = keep & (here - where < window)[None, :]
        s = tl.where(keep, s, -float("inf"))
        values = tl.load(v + line[:, None] * E + e, mask=seen[:, None] & (e < E), other=0.0)
        top, total, acc = fold(s, values, top, total, acc)
    if SINKS:
        sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
        total += tl.exp2((sink - top) * LOG2E)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * HEADS + head)[:, None] * E + e, result, mask=there[:, None] & (e < E))
    at = (new_page * PAGE + length % PAGE) * KV + kv
    tl.store(k + at * D + d, new_k, mask=d < D)
    tl.store(v + at * E + e, new_v, mask=e < E)


@triton.jit(do_not_specialize=["layer", "groups", "prompt_splits", "own_splits", "own_width", "prompt_width", "window"])
def attend_splits(  # type: ignore[no-untyped-def]
    q, key, value, cos, sin, addresses, layer, sums, tops, positions, cached, own_table, members, lengths, prompt_table,
    groups, prompt_splits, own_splits, q_b, q_h, k_b, k_h, v_b, v_h, cos_b, sin_b, own_width, prompt_width, scale, cap,
    window,
    HEADS: tl.constexpr, KV: tl.constexpr, REPEAT: tl.constexpr, MOST: tl.constexpr, ROWS: tl.constexpr,
    OWN_ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, BY_WINDOW: tl.constexpr, CAPPED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """See the module's docstring. Grid (groups · prompt_splits + rows · own_splits, KV)."""
    program, kv = tl.program_id(0), tl.program_id(1)
    # An address from a table says nothing of its alignment; without the hint every load would be of two bytes.
    k = tl.multiple_of(tl.load(addresses + 2 * layer).to(tl.pointer_type(key.dtype.element_ty)), 16)
    v = tl.multiple_of(tl.load(addresses + 2 * layer + 1).to(tl.pointer_type(value.dtype.element_ty)), 16)
    splits = prompt_splits + own_splits
    if program < groups * prompt_splits:
        g = program // prompt_splits
        if tl.load(members + g * MOST) >= 0:
            _attend_prompt_split(
                g, program % prompt_splits, prompt_splits, splits, kv, q, k, v, cos, sin, sums, tops, positions,
                members, lengths, prompt_table, q_b, q_h, cos_b, sin_b, prompt_width, scale, cap, window, HEADS, KV,
                REPEAT, MOST, ROWS, D, BD, E, BE, PAGE, BN, BY_WINDOW, CAPPED, ROTATED,
            )  # fmt: skip
    else:
        program -= groups * prompt_splits
        _attend_own_split(
            program // own_splits, program % own_splits, prompt_splits, own_splits, splits, kv, q, key, value, k, v,
            cos, sin, sums, tops, positions, cached, own_table, q_b, q_h, k_b, k_h, v_b, v_h, cos_b, sin_b, own_width,
            scale, cap, window, HEADS, KV, REPEAT, OWN_ROWS, D, BD, E, BE, PAGE, BN, BY_WINDOW, CAPPED, ROTATED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def merge_splits(  # type: ignore[no-untyped-def]
    sums, tops, sinks, out, splits, HEADS: tl.constexpr, BP: tl.constexpr, E: tl.constexpr, BE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """One head of one row: its partial sums added up, (B, H, E)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = row * HEADS + head
    p, e = tl.arange(0, BP), tl.arange(0, BE)
    there = p < splits
    top = tl.load(tops + (line * splits + p) * 2, mask=there, other=-float("inf"))
    total = tl.load(tops + (line * splits + p) * 2 + 1, mask=there, other=0.0)
    top = tl.where(total > 0, top, -float("inf"))
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    weight = tl.where(total > 0, tl.exp2((top - highest) * LOG2E), 0.0)
    partial = tl.load(
        sums + (line * splits + p)[:, None] * E + e[None, :],
        mask=(there & (total > 0))[:, None] & (e[None, :] < E), other=0.0,
    )  # fmt: skip
    whole = tl.sum(total * weight, 0)
    if SINKS:
        whole += tl.exp2((sink - highest) * LOG2E)
    value = tl.sum(partial * weight[:, None], 0) / whole
    tl.store(out + line * E + e, value.to(out.dtype.element_ty), mask=e < E)
