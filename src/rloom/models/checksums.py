"""Checksums of weights: two sets of weights are told apart without being in one place."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 1 << 20
"""Words of eight bytes that are summed at a time: what it takes of memory."""

ODD = 0x1E3779B97F4A7C15
"""An odd number, by which places are multiplied: no two of them weigh the same modulo 2^64."""


@torch.no_grad()
def checksums_of(tensors: Iterable[Tensor]) -> list[int]:
    """Two numbers for each tensor, which change with any of its bits, and with the order of its numbers.

    >>> one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    >>> checksums_of([one]) == checksums_of([one.clone()]) != checksums_of([other])
    True
    """
    sums = [_sums(tensor) for tensor in tensors]
    return torch.stack([s.to(sums[0].device) for s in sums]).flatten().tolist() if sums else []


def _sums(tensor: Tensor) -> Tensor:
    """The sum of a tensor's words, and their sum weighted by place: (2,), modulo 2^64."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole]
    words = (words if words.storage_offset() % 8 == 0 else words.clone()).view(torch.int64)
    places = _places(tensor.device)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for number, part in enumerate((data[whole:].long(), *words.split(CHUNK))):
        sums = torch.stack([part.sum(), (part * places[: len(part)]).sum()])
        # An odd factor, so that nothing is lost modulo 2^64.
        total += sums * (2 * number + 1)
    return total


@functools.cache
def _places(device: torch.device) -> Tensor:
    return torch.arange(1, CHUNK + 1, device=device) * ODD
