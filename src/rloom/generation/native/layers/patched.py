"""All patches of a model's layers, made and applied in one order.

Later patches replace the forwards of earlier ones on the same module:

1. `FusedLayers`: norms, rotations and activations, each as one kernel.
2. `MergedLayers`: copies of weights into which LoRA adapters are merged.
3. `FusedLinears`: linear layers that read one input, as one product. It uses the merged copies.
4. `LowRankLayers`: LoRA adapters of the layers that neither 2 nor 3 has taken.
5. `SwigluBlocks`: whole feed-forward blocks over the products of 3.
6. `ResidualLayers`: whole layers, whose last products are added to the residual in place.
7. `PlainLogits`: the model itself, without accelerate's float32 copy of the logits.

What is compiled (`compiled.py`) is applied on top of these, for a decode step alone.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from rloom.generation.native.layers import Forwards, LayerPatch
from rloom.generation.native.layers.fused_linear import FusedLinears
from rloom.generation.native.layers.low_rank import LowRankLayers
from rloom.generation.native.layers.merged import MergedLayers
from rloom.generation.native.layers.residual import ResidualLayers
from rloom.generation.native.layers.swiglu import SwigluBlocks
from rloom.models.fused import FusedLayers, forwards_replaced, rotating


class PatchedLayers:
    """The patches of one model. `merge`: see [`MergedLayers`]; `fuse`: whether `FusedLayers` and
    `ResidualLayers` are among them."""

    def __init__(self, model: nn.Module, *, merge: bool | None, fuse: bool) -> None:
        self.fused = FusedLayers([model]) if fuse else None
        self.merged = MergedLayers(model, merge)
        self.linears = FusedLinears(model, self.merged.copies)
        self.low_rank = LowRankLayers(model, {*self.merged.copies, *self.linears.owners})
        self.swiglu = SwigluBlocks(self.linears, model)
        self.in_order: list[LayerPatch] = [
            self.merged, self.linears, self.low_rank, self.swiglu, PlainLogits(model)
        ]  # fmt: skip
        if self.fused is not None:
            self.in_order = [Fixed(self.fused.forwards), *self.in_order, ResidualLayers(model)]

    @property
    def rotates(self) -> bool:
        """Whether the model's rotation of queries and keys can be left to the attention kernel."""
        return self.fused is not None and self.fused.rotates

    def refresh(self) -> None:
        """Copy what the weights and adapters are now."""
        for patch in self.in_order:
            patch.refresh()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the model with all patches meanwhile."""
        forwards = {layer: forward for patch in self.in_order for layer, forward in patch.forwards}
        try:
            with forwards_replaced(list(forwards.items())), rotating() if self.fused is not None else nullcontext():
                yield
        finally:
            self.linears.forget()


@dataclass(frozen=True, slots=True)
class Fixed:
    """Forwards that read the model's own weights: there is nothing to copy again."""

    forwards: Forwards

    def refresh(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True, slots=True)
class PlainLogits:
    """The model's forward as accelerate has prepared it, but for the float32 copy of the logits: sampling needs none,
    and writing it takes as long as several layers."""

    model: Any

    @property
    def forwards(self) -> Forwards:
        """The model's forward without the copy; nothing, where accelerate has not prepared the model."""
        forward = self.model.__dict__.get("forward")
        converting = getattr(getattr(forward, "__func__", forward), "__wrapped__", None)
        inner = getattr(converting, "model_forward", None)
        if inner is None:
            return []
        return [(self.model, types.MethodType(inner, self.model) if hasattr(forward, "__func__") else inner)]

    def refresh(self) -> None:
        """Nothing to do."""
