"""Sharded state as one process has it: what saving and loading under FSDP2 and under DeepSpeed share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rloom.models.load import is_peft_model
from rloom.models.low_bits import LOW_BITS, split_float32


def saved_weights(
    model: nn.Module,
    dtypes: dict[str, torch.dtype],
    on_main: Callable[[Tensor], Tensor],
    is_part: Callable[[Tensor], bool],
) -> dict[str, Any]:
    """Weights as they were loaded, in the main process. Tied weights share their memory, as in the model.

    `on_main` gathers a weight there. Frozen ones beside an adapter are not gathered where processes hold parts of them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    frozen = _not_saved(model) if is_peft_model(model) else set()
    known: dict[int, Tensor] = {}
    saved: dict[str, Any] = {}
    for name, part in model.state_dict().items():
        value = parameters.get(name, part)
        if id(value) not in known:
            left_out = name in frozen and is_part(value)
            known[id(value)] = torch.empty(0) if left_out else as_loaded(on_main(value), dtypes.get(name, value.dtype))
        saved[name] = known[id(value)]
    return saved


def _not_saved(model: Any) -> set[str]:
    """The weights of a model with adapters that peft does not save. It saves all adapters, frozen ones too, and
    embeddings that have an adapter or have been resized."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(p) for layer in layers if layer is not None for p in layer.parameters()}
    return {
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if not (p.requires_grad or id(p) in embeddings or set(name.split(".")) & set(model.peft_config))
    }


def as_loaded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the dtype in which it was loaded, rounded as its low bits are counted from."""
    is_half = value.dtype == torch.float32 and dtype == torch.bfloat16
    return split_float32(value)[0] if is_half else value.to(dtype)


def and_low_bits(values: dict[str, Any], weight: Tensor) -> dict[str, Any]:
    """An optimizer's state of a weight that is saved in bfloat16, with the bits which that drops.

    An optimizer may have no state at all: plain SGD has none, and an optimizer that has made no update.

    >>> and_low_bits({}, torch.tensor([1.0])), and_low_bits({}, torch.tensor([1.0 + 2**-20]))
    ({}, {'rest': tensor([8], dtype=torch.int16)})
    """
    low_bits = split_float32(weight)[1]
    return {**values, LOW_BITS: low_bits} if values or low_bits.any() else values


def numbers_of(state: dict[str, Any]) -> list[int]:
    """The numbers of an optimizer's weights in its saved state."""
    return [number for group in state["param_groups"] for number in group["params"]]


@contextmanager
def methods_replaced(thing: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Let an object have these methods meanwhile."""
    for name, method in methods.items():
        setattr(thing, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(thing, name)
