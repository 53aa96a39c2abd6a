"""Parameters that lie one after the other in one buffer, so that a product takes them as one.

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

_known: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
"""Buffers by their address and how many rows of parameters they hold: what lies behind some may be other parameters."""

_users: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Who has written what lies behind the parameters, by the buffer's address: nobody else may, as long as they live."""


def can_be_laid(parameters: list[Any]) -> bool:
    """Whether each has memory of its own: views of somebody else's buffer (DeepSpeed's) must stay what they are, and so
    must memory that other processes see."""
    return (
        len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)
        and all(type(p) is nn.Parameter and p.is_contiguous() for p in parameters)
        and not any(p.device.type == "cpu" and p.is_shared() for p in parameters)  # on a GPU all say that they are
        and all(_bytes(p) % ALIGNMENT == 0 and _bytes(p) == p.untyped_storage().nbytes() for p in parameters)
    )


def laid_together(parameters: list[Any], behind: int = 0) -> Tensor:
    """A buffer in which the parameters lie from now on, with `behind` rows after them for whoever claims those."""
    rows = sum(map(len, parameters))
    known = _known.get((parameters[0].data_ptr(), rows))
    if known is not None and lie_in(known, parameters) and rows + behind <= len(known):
        return known[: rows + behind]  # by another engine of the same model
    with torch.inference_mode(False), torch.no_grad():
        room = parameters[0].data.new_zeros((behind, *parameters[0].shape[1:]))
        whole = torch.cat([*(p.data for p in parameters), room])
        for parameter, part in zip(parameters, whole[:rows].split([*map(len, parameters)]), strict=True):
            parameter.data = torch.from_dlpack(part)
    _known[whole.data_ptr(), rows] = whole
    return whole


def lie_in(whole: Tensor, parts: list[Any]) -> bool:
    """Whether these tensors lie in it one after the other, from its beginning."""
    expected = whole.data_ptr()
    for part in parts:
        if part.data_ptr() != expected:
            return False
        expected += _bytes(part)
    return expected <= whole.data_ptr() + _bytes(whole)


def claim(whole: Tensor, user: Any) -> None:
    """Let `user` write what lies behind the parameters."""
    _users[whole.data_ptr()] = user


def is_claimed(parameter: Tensor) -> bool:
    """Whether what lies behind it and its siblings is somebody's already: another engine's, or another model's."""
    return parameter.data_ptr() in _users


def _bytes(p: Tensor) -> int:
    return p.numel() * p.element_size()
