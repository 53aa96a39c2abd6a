"""Saves and loads what processes under FSDP2 hold: as a whole, or each its part (`sharded_checkpoint.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rloom.models.low_bits import LOW_BITS, with_low_bits
from rloom.models.master_weights import MASTERS
from rloom.training import sharded_checkpoint
from rloom.training.exchange import explaining_lost_peers
from rloom.training.whole_state import and_low_bits, methods_replaced, numbers_of, saved_weights


class ShardedState:
    """The weights of a sharded model and its optimizer's state. All processes must call every method.

    `dtypes`: those in which weights were loaded, in which they are saved.
    """

    def __init__(self, model: nn.Module, dtypes: dict[str, torch.dtype], *, group: Any, main: bool) -> None:
        self._model, self._dtypes, self._group, self._main = model, dtypes, group, main

    # -- as a whole

    @contextmanager
    def whole_weights(self, model: nn.Module, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the model is saved, or loaded, as a whole: files say nothing of processes.

        What is saved is in the main process alone.
        """
        if "state_dict" in model.__dict__:
            # Inside of another such block.
            yield
            return
        there, own = model.state_dict(), model.load_state_dict

        def load(whole: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            parts = {name: _part_like(there.get(name), value) for name, value in whole.items()}
            return own(parts, *args, **kwargs)

        state = there if loading else saved_weights(model, self._dtypes, self._on_main, _is_part)
        with methods_replaced(model, state_dict=lambda *args, **kwargs: state, load_state_dict=load):
            yield

    def _on_main(self, part: Tensor) -> Tensor:
        """A value as a whole on the main process' host; nothing of it elsewhere."""
        if not isinstance(part, DTensor):
            return part
        with explaining_lost_peers():
            whole = whole_of(part).detach()
        return whole.cpu() if self._main else whole.new_empty(0, device="cpu")

    @contextmanager
    def whole_optimizer(self, optimizer: Any, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the optimizer's state is saved, or loaded, as a whole, as one process' optimizer has it.

        That has the bits that bfloat16 drops, where weights are saved in bfloat16.
        """
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state, own = optimizer.state_dict(), optimizer.load_state_dict
        if not loading:
            state["state"] = self._saved_state(state, params)

        def load(whole: dict[str, Any]) -> Any:
            dtypes, masters = self._dtypes_of_params(), iter(whole.pop(MASTERS, None) or ())
            for number, p in zip(numbers_of(whole), params, strict=True):
                values = whole["state"].get(number, {})
                _join_low_bits(p, values.pop(LOW_BITS, None))
                if dtypes[id(p)] == torch.bfloat16:
                    _set_master(p, next(masters, None))
                values |= {name: _part_like(p, value) for name, value in values.items() if _is_like(p, value)}
            return own(whole)

        with methods_replaced(optimizer, state_dict=lambda: state, load_state_dict=load):
            yield

    def _dtypes_of_params(self) -> dict[int, torch.dtype]:
        return {id(p): self._dtypes[name] for name, p in self._model.named_parameters()}

    def _saved_state(self, state: dict[str, Any], params: list[Tensor]) -> dict[int, dict[str, Any]]:
        dtypes = self._dtypes_of_params()
        saved: dict[int, dict[str, Any]] = {}
        for number, p in zip(numbers_of(state), params, strict=True):
            values = state["state"].get(number, {})
            values = {name: self._on_main(v) if isinstance(v, Tensor) else v for name, v in values.items()}
            if dtypes[id(p)] == torch.bfloat16:
                values = and_low_bits(values, self._on_main(p))
            if values:
                saved[number] = values
        return saved

    # -- in parts

    def save_weights(self, folder: Path) -> None:
        """Write this process' part of the weights to a checkpoint."""
        with explaining_lost_peers():
            sharded_checkpoint.save_weights(folder, self._model, group=self._group, main=self._main)

    def save_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Write this process' part of the optimizer's state to a checkpoint."""
        with explaining_lost_peers():
            sharded_checkpoint.save_optimizer(
                folder, self._model, optimizer, self._dtypes, group=self._group, main=self._main
            )

    def load_weights(self, folder: Path) -> None:
        """Read this process' part of weights that were saved in parts."""
        with explaining_lost_peers():
            sharded_checkpoint.load_weights(folder, self._model, self._group)

    def load_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Read this process' part of an optimizer's state that was saved in parts."""
        with explaining_lost_peers():
            sharded_checkpoint.load_optimizer(folder, self._model, optimizer, self._group)


def whole_of(value: Any) -> Any:
    """A value as a whole. All processes must ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_part(value: Any) -> bool:
    return isinstance(value, DTensor)


def _is_like(p: Tensor, value: Any) -> bool:
    """Whether a value of an optimizer's state has an entry for each of a weight's."""
    return isinstance(value, Tensor) and value.shape == p.shape


def _part_like(p: Any, value: Tensor) -> Tensor:
    """This process' part of a whole value, cut as the weight is. Only the part is moved to the device. peft loads the
    model's own parts together with an adapter: they stay as they are."""
    if not isinstance(p, DTensor) or isinstance(value, DTensor):
        return value
    parts = value.chunk(p.device_mesh.size(), 0)
    rank = p.device_mesh.get_local_rank()
    part = parts[rank] if rank < len(parts) else value[:0]
    part = part.to(p.device, p.dtype if value.is_floating_point() else value.dtype, copy=True)
    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


@torch.no_grad()
def _set_master(p: Tensor, master: Tensor | None) -> None:
    """Give a part the float32 copy that an optimizer of one process has kept of a bfloat16 weight."""
    if isinstance(p, DTensor) and master is not None:
        part = _part_like(p, master)
        assert isinstance(part, DTensor)
        p.to_local().copy_(part.to_local())


@torch.no_grad()
def _join_low_bits(p: Tensor, low_bits: Any) -> None:
    """Give a float32 part that was loaded from bfloat16 weights the bits that those had dropped."""
    if isinstance(p, DTensor) and isinstance(low_bits, Tensor) and low_bits.dtype == torch.int16:
        bits = _part_like(p, low_bits)
        assert isinstance(bits, DTensor)
        p.to_local().copy_(with_low_bits(p.to_local(), bits.to_local()))
