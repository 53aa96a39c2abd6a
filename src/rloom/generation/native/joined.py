"""Linear layers that read the same input run as one product: query, key and value; gate and up.

A decode step multiplies few rows with many weights, and a product of a small matrix takes as long as its launch. The
weights are laid one after the other in memory, and stay the model's own parameters: views of one buffer. So nothing is
copied when they are trained, and an update is seen by the next product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
ALIGNMENT = 64
"""Bytes that every weight must begin at a multiple of, as it does in memory of its own: kernels rely on it."""


def join_layers(model: nn.Module) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Lay siblings of the model together, and give for each layer the forward that uses it.

    >>> block = nn.Module()
    >>> block.gate_proj, block.up_proj = nn.Linear(64, 32), nn.Linear(64, 32)
    >>> x = torch.randn(2, 64)
    >>> expected = block.up_proj(x)
    >>> (gate, run_gate), (up, run_up) = join_layers(block)
    >>> _ = run_gate(x)
    >>> torch.allclose(run_up(x), expected, atol=1e-6)
    True
    """
    return [pair for siblings in _siblings(model) for pair in _joined(siblings)]


def _siblings(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        for names in SIBLINGS:
            found = [_plain(getattr(module, name, None)) for name in names]
            if all(layer is not None for layer in found) and _can_join(found):  # type: ignore[arg-type]
                yield found  # type: ignore[misc]


def _plain(layer: Any) -> nn.Linear | None:
    """The linear layer itself, or the one under an adapter; None for any other kind."""
    layer = getattr(layer, "base_layer", layer)
    if type(layer) is not nn.Linear or "forward" in layer.__dict__:  # quantized, or accelerate moves its weights about
        return None
    return layer


def _can_join(layers: list[nn.Linear]) -> bool:
    parameters = [p for layer in layers for p in layer.parameters()]
    kinds = {(layer.bias is None, layer.in_features, p.dtype, p.device) for layer in layers for p in layer.parameters()}
    return (
        len(kinds) == 1
        and all(
            type(p) is nn.Parameter and p.is_contiguous() and p.numel() * p.element_size() % ALIGNMENT == 0
            for p in parameters
        )
        and all(
            _can_lay_together(part) for part in ([layer.weight for layer in layers], [layer.bias for layer in layers])
        )
    )


def _can_lay_together(parameters: list[Any]) -> bool:
    """Whether they have memory of their own. Views of somebody else's buffer (DeepSpeed's) must stay where they are."""
    if parameters[0] is None or _are_together(parameters):
        return True
    return all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in parameters)


def _joined(layers: list[nn.Linear]) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    weight = _laid_together([layer.weight for layer in layers])  # type: ignore[misc]
    bias = None if layers[0].bias is None else _laid_together([layer.bias for layer in layers])
    sizes = [layer.out_features for layer in layers]
    waiting: list[Tensor] = []  # the input of the first, and what the others will answer to it

    def first(x: Tensor) -> Tensor:
        answers = functional.linear(x, weight, bias).split(sizes, -1)
        waiting[:] = [x, *answers[1:]]
        return answers[0]

    def other(index: int) -> Callable[[Tensor], Tensor]:
        layer = layers[index]

        def forward(x: Tensor) -> Tensor:
            if not waiting or waiting[0] is not x:  # a model that reads something else here
                return functional.linear(x, layer.weight, layer.bias)
            answer = waiting[index]
            if index == len(layers) - 1:
                waiting.clear()
            return answer

        return forward

    return [(layers[0], first), *((layers[i], other(i)) for i in range(1, len(layers)))]


@torch.no_grad()
def _laid_together(parameters: list[nn.Parameter]) -> Tensor:
    """One buffer of which the parameters are views, one after the other; they become so if they are not yet."""
    first, rows = parameters[0].data, [len(p) for p in parameters]
    if not _are_together(parameters):
        whole = torch.cat([p.data for p in parameters])
        for parameter, part in zip(parameters, whole.split(rows), strict=True):
            parameter.data = part
        return whole
    return first.as_strided((sum(rows), *first.shape[1:]), first.stride())


def _are_together(parameters: list[nn.Parameter]) -> bool:
    expected = parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != expected:
            return False
        expected += parameter.numel() * parameter.element_size()
    return len({p.untyped_storage().data_ptr() for p in parameters}) == 1
