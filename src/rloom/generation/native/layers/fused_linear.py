"""Linear layers that read the same input, run as one product: query, key and value; gate and up; and LoRA adapters.

A decode step multiplies few rows with many weights, and a product with a small matrix takes as long as its launch. The
weights are made contiguous, and stay the model's own parameters: nothing is copied when they are trained in place, and
the next product sees what an update has written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.layers import Forwards
from rloom.generation.native.layers.contiguous import can_be_contiguous, claim, is_claimed, lie_in, make_contiguous
from rloom.generation.native.layers.lora import is_lora_on_linear
from rloom.generation.native.layers.low_rank import LowRank, low_rank_of

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same input, in the order in which a model calls them."""


class FusedLinears:
    """The siblings of a model, each group as one product. `copies`: layers that are to be run in place of others.

    >>> block = nn.Module()
    >>> block.gate_proj, block.up_proj = nn.Linear(64, 32), nn.Linear(64, 32)
    >>> x = torch.randn(2, 1, 64)
    >>> expected = block.up_proj(x)
    >>> (gate, run_gate), (up, run_up) = FusedLinears(block).forwards
    >>> _ = run_gate(x)
    >>> torch.allclose(run_up(x), expected, atol=1e-6)
    True
    """

    def __init__(self, model: nn.Module, copies: Mapping[nn.Module, nn.Linear] | None = None) -> None:
        self.groups = [Siblings(*parts) for parts in _siblings(model, copies or {})]
        self.adapters = [group.adapters for group in self.groups if group.adapters is not None]

    @property
    def forwards(self) -> Forwards:
        """The layers, each with its part of the product; none whose weights have been moved since."""
        return [pair for group in self.groups if group.is_contiguous() for pair in group.forwards]

    @property
    def owners(self) -> list[nn.Module]:
        """The layers whose forwards are replaced while their weights are contiguous."""
        return [owner for group in self.groups for owner in group.owners]

    def refresh(self) -> None:
        """Copy what adapters are now."""
        for adapters in self.adapters:
            adapters.refresh()

    def forget(self) -> None:
        """Let go of answers that nobody has asked for."""
        for group in self.groups:
            group.waiting.clear()


class Siblings:
    """Layers that read one input, in the order in which they do, with their weights as one matrix.

    The first layer that is called computes the answers of all; the others return theirs. `owners` are the modules whose
    forwards are replaced, `layers` those whose weights are used. With `adapters`, the product adds what those add.
    """

    def __init__(self, owners: list[nn.Module], layers: list[nn.Linear], adapters: LowRank | None = None) -> None:
        self.owners, self.layers, self.adapters = owners, layers, adapters
        extra_rows = 0 if adapters is None else adapters.rows
        self.weight = make_contiguous([x.weight for x in layers], extra_rows)
        self.bias = None if layers[0].bias is None else make_contiguous([x.bias for x in layers], extra_rows)
        if adapters is not None:
            claim(self.weight, adapters)
            adapters.place(self.weight[-extra_rows:])
        self.waiting: list[Tensor] = []  # the input of the first, and what the others will answer to it
        self.differ: list[bool] = []  # not empty: they do not read the same input after all
        self.forwards = [(owner, self._forward(index)) for index, owner in enumerate(owners)]

    def is_contiguous(self) -> bool:
        """Whether the layers' weights still lie in the buffer: they may have been moved or replaced since."""
        weights_lie = lie_in(self.weight, [x.weight for x in self.layers])
        return weights_lie and (self.bias is None or lie_in(self.bias, [x.bias for x in self.layers]))

    def _forward(self, index: int) -> Callable[..., Tensor]:
        """Of one layer. Only for steps of one token a row: longer inputs gain nothing, and would keep more memory."""
        waiting, differ, last = self.waiting, self.differ, len(self.layers) - 1
        sizes, product = [x.out_features for x in self.layers], self._product()
        alone = _alone(self.owners[index], self.layers[index])

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if differ or args or kwargs or x.dim() < 3 or x.shape[-2] > 1:
                return alone(x, *args, **kwargs)
            if index == 0:
                answers = product(x).split(sizes, -1)
                waiting[:] = [x, *answers[1:]] if last else []
                return answers[0]
            if not waiting or waiting[0] is not x:
                differ.append(True)
                waiting.clear()
                return alone(x)
            answer = waiting[index]
            if index == last:
                waiting.clear()
            return answer

        return forward

    def _product(self) -> Callable[[Tensor], Tensor]:
        """All answers to an input, one behind the other."""
        weight, bias = self.weight, self.bias
        if self.adapters is None:
            return lambda x: functional.linear(x, weight, bias)
        up, layer_of = self.adapters.up, self.adapters.layer_of

        def product(x: Tensor) -> Tensor:
            base, low = functional.linear(x, weight, bias).split([up.shape[1], len(weight) - up.shape[1]], -1)
            return torch.ops.rloom.add_low_rank(base, low, up, layer_of)

        return product


def _alone(owner: Any, layer: nn.Linear) -> Callable[..., Tensor]:
    """What one does by itself: with an adapter that is left beside it, or as the plain product that it is."""
    if hasattr(owner, "base_layer") and owner.base_layer is layer:
        return owner.forward
    return lambda x, *args, **kwargs: functional.linear(x, layer.weight, layer.bias)


def _siblings(
    model: nn.Module, copies: Mapping[nn.Module, nn.Linear]
) -> Iterator[tuple[list[nn.Module], list[nn.Linear], LowRank | None]]:
    """Arguments of each [`Siblings`]. A single layer is one too where its adapter becomes part of its product."""
    done: set[nn.Module] = set()
    single = ([module] for module in model.modules() if is_lora_on_linear(module))
    for parts in itertools.chain(siblings_in(model), single):
        found = [layer for part in parts if (layer := copies.get(part) or _plain(part)) is not None]
        if len(found) < len(parts) or not done.isdisjoint(parts) or not _can_fuse(found):
            continue
        can_adapt = copies.keys().isdisjoint(parts) and not is_claimed(found[0].weight)
        adapters = low_rank_of(parts, found) if can_adapt else None
        if len(parts) > 1 or adapters is not None:
            done.update(parts)
            # Under adapters that are part of the product the adapted layer's forward is replaced, else the base's.
            is_adapted = adapters is not None
            yield [p if is_adapted or p in copies else f for p, f in zip(parts, found, strict=True)], found, adapters


def siblings_in(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Layers, of whatever kind, whose names say that they read the same input."""
    for module in model.modules():
        for names in SIBLINGS:
            parts = [getattr(module, name, None) for name in names]
            if all(isinstance(part, nn.Module) for part in parts):
                yield parts  # type: ignore[misc]


def _plain(layer: Any) -> nn.Linear | None:
    """The linear layer itself, or the one under an adapter; None for any other kind."""
    # An adapter of the weight itself (peft's `target_parameters`) changes it while it is used.
    if hasattr(layer, "parameter_name"):
        return None
    layer = getattr(layer, "base_layer", layer)
    # Other layers are quantized, or have a forward by which accelerate moves their weights.
    return layer if type(layer) is nn.Linear and "forward" not in layer.__dict__ else None


def _can_fuse(layers: list[nn.Linear]) -> bool:
    alike = {(len(list(x.parameters())), x.in_features, x.weight.dtype, x.weight.device) for x in layers}
    return len(alike) == 1 and can_be_contiguous([p for layer in layers for p in layer.parameters()])
