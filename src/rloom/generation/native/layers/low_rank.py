"""What LoRA adapters add in a decode step, by a kernel, without products in float32 and the operations around them.

Of layers that read one input and are run as one product, the adapters' first matrices lie behind the weights: the
product then has, behind the layers' answers, what the adapters make of the input. Other layers (quantized ones) have a
product for that. The layers' weights are not changed. The adapters are copied for each rollout, in the type that the
layers compute in, which rounds a part in 500 of what they add.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rloom.generation.native.layers.lora import adds_nothing, is_lora_on_linear, is_plain_lora, parts_of
from rloom.generation.native.operators import define_operator
from rloom.models.verify import agrees

COLUMNS = 64
"""Of the product, to a program of the kernel. Each program belongs to one layer: sizes are multiples of it."""


class LowRank:
    """Copies of the adapters of some layers that read one input.

    `down` holds their first matrices (layers · rank, inputs) once [`place`] says where, `up` the second ones (rank, all
    outputs), scaled. `layer_of` says for each `COLUMNS` outputs which layer they are of.
    """

    def __init__(self, layers: list[Any], bases: list[Any]) -> None:
        device, dtype = bases[0].weight.device, _computes_in(bases[0])
        self.layers, self.sizes = layers, [base.out_features for base in bases]
        largest = max(sum(len(first) for first, _, _ in _parts(layer)) for layer in layers)
        # Tensor cores take multiples of 16.
        self.rank = -(-largest // 16) * 16
        self.rows, self.inputs = self.rank * len(layers), bases[0].in_features
        self.down: Tensor
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            self.up = torch.zeros((self.rank, sum(self.sizes)), dtype=dtype, device=device)
        counts = torch.tensor([size // COLUMNS for size in self.sizes])
        self.layer_of = torch.arange(len(layers)).repeat_interleave(counts).to(device, torch.int32)

    def place(self, down: Tensor | None = None) -> None:
        """Where the first matrices are to lie: None, in memory of their own."""
        with torch.inference_mode(False):
            self.down = self.up.new_empty((self.rows, self.inputs)) if down is None else down
        # The memory may hold NaN from before.
        self.down.zero_()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy what the adapters are now."""
        for layer, down, up in zip(self.layers, self.down.split(self.rank), self.up.split(self.sizes, 1), strict=True):
            start = 0
            for first, second, scaling in _parts(layer):
                end = start + len(first)
                down[start:end] = first
                up[start:end] = second.T * scaling
                start = end


class LowRankLayers:
    """Layers under plain LoRA that are run one by one: all but those that `others` take care of."""

    def __init__(self, model: nn.Module, others: Collection[nn.Module] = ()) -> None:
        layers = [m for m in model.modules() if is_plain_lora(m) and m not in others and fits_kernel([m.base_layer])]
        self.adapters = [LowRank([layer], [layer.base_layer]) for layer in layers]
        for adapters in self.adapters:
            adapters.place()
        self.forwards = [(layer, _forward(layer, own)) for layer, own in zip(layers, self.adapters, strict=True)]

    def refresh(self) -> None:
        """Copy what the adapters are now."""
        for adapters in self.adapters:
            adapters.refresh()


def _forward(layer: Any, adapters: LowRank) -> Callable[..., Tensor]:
    """For steps of one token a row; the layer's own for all else."""
    own, base, down, up, layer_of = layer.forward, layer.base_layer, adapters.down, adapters.up, adapters.layer_of

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or x.dim() != 3 or x.shape[1] > 1:
            return own(x, *args, **kwargs)
        return torch.ops.rloom.add_low_rank(base(x), functional.linear(x.to(down.dtype), down), up, layer_of)

    return forward


def low_rank_of(layers: list[Any], bases: list[nn.Linear]) -> LowRank | None:
    """For layers of which some are under plain LoRA and to the others nothing is added; None for all else, and where
    there is no kernel: an adapter is then run as it is."""
    plain = [layer is base or adds_nothing(layer) for layer, base in zip(layers, bases, strict=True)]
    alike = all(one or is_lora_on_linear(layer) for one, layer in zip(plain, layers, strict=True))
    return LowRank(layers, bases) if alike and not all(plain) and fits_kernel(bases) else None


def fits_kernel(bases: list[Any]) -> bool:
    """Whether they are linear layers of some kind, of sizes that the kernel takes, on a device that has it."""
    if not all(hasattr(base, "out_features") and isinstance(getattr(base, "weight", None), Tensor) for base in bases):
        return False
    fits = all(base.out_features % COLUMNS == 0 for base in bases)
    return fits and has_kernel(bases[0].weight.device, _computes_in(bases[0]))


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the GPU runs it: for half precision, since in float32 what matters are products."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") != dtype:
        return False
    return _kernel_works(device, dtype)


@functools.cache
def _kernel_works(device: torch.device, dtype: torch.dtype) -> bool:
    return agrees(lambda: _trial(device, dtype), "LoRA adapters are run as they are")


def _trial(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What the kernel finds for two layers of rank 16, and what it should."""
    size = 2 * COLUMNS
    drawn = torch.randn((21, 1, 3 * size), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    base, low, up = drawn[..., :size], drawn[..., size : size + 32], drawn[:16, 0, -size:].contiguous()
    parts = zip(low.float().split(16, -1), up.float().chunk(2, 1), strict=True)
    expected = base.float() + torch.cat([first @ second for first, second in parts], -1)
    return _run(base, low, up, torch.tensor([0, 1], dtype=torch.int32, device=device)), expected


def _computes_in(base: Any) -> torch.dtype:
    """Its weights' type; bitsandbytes' 4-bit layers have another for their products."""
    return getattr(base, "compute_dtype", None) or base.weight.dtype


def _parts(layer: Any) -> list[tuple[Tensor, Tensor, float]]:
    return [] if type(layer) is nn.Linear else parts_of(layer)


def _run(base: Tensor, low: Tensor, up: Tensor, layer_of: Tensor) -> Tensor:
    from rloom.generation.native.kernels.add_low_rank import add_low_rank

    return add_low_rank(base, low, up, layer_of)


define_operator(
    "add_low_rank(Tensor base, Tensor low, Tensor up, Tensor layer_of) -> Tensor",
    _run,
    lambda base, low, up, layer_of: base.new_empty(base.shape),
)
