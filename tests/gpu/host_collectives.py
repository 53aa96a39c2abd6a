"""Collectives that go by way of the host, for two processes on one GPU.

NCCL refuses two ranks on one GPU, and gloo reads no memory of a GPU. With these, sharded training runs there all the
same: everything but how the bytes travel is what it is on several GPUs. Importing the module installs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DTensor, Shard

from rloom.training import sharded, sharded_state


class Done:
    """What a collective returns that others may wait for: it is over."""

    def wait(self) -> None:
        """Do nothing."""


def _finish(tensor: torch.Tensor) -> None:
    """Who waits may do so on another stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream().synchronize()


def _into_another(original: Callable[..., Any]) -> Callable[..., Done]:
    def staged(*args: Any, **kwargs: Any) -> Done:
        given = list(args)
        # Versions of torch name them otherwise.
        output, value = (kwargs.pop(f"{name}_tensor", kwargs.pop(name, None)) for name in ("output", "input"))
        output = given.pop(0) if output is None else output
        value = given.pop(0) if value is None else value
        kwargs.pop("async_op", None)
        here = torch.empty(output.shape, dtype=output.dtype)
        original(here, value.detach().cpu(), *given, **kwargs)
        output.copy_(here)
        _finish(output)
        return Done()

    return staged


def _in_place(original: Callable[..., Any]) -> Callable[..., Done]:
    def staged(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Done:
        here = tensor.detach().cpu().clone()
        kwargs.pop("async_op", None)
        original(here, *args, **kwargs)
        tensor.detach().copy_(here)
        _finish(tensor)
        return Done()

    return staged


def _functional(original: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def staged(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = original(tensor.detach().cpu(), *args, **kwargs)
        return (found.wait() if hasattr(found, "wait") else found).to(tensor.device)

    return staged


def whole(value: Any) -> Any:
    """A weight as a whole, or a number that is spread over processes."""
    if not isinstance(value, DTensor):
        return value
    place, local = value.placements[0], value.to_local().detach().cpu()
    if not isinstance(place, Shard) and not place.is_partial():
        return value.to_local()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    if isinstance(place, Shard):
        return torch.cat(parts, place.dim).to(value.device)
    norm = getattr(place, "norm_type", None)
    return (torch.stack(parts).sum(0) if norm is None else torch.stack(parts).norm(norm)).to(value.device)


for _name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
    if hasattr(dist, _name):
        setattr(dist, _name, _into_another(getattr(dist, _name)))
for _name in ("broadcast", "all_reduce"):
    setattr(dist, _name, _in_place(getattr(dist, _name)))
for _name in ("all_gather_tensor", "all_reduce", "reduce_scatter_tensor"):
    setattr(functional, _name, _functional(getattr(functional, _name)))
sharded.whole_of = sharded_state.whole_of = whole
