"""Linear layers that read the same input run as one product: query, key and value; gate and up; and what adapters add.

A decode step multiplies few rows with many weights, and a product with a small matrix takes as long as its launch. The
weights are laid one after the other in memory, and stay the model's own parameters there: nothing is copied when they
are trained in place, and the next product sees what an update has written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.layers.contiguous import can_be_laid, claim, is_claimed, laid_together, lie_in
from rloom.generation.native.layers.lora import is_lora_on_linear
from rloom.generation.native.layers.low_rank import LowRank, low_rank_of

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class JoinedLayers:
    """The siblings of a model, laid together. `copies`: layers that are to be run in place of others.

    >>> block = nn.Module()
    >>> block.gate_proj, block.up_proj = nn.Linear(64, 32), nn.Linear(64, 32)
    >>> x = torch.randn(2, 1, 64)
    >>> expected = block.up_proj(x)
    >>> (gate, run_gate), (up, run_up) = JoinedLayers(block).forwards()
    >>> _ = run_gate(x)
    >>> torch.allclose(run_up(x), expected, atol=1e-6)
    True
    """

    def __init__(self, model: nn.Module, copies: Mapping[nn.Module, nn.Linear] | None = None) -> None:
        self.groups = [Siblings(*parts) for parts in _siblings(model, copies or {})]
        self.adapters = [group.adapters for group in self.groups if group.adapters is not None]

    def forwards(self) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """The layers, each with the forward that uses the joined product; none that weights have been moved from."""
        return [pair for group in self.groups if group.in_place() for pair in group.forwards]

    def owners(self) -> list[nn.Module]:
        """The layers whose forwards are replaced, while weights are where they were laid."""
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
    """Layers that read one input, in the order in which they do, and their weights as one; with `adapters`, what those
    add too."""

    def __init__(self, owners: list[nn.Module], layers: list[nn.Linear], adapters: LowRank | None = None) -> None:
        self.owners, self.layers = owners, layers  # whose forwards are replaced, and whose weights are used
        self.adapters, behind = adapters, 0 if adapters is None else adapters.rows
        self.weight = laid_together([x.weight for x in layers], behind)
        self.bias = None if layers[0].bias is None else laid_together([x.bias for x in layers], behind)
        if adapters is not None:
            claim(self.weight, adapters)
            adapters.place(self.weight[-behind:])
        self.waiting: list[Tensor] = []  # the input of the first, and what the others will answer to it
        self.apart: list[bool] = []  # not empty: they do not read the same input after all
        self.forwards = [(owner, self._forward(index)) for index, owner in enumerate(owners)]

    def in_place(self) -> bool:
        """Whether the layers' weights are where they were laid: they may have been moved or replaced since."""
        weights_lie = lie_in(self.weight, [x.weight for x in self.layers])
        return weights_lie and (self.bias is None or lie_in(self.bias, [x.bias for x in self.layers]))

    def _forward(self, index: int) -> Callable[..., Tensor]:
        """Of one layer. Only for steps of one token a row: longer inputs gain nothing, and would keep more memory."""
        waiting, apart, last = self.waiting, self.apart, len(self.layers) - 1
        sizes, product = [x.out_features for x in self.layers], self._product()
        alone = _alone(self.owners[index], self.layers[index])

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if apart or args or kwargs or x.dim() < 3 or x.shape[-2] > 1:
                return alone(x, *args, **kwargs)
            if index == 0:
                answers = product(x).split(sizes, -1)
                waiting[:] = [x, *answers[1:]] if last else []
                return answers[0]
            if not waiting or waiting[0] is not x:
                apart.append(True)
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
    done: set[nn.Module] = set()
    single = ([module] for module in model.modules() if is_lora_on_linear(module))
    for parts in itertools.chain(siblings_in(model), single):
        layers = [copies.get(part) or _plain(part) for part in parts]
        found = [layer for layer in layers if layer is not None]
        if len(found) < len(parts) or not done.isdisjoint(parts) or not _can_join(found):
            continue
        can_adapt = copies.keys().isdisjoint(parts) and not is_claimed(found[0].weight)
        adapters = low_rank_of(parts, found) if can_adapt else None
        if len(parts) > 1 or adapters is not None:
            done.update(parts)
            keep = adapters is not None
            yield [p if keep or p in copies else f for p, f in zip(parts, found, strict=True)], found, adapters


def siblings_in(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Layers, of whatever kind, whose names say that they read the same input."""
    for module in model.modules():
        for names in SIBLINGS:
            parts = [getattr(module, name, None) for name in names]
            if all(isinstance(part, nn.Module) for part in parts):
                yield parts  # type: ignore[misc]


def _plain(layer: Any) -> nn.Linear | None:
    """The linear layer itself, or the one under an adapter; None for any other kind."""
    if hasattr(layer, "parameter_name"):  # an adapter of the weight itself, which it changes while it is used
        return None
    layer = getattr(layer, "base_layer", layer)
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:  # quantized, or accelerate moves its weights about
        return None
    return layer


def _can_join(layers: list[nn.Linear]) -> bool:
    alike = {(len(list(x.parameters())), x.in_features, x.weight.dtype, x.weight.device) for x in layers}
    return len(alike) == 1 and can_be_laid([p for layer in layers for p in layer.parameters()])
