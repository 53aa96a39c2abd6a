"""Recording CUDA graphs in a process in which other threads use the GPU too, and leaving nothing behind on failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from rloom.printable import get_logger

logger = get_logger(__name__)

one_at_a_time = threading.RLock()
"""Held while a graph is recorded, and by whoever must not do so meanwhile: nobody can wait for the device then, and
torch's own generator draws nothing outside of the graph."""


class Disturbed(RuntimeError):
    """A graph could not be recorded because of what another thread did on the device. Another time it may."""


def captured(step: Callable[[], None], pool: Any) -> Any:
    """The graph of what `step` does, which must have run before. What it raises is raised, and torch is as it was."""
    with one_at_a_time:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        found: BaseException | None = None
        try:
            # By thread: rewards may run a model, and take memory, in another meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    step()
                except BaseException as error:
                    # Kept, since torch raises another at the end, which does not say why.
                    found = error
                    raise
        except BaseException as error:
            # torch stays on the stream that it recorded.
            torch.cuda.set_stream(stream)
            _mend()
            found = found or error
            raise (Disturbed(str(found)) if "previous error during capture" in str(found) else found) from None
        return graph


def _mend() -> None:
    """Record an empty graph. After a recording that failed torch's generator takes it for still under way, and the next
    dropout would fail: a recording that succeeds ends it."""
    try:
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device="cuda")
    except RuntimeError as error:
        # Not raised: the caller raises what made the recording fail.
        logger.warning("torch could not be brought back to order after a CUDA graph that failed: %s", error)


def wait_for_others() -> None:
    """Wait until no other thread records a graph. The lock is not kept: whoever wants it next may hold a model's."""
    with one_at_a_time:
        pass


def is_in_the_way(error: BaseException) -> bool:
    """Whether something failed only because a graph was recorded in another thread meanwhile.

    >>> is_in_the_way(RuntimeError("CUDA error: operation not permitted when stream is capturing"))
    True
    >>> is_in_the_way(RuntimeError("the camera captured nothing"))
    False
    """
    words = ("stream is capturing", "graph capture", "during capture")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
