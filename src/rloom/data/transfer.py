"""Copies data from the host to a device without waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`. It is copied from pinned memory, since otherwise the host would wait for the device.

    >>> upload(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def flat_tokens(rows: Sequence[Iterable[int]]) -> Tensor:
    """Lists of token ids as one tensor. It is several times as fast as `torch.tensor` of the joined list.

    >>> flat_tokens([[1, 2], [], [3]])
    tensor([1, 2, 3])
    """
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=np.int64))


def flat_numbers(rows: Sequence[Iterable[float]]) -> Tensor:
    """The same for lists of numbers.

    >>> flat_numbers([[0.5], [1.0, 2.0]])
    tensor([0.5000, 1.0000, 2.0000])
    """
    return torch.from_numpy(np.fromiter(chain.from_iterable(rows), dtype=np.float32))
