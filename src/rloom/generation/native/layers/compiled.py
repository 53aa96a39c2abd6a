"""What of a model is compiled for decode steps, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def compiled_forwards(model: nn.Module, *, on_gpu: bool) -> list[tuple[nn.Module, Any]]:
    """The layers, each with its forward compiled; on a GPU, where launches cost more than what they compute, also the
    small parts beside the layers."""
    parts = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if on_gpu:
        parts += beside(model)
    return [(part, torch.compile(part.forward, dynamic=True)) for part in parts]


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
