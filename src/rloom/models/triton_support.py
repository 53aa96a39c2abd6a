"""Whether our kernels run here: they are written in Triton, which torch brings along for most GPUs and not for all."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.cache
def has_triton() -> bool:
    """Whether there is a compiler for kernels."""
    return importlib.util.find_spec("triton") is not None


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels run on a device.

    >>> runs_kernels(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and has_triton()
