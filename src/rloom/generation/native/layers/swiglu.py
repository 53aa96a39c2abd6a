"""Gate, up and their activation as one product, where a model's blocks are made so and the GPU has a kernel for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.layers.fused_linear import JoinedLayers, Siblings
from rloom.models.fused import forwards_replaced
from rloom.models.trial import agrees

PARTS = ("gate_proj", "up_proj", "act_fn")
"""Of a block, that the kernel stands in for."""

ROWS = (4, 100, 130)
"""With so many the kernels are tried: each has a form of its own."""


class GatedBlocks:
    """Blocks that are down(silu(gate(x)) · up(x)), with gate and up laid together."""

    def __init__(self, joined: JoinedLayers, model: nn.Module) -> None:
        tried: dict[Any, bool] = {}
        self.blocks = [
            (group, (block, _forward(block, group.weight)))
            for block, group in _candidates(joined, model)
            if _is_gated(block, group) and _kernel_works(group.weight, tried)
        ]

    def forwards(self) -> list[tuple[nn.Module, Callable[..., Tensor]]]:
        """The blocks, each with the forward that uses the product; none that weights have been moved from."""
        return [pair for group, pair in self.blocks if group.in_place()]


def _candidates(joined: JoinedLayers, model: nn.Module) -> Iterator[tuple[Any, Siblings]]:
    """Blocks whose gate and up are plain layers that nobody listens to: what adapters and hooks do would be missing."""
    laid = {tuple(map(id, group.owners)): group for group in joined.groups}
    for block in model.modules():
        parts = [getattr(block, name, None) for name in PARTS]
        group = laid.get((id(parts[0]), id(parts[1])))
        if group is None or group.bias is not None or group.adapters is not None or not has_kernel(group.weight):
            continue
        if "forward" not in block.__dict__ and not any(_has_hooks(part) for part in parts):
            yield block, group


def _has_hooks(part: Any) -> bool:
    return not isinstance(part, nn.Module) or bool(part._forward_hooks or part._forward_pre_hooks)


def has_kernel(weight: Tensor) -> bool:
    """Whether the GPU is of the kind that the kernel was written for, and the weights of a size that it holds."""
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16) or weight.shape[1] % 8:
        return False
    if torch.version.hip or torch.cuda.get_device_capability(weight.device)[0] != 9:
        return False
    try:
        from rloom.generation.native.kernels.swiglu_product import holds
    except ImportError:  # no Triton, or one without tensor descriptors
        return False
    return holds(len(weight) // 2, weight.device)


def _is_gated(block: Any, group: Siblings) -> bool:
    with forwards_replaced(group.forwards):  # an adapter's, where it is merged
        return is_gated(block, *(layer.weight for layer in group.layers))


@torch.no_grad()
def is_gated(block: Any, gate: Tensor | None = None, up: Tensor | None = None) -> bool:
    """Whether a block does what its parts' names say: no other activation, nothing in between, no limits.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaMLP
    >>> make = lambda act: LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=16, hidden_act=act))
    >>> is_gated(make("silu")), is_gated(make("gelu"))
    (True, False)
    """
    down = block._modules.get("down_proj")
    if down is None:
        return False
    gate = block.gate_proj.weight if gate is None else gate
    up = block.up_proj.weight if up is None else up
    in_training = [module for module in block.modules() if module.training]
    drawn = torch.randn((1, 2, gate.shape[1]), generator=torch.Generator().manual_seed(0))
    drawn[:, 1] *= 1000  # some models clamp what is large
    x = drawn.to(gate.device, gate.dtype)
    try:
        block._modules["down_proj"] = nn.Identity()  # weights of zero would hide what comes before them
        for module in in_training:  # dropout would draw
            module.training = False
        found = block.forward(x)
    except Exception:  # it takes other arguments, or does other things with its parts
        return False
    finally:
        block._modules["down_proj"] = down
        for module in in_training:
            module.training = True
    expected = functional.silu(functional.linear(x, gate)) * functional.linear(x, up)
    return isinstance(found, Tensor) and torch.allclose(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@torch.no_grad()
def _kernel_works(weight: Tensor, tried: dict[Any, bool]) -> bool:
    """Whether the kernel runs here and is right, tried once for weights of a shape: else blocks stay as they are."""
    key = (weight.shape, weight.dtype, weight.device)
    if key not in tried:
        trials = (functools.partial(_trial, weight, rows) for rows in ROWS)
        tried[key] = all(agrees(trial, "gate and up are not run as one product") for trial in trials)
    return tried[key]


def _trial(weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """What the kernel finds, and what it should."""
    x = torch.randn((rows, weight.shape[1]), generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, weight.dtype)
    gate, up = functional.linear(x, weight).float().chunk(2, -1)
    return _run(x, weight), functional.silu(gate) * up


def _forward(block: Any, weight: Tensor) -> Callable[..., Tensor]:
    """For steps of one token a row; the block's own for all else."""
    own = block.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or x.dim() != 3 or x.shape[1] > 1 or x.dtype != weight.dtype:
            return own(x, *args, **kwargs)
        product = torch.ops.rloom.gated_product(x.flatten(0, 1), weight)
        return block.down_proj(product.unsqueeze(1))

    return forward


def _run(x: Tensor, weight: Tensor) -> Tensor:
    from rloom.generation.native.kernels import swiglu_product as kernels

    if len(x) <= kernels.MOST_ROWS:
        return kernels.gated_product(x.contiguous(), weight)
    return kernels.activation(functional.linear(x, weight))


_library = torch.library.Library("rloom", "FRAGMENT")
_library.define("gated_product(Tensor x, Tensor weight) -> Tensor")
_library.impl("gated_product", _run, "CUDA")
_library.impl("gated_product", _run, "CPU")


def _shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


torch.library.register_fake("rloom::gated_product", _shape)
