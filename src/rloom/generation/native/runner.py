"""Runs the model: prompts as packed rows, then steps of one token per row, in CUDA graphs where there are any."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rloom.data.model_inputs import fitted_to, join_packed
from rloom.generation.native.cache.attention import Cache, decoding, native_attention, prefilling, rotate_in_attention
from rloom.generation.native.cache.dense import DenseCache
from rloom.generation.native.cache.geometry import Geometry
from rloom.generation.native.cache.paged import PAGE, PagedCache, fits_kernels
from rloom.generation.native.graphs import Bucket, Graphs
from rloom.generation.native.layers.compiled import CompiledLayers
from rloom.generation.native.layers.patched import PatchedLayers
from rloom.generation.native.proof import NOISE
from rloom.generation.native.rows import CHUNK, Readback, Rows
from rloom.generation.native.sampling.sampler import Sampler
from rloom.generation.native.scheduler import SampledSequence, SharedPrompt
from rloom.models.fused import rotating
from rloom.models.load import base_of
from rloom.models.positions import position_limit, prompt_positions, rope_index_of
from rloom.models.triton_support import runs_kernels
from rloom.models.verify import accepted_by
from rloom.types import Block, PackedRow

STEPS_AHEAD = 8
"""Steps that are begun before those before them are read back: a row that has ended meanwhile draws nothing in them."""

CHUNK_ON_CPU = 4
"""Steps between two readbacks on a CPU, where reading costs nothing and rows that have ended do."""

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def lock_of(model: nn.Module) -> threading.RLock:
    """Held by the thread that runs a model as the engine does: its layers are others meanwhile."""
    return _locks.setdefault(model, threading.RLock())


class Runner:
    """One model, its patched layers, and the graphs of its decode steps."""

    def __init__(
        self, model: Any, sampler: Sampler, *, max_new_tokens: int, eos_token_ids: tuple[int, ...], compiled: bool,
        merged: bool | None = None, group_size: int = 0, longest_prompt: int = 0, fused: bool = True,
        late_rotation: bool = True, noise: float = NOISE,
    ) -> None:  # fmt: skip
        self.model, self.base, self.modules = model, base_of(model), list(model.modules())
        self.device = next(model.parameters()).device
        # The compiler fuses more than the kernels of `FusedLayers`, and must see the layers as they are.
        fuse = fused and not compiled and runs_kernels(self.device)
        # Patches try their kernels, on the model's device.
        with self.on_device():
            self.layers = PatchedLayers(model, merge=merged, fuse=fuse)
        self.compiled = CompiledLayers(self.base, wanted=compiled, on_gpu=self.device.type == "cuda")
        self.late_rotation = late_rotation and self.layers.rotates
        self.noise = noise  # how far logits may differ from a plain forward's, as a share of the largest
        self.sampler, self.max_new_tokens = sampler, max_new_tokens
        if sampler.never is not None:
            sampler.never = sampler.never.to(self.device)
        ends = torch.tensor(sorted(eos_token_ids) or [-1], device=self.device)
        self.accepts = accepted_by(self.base)
        self.no_cache = {"use_cache": False} if "use_cache" in self.accepts else {}
        self.position_limit, self.rope_index = position_limit(self.base), rope_index_of(self.base)
        vocabulary = int(self.base.get_output_embeddings().weight.shape[0])
        # No method of the runner's: its memory must go with the last reference, not with the next garbage collection.
        make_rows = partial(Rows.empty, ends=ends, vocabulary=vocabulary, with_seen=sampler.penalty != 1.0)
        self.graphs = Graphs(
            self.device, make_rows, max_new_tokens=max_new_tokens, group_size=group_size,
            longest_prompt=longest_prompt,
        )  # fmt: skip
        self.geometry = Geometry(())  # found by the first prefill
        self.addresses: Tensor | None = None

    # -- the forwards

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The model as the engine runs it: its attention, patched layers, no dropout, no gradients."""
        with (
            lock_of(self.base), self.on_device(), _without_training(self.modules), torch.no_grad(),
            native_attention(self.base), self.layers.used(),
        ):  # fmt: skip
            yield

    def on_device(self) -> Any:
        """Kernels are launched on the model's own GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def prefill_shared(self, prompts: list[SharedPrompt], cache: Cache) -> Tensor:
        """Logits (P, V) after each prompt, all of them with images or none."""
        cache.begin_prefill(prompts)
        tokens = [prompt.token_ids for prompt in prompts]
        if prompts[0].inputs is None:
            return self.prefill(tokens, cache)
        shown = join_packed([prompt.inputs for prompt in prompts], list(map(len, tokens)), sum(map(len, tokens)))
        inputs: dict[str, Any] = fitted_to(self.base, shown)
        if self.rope_index is not None:
            positions = [prompt_positions(self.rope_index, prompt.token_ids, prompt.inputs) for prompt in prompts]
            for prompt, counted in zip(prompts, positions, strict=True):
                prompt.next_position = int(counted.max()) + 1
            inputs["position_ids"] = torch.cat(positions, -1).to(self.device, non_blocking=True)
        return self.prefill(tokens, cache, **inputs)

    def prefill(self, prompts: list[list[int]], cache: Cache | None = None, **more: Any) -> Tensor:
        """Logits (P, V) after each prompt; its keys and values go to the cache. `more`: what images add."""
        row = prompt_row(prompts, self.device)
        inputs = {"input_ids": row.input_ids, "position_ids": row.position_ids, **self.no_cache, **more}
        with prefilling(cache, row) as found:
            if "logits_to_keep" in self.accepts:
                logits = self.model(**inputs, logits_to_keep=row.source).logits[0]
            else:
                logits = self.model(**inputs).logits[0, row.source]
        if not self.geometry.layers:
            self.geometry = Geometry(tuple(found[index] for index in sorted(found)), tuple(found))
        return logits

    def logits(self, rows: Rows, cache: Cache) -> Tensor:
        """(B, V) after the rows' next tokens."""
        later = rotating(rotate_in_attention) if self.late_rotation else nullcontext()
        with decoding(cache, rows, order=self.geometry.order), later:
            return self.model(input_ids=rows.tokens, position_ids=rows.positions, **self.no_cache).logits[:, -1]

    def step(self, rows: Rows, cache: Cache) -> None:
        """One token more for each row."""
        self._advance(rows, self.logits(rows, cache))

    def _advance(self, rows: Rows, logits: Tensor) -> None:
        rows.advance(self.sampler(logits, rows.keys, rows.counts, rows.seen))

    def _eager_step(self, rows: Rows, cache: Cache) -> None:
        """A step without a graph. On a CPU its layers are compiled where that was asked for, but not for a single row,
        which would be compiled apart."""
        if not self.compiled.wanted or self.device.type != "cpu" or len(rows) == 1:
            self.step(rows, cache)
            return
        try:
            with self.compiled.used():
                logits = self.logits(rows, cache)
        except Exception as error:
            self.compiled.give_up(error)
            # Once more: keys and values are written to the same places.
            logits = self.logits(rows, cache)
        self._advance(rows, logits)

    # -- memory

    @property
    def paged(self) -> bool:
        """Whether keys and values lie in pages, for the kernels."""
        return runs_kernels(self.device) and fits_kernels(self.geometry)

    @property
    def page_size(self) -> int:
        """Tokens to a page."""
        return PAGE if self.paged else 16

    def make_cache(self, total_pages: int, max_new_tokens: int) -> Cache:
        """For one rollout, with the weights as they are now."""
        self.layers.refresh()
        self.graphs.begin_rollout()
        if not self.paged:
            return DenseCache(self.geometry, max_new_tokens, self.device)
        if self.addresses is None:
            self.addresses = torch.zeros(2 * len(self.geometry.layers), dtype=torch.int64, device=self.device)
        return PagedCache(self.geometry, total_pages, self.addresses)

    # -- decode

    @property
    def chunk(self) -> int:
        """Steps between two readbacks."""
        return CHUNK if self.device.type == "cuda" else CHUNK_ON_CPU

    def decode(self, sequences: list[SampledSequence], cache: Cache, steps: int, expected: int) -> Readback:
        """Draw up to `steps` more tokens for each sequence. `expected`: steps that are likely still to come."""
        bucket = self.bucket_for(sequences)
        bucket.rows.load(sequences, self.max_new_tokens, steps)
        cache.arrange(sequences, bucket.tables, steps)
        if self.graphs.is_worth_capturing(bucket, expected):
            context = self._compiled_if_right(bucket.rows, cache)
            self.graphs.capture(bucket, lambda: self.step(bucket.rows, cache), context)
        for _ in range(steps):
            if bucket.graph is not None:
                bucket.graph.replay()
            else:
                self._eager_step(bucket.rows, cache)
                cache.stepped()
                bucket.steps += 1
        return bucket.rows.read_back(steps)

    @contextmanager
    def _compiled_if_right(self, rows: Rows, cache: Cache) -> Iterator[None]:
        self.compiled.prove(rows, lambda: self.logits(rows, cache), self.noise)
        with self.compiled.used():
            yield

    def can_run_ahead(self, sequences: list[SampledSequence]) -> bool:
        """Whether the last steps were of just these rows, in a graph: more of them need nothing from the host."""
        bucket = self.graphs.current
        return bucket is not None and bucket.graph is not None and bucket.rows.loaded == sequences

    def run_ahead(self, cache: Cache, steps: int) -> Readback:
        """`steps` more of the rows of the last steps, which may still be under way."""
        bucket = self.graphs.current
        assert bucket is not None
        bucket.rows.run_ahead(steps)
        cache.lengthen(bucket.rows.loaded)
        for _ in range(steps):
            bucket.graph.replay()
        return bucket.rows.read_back(steps)

    def bucket_for(self, sequences: list[SampledSequence]) -> Bucket:
        """Buffers that hold these sequences."""
        return self.graphs.bucket_for(sequences, self.geometry if self.paged else None)


@contextmanager
def _without_training(modules: list[nn.Module]) -> Iterator[None]:
    """Switch dropout off. `eval` and `train` would walk the model anew each time that a group is handed over."""
    in_training = [module for module in modules if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def prompt_row(prompts: list[list[int]], device: torch.device) -> PackedRow:
    """Prompts one after the other, each attending to itself; `source` is where each ends."""
    blocks: list[Block] = []
    start, total = 0, sum(map(len, prompts))
    for prompt in prompts:
        blocks.append(Block(start=start, prompt=len(prompt), first=total, completions=()))
        start += len(prompt)
    ids = [token for prompt in prompts for token in prompt]
    positions = [position for prompt in prompts for position in range(len(prompt))]
    tokens = torch.tensor([ids, positions]).to(device, non_blocking=True)
    ends = torch.tensor([block.start + block.prompt - 1 for block in blocks]).to(device, non_blocking=True)
    return PackedRow(
        blocks=tuple(blocks), num_prompt_tokens=total, input_ids=tokens[:1], position_ids=tokens[1:], source=ends
    )
