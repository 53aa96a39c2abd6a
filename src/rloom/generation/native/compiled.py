"""What of a model is compiled for decode steps, and how."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compiled_forwards(model: nn.Module, *, on_gpu: bool) -> list[tuple[nn.Module, Any]]:
    """The layers, each with its forward compiled; on a GPU, where launches cost more than what they compute, with more
    put together than the compiler does by itself, and with what stands beside them."""
    options = {"post_grad_custom_pre_pass": _fusing()} if on_gpu else None
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    found = [(layer, torch.compile(layer.forward, dynamic=True, options=options)) for layer in layers]
    return found + [(part, torch.compile(part.forward, dynamic=True)) for part in (beside(model) if on_gpu else [])]


@functools.cache  # the compiler takes another one for another compiler: the next runner would have all compiled anew
def _fusing() -> Any:
    from rloom.generation.native.fusing import Fusing  # of the compiler's inner parts, which not every run needs

    return Fusing()


def beside(model: nn.Module) -> list[nn.Module]:
    """What stands beside the layers and is a handful of small operations: the norm at the end, the rotations' angles.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> model = LlamaModel(LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=9))
    >>> [type(part).__name__ for part in beside(model)]
    ['LlamaRMSNorm', 'LlamaRotaryEmbedding']
    """
    is_stack = lambda m: isinstance(m, nn.ModuleList) and any(isinstance(x, GradientCheckpointingLayer) for x in m)  # noqa: E731
    around = [module for module in model.modules() if any(map(is_stack, module.children()))]
    parts = dict.fromkeys(part for module in around for part in module.children())  # stacks may share some
    return [part for part in parts if not isinstance(part, (nn.Embedding, nn.Linear)) and not list(part.children())]
