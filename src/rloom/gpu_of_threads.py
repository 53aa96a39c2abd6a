"""The GPU that a new thread begins on: that of the thread which has made it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def on_this_gpu(work: Callable[P, T]) -> Callable[P, T]:
    """`work`, which any thread begins on the GPU that is the current one here.

    To CUDA each new thread is on the first GPU. In eight processes with a GPU each, what threads load with
    `device="cuda"` would all lie there. Every thread that may run a user's code or a model is begun with this.

    >>> on_this_gpu(len)("four")
    4
    """
    gpu = _current_gpu()
    if gpu is None:
        return work

    def begun(*args: P.args, **kwargs: P.kwargs) -> T:
        import torch

        torch.cuda.set_device(gpu)
        return work(*args, **kwargs)

    return begun


def _current_gpu() -> int | None:
    """The GPU of this thread; None where CUDA is not in use. Neither torch nor CUDA is started to find out."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None
