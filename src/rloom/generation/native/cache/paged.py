"""Keys and values in pages on a GPU. Their memory is given back between rollouts; captured graphs stay good, since they
read where the pages lie from a table of addresses."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rloom.generation.native.cache.geometry import Geometry
from rloom.generation.native.rows import Rows, groups_of
from rloom.generation.native.scheduler import SampledSequence, SharedPrompt
from rloom.models.prefix import DTYPES, WIDEST, for_width
from rloom.types import PackedRow

# Tokens to a page.
PAGE = 64

# Programs that fill a GPU.
PROGRAMS = 512

# Splits of a prompt or of a completion, at most (split-KV: each is attended to by a program of its own).
MOST_SPLITS = 16

# Up to so many are merged by a smaller program.
FEW_SPLITS = 8

# Tokens of a completion that are worth a program of their own.
OWN_SPLIT = 256


@dataclass(frozen=True, slots=True)
class Launch:
    """What a program of the attention kernel does at a time, as measured on an H200 (bench/RESULTS.md)."""

    fold: int  # tokens that are attended to at a time
    warps: int
    stages: int  # folds that are being loaded
    queries: int  # rows times repeated heads that attend to a prompt together
    prompt_split: int  # tokens of a prompt that are worth a program of their own


LAUNCHES = {64: Launch(64, 4, 3, 64, 64), 128: Launch(64, 2, 2, 16, 128), 256: Launch(32, 4, 3, 64, 64)}
"""For heads up to a width, in half precision."""

LAUNCHES_FLOAT32 = {64: Launch(32, 4, 2, 16, 64), 128: Launch(32, 4, 2, 16, 128), 256: Launch(16, 4, 2, 16, 64)}
"""The same in float32, whose tiles take twice the room and are multiplied without tensor cores."""

WHOLE = {64: (64, 4, 3), 128: (64, 2, 3), 256: (32, 4, 3)}
"""Fold, warps and stages of a program that takes all of a row, for heads up to a width."""

WHOLE_FLOAT32 = {64: (32, 4, 2), 128: (32, 4, 2), 256: (16, 4, 2)}

SHORT = 4
"""Prompts are short where completions are so many times longer: then each row reads its prompt for itself."""


@dataclass(slots=True, eq=False)
class Tables:
    """What the kernels are told about B rows; addresses never change."""

    own: Tensor  # (B, pages of a completion) int32
    members: Tensor  # (G, rows to a group) int32, −1: none
    group_of: Tensor  # (B,) int32
    prompt_lengths: Tensor  # (B,) int32, 0 for rows without a sequence
    lengths: Tensor  # (G,) int32
    prompts: Tensor  # (G, pages of a prompt) int32
    sums: Tensor  # (B · H · splits, E) float32: a split's weighted sum of values
    tops: Tensor  # (B · H · splits, 2) float32: its largest score, and its sum of weights
    prompt_splits: int  # of each prompt
    own_splits: int  # of each row's own tokens
    whole: bool  # a program takes all that a row attends to


def fits_kernels(geometry: Geometry) -> bool:
    """Heads that the tiles hold, of a type that they are made for."""
    return all(
        layer.dtype in DTYPES and max(layer.width, layer.value_width) <= WIDEST for layer in set(geometry.layers)
    )


class PagedCache:
    """`total` pages of all layers, for as long as a rollout lasts; kernels find them by the table `addresses`."""

    def __init__(self, geometry: Geometry, total: int, addresses: Tensor) -> None:
        self.addresses, self.device = addresses, addresses.device
        make = lambda heads, width, dtype: torch.empty((total, PAGE, heads, width), dtype=dtype, device=self.device)  # noqa: E731
        self.layers = [
            (make(x.heads, x.width, x.dtype), make(x.heads, x.value_width, x.dtype)) for x in geometry.layers
        ]
        pointers = [tensor.data_ptr() for pair in self.layers for tensor in pair]
        self.pointers = torch.tensor(pointers, pin_memory=self.device.type == "cuda")
        self.lines: Tensor  # (T,): where the tokens of a prefill go, over all pages
        self.tables: Tables

    # -- prefill

    def begin_prefill(self, prompts: list[SharedPrompt]) -> None:
        """The prompts whose keys and values come next, in the order of the packed row."""
        lines = [
            torch.tensor(prompt.pages).repeat_interleave(PAGE)[: len(prompt.token_ids)] * PAGE
            + torch.arange(len(prompt.token_ids)) % PAGE
            for prompt in prompts
        ]
        self.lines = torch.cat(lines).to(self.device, non_blocking=True)

    def keep(self, layer: int, key: Tensor, value: Tensor, row: PackedRow) -> None:
        """Keep a layer's keys and values (1, H, T, D) of the prompts."""
        from rloom.generation.native.kernels.decode_attention import keep_prompts

        pages_k, pages_v = self.layers[layer]
        key, value = (x[0] if x.stride(-1) == 1 else x[0].contiguous() for x in (key, value))
        heads, count, width = key.shape
        size = value.shape[-1]
        keep_prompts[(count,)](
            key, value, self.lines, pages_k, pages_v, *key.stride()[:2], *value.stride()[:2], KV=heads, D=width,
            BD=_power(width), E=size, BE=_power(size), BH=1 << (heads - 1).bit_length(), num_warps=4,
        )  # fmt: skip

    # -- decode

    def arrange(self, sequences: list[SampledSequence], tables: Tables | None, steps: int) -> None:
        """Tell the kernels which pages the rows of the next steps read. `tables`: the bucket's."""
        assert tables is not None
        self.tables = tables
        # Another rollout may have been begun meanwhile, whose pages lie elsewhere.
        self.addresses.copy_(self.pointers, non_blocking=True)
        self.lengthen(sequences)
        names = ("members", "prompts", "lengths", "group_of", "prompt_lengths")
        fresh = {name: np.zeros(getattr(tables, name).shape, dtype=np.int32) for name in names}
        fresh["members"].fill(-1)
        for index, (prompt, rows) in enumerate(groups_of(sequences, most=tables.members.shape[1])):
            fresh["members"][index, : len(rows)] = rows
            fresh["prompts"][index, : len(prompt.pages)] = prompt.pages
            fresh["lengths"][index] = fresh["prompt_lengths"][rows] = len(prompt.token_ids)
            fresh["group_of"][rows] = index
        for name, values in fresh.items():
            getattr(tables, name).copy_(torch.from_numpy(values))
        # Rows without a sequence have no prompt: their splits must weigh nothing.
        tables.tops.zero_()

    def lengthen(self, sequences: list[SampledSequence]) -> None:
        """Tell the kernels of pages that rows have got since, without waiting for steps that are under way."""
        own = torch.zeros(self.tables.own.shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        lines = own.numpy()
        for row, sequence in enumerate(sequences):
            lines[row, : len(sequence.pages)] = sequence.pages
        self.tables.own.copy_(own, non_blocking=True)

    def stepped(self) -> None:
        """Nothing to do: lengths are on the device."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: dict[str, Any]
    ) -> Tensor:
        """Keep one more token per row, and attend to all that is kept: query (B, H, 1, D), key and value
        (B, H_kv, 1, ·) of the new token → (B, 1, H, E).

        `options["rotation"]`: cosines and sines (B, 1, D) by which query and key are still to be rotated.
        """
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        count, heads, _, width = query.shape
        shared, size = key.shape[1], value.shape[-1]
        out = torch.empty((count, 1, heads, size), dtype=query.dtype, device=query.device)
        constants = {
            "HEADS": heads, "KV": shared, "REPEAT": heads // shared, "D": width, "BD": _power(width), "E": size,
            "BE": _power(size), "PAGE": PAGE, "BY_WINDOW": bool(options["window"]), "CAPPED": bool(options["softcap"]),
            "ROTATED": options.get("rotation") is not None,
        }  # fmt: skip
        attend = self._attend_whole if self.tables.whole else self._attend_splits
        attend(layer, query, key, value, rows, options, out, constants)
        return out

    def _attend_whole(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows,
        options: dict[str, Any], out: Tensor, constants: dict[str, Any],
    ) -> None:  # fmt: skip
        from rloom.generation.native.kernels import decode_attention as kernels

        tables, sinks = self.tables, options["sinks"]
        cos, sin = _angles(query, options)
        forms = WHOLE_FLOAT32 if query.dtype == torch.float32 else WHOLE
        tokens, warps, stages = for_width(forms, max(query.shape[-1], out.shape[-1]))
        kernels.attend_whole[(len(query), key.shape[1])](
            query, key, value, cos, sin, query if sinks is None else sinks, out, self.addresses, layer, rows.positions,
            rows.cached, tables.own, tables.group_of, tables.prompt_lengths, tables.prompts, query.stride(0),
            query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1), cos.stride(0),
            sin.stride(0), tables.own.shape[1], tables.prompts.shape[1], options["scale"], options["softcap"] or 1.0,
            options["window"] or 0, **constants, ROWS=_power(constants["REPEAT"]), BN=tokens,
            SINKS=sinks is not None, num_warps=warps, num_stages=min(stages, _most_stages(self.device)),
        )  # fmt: skip

    def _attend_splits(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows,
        options: dict[str, Any], out: Tensor, constants: dict[str, Any],
    ) -> None:  # fmt: skip
        from rloom.generation.native.kernels import decode_attention as kernels

        tables, sinks = self.tables, options["sinks"]
        groups, most = tables.members.shape
        count, heads, repeat = len(query), constants["HEADS"], constants["REPEAT"]
        splits = tables.prompt_splits + tables.own_splits
        cos, sin = _angles(query, options)
        launch = launch_for(query.dtype, max(constants["D"], constants["E"]))
        kernels.attend_splits[(groups * tables.prompt_splits + count * tables.own_splits, key.shape[1])](
            query, key, value, cos, sin, self.addresses, layer, tables.sums, tables.tops, rows.positions, rows.cached,
            tables.own, tables.members, tables.lengths, tables.prompts, groups, tables.prompt_splits, tables.own_splits,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            cos.stride(0), sin.stride(0), tables.own.shape[1], tables.prompts.shape[1], options["scale"],
            options["softcap"] or 1.0, options["window"] or 0, **constants, MOST=most, ROWS=_power(most * repeat),
            OWN_ROWS=_power(repeat), BN=launch.fold, num_warps=launch.warps,
            num_stages=min(launch.stages, _most_stages(self.device)),
        )  # fmt: skip
        kernels.merge_splits[(count, heads)](
            tables.sums, tables.tops, query if sinks is None else sinks, out, splits, HEADS=heads,
            BP=FEW_SPLITS if splits <= FEW_SPLITS else 2 * MOST_SPLITS, E=constants["E"], BE=constants["BE"],
            SINKS=sinks is not None, num_warps=1,
        )  # fmt: skip


def _angles(query: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which the kernel rotates; any tensor, where it does not."""
    cos, sin = options.get("rotation") or (query, query)
    return (cos, sin) if cos.stride(-1) == sin.stride(-1) == 1 else (cos.contiguous(), sin.contiguous())


def launch_for(dtype: torch.dtype, width: int) -> Launch:
    """How heads of a type and width are attended to."""
    return for_width(LAUNCHES_FLOAT32 if dtype == torch.float32 else LAUNCHES, width)


def _launches(geometry: Geometry) -> list[Launch]:
    return [launch_for(layer.dtype, max(layer.width, layer.value_width)) for layer in geometry.layers]


def rows_at_once(geometry: Geometry, largest_group: int) -> int:
    """Rows that attend to a split of their prompt in one program."""
    repeat = max(layer.query_heads // layer.heads for layer in geometry.layers)
    queries = min(launch.queries for launch in _launches(geometry))
    return max(1, min(queries // repeat, largest_group))


def make_tables(
    geometry: Geometry,
    count: int,
    groups: int,
    most: int,
    max_prompt: int,
    max_new_tokens: int,
    device: torch.device,
    others: list[Tables] | None = None,
) -> Tables:
    """Buffers for `count` rows in `groups` of at most `most`, and prompts and completions up to these sizes.

    `others`: tables of which one is in use at a time; their room for partial sums is shared.
    """
    heads = max(layer.query_heads for layer in geometry.layers)
    width = max(layer.value_width for layer in geometry.layers)
    shared = min(layer.heads for layer in geometry.layers)
    worth = min(launch.prompt_split for launch in _launches(geometry))
    prompt_splits = num_splits(-(-max_prompt // worth), groups * shared)
    own_splits = num_splits(-(-max_new_tokens // OWN_SPLIT), count * shared)
    short: dict[str, Any] = {"dtype": torch.int32, "device": device}
    lines = count * heads * (prompt_splits + own_splits)
    large = [other.sums for other in others or [] if len(other.sums) >= lines]
    return Tables(
        own=torch.zeros((count, -(-max_new_tokens // PAGE)), **short),
        members=torch.full((groups, most), -1, **short),
        group_of=torch.zeros(count, **short),
        prompt_lengths=torch.zeros(count, **short),
        lengths=torch.zeros(groups, **short),
        prompts=torch.zeros((groups, -(-max_prompt // PAGE)), **short),
        sums=large[0][:lines] if large else torch.empty((lines, width), dtype=torch.float32, device=device),
        tops=torch.zeros((lines, 2), dtype=torch.float32, device=device),
        prompt_splits=prompt_splits,
        own_splits=own_splits,
        whole=count * shared >= PROGRAMS // 2 and max_new_tokens >= SHORT * max_prompt,
    )


def num_splits(most: int, sequences: int) -> int:
    """Splits of each of these sequences: no more than fill the GPU together, since every one has to be started.

    >>> num_splits(4, 256), num_splits(4, 16), num_splits(4, 1024)
    (2, 4, 1)
    """
    return max(1, min(most, PROGRAMS // sequences, MOST_SPLITS))


@functools.cache
def _most_stages(device: torch.device) -> int:
    """Folds that may be on their way: three take 102,400 bytes for heads of 256, and consumer cards have 101,376."""
    if device.type != "cuda":
        return 2
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return 3 if driver.active.utils.get_device_properties(index)["max_shared_mem"] >= 160_000 else 2


def _power(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
