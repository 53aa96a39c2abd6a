"""Noise that depends on who draws and where, not on what else is in the batch.

A sequence has a key, made from (seed, prompt, sample); the number it draws at a position is a hash of both. So the same
seed draws the same noise whatever the batch is made of, and the completions of a group are independent.
"""

from __future__ import annotations

from torch import Tensor

from rloom.seeds import derive_seed

MASK = 0xFFFFFFFF


def key_of(seed: int, prompt: int, sample: int) -> int:
    """The key of one completion, 62 bits."""
    return derive_seed(seed, "completion", prompt, sample) & ((1 << 62) - 1)


def _mixed(x: Tensor) -> Tensor:
    """Murmur3's last step: every bit of a 32-bit word moves every other."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Numbers in (0, 1), float32, from keys and positions (int64). The kernels compute the same.

    >>> import torch
    >>> uniform(torch.tensor([7, 7, 8]), torch.tensor([0, 1, 0]))
    tensor([0.0662, 0.6843, 0.9753])
    """
    x = _mixed((keys & MASK) ^ _mixed((positions + 0x9E3779B9) & MASK))
    x = _mixed(x ^ ((keys >> 31) & MASK))
    # Exact in float32: neither 0 nor 1.
    return (x >> 9).float() * 2.0**-23 + 2.0**-24
