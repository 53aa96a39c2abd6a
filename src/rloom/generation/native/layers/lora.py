"""What is known of a layer under LoRA adapters: whether it is of the plain kind, and what its adapters are made of."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_plain_lora(layer: Any) -> bool:
    """Whether it is a layer under plain LoRA (no DoRA or the like) that is switched on and not merged yet."""
    if not _is_lora(layer) or getattr(layer, "fan_in_fan_out", False):
        return False
    return bool(_active(layer)) and all(_is_plain(layer, name) for name in _active(layer))


def adds_nothing(layer: Any) -> bool:
    """Whether it is a layer under LoRA of which no adapter is in use."""
    return _is_lora(layer) and not _active(layer)


def _is_lora(layer: Any) -> bool:
    """A layer under adapters that has no hooks, and whose weights the adapters are not merged into."""
    if not isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) or not hasattr(layer, "base_layer"):
        return False
    hooked = any("forward" in x.__dict__ or x._forward_hooks or x._forward_pre_hooks for x in layer.modules())
    return not hooked and not layer.merged


def _is_plain(layer: Any, name: str) -> bool:
    down, up = layer.lora_A[name], layer.lora_B[name]
    return type(down) is type(up) is nn.Linear and up.bias is None and name not in getattr(layer, "lora_variant", ())


def is_lora_on_linear(layer: Any) -> bool:
    """Whether it is such a layer over a linear one whose weights can be added to: not one that is quantized."""
    return (
        is_plain_lora(layer) and type(layer.base_layer) is nn.Linear and type(layer.base_layer.weight) is nn.Parameter
    )


def parts_of(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    """Of each adapter in use: down (R, in), up (out, R), and the scale of what they add."""
    return [(layer.lora_A[n].weight, layer.lora_B[n].weight, layer.scaling[n]) for n in _active(layer)]


def _active(layer: Any) -> list[str]:
    return [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
