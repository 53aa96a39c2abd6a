"""Decode steps as CUDA graphs. Rows are decoded in buckets: buffers for a number of rows, and the graph of a step over
them. Keys and values are no part of a bucket: kernels find them through a table of addresses, so that a graph outlives
the memory it was captured with."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rloom.generation.native.cache.geometry import Geometry
from rloom.generation.native.cache.paged import PAGE, Tables, make_tables, rows_at_once
from rloom.generation.native.layers.compiled import first_line
from rloom.generation.native.rows import Rows, groups_of
from rloom.generation.native.scheduler import SampledSequence
from rloom.models.capture import Disturbed, captured, one_at_a_time
from rloom.printable import get_logger

logger = get_logger(__name__)

BUCKETS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
"""Numbers of rows that graphs are captured for."""

WORTH_A_GRAPH = 8
"""Steps from which on a capture pays: it takes about as long as a few steps without a graph."""


@dataclass(slots=True, eq=False)
class Bucket:
    """Buffers for a number of rows, and the graph of a step over them."""

    rows: Rows
    tables: Tables | None  # None: keys and values do not lie in pages
    graph: Any = None
    steps: int = 0  # run without a graph so far
    failed: bool = False  # the step cannot be captured
    postponed: bool = False  # a capture was short of memory or disturbed: it is tried again in the next rollout


class Graphs:
    """The buckets of one model, and the pool of memory that their graphs share: one of them runs at a time."""

    def __init__(
        self,
        device: torch.device,
        make_rows: Callable[[int], Rows],
        *,
        max_new_tokens: int,
        group_size: int,
        longest_prompt: int,
    ) -> None:
        self.device, self.make_rows, self.max_new_tokens = device, make_rows, max_new_tokens
        # The longest prompt that is expected: graphs are captured for it at once.
        self.longest_prompt = longest_prompt
        # The longest prompt and the largest group that buffers are made for.
        self.max_prompt, self.largest_group = 0, group_size
        self.buckets: dict[tuple[int, int], Bucket] = {}  # by rows and groups
        self.current: Bucket | None = None  # of the last steps
        self.pool: Any = None
        self.capture_seconds = 0.0

    def begin_rollout(self) -> None:
        """Try captures again that were postponed."""
        for bucket in self.buckets.values():
            bucket.postponed = False

    def prepare_for(self, longest_prompt: int, largest_group: int) -> None:
        """Make buffers for prompts and groups of this size from now on; graphs over smaller ones are dropped."""
        if longest_prompt > self.max_prompt or largest_group > self.largest_group:
            longest_prompt = max(longest_prompt, self.longest_prompt)
            self.max_prompt = max(self.max_prompt, PAGE, 1 << (longest_prompt - 1).bit_length())
            self.largest_group = max(self.largest_group, largest_group)
            self.drop()

    def drop(self) -> None:
        """Let go of all buckets; steps of a rollout that was left in the middle may still be under way in one."""
        if self.buckets and self.device.type == "cuda":
            with one_at_a_time:
                torch.cuda.synchronize(self.device)
        self.buckets.clear()
        # The pool too: torch takes no more graphs into a pool whose graphs are all gone.
        self.current = self.pool = None

    def bucket_for(self, sequences: list[SampledSequence], geometry: Geometry | None) -> Bucket:
        """Buffers that hold these sequences: the next size for which graphs are captured; or for just so many rows,
        where there are no pages (`geometry` None)."""
        if geometry is None:
            # Nothing is captured, and buffers of just this size are cheap.
            self.buckets.clear()
            key, tables = (len(sequences), 0), None
        else:
            # A row more costs nothing, another graph does.
            size, most = _next_size(len(sequences)), rows_at_once(geometry, self.largest_group)
            groups = len(groups_of(sequences, most))
            fitting = [key for key in self.buckets if key[0] == size and key[1] >= groups]
            key = min(fitting, default=(size, min(size, 1 << (groups - 1).bit_length())))
            others = [bucket.tables for bucket in self.buckets.values() if bucket.tables is not None]
            limits = (self.max_prompt, self.max_new_tokens)
            tables = None if fitting else make_tables(geometry, *key, most, *limits, self.device, others)
        if key not in self.buckets:
            self.buckets[key] = Bucket(rows=self.make_rows(key[0]), tables=tables)
        self.current = self.buckets[key]
        return self.current

    def is_worth_capturing(self, bucket: Bucket, expected: int) -> bool:
        """Whether to capture a step now, with so many steps likely still to come."""
        if bucket.tables is None or bucket.graph is not None or bucket.failed or bucket.postponed:
            return False
        return bucket.steps + expected >= WORTH_A_GRAPH

    def capture(self, bucket: Bucket, step: Callable[[], None], context: AbstractContextManager[None]) -> None:
        """Record a step, which is run in this context; the rows' state is put back afterwards.

        Where that fails the bucket has no graph, and its steps run one by one.
        """
        # One at a time, all of it: compiling and warming up wait for the device, too.
        with one_at_a_time, _state_restored(bucket.rows), _no_autocast_cache():
            start = time.perf_counter()
            try:
                with context:
                    _warm_up(step)
                    self.pool = self.pool or torch.cuda.graph_pool_handle()
                    bucket.graph = captured(step, self.pool)
            except torch.OutOfMemoryError:
                bucket.postponed = True
                rows = len(bucket.rows)
                logger.warning("no memory left to capture a decode step of %d rows: it runs without a graph", rows)
            except Disturbed:
                bucket.postponed = True
                logger.warning(
                    "another thread waited for the GPU while a decode step was captured: it runs without a graph"
                )
            # An architecture that synchronises inside, as some mixtures of experts do.
            except Exception as error:
                bucket.failed = True
                logger.warning(
                    "a decode step of this model cannot be captured in a CUDA graph, and runs without: %s",
                    first_line(error),
                )
        if bucket.graph is None:
            # A pool in which a capture failed takes no other.
            self.pool = None
        self.capture_seconds += time.perf_counter() - start


def _warm_up(step: Callable[[], None]) -> None:
    """Run a step beside the current stream, so that kernels are compiled and workspaces made."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)


@contextmanager
def _state_restored(rows: Rows) -> Iterator[None]:
    """Let steps run that do not count."""
    state = [rows.tokens, rows.positions, rows.cached, rows.counts, rows.remaining, rows.alive, rows.out_tokens]
    state += [] if rows.seen is None else [rows.seen]
    saved = [x.clone() for x in state]
    try:
        yield
    finally:
        for target, source in zip(state, saved, strict=True):
            target.copy_(source)
        rows.rewind()


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """A graph must not hold weights that autocast has cast before."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _next_size(count: int) -> int:
    """
    >>> _next_size(33), _next_size(1025)
    (48, 1536)
    """
    index = bisect.bisect_left(BUCKETS, count)
    return BUCKETS[index] if index < len(BUCKETS) else -(-count // 512) * 512
