"""Layers under a LoRA adapter, run as single products with copies of their weights into which the adapter is merged.

An adapter adds two small products and an addition to each layer, which in a decode step cost more than they compute.
The copies are filled again for each rollout and stay where they are, so that captured graphs read them. They take
memory, and in half precision they round part of what the adapter adds away: there it is done only if it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.cache.memory import free_memory
from rloom.generation.native.layers.fused_linear import siblings_in
from rloom.generation.native.layers.lora import is_lora_on_linear, parts_of
from rloom.printable import get_logger

logger = get_logger(__name__)

SHARE_FOR_COPIES = 0.25
"""What copies may take of what is free, where nobody asked for them."""


class MergedLayers:
    """Copies for a model's layers under adapters that are in use. `asked`: whether to merge; None, where that is exact
    and there is room.

    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9))
    >>> model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    >>> len(MergedLayers(model).copies)  # of the keys' layer too, so that the three are one product
    3
    """

    def __init__(self, model: nn.Module, asked: bool | None = True) -> None:
        layers: list[Any] = [layer for layer in model.modules() if is_lora_on_linear(layer)]
        self.copies: dict[nn.Module, nn.Linear] = {}
        if _worth_merging(layers, asked):
            self.copies = {layer: _copy(layer.base_layer) for layer in layers}
            self.copies |= {layer: _copy(layer) for layer in _plain_siblings(self.copies, model)}
        self.forwards = [(layer, _forward(copy)) for layer, copy in self.copies.items()]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Merge what the adapters are now."""
        device = next((copy.weight.device.type for copy in self.copies.values()), "cpu")
        with torch.autocast(device, enabled=False):
            for layer, copy in self.copies.items():
                copy.weight.copy_(layer.weight if type(layer) is nn.Linear else merged_weight(layer))


def _worth_merging(layers: list[Any], asked: bool | None) -> bool:
    """As asked for, or where merged weights are the same up to what float32 rounds, and there is room for them."""
    if asked and not layers:
        logger.warning("there is nothing to merge: no layer under a plain LoRA adapter that is switched on")
    if asked is not None or not layers:
        return bool(asked)
    weights: list[Tensor] = [layer.base_layer.weight for layer in layers]
    parts = [*weights, *(matrix for layer in layers for down, up, _ in parts_of(layer) for matrix in (down, up))]
    device = weights[0].device
    if torch.is_autocast_enabled(device.type) or any(part.dtype != torch.float32 for part in parts):
        return False
    return sum(weight.nbytes for weight in weights) <= SHARE_FOR_COPIES * free_memory(device)


def merged_weight(layer: Any) -> Tensor:
    """The base's weight and what its adapters add, rounded once."""
    weight = layer.base_layer.weight
    merged = weight.float()
    for down, up, scaling in parts_of(layer):
        merged = merged + (up.float() @ down.float()) * scaling
    return merged.to(weight.dtype)


def _plain_siblings(copies: dict[nn.Module, nn.Linear], model: nn.Module) -> list[nn.Linear]:
    """Layers without an adapter that read the same input as some that have copies: with copies they are one product."""
    found: list[nn.Linear] = []
    for parts in siblings_in(model):
        plain = [part for part in parts if type(part) is nn.Linear and "forward" not in part.__dict__]
        copied = sum(part in copies for part in parts)
        if copied and copied + len(plain) == len(parts):
            found += plain
    return found


def _copy(base: nn.Linear) -> nn.Linear:
    copy = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
    copy.weight = nn.Parameter(base.weight.detach().clone(), requires_grad=False)
    # The bias itself: it may be trained.
    copy.bias = base.bias
    return copy


def _forward(copy: nn.Linear) -> Callable[..., Tensor]:
    return lambda x, *args, **kwargs: functional.linear(x, copy.weight, copy.bias)
