"""Compiles the kernels that a run needs, in parallel at its start.

Triton compiles a kernel when it is first launched, which takes a second or two. One after the other, this took most of
a run's first minute. Here threads launch each kernel once on small tensors of the model's own shapes; the compiler
releases Python's lock. Kernels that Triton has on disk already are only loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rloom.config import RLOOConfig
from rloom.data.packing import pack
from rloom.models.head import LogitTransform
from rloom.models.load import base_of
from rloom.models.prefix import Options, Tiles, launch, prefix_forward, prefix_grads
from rloom.models.triton_support import runs_kernels
from rloom.printable import get_logger
from rloom.types import Rollout

logger = get_logger(__name__)

ROWS = 16
"""Rows of the decode steps and logits that are run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The shapes that kernels are compiled for."""

    heads: int
    shared: int  # heads of keys and values
    width: int
    hidden: int
    inner: int  # width of the MLP
    vocabulary: int
    group: int  # completions of a prompt
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, model: Any, args: RLOOConfig) -> Sizes:
        """Read the sizes from the model's config. A kernel for other sizes is compiled when it is first used."""
        config, head = base_of(model).config.get_text_config(), base_of(model).get_output_embeddings().weight
        heads, dtype = config.num_attention_heads, head.dtype
        if dtype == torch.float32 and (args.bf16 or args.fp16):
            dtype = torch.bfloat16 if args.bf16 else torch.float16
        return cls(
            heads=heads,
            shared=getattr(config, "num_key_value_heads", None) or heads,
            width=getattr(config, "head_dim", None) or config.hidden_size // heads,
            hidden=config.hidden_size,
            inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            vocabulary=head.shape[0],
            group=args.num_generations,
            dtype=dtype,
            device=head.device,
        )

    def numbers(self, *shape: int) -> Tensor:
        """Zeros of this shape, in the dtype that the model computes in."""
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def compile_kernels(model: Any, args: RLOOConfig) -> None:
    """Compile the kernels of updates and generation. It changes no result: errors are only logged."""
    if not runs_kernels(args.device):
        return
    try:
        sizes = Sizes.of(model, args)
        tasks = [*_of_attention(sizes), *_of_head(sizes), *_of_layers(sizes), *_of_decoding(sizes)]
    except Exception as error:
        # The architecture has other names for its sizes, or does not use the kernels.
        logger.debug("kernels are compiled when they are needed: %s", error)
        return
    trains_half = any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    tasks += [lambda: _optimizer(sizes)] if trains_half else []

    def run(task: Callable[[], Any]) -> None:
        try:
            with torch.no_grad(), torch.cuda.device(sizes.device):
                task()
        except Exception as error:
            # A kernel that fails here will fail again in use, and is handled there.
            logger.debug("a kernel was not compiled at the start: %s", error)

    with ThreadPoolExecutor(min(len(tasks), os.cpu_count() or 1)) as threads:
        list(threads.map(run, tasks))
    torch.cuda.synchronize(sizes.device)


def _of_attention(sizes: Sizes) -> list[Callable[[], Any]]:
    rollout = Rollout(
        prompt_ids=[[1, 1], [1, 1]], completion_ids=[[1], [1]], groups=torch.tensor([0, 0]),
        scores=torch.zeros(2, 1), score=torch.zeros(2), trained=[True, True],
    )  # fmt: skip
    row = pack(rollout, range(2), sizes.device)
    count = row.input_ids.shape[1]
    q, kv = sizes.numbers(count, sizes.heads, sizes.width), sizes.numbers(count, sizes.shared, sizes.width)
    tiles, options = Tiles.of(row, sizes.device, launch(q, kv).tile), Options(scale=1.0)
    lse = torch.zeros((sizes.heads, count), device=sizes.device)
    return [
        lambda: prefix_forward(q, kv, kv, None, tiles, options),
        lambda: prefix_grads(q, q, kv, kv, q, lse, None, tiles, options),
    ]


def _of_head(sizes: Sizes) -> list[Callable[[], Any]]:
    from rloom.models import kernels

    targets = torch.zeros(ROWS, dtype=torch.int64, device=sizes.device)
    ones, plain = torch.ones(ROWS, device=sizes.device), LogitTransform()
    return [
        lambda: kernels.row_stats(sizes.numbers(ROWS, sizes.vocabulary), targets, plain),
        lambda: kernels.row_grads(sizes.numbers(ROWS, sizes.vocabulary), targets, ones, ones, plain),
    ]


def _of_layers(sizes: Sizes) -> list[Callable[[], Any]]:
    from rloom.models import fused_kernels as kernels

    x, weight = sizes.numbers(ROWS, sizes.hidden), sizes.numbers(sizes.hidden)
    inner, scales = sizes.numbers(ROWS, sizes.inner), torch.ones(ROWS, device=sizes.device)
    q, k = sizes.numbers(1, ROWS, sizes.heads, sizes.width), sizes.numbers(1, ROWS, sizes.shared, sizes.width)
    q, k, angles = q.transpose(1, 2), k.transpose(1, 2), sizes.numbers(1, ROWS, sizes.width)
    return [
        lambda: kernels.norm(x, weight, 1e-6),
        lambda: kernels.norm_grads(x, x, weight, scales),
        lambda: kernels.gate(inner, inner),
        lambda: kernels.gate_grads(inner, inner, inner),
        lambda: kernels.rotate(q, k, angles, angles),
        lambda: kernels.rotate(q, k, angles, angles, back=True),
    ]


def _of_decoding(sizes: Sizes) -> list[Callable[[], Any]]:
    from rloom.generation.base import Sampling
    from rloom.generation.native.cache.geometry import Geometry, Layer
    from rloom.generation.native.cache.paged import PagedCache, make_tables, rows_at_once
    from rloom.generation.native.layers.swiglu import TRIED_ROWS, has_kernel
    from rloom.generation.native.rows import Rows
    from rloom.generation.native.runner import prompt_row
    from rloom.generation.native.sampling.sampler import Sampler
    from rloom.generation.native.scheduler import SharedPrompt

    layer = Layer(sizes.shared, sizes.width, sizes.width, sizes.heads, sizes.dtype)
    geometry, ends = Geometry((layer,)), torch.zeros(1, dtype=torch.int64, device=sizes.device)
    q, kv = sizes.numbers(ROWS, sizes.heads, 1, sizes.width), sizes.numbers(ROWS, sizes.shared, 1, sizes.width)
    angles = sizes.numbers(ROWS, 1, sizes.width)
    options = {"scale": 1.0, "window": 0, "softcap": 0.0, "sinks": None, "rotation": (angles, angles)}

    def attend(whole: bool) -> None:
        addresses = torch.zeros(2, dtype=torch.int64, device=sizes.device)
        cache = PagedCache(geometry, 2, addresses)
        addresses.copy_(cache.pointers)
        most = rows_at_once(geometry, sizes.group)
        cache.tables = make_tables(geometry, ROWS, 2, most, 64, 64, sizes.device)
        cache.tables.whole = whole
        cache.attend(0, q, kv, kv, Rows.empty(ROWS, ends, sizes.vocabulary, with_seen=False), options)
        if whole:
            return
        cache.begin_prefill([SharedPrompt([1, 1], pages=[0])])
        keys = sizes.numbers(1, sizes.shared, 2, sizes.width)
        cache.keep(0, keys, keys, prompt_row([[1, 1]], sizes.device))

    def swiglu(rows: int) -> None:
        weight = sizes.numbers(2 * sizes.inner, sizes.hidden)
        if has_kernel(weight):
            torch.ops.rloom.swiglu_product(sizes.numbers(rows, sizes.hidden), weight)

    def draw() -> None:
        rows = Rows.empty(ROWS, ends, sizes.vocabulary, with_seen=False)
        sampler = Sampler(Sampling(max_completion_length=4, eos_token_ids=(0,), pad_token_id=0))
        rows.advance(sampler(sizes.numbers(ROWS, sizes.vocabulary), rows.keys, rows.counts))

    return [lambda: attend(False), lambda: attend(True), draw, *(partial(swiglu, rows) for rows in TRIED_ROWS)]


def _optimizer(sizes: Sizes) -> None:
    from rloom.models.kernels import adamw_split

    weight, wide = torch.zeros(1024, dtype=torch.bfloat16, device=sizes.device), torch.zeros(1024, device=sizes.device)
    rest = torch.zeros(1024, dtype=torch.int16, device=sizes.device)
    state = {"rest": rest, "exp_avg": wide, "exp_avg_sq": wide.clone()}
    group = {"betas": (0.9, 0.999), "lr": 0.0, "weight_decay": 0.0, "eps": 1e-8}
    adamw_split(weight, state, wide.clone(), group, 1, wide[:1])
