"""Runs the model: prompts as packed rows, then steps of one token per row, in CUDA graphs where there are any."""

from __future__ import annotations

import bisect
import inspect
import threading
import time
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rloom.data.model_inputs import fitted_to, join_packed
from rloom.generation.native.cache.attention import decoding, native_attention, prefilling, rotate_in_attention
from rloom.generation.native.cache.dense import DenseCache
from rloom.generation.native.cache.geometry import Geometry
from rloom.generation.native.cache.paged import PAGE, PagedCache, Tables, fits_kernels, make_tables, rows_at_once
from rloom.generation.native.layers.compiled import compiled_forwards
from rloom.generation.native.layers.fused_linear import JoinedLayers
from rloom.generation.native.layers.low_rank import AdaptedLayers
from rloom.generation.native.layers.merged import MergedLayers
from rloom.generation.native.layers.swiglu import GatedBlocks
from rloom.generation.native.proof import NOISE, difference
from rloom.generation.native.rows import CHUNK, Look, Rows, groups_of
from rloom.generation.native.sampling.sampler import Drawn, Sampler
from rloom.generation.native.scheduler import Sequence, SharedPrompt
from rloom.models.capture import Disturbed, captured, one_at_a_time
from rloom.models.fused import FusedLayers, forwards_replaced, rotating
from rloom.models.gpu import runs_kernels
from rloom.models.load import base_of
from rloom.models.positions import position_limit, prompt_positions, rope_index_of
from rloom.printable import get_logger
from rloom.types import Block, PackedRow

logger = get_logger(__name__)

BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
"""Numbers of rows that graphs are captured for."""

AHEAD = 8
"""Steps that are begun before those before them were looked at: who has ended meanwhile draws nothing in them."""

COMPARED = 32
"""Rows whose logits a compiled step is judged by: those of a thousand, in float32, would take gigabytes."""

CHUNK_ON_CPU = 4
"""Steps between two looks on a CPU, where looking costs nothing and rows that have ended do."""


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


def lock_of(model: nn.Module) -> threading.RLock:
    """Held by the thread that runs a model as the engine does: its layers are others meanwhile."""
    return _locks.setdefault(model, threading.RLock())


@dataclass(slots=True, eq=False)
class Bucket:
    """Buffers for a number of rows, and the graph of a step over them."""

    rows: Rows
    tables: Tables | None
    graph: Any = None
    steps: int = 0  # run without a graph so far
    failed: bool = False  # to be captured
    starved: bool = False  # of what a graph takes, in this rollout: tried again in the next


class Runner:
    """One model, its buckets and their graphs."""

    def __init__(
        self, model: Any, sampler: Sampler, *, max_new_tokens: int, eos_token_ids: tuple[int, ...], compiled: bool,
        merged: bool | None = None, group_size: int = 0, longest_prompt: int = 0, fused: bool = True,
        late: bool = True, noise: float = NOISE,
    ) -> None:  # fmt: skip
        self.model = model
        self.base = base_of(model)
        self.modules = list(model.modules())
        self.device = next(model.parameters()).device
        with self._here():  # kernels are tried
            self.merged = MergedLayers(model, merged)
            self.joined = JoinedLayers(model, self.merged.copies)
            self.adapted = AdaptedLayers(model, {*self.merged.copies, *self.joined.owners()})
            self.gated = GatedBlocks(self.joined, model)
            # The compiler puts more together than these kernels do, and must see the layers as they are.
            self.fused = FusedLayers([model]) if fused and not compiled and runs_kernels(self.device) else None
        self.sampler, self.max_new_tokens = sampler, max_new_tokens
        self.accepts = frozenset(inspect.signature(type(self.base).forward).parameters)
        self.position_limit = position_limit(self.base)
        self.ends = torch.tensor(sorted(eos_token_ids) or [-1], device=self.device)
        if sampler.never is not None:
            sampler.never = sampler.never.to(self.device)
        self.rope_index = rope_index_of(self.base)
        self.vocabulary = int(self.base.get_output_embeddings().weight.shape[0])
        self.compiled = compiled
        self.proved: set[bool] = set()  # steps that were right when compiled: of a single row, of several
        self.max_prompt, self.largest_group = 0, group_size  # that buffers are made for
        self.noise = noise  # how far logits may differ from a plain forward's, of the largest
        self.late = late  # rotation is left to the attention kernel
        self.longest_prompt = longest_prompt  # that is expected: graphs are captured for it at once
        self.buckets: dict[tuple[int, int], Bucket] = {}  # by rows and groups
        self.geometry: Geometry | None = None
        self.addresses: Tensor | None = None
        self.layers: list[tuple[nn.Module, Any]] = []
        self.bucket: Bucket | None = None  # of the last steps
        self.pool: Any = None  # of memory, for all graphs: one of them runs at a time
        self.seconds = {"capture": 0.0}

    # -- the forwards

    @contextmanager
    def ready(self) -> Iterator[None]:
        """The model as the engine runs it: its attention, joined products, no dropout, no gradients."""
        with lock_of(self.base), self._here(), self._changed():
            yield

    def _here(self) -> Any:
        """Kernels are launched on the model's own GPU."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @contextmanager
    def _changed(self) -> Iterator[None]:
        in_training = [module for module in self.modules if module.training]
        for module in in_training:  # `eval` and `train` would walk the model anew at every hand-over
            module.training = False
        try:
            forwards = dict(self.fused.forwards if self.fused is not None else [])
            forwards |= dict([*self.merged.forwards, *self.adapted.forwards])
            forwards |= dict([*self.joined.forwards(), *self.gated.forwards()])
            forwards |= dict(_without_copies_of_logits(self.model))
            turning = rotating() if self.fused is not None else nullcontext()
            with torch.no_grad(), native_attention(self.base), forwards_replaced(list(forwards.items())), turning:
                yield
        finally:
            self.joined.forget()
            for module in in_training:
                module.training = True

    def prefill_shared(self, prompts: list[SharedPrompt], cache: Any) -> Tensor:
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
                prompt.goes_on_at = int(counted.max()) + 1
            inputs["position_ids"] = torch.cat(positions, -1).to(self.device, non_blocking=True)
        return self.prefill(tokens, cache, **inputs)

    def prefill(self, prompts: list[list[int]], cache: Any = None, **more: Any) -> Tensor:
        """Logits (P, V) after each prompt; its keys and values go to the cache. `more`: what images add."""
        row = prompt_row(prompts, self.device)
        last = row.source
        inputs = {"input_ids": row.input_ids, "position_ids": row.position_ids, **self._no_cache(), **more}
        with prefilling(cache, row) as found:
            if "logits_to_keep" in self.accepts:
                logits = self.model(**inputs, logits_to_keep=last).logits[0]
            else:
                logits = self.model(**inputs).logits[0, last]
        if self.geometry is None:
            self.geometry = Geometry(tuple(found[index] for index in sorted(found)), tuple(found))
        return logits

    def _no_cache(self) -> dict[str, Any]:
        return {"use_cache": False} if "use_cache" in self.accepts else {}

    def logits(self, rows: Rows, cache: Any) -> Tensor:
        """(B, V) after the rows' next tokens."""
        inputs = {"input_ids": rows.tokens, "position_ids": rows.positions, **self._no_cache()}
        order = self.geometry.order if self.geometry is not None else ()
        late = self.late and self.fused is not None and self.fused.rotates
        with decoding(cache, rows, order=order), rotating(rotate_in_attention) if late else nullcontext():
            return self.model(**inputs).logits[:, -1]

    def draw(self, logits: Tensor, keys: Tensor, counts: Tensor, seen: Tensor | None = None) -> Drawn:
        """A token per row."""
        return self.sampler(logits, keys, counts, seen)

    def _step(self, rows: Rows, cache: Any) -> None:
        self._advance(rows, self.logits(rows, cache))

    def _advance(self, rows: Rows, logits: Tensor) -> None:
        rows.advance(self.draw(logits, rows.keys, rows.counts, rows.seen))

    def _eager_step(self, rows: Rows, cache: Any) -> None:
        """A step without a graph. On a CPU its layers are compiled where that was asked for, but not for a single row,
        which would be compiled apart."""
        if not self.compiled or self.device.type != "cpu" or len(rows) == 1:
            self._step(rows, cache)
            return
        try:
            with self._compiled_layers():
                logits = self.logits(rows, cache)
        except Exception as error:  # no compiler here, or an architecture that is not to its liking
            _warn_not_compiled(error)
            self.compiled = False
            logits = self.logits(rows, cache)  # once more: keys and values are written to the same places
        self._advance(rows, logits)

    # -- memory

    @property
    def paged(self) -> bool:
        """Whether keys and values lie in pages, for the kernels."""
        assert self.geometry is not None
        return runs_kernels(self.device) and fits_kernels(self.geometry)

    @property
    def page_size(self) -> int:
        """Tokens to a page."""
        return PAGE if self.paged else 16

    def make_cache(self, total_pages: int) -> Any:
        """For one rollout."""
        assert self.geometry is not None
        for copies in (self.merged, self.joined, self.adapted):
            copies.refresh()
        for bucket in self.buckets.values():
            bucket.starved = False
        if not self.paged:
            return DenseCache(self.geometry, self.max_new_tokens, self.device)
        if self.addresses is None:
            self.addresses = torch.zeros(2 * len(self.geometry.layers), dtype=torch.int64, device=self.device)
        return PagedCache(
            self.geometry, total=total_pages, addresses=self.addresses, max_new_tokens=self.max_new_tokens,
            device=self.device,
        )  # fmt: skip

    def prepare_for(self, longest_prompt: int, largest_group: int) -> None:
        """Buffers for prompts and groups of this size; graphs over smaller ones are dropped."""
        if longest_prompt > self.max_prompt or largest_group > self.largest_group:
            longest_prompt = max(longest_prompt, self.longest_prompt)
            self.max_prompt = max(self.max_prompt, PAGE, 1 << (longest_prompt - 1).bit_length())
            self.largest_group = max(self.largest_group, largest_group)
            self.drop_graphs()

    def drop_graphs(self) -> None:
        """Let go of all buckets; steps of a rollout that was left in the middle may still be under way in one."""
        if self.buckets and self.device.type == "cuda":
            with one_at_a_time:
                torch.cuda.synchronize(self.device)
        self.buckets.clear()
        self.bucket = self.pool = None  # torch takes no more graphs into a pool whose graphs are all gone

    # -- decode

    @property
    def chunk(self) -> int:
        """Steps between two looks at what was drawn."""
        return CHUNK if self.device.type == "cuda" else CHUNK_ON_CPU

    def decode(self, sequences: list[Sequence], cache: Any, steps: int, expected: int) -> Look:
        """Draw up to `steps` more tokens for each sequence. `expected`: steps that are likely still to come."""
        bucket = self.bucket = self._bucket(sequences)
        if isinstance(cache, PagedCache):
            cache.tables = bucket.tables
        bucket.rows.load(sequences, self.max_new_tokens, steps)
        cache.arrange(sequences, bucket.rows, steps)
        if self._worth_a_graph(bucket, cache, expected):
            with one_at_a_time:  # all of it: compiling and warming up wait for the device, too
                self._capture(bucket, cache)
        for _ in range(steps):
            if bucket.graph is not None:
                bucket.graph.replay()
            else:
                self._eager_step(bucket.rows, cache)
                cache.stepped()
                bucket.steps += 1
        return bucket.rows.look(steps)

    def can_go_on(self, sequences: list[Sequence]) -> bool:
        """Whether the last steps were of just these rows, in a graph: more of them need nothing from the host."""
        return self.bucket is not None and self.bucket.graph is not None and self.bucket.rows.loaded == sequences

    def go_on(self, cache: PagedCache, steps: int) -> Look:
        """`steps` more of the rows of the last steps, which may still be under way."""
        assert self.bucket is not None
        rows = self.bucket.rows
        rows.go_on(steps)
        cache.lengthen(rows.loaded)
        for _ in range(steps):
            self.bucket.graph.replay()
        return rows.look(steps)

    def _bucket(self, sequences: list[Sequence]) -> Bucket:
        """Buffers that hold these: for just so many rows, or the next size for which graphs are captured."""
        assert self.geometry is not None
        if not self.paged:
            self.buckets.clear()  # buffers of just this size are cheap, and nothing is captured
            return self.buckets.setdefault((len(sequences), 0), Bucket(rows=self._rows(len(sequences)), tables=None))
        size = _next_size(len(sequences))  # a row more costs nothing, another graph does
        most = rows_at_once(self.geometry, self.largest_group)
        groups = len(groups_of(sequences, most))
        fitting = [key for key in self.buckets if key[0] == size and key[1] >= groups]
        key = min(fitting, default=(size, min(size, 1 << (groups - 1).bit_length())))
        if key not in self.buckets:
            others = [bucket.tables for bucket in self.buckets.values() if bucket.tables is not None]
            limits = (self.max_prompt, self.max_new_tokens)
            tables = make_tables(self.geometry, size, key[1], most, *limits, self.device, others)
            self.buckets[key] = Bucket(rows=self._rows(size), tables=tables)
        return self.buckets[key]

    def _rows(self, count: int) -> Rows:
        return Rows.empty(count, self.ends, self.vocabulary, with_seen=self.sampler.penalty != 1.0)

    def _worth_a_graph(self, bucket: Bucket, cache: Any, expected: int) -> bool:
        """A capture costs about as much as a few steps without one."""
        if bucket.graph is not None or bucket.failed or bucket.starved or not isinstance(cache, PagedCache):
            return False
        return bucket.steps + expected >= 8

    def _capture(self, bucket: Bucket, cache: PagedCache) -> None:
        """Record a step. The rows' state is put back afterwards."""
        start = time.perf_counter()
        rows = bucket.rows
        state = [rows.tokens, rows.positions, rows.cached, rows.counts, rows.remaining, rows.alive, rows.out_tokens]
        state += [] if rows.seen is None else [rows.seen]
        saved = [x.clone() for x in state]
        caching = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a graph must not hold weights that autocast has cast before
        try:
            if self.compiled and not self.compiled_is_right(rows, cache):
                self.compiled = False
            with self._compiled_layers():
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):  # warm-up: kernels are compiled, workspaces made
                    for _ in range(2):
                        self._step(rows, cache)
                torch.cuda.current_stream().wait_stream(stream)
                self.pool = self.pool or torch.cuda.graph_pool_handle()
                bucket.graph = captured(lambda: self._step(rows, cache), self.pool)
        except torch.OutOfMemoryError:
            bucket.starved, self.pool = True, None  # a pool of which a capture failed takes no other
            logger.warning("no memory left to capture a decode step of %d rows: it runs without a graph", len(rows))
        except Disturbed:
            bucket.starved, self.pool = True, None
            logger.warning(
                "another thread waited for the GPU while a decode step was captured: it runs without a graph"
            )
        except Exception as error:  # an architecture that synchronises inside (some mixtures of experts)
            bucket.failed, self.pool = True, None
            logger.warning(
                "a decode step of this model cannot be captured in a CUDA graph, and runs without: %s",
                _first_line(error),
            )
        finally:
            torch.set_autocast_cache_enabled(caching)
            for target, source in zip(state, saved, strict=True):
                target.copy_(source)
            rows.step.zero_()
        self.seconds["capture"] += time.perf_counter() - start

    def compiled_is_right(self, rows: Rows, cache: Any) -> bool:
        """Whether a step can be compiled, and has the logits of the same step without; tried once for a single row,
        which is compiled apart, and once for several.

        Keys and values are written to the same places by both, and the rows stay where they are.
        """
        single = len(rows) == 1
        if single in self.proved:
            return True
        living = rows.alive.nonzero()[:COMPARED, 0]
        plain = self.logits(rows, cache)[living]
        try:
            with self._compiled_layers():
                found = self.logits(rows, cache)[living]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            _warn_not_compiled(error)
            return False
        worst = difference(found, plain)
        if not worst < self.noise:
            logger.warning(
                "the compiled decode step differs from the plain one by %.1e of the largest logit, and is not used",
                worst,
            )
            return False
        self.proved.add(single)
        return True

    @contextmanager
    def _compiled_layers(self) -> Iterator[None]:
        if not self.compiled:
            yield
            return
        self.layers = self.layers or compiled_forwards(self.base, on_gpu=self.device.type == "cuda")
        with forwards_replaced(self.layers):
            yield


def _without_copies_of_logits(model: Any) -> list[tuple[nn.Module, Any]]:
    """The model's forward as accelerate has prepared it, but for the float32 copy of the logits: sampling needs none,
    and writing it takes as long as several layers."""
    forward = model.__dict__.get("forward")
    converting = getattr(getattr(forward, "__func__", forward), "__wrapped__", None)
    inner = getattr(converting, "model_forward", None)
    if inner is None:
        return []
    return [(model, types.MethodType(inner, model) if hasattr(forward, "__func__") else inner)]


def _warn_not_compiled(error: Exception) -> None:
    logger.warning("the decode step cannot be compiled, and runs without: %s", _first_line(error))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def _next_size(count: int) -> int:
    """
    >>> _next_size(33), _next_size(1025)
    (48, 1536)
    """
    index = bisect.bisect_left(BUCKETS, count)
    return BUCKETS[index] if index < len(BUCKETS) else -(-count // 512) * 512


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
