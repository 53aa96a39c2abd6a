"""Packed attention on CUDA: what the kernels of `prefix_kernels.py` are told, and how their parts add up.

Grouped queries, soft-caps, sliding windows, sinks, values of another width than keys: all in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloom.data.transfer import upload
from rloom.models.triton_support import runs_kernels
from rloom.types import PackedRow

T = TypeVar("T")

WIDEST = 256
"""Dimensions of a head that the kernels' tiles hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """A row cut into tiles, on the device; see `prefix_kernels.py` for the fields."""

    size: int
    table: Tensor  # (tiles, fields), int32
    positions: Tensor  # (T,), int32
    longest: int  # prompt and completion together

    @classmethod
    def of(cls, row: PackedRow, device: torch.device, size: int) -> Tiles:
        prompts: list[tuple[int, ...]] = []
        others: list[tuple[int, ...]] = []
        for block in row.blocks:
            after_end = block.first + sum(block.completions)
            own = block.start
            for start in range(own, own + block.prompt, size):
                prompts.append((start, own + block.prompt, own, own, 0, block.first, after_end))
            first = block.first
            for length in block.completions:
                for start in range(first, first + length, size):
                    others.append((start, first + length, first, own, block.prompt, 0, 0))
                first += length
        return cls(
            size=size,
            table=upload(torch.tensor([*prompts, *others], dtype=torch.int32), device),
            positions=row.position_ids[0].to(torch.int32),
            longest=longest_sequence(row),
        )


def longest_sequence(row: PackedRow) -> int:
    """Tokens of the longest prompt and completion together."""
    return max(block.prompt + max(block.completions, default=0) for block in row.blocks)


def effective_window(window: int | None, longest: int) -> int | None:
    """The attention window, if the longest sequence is long enough for it to hide something; else None.

    >>> effective_window(100, longest=101), effective_window(100, longest=100), effective_window(None, longest=9)
    (100, None, None)
    """
    return window if window and window < longest else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How the kernels are launched for heads up to a width: tokens to a tile, and (inner tile, warps, stages) each."""

    tile: int
    forward: tuple[int, int, int]
    queries: tuple[int, int, int]
    keys: tuple[int, int, int]


# The fastest of those tried on an H200, triton 3.6.
LAUNCHES = {
    64: Launch(tile=64, forward=(64, 4, 2), queries=(32, 4, 3), keys=(32, 4, 3)),
    128: Launch(tile=64, forward=(64, 4, 2), queries=(32, 4, 2), keys=(64, 4, 2)),
    256: Launch(tile=64, forward=(32, 4, 2), queries=(64, 4, 2), keys=(64, 8, 2)),
}


# float32 tiles are twice as large, and multiplied without tensor cores: smaller ones, which fit the registers.
LAUNCHES_FLOAT32 = {
    64: Launch(tile=32, forward=(32, 4, 2), queries=(32, 4, 2), keys=(32, 4, 2)),
    128: Launch(tile=32, forward=(32, 4, 2), queries=(32, 4, 1), keys=(32, 4, 1)),
    256: Launch(tile=16, forward=(16, 4, 1), queries=(16, 4, 1), keys=(16, 4, 1)),
}


def launch(q: Tensor, v: Tensor) -> Launch:
    """For heads of this width and type."""
    launches = LAUNCHES_FLOAT32 if q.dtype == torch.float32 else LAUNCHES
    return for_width(launches, max(q.shape[-1], v.shape[-1]))


def for_width(launches: Mapping[int, T], width: int) -> T:
    """The first of some choices, by the widest heads that they are for, that these heads fit.

    >>> for_width({64: "narrow", 256: "wide"}, 128)
    'wide'
    """
    return next(found for limit, found in launches.items() if width <= limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What attention does besides attending."""

    scale: float
    window: int | None = None
    softcap: float | None = None


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether the kernels can serve these heads."""
    return runs_kernels(query.device) and query.dtype in DTYPES and max(query.shape[-1], value.shape[-1]) <= WIDEST


def prefix_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, tiles: Tiles, options: Options
) -> tuple[Tensor, Tensor]:
    """q (T, H, D), k (T, H_kv, D), v (T, H_kv, E), sinks (H,) or None → output (T, H, E), log-sum-exp (H, T)."""
    from rloom.models import prefix_kernels as kernels

    q, k, v = _dense(q), _dense(k), _dense(v)
    count, heads, _ = q.shape
    out = torch.empty((count, heads, v.shape[-1]), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, count), dtype=torch.float32, device=q.device)
    inner, warps, stages = launch(q, v).forward
    kernels.forward[(heads, len(tiles.table))](
        q, k, v, q if sinks is None else sinks, out, lse, tiles.table, *_strides(q, k, v), count, *_numbers(options),
        **_constants(q, k, v, tiles, options), BN=inner, SINKS=sinks is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


def prefix_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    tiles: Tiles,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and sinks."""
    from rloom.models import prefix_kernels as kernels

    q, k, v, grad = _dense(q), _dense(k), _dense(v), grad.contiguous()
    count, heads, _ = q.shape
    how = launch(q, v)
    repeat = heads // k.shape[1]
    dq, delta = torch.empty((count, heads, q.shape[-1]), dtype=q.dtype, device=q.device), torch.empty_like(lse)
    # One gradient per query head; those of a key head are summed below.
    each = q.dtype if repeat == 1 else torch.float32
    dk = torch.empty((count, heads, k.shape[-1]), dtype=each, device=q.device)
    dv = torch.empty((count, heads, v.shape[-1]), dtype=each, device=q.device)
    grid, constants = (heads, len(tiles.table)), _constants(q, k, v, tiles, options)
    inner, warps, stages = how.queries
    kernels.backward_queries[grid](
        grad, q, k, v, out, lse, dq, delta, tiles.table, *_strides(q, k, v), count, *_numbers(options), **constants,
        BN=inner, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    inner, warps, stages = how.keys
    kernels.backward_keys[grid](
        grad, q, k, v, lse, delta, dk, dv, tiles.table, tiles.positions, *_strides(q, k, v), count, *_numbers(options),
        **constants, BM=inner, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    dsinks = None
    if sinks is not None:
        share = (sinks.float().unsqueeze(1) - lse).exp()  # (H, T): what the sink takes
        dsinks = -(share * delta).sum(1).to(sinks.dtype)
    return dq, _per_key_head(dk, repeat, k.dtype), _per_key_head(dv, repeat, v.dtype), dsinks


def _per_key_head(grad: Tensor, repeat: int, dtype: torch.dtype) -> Tensor:
    if repeat == 1:
        return grad
    count, heads, width = grad.shape
    return grad.view(count, heads // repeat, repeat, width).sum(2, dtype=torch.float32).to(dtype)


def _dense(x: Tensor) -> Tensor:
    """Kernels step through tokens and heads by strides, through a head's numbers one by one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in (x.stride(0), x.stride(1))]


def _numbers(options: Options) -> tuple[float, float, int]:
    return options.scale, options.softcap or 1.0, options.window or 0


def _constants(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> dict[str, Any]:
    d, e = q.shape[-1], v.shape[-1]
    return {
        "HEADS": q.shape[1], "REPEAT": q.shape[1] // k.shape[1], "D": d, "BD": _power(d), "E": e, "BE": _power(e),
        "TILE": tiles.size, "BY_WINDOW": effective_window(options.window, tiles.longest) is not None,
        "CAPPED": options.softcap is not None,
    }  # fmt: skip


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
