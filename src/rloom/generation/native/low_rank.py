"""What LoRA adapters add in a decode step, by a kernel, without products in float32 and the operations around them.

Of layers that read one input and are run as one product, the adapters' first matrices lie behind the weights: the
product then has, behind the layers' answers, what the adapters make of the input. Other layers (quantized ones) have a
product for that. The layers' weights are not changed, so that what is sampled rounds as it does in training. The
adapters are copied, in the type that the layers compute in, for each rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.adapters import is_over_linear, is_plain_lora, parts_of


class LowRank:
    """Copies of the adapters of some layers that read one input."""

    def __init__(self, layers: list[Any], bases: list[Any]) -> None:
        device, dtype = bases[0].weight.device, _computes_in(bases[0])
        self.layers, self.sizes = layers, [base.out_features for base in bases]
        largest = max(sum(len(first) for first, _, _ in _parts(layer)) for layer in layers)
        self.rank = -(-largest // 16) * 16  # as tensor cores take it
        self.up = torch.zeros((self.rank, sum(self.sizes)), dtype=dtype, device=device)
        self.down: Tensor | None = None  # where their first matrices are to lie
        counts = torch.tensor([size // _columns() for size in self.sizes])
        self.owners = torch.arange(len(layers)).repeat_interleave(counts).to(device, torch.int32)

    @property
    def rows(self) -> int:
        """Of `down`."""
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


class AdaptedLayers:
    """Layers under plain LoRA that are run by themselves: all but those that `others` take care of."""

    def __init__(self, model: nn.Module, others: Collection[nn.Module] = ()) -> None:
        layers = [m for m in model.modules() if is_plain_lora(m) and m not in others and fits_kernel([m.base_layer])]
        self.adapters = [_by_itself(layer) for layer in layers]
        self.forwards = [(layer, _forward(layer, own)) for layer, own in zip(layers, self.adapters, strict=True)]
        self.refresh()

    def refresh(self) -> None:
        """Copy what the adapters are now."""
        for adapters in self.adapters:
            adapters.refresh()


def _by_itself(layer: Any) -> LowRank:
    adapters, base = LowRank([layer], [layer.base_layer]), layer.base_layer
    adapters.down = adapters.up.new_zeros((adapters.rows, base.in_features))
    return adapters


def _forward(layer: Any, adapters: LowRank) -> Callable[..., Tensor]:
    """For steps of one token a row; the layer's own for all else."""
    own, base, down, up, owners = layer.forward, layer.base_layer, adapters.down, adapters.up, adapters.owners
    assert down is not None

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or x.dim() != 3 or x.shape[1] > 1:
            return own(x, *args, **kwargs)
        return torch.ops.rloom.add_low_rank(base(x), functional.linear(x.to(down.dtype), down), up, owners)

    return forward


def low_rank_of(layers: list[Any], bases: list[nn.Linear]) -> LowRank | None:
    """For layers of which some are under plain LoRA and the others are linear themselves; None for all else, and where
    there is no kernel: an adapter is then run as it is."""
    alike = all(layer is base or is_over_linear(layer) for layer, base in zip(layers, bases, strict=True))
    if not alike or layers == bases or not fits_kernel(bases):
        return None
    return LowRank(layers, bases)


def fits_kernel(bases: list[Any]) -> bool:
    """Whether they are linear layers of some kind, of sizes that the kernel takes, on a device that has it."""
    if not all(hasattr(base, "out_features") and isinstance(getattr(base, "weight", None), Tensor) for base in bases):
        return False
    if not has_kernel(bases[0].weight.device, _computes_in(bases[0])):
        return False
    return not any(base.out_features % _columns() for base in bases)


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the GPU runs it: for half precision, since in float32 adapters are merged."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != dtype:
        return False
    try:
        _columns()
    except ImportError:  # no Triton
        return False
    return True


def _computes_in(base: Any) -> torch.dtype:
    """Its weights' type; bitsandbytes' 4-bit layers have another for their products."""
    return getattr(base, "compute_dtype", None) or base.weight.dtype


def _parts(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    return [] if type(layer) is nn.Linear else parts_of(layer)


def _columns() -> int:
    from rloom.generation.native.low_rank_kernels import COLUMNS

    return COLUMNS


def _run(base: Tensor, low: Tensor, up: Tensor, owners: Tensor) -> Tensor:
    from rloom.generation.native.low_rank_kernels import add_low_rank

    return add_low_rank(base, low, up, owners)


_library = torch.library.Library("rloom", "FRAGMENT")
_library.define("add_low_rank(Tensor base, Tensor low, Tensor up, Tensor owners) -> Tensor")
for _device in ("CUDA", "CPU"):
    _library.impl("add_low_rank", _run, _device)


def _shape(base: Tensor, low: Tensor, up: Tensor, owners: Tensor) -> Tensor:
    return base.new_empty(base.shape)


torch.library.register_fake("rloom::add_low_rank", _shape)
