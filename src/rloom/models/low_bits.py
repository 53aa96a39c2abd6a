"""float32 numbers as a bfloat16 weight and its low bits, the 16 bits that bfloat16 drops.

A bfloat16 weight has 8 bits of precision: at a learning rate of 1e-6 most updates are smaller than the gap to the next
bfloat16 number and would be rounded away. With the low bits beside them weights move as float32 ones do, while the
model computes (and samples) with the bfloat16 weights themselves, with no cast per step.

Gradients accumulate in float32 (torch's `grad_dtype`), for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

LOW_BITS = "rest"
"""The low bits' name in an optimizer's state, and so in checkpoints."""

LowBits = MutableMapping[Tensor, Tensor]
"""The low bits of weights, int16, by weight."""

Piece = slice | EllipsisType
"""What to index a weight with: some of its rows, or `...` for all of it."""

Value = Callable[[Tensor, Piece], Tensor]
"""Tells what a piece of a parameter stands for: `p[piece]`, joined with the low bits that somebody keeps for it."""


def join_float32(weight: Tensor, low_bits: Tensor) -> Tensor:
    """The float32 number that a bfloat16 weight and its low bits stand for."""
    return ((weight.view(torch.int16).int() << 16) + low_bits.int()).view(torch.float32)


def split_float32(value: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 number as the nearest bfloat16 weight and its low bits, a signed 16-bit number.

    >>> value = torch.tensor([1.0 + 2**-12, -3.1415927])
    >>> weight, low_bits = split_float32(value)
    >>> weight
    tensor([ 1.0000, -3.1406], dtype=torch.bfloat16)
    >>> torch.equal(join_float32(weight, low_bits), value)
    True
    """
    bits = value.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.short().view(torch.bfloat16), (bits - (upper << 16)).short()


def with_low_bits(value: Tensor, low_bits: Tensor) -> Tensor:
    """A float32 weight that was loaded from bfloat16, with the bits that those had dropped.

    One that was loaded from float32 has them already, and stays as it is.

    >>> value = torch.tensor([1.0 + 2**-8])
    >>> weight, low_bits = split_float32(value)
    >>> torch.equal(with_low_bits(weight.float(), low_bits), value), torch.equal(with_low_bits(value, low_bits), value)
    (True, True)
    """
    return join_float32(split_float32(value)[0], low_bits)


def store_float32(value: Tensor, weight: Tensor, low_bits: Tensor | None) -> None:
    """Write a float32 number to a bfloat16 weight, and its low bits to where they are kept, if they are."""
    upper, dropped = split_float32(value)
    weight.copy_(upper)
    if low_bits is not None:
        low_bits.copy_(dropped)


def low_bits_of(p: Tensor, low_bits: LowBits) -> Tensor:
    """The low bits of a weight, on its device; zeros, which are noted, where nobody has any.

    What was frozen once may have its low bits on the host.
    """
    found = low_bits.get(p)
    if found is None:
        found = torch.zeros_like(p, dtype=torch.int16)
    low_bits[p] = found.to(p.device)
    return low_bits[p]


def dither_(weight: Tensor, low_bits: Tensor, seed: int) -> None:
    """Draw the low bits of a weight matrix that has none, uniformly among those that round to the same bfloat16 weight.

    A checkpoint in bfloat16 begins with low bits of 0. Each weight would then have to move by half the gap to the next
    bfloat16 number before the model computes with anything else, and what the model computes with would lag behind the
    float32 numbers that are saved. With low bits at random, an update of a tenth of the gap moves a tenth of the
    weights by a whole gap: the bfloat16 weights move as far as the float32 ones, in the mean. (Dither, as in signal
    processing; rounding stochastically would draw anew in each update.)

    Vectors, such as those of norms, and zeros are left alone: they are few, and the gaps at zero are tiny.

    >>> weight, low_bits = torch.full((100, 100), 0.5, dtype=torch.bfloat16), torch.zeros(100, 100, dtype=torch.int16)
    >>> dither_(weight, low_bits, seed=0)
    >>> value = join_float32(weight, low_bits)
    >>> torch.equal(value.bfloat16(), weight), bool((value == 0.5).all())
    (True, False)
    """
    if weight.dim() < 2 or bool(low_bits.any()):
        return
    generator = torch.Generator(device=weight.device).manual_seed(seed)
    # Without the ends, at which a number is as near to the next weight.
    limit = 2**15 - 1
    low_bits.random_(-limit, limit + 1, generator=generator)
    low_bits[(weight == 0) | ~weight.isfinite()] = 0


def as_they_are(p: Tensor, piece: Piece) -> Tensor:
    """A piece of a parameter for which nobody keeps low bits."""
    return p[piece]


def accumulate_in_float32(params: Iterable[Tensor]) -> None:
    """Let bfloat16 parameters have float32 gradients, so that micro-batches add up without rounding."""
    for p in params:
        if p.dtype == torch.bfloat16 and p.requires_grad and p.is_leaf:
            # torch refuses float32 while there is a bfloat16 gradient.
            p.grad_dtype = None
            if p.grad is not None:
                p.grad = p.grad.float()
            p.grad_dtype = torch.float32


def accumulates_in_float32(p: Tensor) -> bool:
    """Whether [`accumulate_in_float32`] was called for a bfloat16 parameter."""
    return p.dtype == torch.bfloat16 and p.requires_grad and p.is_leaf and p.grad_dtype == torch.float32


@contextmanager
def added_as_they_come(model: Any) -> Iterator[Callable[[], None]]:
    """Meanwhile bfloat16 gradients are added to float32 ones as they come.

    Autograd would cast each to float32 first, which is one more pass over memory. Yields a function to call after each
    backward: it makes float32 of gradients that were the first of their parameter.

    The head's own gradient comes in float32 (`head.py`), and may be added to the embedding's before: left as it is.
    """
    head = model.get_output_embeddings()
    params = [p for p in model.parameters() if accumulates_in_float32(p) and p is not getattr(head, "weight", None)]

    def half_precision() -> Iterator[Tensor]:
        return (p for p in params if p.grad is not None and p.grad.dtype == torch.bfloat16)

    def widen() -> None:
        for p in half_precision():
            p.grad = p.grad.float()  # type: ignore[union-attr]

    for p in params:
        p.grad_dtype = None
    try:
        yield widen
        widen()
    finally:
        # Those of an update that failed, and is begun again.
        for p in half_precision():
            p.grad = None
        for p in params:
            p.grad_dtype = torch.float32
