"""SwiGLU blocks, down(silu(gate(x)) · up(x)): gate, up and their activation as one kernel, on the GPUs that it was
written for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.layers import Forwards
from rloom.generation.native.layers.fused_linear import FusedLinears, Siblings
from rloom.generation.native.operators import define_operator
from rloom.models.fused import forwards_replaced
from rloom.models.verify import agrees

PARTS = ("gate_proj", "up_proj", "act_fn")
"""What the kernel stands in for in a block."""

TRIED_ROWS = (4, 100, 130)
"""Numbers of rows with which the kernels are tried: each has a form of its own."""


class SwigluBlocks:
    """Blocks that are down(silu(gate(x)) · up(x)), and whose gate and up are fused."""

    def __init__(self, linears: FusedLinears, model: nn.Module) -> None:
        tried: dict[Any, bool] = {}
        self.blocks = [
            (group, (block, _forward(block, group.weight)))
            for block, group in _candidates(linears, model)
            if _is_swiglu(block, group) and _kernel_works(group.weight, tried)
        ]

    @property
    def forwards(self) -> Forwards:
        """The blocks, each with the forward that uses the kernel; none whose weights have been moved since."""
        return [pair for group, pair in self.blocks if group.is_contiguous()]

    def refresh(self) -> None:
        """Nothing to do: the kernel reads the model's own weights."""


def _candidates(linears: FusedLinears, model: nn.Module) -> Iterator[tuple[Any, Siblings]]:
    """Blocks whose gate and up are plain layers without hooks: what adapters and hooks do would be missing."""
    groups = {tuple(map(id, group.owners)): group for group in linears.groups}
    for block in model.modules():
        parts = [getattr(block, name, None) for name in PARTS]
        group = groups.get((id(parts[0]), id(parts[1])))
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
    # There is no Triton, or one without tensor descriptors.
    except ImportError:
        return False
    return holds(len(weight) // 2, weight.device)


def _is_swiglu(block: Any, group: Siblings) -> bool:
    # With the forwards that run merged copies, where adapters are merged.
    with forwards_replaced(group.forwards):
        return is_swiglu(block, *(layer.weight for layer in group.layers))


@torch.no_grad()
def is_swiglu(block: Any, gate: Tensor | None = None, up: Tensor | None = None) -> bool:
    """Whether a block does what its parts' names say: no other activation, nothing in between, no limits.

    >>> from transformers import LlamaConfig
    >>> from transformers.models.llama.modeling_llama import LlamaMLP
    >>> make = lambda act: LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=16, hidden_act=act))
    >>> is_swiglu(make("silu")), is_swiglu(make("gelu"))
    (True, False)
    """
    down = block._modules.get("down_proj")
    if down is None:
        return False
    gate = block.gate_proj.weight if gate is None else gate
    up = block.up_proj.weight if up is None else up
    in_training = [module for module in block.modules() if module.training]
    drawn = torch.randn((1, 2, gate.shape[1]), generator=torch.Generator().manual_seed(0))
    # Some models clamp what is large.
    drawn[:, 1] *= 1000
    x = drawn.to(gate.device, gate.dtype)
    try:
        # Without `down`, whose weights may be zero and hide what comes before them.
        block._modules["down_proj"] = nn.Identity()
        # Dropout would draw from the process' random state.
        for module in in_training:
            module.training = False
        found = block.forward(x)
    # It takes other arguments, or does other things with its parts.
    except Exception:
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
        trials = (functools.partial(_trial, weight, rows) for rows in TRIED_ROWS)
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
        product = torch.ops.rloom.swiglu_product(x.flatten(0, 1), weight)
        return block.down_proj(product.unsqueeze(1))

    return forward


def _run(x: Tensor, weight: Tensor) -> Tensor:
    from rloom.generation.native.kernels import swiglu_product as kernels

    if len(x) <= kernels.MOST_ROWS:
        return kernels.swiglu_product(x.contiguous(), weight)
    return kernels.swiglu(functional.linear(x, weight))


define_operator(
    "swiglu_product(Tensor x, Tensor weight) -> Tensor",
    _run,
    lambda x, weight: x.new_empty((x.shape[0], weight.shape[0] // 2)),
)
