"""Gate, up and their activation as one product, where a model's blocks are made so and the GPU has a kernel for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.joined import JoinedLayers, Siblings

MOST_ROWS = 128
"""Of a step; the product of more is long enough to take its activation apart."""


class GatedBlocks:
    """Blocks that are down(silu(gate(x)) · up(x)), with gate and up laid together."""

    def __init__(self, joined: JoinedLayers, model: nn.Module) -> None:
        by_gate = {id(group.layers[0]): group for group in joined.groups}
        known: dict[type, bool] = {}
        # Made once: compiled layers would be compiled anew for another function.
        self.blocks = [
            (group, (block, _forward(block, group.weight)))
            for block, group in _blocks(model, by_gate)
            if _fits(block, group, known)
        ]

    def forwards(self) -> list[tuple[nn.Module, Callable[[Tensor], Tensor]]]:
        """The blocks, each with the forward that uses the product; none that weights have been moved from."""
        return [pair for group, pair in self.blocks if group.in_place()]


def _blocks(model: nn.Module, by_gate: dict[int, Siblings]) -> Iterator[tuple[Any, Siblings]]:
    """Those whose gate and up are plain layers: what an adapter adds to them would be missing."""
    for block in model.modules():
        group = by_gate.get(id(getattr(block, "gate_proj", None)))
        if group is not None and group.bias is None and isinstance(getattr(block, "down_proj", None), nn.Module):
            yield block, group


def _fits(block: Any, group: Siblings, known: dict[type, bool]) -> bool:
    weight = group.weight
    if weight.dtype not in (torch.bfloat16, torch.float16) or "forward" in block.__dict__ or not has_kernel(weight):
        return False
    if type(block) not in known:
        known[type(block)] = is_gated(block)
    return known[type(block)]


def has_kernel(weight: Tensor) -> bool:
    """Whether the GPU is of the kind that the kernel was written for, and the weights of a size that it holds."""
    if not weight.is_cuda or torch.cuda.get_device_capability(weight.device)[0] != 9 or weight.shape[1] % 8:
        return False
    try:
        from rloom.generation.native.gated_kernels import holds
    except ImportError:  # no Triton, or one without tensor descriptors
        return False
    return holds(len(weight) // 2, weight.device)


@torch.no_grad()
def is_gated(block: Any) -> bool:
    """Whether a block does what its parts' names say: nothing between them, no other activation.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaMLP
    >>> make = lambda act: LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=16, hidden_act=act))
    >>> is_gated(make("silu")), is_gated(make("gelu"))
    (True, False)
    """
    weight = block.gate_proj.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 1, weight.shape[1]), generator=generator).to(weight.device, weight.dtype)
    expected = block.down_proj(functional.silu(block.gate_proj(x)) * block.up_proj(x))
    return torch.equal(block(x), expected)


def _forward(block: Any, weight: Tensor) -> Callable[[Tensor], Tensor]:
    """For steps of one token a row; the block's own for all else."""
    own, down = block.forward, block.down_proj

    def forward(x: Tensor) -> Tensor:
        if x.dim() < 3 or x.shape[-2] > 1 or x.dtype != weight.dtype:
            return own(x)
        product = torch.ops.rloom.gated_product(x.flatten(0, -2), weight)
        return down(product.view(*x.shape[:-1], -1))

    return forward


def _run(x: Tensor, weight: Tensor) -> Tensor:
    if len(x) <= MOST_ROWS:
        from rloom.generation.native.gated_kernels import gated_product

        return gated_product(x.contiguous(), weight)
    gate, up = functional.linear(x, weight).chunk(2, -1)
    return functional.silu(gate) * up


_library = torch.library.Library("rloom", "FRAGMENT")
_library.define("gated_product(Tensor x, Tensor weight) -> Tensor")
_library.impl("gated_product", _run, "CUDA")
_library.impl("gated_product", _run, "CPU")


def _shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


torch.library.register_fake("rloom::gated_product", _shape)
