"""Brings weights from the main process to the devices of all, a module at a time.

A model that is to be sharded may be larger than a GPU's memory. So the main process alone reads its weights, into the
host's memory, and the others make the model without data (`loads_without_data`). Then each module is brought to all
devices as a whole, and sharded before the next one comes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rloom.config import RLOOConfig
from rloom.errors import ConfigError
from rloom.training.processes import Processes
from rloom.training.sharding_options import shards


def loads_without_data(args: RLOOConfig) -> bool:
    """Whether this process leaves it to the main one to read a model's weights."""
    return shards(args) and args.process_index != 0


def tie_as_main(model: nn.Module, processes: Processes) -> None:
    """Tie the weights that are tied in the main process, and no others. Refuse models that cannot be brought.

    Where a checkpoint has a tied weight under both names, transformers ties them if they are equal. Without data it
    cannot tell.
    """
    slots = [(owner, name, p) for owner in model.modules() for name, p in owner._parameters.items() if p is not None]
    first: dict[int, int] = {}
    ties = [first.setdefault(id(p), place) for place, (_, _, p) in enumerate(slots)]
    kinds = [(tuple(value.shape), value.dtype) for value in (*(p for _, _, p in slots), *model.buffers())]
    has_data = not any(p.is_meta for _, _, p in slots)
    wanted, same, has_data = processes.from_main((ties, kinds, has_data))
    if processes.any(kinds != same):
        raise ConfigError("the model is not the same in all processes: weights have other shapes or dtypes")
    if not has_data:
        raise ConfigError("the model has no data in the main process (it is on the device 'meta'): load its weights")
    for place, (owner, name, p) in enumerate(slots):
        if wanted[place] != place:
            owner._parameters[name] = slots[wanted[place]][2]
        elif ties[place] != place:
            owner._parameters[name] = nn.Parameter(torch.empty_like(p), p.requires_grad)


class Placement:
    """Gives modules the main process' weights, on this process' device. All processes must do the same in one order.

    A weight that is tied to another of the same module is brought once, and stays tied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By id of a weight as it was: that weight, which keeps its id, and the one in its place. Of one module at a
        # time: the whole weights of a module that has been sharded would stay in memory.
        self._placed: dict[int, tuple[Tensor, nn.Parameter]] = {}

    @torch.no_grad()
    def weights(self, module: nn.Module) -> None:
        """Bring the weights of a module that is not sharded yet. Parts of it that are sharded are left out."""
        for owner in module.modules():
            for name, p in owner._parameters.items():
                if p is not None and not isinstance(p, DTensor):
                    owner._parameters[name] = self._brought(p)
        self._placed = {}

    @torch.no_grad()
    def buffers(self, module: nn.Module) -> None:
        """Bring all buffers, those too that no checkpoint has."""
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = self._received(buffer)

    def _brought(self, p: nn.Parameter) -> nn.Parameter:
        if id(p) not in self._placed:
            value = self._received(p)
            if p.is_meta:
                placed = nn.Parameter(value, p.requires_grad)
            else:
                # The same object as before: its user may hold on to it.
                placed = p
                placed.data = value
            self._placed[id(p)] = self._placed[id(placed)] = (p, placed)
        return self._placed[id(p)][1]

    def _received(self, value: Tensor) -> Tensor:
        """The main process' value."""
        here = torch.empty_like(value, device=self._device) if value.is_meta else value.detach().to(self._device)
        here = here.contiguous()
        if here.numel():
            dist.broadcast(here, src=0)
        return here


def allocate(module: nn.Module) -> None:
    """Give the weights of a module memory that nothing is written to yet. Parts of it that are sharded are left out."""
    placed: dict[int, Any] = {}
    for owner in module.modules():
        for p in owner._parameters.values():
            if p is not None and not isinstance(p, DTensor) and id(p) not in placed:
                p.data = torch.empty(p.shape, dtype=p.dtype, device=p.device)
                placed[id(p)] = p
