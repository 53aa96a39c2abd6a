"""Parameters that lie one after the other in one buffer, so that one product takes them all.

They stay the model's own parameters there. Each gets a storage of its own over its part, by way of DLPack: plain views
would share one, and what is saved by storage (accelerate, safetensors) would leave all but one of them out.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Bytes that every weight must begin at a multiple of, as it does in memory of its own: kernels rely on it."""

_buffers: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
"""Buffers by their address and the rows of parameters they hold: the rows behind those may be other parameters."""

_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Who writes the rows behind the parameters, by the buffer's address: nobody else may, as long as the owner lives."""


def can_be_contiguous(parameters: list[Any]) -> bool:
    """Whether each has memory of its own: views of somebody else's buffer (DeepSpeed's) must stay what they are, and so
    must memory that other processes see."""
    return (
        len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
        and all(type(p) is nn.Parameter and p.is_contiguous() for p in parameters)
        # Only on a CPU: on a GPU all tensors say that they are shared.
        and not any(p.device.type == "cpu" and p.is_shared() for p in parameters)
        and all(p.nbytes % ALIGNMENT == 0 and p.nbytes == p.untyped_storage().nbytes() for p in parameters)
    )


def make_contiguous(parameters: list[Any], extra_rows: int = 0) -> Tensor:
    """A buffer that holds the parameters from now on, with `extra_rows` behind them for whoever claims those."""
    rows = sum(map(len, parameters))
    known = _buffers.get((parameters[0].data_ptr(), rows))
    if known is not None and lie_in(known, parameters) and rows + extra_rows <= len(known):
        # Another engine of the same model has made it.
        return known[: rows + extra_rows]
    with torch.inference_mode(False), torch.no_grad():
        room = parameters[0].data.new_zeros((extra_rows, *parameters[0].shape[1:]))
        buffer = torch.cat([*(p.data for p in parameters), room])
        for parameter, part in zip(parameters, buffer[:rows].split([*map(len, parameters)]), strict=True):
            parameter.data = torch.from_dlpack(part)
    _buffers[buffer.data_ptr(), rows] = buffer
    return buffer


def lie_in(buffer: Tensor, parts: list[Any]) -> bool:
    """Whether these tensors lie in it one after the other, from its beginning."""
    expected = buffer.data_ptr()
    for part in parts:
        if part.data_ptr() != expected:
            return False
        expected += part.nbytes
    return expected <= buffer.data_ptr() + buffer.nbytes


def claim(buffer: Tensor, owner: Any) -> None:
    """Let `owner` write the rows behind the parameters."""
    _owners[buffer.data_ptr()] = owner


def is_claimed(parameter: Tensor) -> bool:
    """Whether the rows behind it and its siblings have an owner already: another engine's, or another model's."""
    return parameter.data_ptr() in _owners
