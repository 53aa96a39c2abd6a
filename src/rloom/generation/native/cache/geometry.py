"""What a model keeps per token and layer: found by running it, not read from its config."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Layer:
    """Keys (heads, width) and values (heads, value_width) of one token."""

    heads: int
    width: int
    value_width: int
    query_heads: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one token's key and value."""
        return self.heads * (self.width + self.value_width) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Geometry:
    """All layers, in order."""

    layers: tuple[Layer, ...]
    order: tuple[int, ...] = ()  # in which they are called

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return sum(layer.bytes for layer in self.layers)
