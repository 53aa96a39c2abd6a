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
from rloom.generation.native.scheduler import Sequence, SharedPrompt
from rloom.models.prefix import DTYPES, WIDEST, for_width
from rloom.types import PackedRow

PAGE = 64
PROGRAMS = 512  # that fill a GPU
STRETCHES = 16  # into which a prompt or a completion is cut, at most
FEW = 8  # parts that are joined by a smaller program than the most that there can be
ON_OWN = 256  # tokens of a completion that are worth a program of their own


@dataclass(frozen=True, slots=True)
class Launch:
    """What a program of the attention kernel does at a time, as measured on an H200 (bench/RESULTS.md)."""

    fold: int  # tokens folded in
    warps: int
    stages: int  # folds that are on their way
    queries: int  # rows times repeated heads that are taken to a prompt together
    on_prompt: int  # tokens of a prompt that are worth a program of their own


LAUNCHES = {64: Launch(64, 4, 3, 64, 64), 128: Launch(64, 2, 2, 16, 128), 256: Launch(32, 4, 3, 64, 64)}
"""For heads up to a width, in half precision."""

LAUNCHES_FLOAT32 = {64: Launch(32, 4, 2, 16, 64), 128: Launch(32, 4, 2, 16, 128), 256: Launch(16, 4, 2, 16, 64)}
"""The same in float32, whose tiles take twice the room and are multiplied without tensor cores."""

WHOLE = {64: (64, 4, 3), 128: (64, 2, 3), 256: (32, 4, 3)}
"""Tokens folded in, warps and stages of a program that takes all of a row, for heads up to a width."""

WHOLE_FLOAT32 = {64: (32, 4, 2), 128: (32, 4, 2), 256: (16, 4, 2)}

SHORT = 4
"""So many times longer than prompts are completions beside which rows may read their prompt each for itself."""


@dataclass(slots=True, eq=False)
class Tables:
    """What the kernels are told about B rows; addresses never change."""

    own: Tensor  # (B, pages of a completion) int32
    members: Tensor  # (G, rows to a group) int32, −1: none
    group_of: Tensor  # (B,) int32
    prompt_lengths: Tensor  # (B,) int32, 0 for rows that do nothing
    lengths: Tensor  # (G,) int32
    prompts: Tensor  # (G, pages of a prompt) int32
    sums: Tensor  # partial sums, float32
    tops: Tensor
    on_prompt: int  # stretches
    on_own: int
    whole: bool  # a program takes all that a row attends to


def fits_kernels(geometry: Geometry) -> bool:
    """Heads that the tiles hold, of a type that they are made for."""
    return all(
        layer.dtype in DTYPES and max(layer.width, layer.value_width) <= WIDEST for layer in set(geometry.layers)
    )


class PagedCache:
    """Pages of all layers, for as long as a rollout lasts."""

    def __init__(
        self, geometry: Geometry, *, total: int, addresses: Tensor, max_new_tokens: int, device: torch.device
    ) -> None:
        self.geometry, self.device, self.addresses = geometry, device, addresses
        self.max_new_tokens = max_new_tokens
        make = lambda heads, width, dtype: torch.empty((total, PAGE, heads, width), dtype=dtype, device=device)  # noqa: E731
        self.layers = [
            (make(x.heads, x.width, x.dtype), make(x.heads, x.value_width, x.dtype)) for x in geometry.layers
        ]
        pointers = [tensor.data_ptr() for pair in self.layers for tensor in pair]
        self.pointers = torch.tensor(pointers, pin_memory=device.type == "cuda")
        self.where: Tensor | None = None
        self.tables: Tables | None = None

    # -- prefill

    def begin_prefill(self, prompts: list[SharedPrompt]) -> None:
        """The prompts whose keys and values come next, in the order of the packed row."""
        lines = [
            torch.tensor(prompt.pages).repeat_interleave(PAGE)[: len(prompt.token_ids)] * PAGE
            + torch.arange(len(prompt.token_ids)) % PAGE
            for prompt in prompts
        ]
        self.where = torch.cat(lines).to(self.device, non_blocking=True)

    def keep(self, layer: int, key: Tensor, value: Tensor, row: PackedRow) -> None:
        """A layer's keys and values (1, H, T, D) of the prompts."""
        from rloom.generation.native.kernels.decode_attention import keep_prompts

        assert self.where is not None
        pages_k, pages_v = self.layers[layer]
        key, value = (x[0] if x.stride(-1) == 1 else x[0].contiguous() for x in (key, value))
        heads, count, width = key.shape
        size = value.shape[-1]
        keep_prompts[(count,)](
            key, value, self.where, pages_k, pages_v, *key.stride()[:2], *value.stride()[:2], KV=heads, D=width,
            BD=_power(width), E=size, BE=_power(size), BH=1 << (heads - 1).bit_length(), num_warps=4,
        )  # fmt: skip

    # -- decode

    def arrange(self, sequences: list[Sequence], rows: Rows, steps: int) -> None:
        """Tell the kernels which rows read which pages."""
        tables = self.tables
        assert tables is not None
        self.addresses.copy_(self.pointers, non_blocking=True)  # another rollout may have been begun meanwhile
        self.lengthen(sequences)
        members = np.full(tables.members.shape, -1, dtype=np.int32)
        prompts = np.zeros(tables.prompts.shape, dtype=np.int32)
        lengths = np.zeros(tables.lengths.shape, dtype=np.int32)
        group_of, prompt_lengths = (np.zeros(len(tables.group_of), dtype=np.int32) for _ in range(2))
        for index, (prompt, found) in enumerate(groups_of(sequences, most=members.shape[1])):
            members[index, : len(found)] = found
            prompts[index, : len(prompt.pages)] = prompt.pages
            lengths[index] = len(prompt.token_ids)
            group_of[found], prompt_lengths[found] = index, lengths[index]
        targets = (tables.members, tables.prompts, tables.lengths, tables.group_of, tables.prompt_lengths)
        sources = (members, prompts, lengths, group_of, prompt_lengths)
        for target, source in zip(targets, sources, strict=True):
            target.copy_(torch.from_numpy(source))
        tables.tops.zero_()  # rows that do nothing have no prompt: their part must weigh nothing

    def lengthen(self, sequences: list[Sequence]) -> None:
        """Tell the kernels of pages that rows have got since; nobody waits for steps that are under way."""
        assert self.tables is not None
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
        """query (B, H, 1, D), key and value (B, H_kv, 1, ·) of the new token → (B, 1, H, E).

        `options["rotation"]`: cosines and sines (B, 1, D) by which query and key are still to be rotated.
        """
        tables = self.tables
        assert tables is not None
        query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
        count, heads, _, width = query.shape
        shared, size = key.shape[1], value.shape[-1]
        out = torch.empty((count, 1, heads, size), dtype=query.dtype, device=query.device)
        constants = {
            "HEADS": heads, "KV": shared, "REPEAT": heads // shared, "D": width, "BD": _power(width), "E": size,
            "BE": _power(size), "PAGE": PAGE, "BY_WINDOW": bool(options["window"]), "CAPPED": bool(options["softcap"]),
            "ROTATED": options.get("rotation") is not None,
        }  # fmt: skip
        attend = self._attend_whole if tables.whole else self._attend_parts
        attend(tables, layer, query, key, value, rows, options, out, constants)
        return out

    def _attend_whole(
        self, tables: Tables, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows,
        options: dict[str, Any], out: Tensor, constants: dict[str, Any],
    ) -> None:  # fmt: skip
        from rloom.generation.native.kernels import decode_attention as kernels

        cos, sin = _angles(query, options)
        sinks = options["sinks"]
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

    def _attend_parts(
        self, tables: Tables, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: Rows,
        options: dict[str, Any], out: Tensor, constants: dict[str, Any],
    ) -> None:  # fmt: skip
        from rloom.generation.native.kernels import decode_attention as kernels

        groups, most = tables.members.shape
        count, heads, repeat = len(query), constants["HEADS"], constants["REPEAT"]
        parts = tables.on_prompt + tables.on_own
        cos, sin = _angles(query, options)
        launch = launch_for(query.dtype, max(constants["D"], constants["E"]))
        kernels.attend_parts[(groups * tables.on_prompt + count * tables.on_own, key.shape[1])](
            query, key, value, cos, sin, self.addresses, layer, tables.sums, tables.tops, rows.positions, rows.cached,
            tables.own, tables.members, tables.lengths, tables.prompts, groups, tables.on_prompt, tables.on_own,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            cos.stride(0), sin.stride(0), tables.own.shape[1], tables.prompts.shape[1], options["scale"],
            options["softcap"] or 1.0, options["window"] or 0, **constants, MOST=most, ROWS=_power(most * repeat),
            OWN_ROWS=_power(repeat), BN=launch.fold, num_warps=launch.warps,
            num_stages=min(launch.stages, _most_stages(self.device)),
        )  # fmt: skip
        sinks = options["sinks"]
        kernels.merge_parts[(count, heads)](
            tables.sums, tables.tops, query if sinks is None else sinks, out, parts, HEADS=heads,
            BP=FEW if parts <= FEW else 2 * STRETCHES, E=constants["E"], BE=constants["BE"], SINKS=sinks is not None,
            num_warps=1,
        )  # fmt: skip


def _angles(query: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Cosines and sines by which the kernel rotates; something, where it does not."""
    cos, sin = options.get("rotation") or (query, query)
    return (cos, sin) if cos.stride(-1) == sin.stride(-1) == 1 else (cos.contiguous(), sin.contiguous())


def launch_for(dtype: torch.dtype, width: int) -> Launch:
    """How heads of a type and width are attended to."""
    return for_width(LAUNCHES_FLOAT32 if dtype == torch.float32 else LAUNCHES, width)


def _launches(geometry: Geometry) -> list[Launch]:
    return [launch_for(layer.dtype, max(layer.width, layer.value_width)) for layer in geometry.layers]


def rows_at_once(geometry: Geometry, largest_group: int) -> int:
    """Rows that one program takes to a stretch of their prompt."""
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
    worth = min(launch.on_prompt for launch in _launches(geometry))
    on_prompt = stretches(-(-max_prompt // worth), groups * shared)
    on_own = stretches(-(-max_new_tokens // ON_OWN), count * shared)
    short: dict[str, Any] = {"dtype": torch.int32, "device": device}
    lines = count * heads * (on_prompt + on_own)
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
        on_prompt=on_prompt,
        on_own=on_own,
        whole=count * shared >= PROGRAMS // 2 and max_new_tokens >= SHORT * max_prompt,
    )


def stretches(most: int, sequences: int) -> int:
    """Into how many each of these is cut: no more than fill the GPU together, since every one has to be started.

    >>> stretches(4, 256), stretches(4, 16), stretches(4, 1024)
    (2, 4, 1)
    """
    return max(1, min(most, PROGRAMS // sequences, STRETCHES))


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
