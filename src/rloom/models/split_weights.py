"""A float32 model that computes in bfloat16, and loses no bit of its weights.

Each float32 number is split (`low_bits.py`): its upper 16 bits, rounded, are a bfloat16 number, which the model
computes and samples with; its low bits lie beside it, and the optimizer updates both as one float32 number. So there is
no float32 copy and no cast in a step. What is saved is float32 again.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rloom.models.load import base_of
from rloom.models.low_bits import join_float32, split_float32

_known: weakref.WeakKeyDictionary[nn.Module, SplitWeights] = weakref.WeakKeyDictionary()
"""By model, without its adapter: one may be trained more than once, and its bits are not in its weights."""


class SplitWeights:
    """Owns the low bits of a model's weights, from the moment at which it is made of a float32 model.

    The model stays the object that it was, and its parameters the same objects; those that were float32 are bfloat16
    from then on. `leave`: parameters that stay as they are.

    >>> layer = nn.Linear(2, 2)
    >>> before = layer.weight.detach().clone()
    >>> split_weights = SplitWeights(layer)
    >>> layer.weight.dtype
    torch.bfloat16
    >>> with split_weights.as_float32():
    ...     torch.equal(layer.weight, before)
    True
    """

    def __init__(self, model: nn.Module, leave: Collection[Tensor] = ()) -> None:
        left = {id(p) for p in leave}
        self.params = [p for p in model.parameters() if p.dtype == torch.float32 and id(p) not in left]
        self.low_bits: dict[Tensor, Tensor] = {}
        for p in self.params:
            p.data, low_bits = split_float32(p.data)
            self._keep(p, low_bits)
        _known[base_of(model)] = self

    @contextmanager
    def as_float32(
        self, only: Collection[Tensor] | None = None, *, loading: bool = False, on_host: bool = True
    ) -> Iterator[None]:
        """The parameters (`only` some of them) as float32 numbers meanwhile: to be saved, or (`loading`) written to."""
        chosen = None if only is None else {id(p) for p in only}
        params = [p for p in self.params if chosen is None or id(p) in chosen]
        weights = [p.data for p in params]
        for p in params:
            p.data = self._value(p).to("cpu" if on_host else p.device)
        try:
            yield
            if loading:
                for p, weight in zip(params, weights, strict=True):
                    self._take_over(p, weight)
        finally:
            for p, weight in zip(params, weights, strict=True):
                p.data = weight

    def undo(self) -> None:
        """Give the model its float32 weights back, with what they have learnt."""
        for p in self.params:
            p.data = self._value(p).to(p.device)
            p.grad_dtype = None
        self.params, self.low_bits = [], {}

    def _value(self, p: Tensor) -> Tensor:
        """What a parameter stands for, on the host: a float32 copy of all weights may be more than the device holds."""
        weight = p.data.cpu()
        return join_float32(weight, self.low_bits[p].cpu()) if p in self.low_bits else weight.float()

    def _take_over(self, p: Tensor, weight: Tensor) -> None:
        """Split what `p` holds now: the upper bits go to where its weight lies, graphs and views included."""
        upper, low_bits = split_float32(p.data.float().contiguous())
        weight.copy_(upper)
        self._keep(p, low_bits)

    def _keep(self, p: Tensor, low_bits: Tensor) -> None:
        if p in self.low_bits:
            self.low_bits[p].copy_(low_bits)
        elif p.requires_grad:
            self.low_bits[p] = low_bits
        elif bool(low_bits.any()):
            # Of a frozen weight: wanted when the model is saved, and not before.
            self.low_bits[p] = low_bits.cpu()


def split_of(model: nn.Module) -> SplitWeights | None:
    """The low bits of a model that was split before, by another trainer, say."""
    found = _known.get(base_of(model))
    return found if found is not None and found.params else None


def kept_in_float32(model: Any) -> list[Tensor]:
    """Parameters that an architecture keeps in float32 where it is loaded in half precision."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept = re.compile(rf"(^|\.)({'|'.join(map(re.escape, names))})(\.|$)")
    return [p for name, p in model.named_parameters() if names and kept.search(name)]
