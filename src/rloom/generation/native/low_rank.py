"""What LoRA adapters add to layers that read one input, without a product of its own for each of them.

Their first matrices lie behind the layers' weights, so that one product has the layers' answers and, behind those, what
the adapters make of the input; one kernel then adds what comes of that. The layers' weights are not changed, and what
is sampled rounds as it does in training. Copies of the adapters in the weights' type are made anew for each rollout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rloom.generation.native.adapters import is_plain_lora, parts_of


class LowRank:
    """The adapters of layers that are run as one product. `bases`: the layers' own linear layers."""

    def __init__(self, layers: list[Any], bases: list[nn.Linear]) -> None:
        weight = bases[0].weight
        self.layers, self.sizes = layers, [base.out_features for base in bases]
        largest = max(sum(len(down) for down, _, _ in _parts(layer)) for layer in layers)
        self.rank = -(-largest // 16) * 16  # as tensor cores take it
        self.up = torch.zeros((self.rank, sum(self.sizes)), dtype=weight.dtype, device=weight.device)
        self.down: Tensor | None = None  # what lies behind the weights
        counts = torch.tensor([size // _columns() for size in self.sizes])
        self.owners = torch.arange(len(layers)).repeat_interleave(counts).to(weight.device, torch.int32)

    @property
    def rows(self) -> int:
        """That lie behind the weights."""
        return self.rank * len(self.layers)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what the adapters are now."""
        assert self.down is not None
        for layer, down, up in zip(self.layers, self.down.split(self.rank), self.up.split(self.sizes, 1), strict=True):
            start = 0
            for first, second, scaling in _parts(layer):
                end = start + len(first)
                down[start:end] = first
                up[start:end] = second.T * scaling
                start = end


def low_rank_of(layers: list[Any], bases: list[nn.Linear]) -> LowRank | None:
    """For layers of which some are under plain LoRA and the others are linear themselves; None for all else, and where
    there is no kernel: an adapter is then run as it is."""
    if not any(map(is_plain_lora, layers)) or not has_kernel(bases[0].weight):
        return None
    if any(base.out_features % _columns() for base in bases):
        return None
    alike = all(layer is base or is_plain_lora(layer) for layer, base in zip(layers, bases, strict=True))
    return LowRank(layers, bases) if alike else None


def has_kernel(weight: Tensor) -> bool:
    """Whether the GPU runs it: for half precision, since in float32 adapters are merged."""
    if not weight.is_cuda or weight.dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != weight.dtype:
        return False
    try:
        _columns()
    except ImportError:  # no Triton
        return False
    return True


def _parts(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    return [] if type(layer) is nn.Linear else parts_of(layer)


def _columns() -> int:
    from rloom.generation.native.low_rank_kernels import COLUMNS

    return COLUMNS


def _run(product: Tensor, up: Tensor, owners: Tensor) -> Tensor:
    from rloom.generation.native.low_rank_kernels import add_low_rank

    return add_low_rank(product, up, owners)


_library = torch.library.Library("rloom", "FRAGMENT")
_library.define("add_low_rank(Tensor product, Tensor up, Tensor owners) -> Tensor")
for _device in ("CUDA", "CPU"):
    _library.impl("add_low_rank", _run, _device)


def _shape(product: Tensor, up: Tensor, owners: Tensor) -> Tensor:
    return product.new_empty((*product.shape[:-1], up.shape[1]))


torch.library.register_fake("rloom::add_low_rank", _shape)
