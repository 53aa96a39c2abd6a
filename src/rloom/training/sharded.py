"""Processes that each hold a part of the model: FSDP2, by torch's `fully_shard`.

Each of N processes holds 1/N of every weight, of its gradient and of the optimizer's state. A layer is gathered while
it runs, forward or backward. So in an update all processes must run the model equally often (`rounds`).

What runs without gradient (generation, the reference's and the first pass, evaluation) runs on a whole copy of the
weights in each process (`whole_copy.py`), which is filled from the parts before each rollout and each evaluation.
There, processes need not be in step. Without such a copy (`ds3_gather_for_generation=False`) it runs on the parts,
layer by layer, and processes are in step there too.

The main process reads the model's weights, and the others receive their parts of them (`placement.py`): no process has
the whole model on its device, but for that copy. accelerate is not told: on a CPU it would silently not shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rloom.errors import ConfigError
from rloom.models.load import base_of, is_peft_model
from rloom.models.low_bits import Piece, Value
from rloom.models.split_weights import kept_in_float32
from rloom.printable import get_logger
from rloom.training.attempts import Attempts
from rloom.training.budget import TokenBudget
from rloom.training.exchange import explaining_lost_peers
from rloom.training.placement import Placement, allocate, tie_as_main
from rloom.training.processes import Processes, T
from rloom.training.sharded_attempts import CAN_BE_LEFT, ShardedAttempts
from rloom.training.sharded_state import ShardedState, whole_of
from rloom.training.whole_copy import (
    WholeCopy,
    cast,
    fits_beside_update,
    lacking_room,
    size_of,
    without_memory,
)

logger = get_logger(__name__)

HALVES = (torch.bfloat16, torch.float16)


class ShardedProcesses(Processes):
    """Processes under FSDP2. See the module's docstring."""

    is_sharded = True
    can_repeat = repeats_together = CAN_BE_LEFT
    cannot_repeat = "with this version of torch, under FSDP"

    def __init__(
        self,
        *place: int,
        half: torch.dtype | None,
        reshard: bool = True,
        layered: bool = False,
        saves_parts: bool = False,
        keep_copy: bool | None = None,
        offload_frozen: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(*place, **options)
        self.half, self._reshard, self.is_layered = half, reshard, layered
        self.saves_parts, self._offload_frozen = saves_parts, offload_frozen
        self._model: nn.Module | None = None
        self._copy: WholeCopy | None = None
        # What the policy was at the start, sharded; None where there is no need for it.
        self._frozen: nn.Module | None = None
        # Whether the copy stays in memory during updates; None until that is decided.
        self._keep_copy = keep_copy
        # Called before the copy is let go of: others hold memory that belongs to it.
        self._users: list[Callable[[], None]] = []
        # The dtypes of the weights that were loaded, in which they are saved.
        self._dtypes: dict[str, torch.dtype] = {}
        # Names of weights that the copy cannot have yet: all at first, then those that are or were trained.
        self._stale: set[str] = set()
        # What all processes repeat together; None until the model is sharded, or where they cannot.
        self._attempts: Attempts | None = None
        # What saves and loads; None until the model is sharded.
        self._state: ShardedState | None = None

    def plan(self) -> str:
        """How the model is distributed by what this process was told."""
        dtype, parts = self.half or "their own dtype", "in parts" if self.saves_parts else "whole"
        return f"parts by FSDP2, gathered in {dtype}, resharded: {self._reshard}, checkpoints {parts}"

    # -- the whole copy

    def without_gradient(self, model: nn.Module) -> nn.Module:
        """The whole copy, in this process alone. Layer by layer: the model itself."""
        return model if self._copy is None else self._copy.module

    def uses_copy(self, release: Callable[[], None] | None, *, in_updates: bool) -> None:
        """Note what else depends on the copy. `in_updates`: it is run there too, and so has to stay."""
        self._users += [] if release is None else [release]
        if in_updates:
            self._keep_copy = True

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Fill the whole copy from the parts of all processes. Weights that were never trained are there already."""
        if self._model is None or self._copy is None:
            return
        parts, trained = dict(self._model.named_parameters()), self._trained()
        self._stale |= set(parts) if self._copy.is_freed else trained
        with explaining_lost_peers():
            self._copy.fill([name for name in parts if name in self._stale], lambda name: whole_of(parts[name]))
        buffers = dict(self._copy.module.named_buffers())
        for name, buffer in self._model.named_buffers():
            buffers[name].copy_(buffer)
        self._stale = trained

    def _trained(self) -> set[str]:
        assert self._model is not None
        return {name for name, p in self._model.named_parameters() if p.requires_grad}

    def _let_go_of_copy(self) -> None:
        """Before an update: let go of the copy where it is not kept. All processes do the same."""
        if self._copy is None or self._model is None:
            return
        if self._keep_copy is None:
            trained = sum(self.own_part(p).numel() for p in self._model.parameters() if p.requires_grad)
            self._keep_copy = not self.any(not fits_beside_update(self._copy, trained, self._own_device))
        if not self._keep_copy and not self._copy.is_freed:
            for release in self._users:
                release()
            self._copy.free()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    # -- sharding

    def choose_copy(self, model: nn.Module, device: torch.device, *, by_servers: bool) -> None:
        """Do without a whole copy where it does not fit, if servers generate: all else can run on the parts."""
        if self.is_layered or not by_servers:
            return
        # The parts that are trained will take memory before the copy does.
        needed = size_of(model.parameters(), self.half) + size_of(model.parameters(), None) // self.count
        lack = lacking_room(needed, device)
        self.is_layered = self.any(lack is not None)
        if self.is_layered and self.is_main:
            logger.warning(
                "%s, with this process' part of them: vLLM generates, and passes without gradient run on the parts, "
                "layer by layer, which is slower",
                lack or "another process has no room for a whole copy of the weights",
            )

    def share_weights(self, model: nn.Module) -> None:
        """Make the models alike. The main process' weights are sent later, while the model is sharded."""
        tie_as_main(model, self)

    def shard(self, model: nn.Module, *, with_reference: bool) -> None:
        """Shard the model in place, layer by layer. It stays the same object, with the main process' weights.

        `with_reference`: a frozen copy of it will be asked for.
        """
        check_ties(model)
        half = self._prepare_dtypes(model)
        place = Placement(self._own_device)
        # Before the copies, which take them over.
        place.buffers(model)
        # Copies are made before: torch copies nothing that is sharded.
        frozen = None
        if not self.is_layered:
            self._copy = WholeCopy(model, half=half, device=self._own_device)
        elif with_reference:
            frozen = without_memory(model, half=half, device=self._own_device)
        root = self._shard(model, half or _half_of(model), place.weights)
        # Processes may use other experts. Older versions of torch cannot be told.
        if _has_experts(model) and hasattr(root, "set_reduce_scatter_unused_params"):
            root.set_reduce_scatter_unused_params(True)
        self._model = model
        self._state = ShardedState(model, self._dtypes, group=self._group, main=self.is_main)
        if frozen is not None:
            self._frozen = self._shard_frozen(frozen, model)
        self._watch_attempts()
        self.gather_weights()

    def _prepare_dtypes(self, model: nn.Module) -> torch.dtype | None:
        """Note in which dtypes weights were loaded, and return the one in which they are gathered and run; None: their
        own. Frozen weights beside an adapter are cast to it now."""
        if kept_in_float32(base_of(model)):
            self.half = None
        if self.half is not None and is_peft_model(model):
            cast((p for p in model.parameters() if not p.requires_grad), self.half)
        self._dtypes = {name: value.dtype for name, value in model.state_dict().items()}
        return None if is_peft_model(model) else self.half

    def _shard(
        self, model: nn.Module, half: torch.dtype | None, place: Callable[[nn.Module], None], *, offload: bool = False
    ) -> FSDPModule:
        """Shard a model layer by layer; `place` gives the weights of a layer, which come as a whole, memory. `offload`:
        parts lie in the host's memory, and come to the device when they are gathered."""
        mesh = init_device_mesh(self._own_device.type, (self.count,))
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None),
        }
        if offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
        for layer in _layers(model):
            place(layer)
            _widen(layer)
            fully_shard(layer, reshard_after_forward=self._reshard, **options)
        place(model)
        _widen(model)
        root = fully_shard(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gradients are added up, as losses have denominators that cover all processes.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return root

    def _shard_frozen(self, frozen: nn.Module, model: nn.Module) -> nn.Module:
        """A model without memory becomes a frozen, sharded copy of a sharded one. Each process copies its parts."""
        self._shard(frozen.requires_grad_(False), None, allocate, offload=self._offload_frozen)
        with torch.no_grad():
            for p, theirs in zip(frozen.parameters(), model.parameters(), strict=True):
                self.own_part(p).copy_(self.own_part(theirs))
        return frozen

    def place_frozen(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Bring a model that is not trained to the device: a part of it where the policy runs in parts too."""
        if not self.is_layered:
            return super().place_frozen(model, device)
        tie_as_main(model, self)
        place = Placement(device)
        place.buffers(model)
        self._frozen = model.requires_grad_(False)
        self._shard(self._frozen, None, place.weights, offload=self._offload_frozen)
        self._watch_attempts()
        return self._frozen

    def _watch_attempts(self) -> None:
        """Have a process that runs out of memory in one of the models join the others again."""
        models = [model for model in (self._model, self._frozen) if model is not None]
        self._attempts = ShardedAttempts(models, self) if self.can_repeat else None

    def frozen_policy(self) -> nn.Module | None:
        """A sharded copy of the policy as it was given, which runs in step; None where the whole copy serves for it."""
        return self._frozen

    @property
    def _own_device(self) -> torch.device:
        return self._device or torch.device("cpu")

    # -- an update

    def rounds(self, count: int) -> int:
        """The largest number of micro-batches that a process has, at least 1."""
        rounds = max(1, *self.gather(count))
        if self._attempts is not None:
            self._attempts.begin(rounds)
        return rounds

    def micro_batch_done(self) -> None:
        """After each of the `rounds`."""
        if self._attempts is not None:
            self._attempts.micro_batch_done()

    def retrying(self, budget: TokenBudget, work: Callable[[], T], **options: Any) -> T:
        """Do some work in all processes. Where one runs out of memory, all undo and repeat it."""
        if self._attempts is None:
            return super().retrying(budget, work, **options)
        return self._attempts.retrying(budget, work, **{"undo": None, "gradient": True, **options})

    def bring_back_copy(self) -> None:
        """Fill the whole copy again where the update has let go of it. All processes do the same."""
        if self._copy is not None and self._copy.is_freed:
            self.gather_weights()

    def in_step(self) -> AbstractContextManager[None]:
        """Layers are gathered inside the block, from all processes. The whole copy is let go of where it must be."""
        self._let_go_of_copy()
        self.after_forwards()
        return explaining_lost_peers()

    def after_forwards(self) -> None:
        """Let go of what forwards without a backward have gathered: it is not what the optimizer updates."""
        for model in (self._model, self._frozen) if self.is_layered else ():
            for module in model.modules() if model is not None else ():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def backward(self, accelerator: Accelerator, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Run a micro-batch backward, which adds its gradients to the parts that other processes hold."""
        accelerator.backward(loss)

    def add_up(self, parameters: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """The summed loss. Gradients have been summed by each backward."""
        loss = loss.clone()
        with explaining_lost_peers():
            dist.all_reduce(loss)
        return loss

    def as_number(self, norm: Any) -> Any:
        """The norm of the whole gradient."""
        return whole_of(norm)

    def check_same_weights(self, model: nn.Module) -> None:
        """Nothing to compare: each part is in one process alone."""

    def own_part(self, p: Tensor) -> Tensor:
        """What this process holds of a weight."""
        return p.to_local() if isinstance(p, DTensor) else p

    def is_part(self, p: Tensor) -> bool:
        """Whether this process holds a part of a weight alone."""
        return isinstance(p, DTensor)

    def first_row(self, p: Tensor) -> int:
        """The row of a whole weight at which this process' part of it begins."""
        if not isinstance(p, DTensor):
            return 0
        rows = -(-len(p) // p.device_mesh.size())
        return min(rows * p.device_mesh.get_local_rank(), len(p))

    def joined(self, p: Tensor, part: Tensor) -> Tensor:
        """A whole of the values that processes have for their parts of a weight, in the main one."""
        if not isinstance(p, DTensor):
            return part
        # Parts that lie in the host's memory are gathered on the device.
        cut = DTensor.from_local(
            part.to(self._own_device),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
        with explaining_lost_peers():
            whole = whole_of(cut)
        return whole.cpu() if self.is_main else whole.new_empty(0, device="cpu")

    def whole(self, p: Tensor) -> Tensor:
        """A weight as a whole. All processes must ask for it."""
        with explaining_lost_peers():
            return whole_of(p)

    def values_of(self, optimizer: Any) -> Value:
        """Whole weights, each gathered once, however many pieces of it a process asks for."""
        latest: list[Tensor] = []

        def value(p: Tensor, piece: Piece) -> Tensor:
            if not latest or latest[0] is not p:
                latest[:] = [p, self.whole(p)]
            return latest[1][piece]

        return value

    # -- saving and loading

    @property
    def _saved(self) -> ShardedState:
        """What saves and loads. The model must have been sharded."""
        assert self._state is not None
        return self._state

    def whole_weights(self, model: nn.Module, *, loading: bool = False) -> AbstractContextManager[None]:
        """Inside the block the model is saved, or loaded, as a whole."""
        if loading:
            self._note_loading()
        return self._saved.whole_weights(model, loading=loading)

    def whole_optimizer(self, optimizer: Any, *, loading: bool = False) -> AbstractContextManager[None]:
        """Inside the block the optimizer's state is saved, or loaded, as a whole."""
        return self._saved.whole_optimizer(optimizer, loading=loading)

    def save_weights(self, folder: Path) -> None:
        """Write this process' part of the weights to a checkpoint."""
        self._saved.save_weights(folder)

    def save_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Write this process' part of the optimizer's state to a checkpoint."""
        self._saved.save_optimizer(folder, optimizer)

    def load_weights(self, folder: Path) -> None:
        """Read this process' part of weights that were saved in parts."""
        self._note_loading()
        self._saved.load_weights(folder)

    def load_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Read this process' part of an optimizer's state that was saved in parts."""
        self._saved.load_optimizer(folder, optimizer)

    def _note_loading(self) -> None:
        """The copy has none of the weights that are loaded now."""
        assert self._model is not None
        self._stale = {name for name, _ in self._model.named_parameters()}


def _widen(module: nn.Module) -> None:
    """Make trained weights float32 that are not sharded yet: bfloat16 would round small updates away."""
    for p in module.parameters():
        if p.requires_grad and p.dtype in HALVES and not isinstance(p, DTensor):
            p.data = p.data.float()


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def check_ties(model: nn.Module) -> None:
    """Refuse weights that belong to two layers, or to a layer and to what is around it: sharding would untie them."""
    owners: dict[int, nn.Module] = {}
    inside = {module: layer for layer in _layers(model) for module in layer.modules()}
    for module in model.modules():
        for name, p in module._parameters.items():
            owner = inside.get(module, model)
            if p is not None and owners.setdefault(id(p), owner) is not owner:
                raise ConfigError(
                    f"{type(base_of(model)).__name__} uses one weight ({name}) in several layers, which FSDP would "
                    "take apart: leave fsdp out, or shard by DeepSpeed's ZeRO-2"
                )


def _half_of(model: nn.Module) -> torch.dtype | None:
    """The half-precision dtype of the trained weights, if they have one."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    return next((dtype for dtype in HALVES if dtype in dtypes), None)


def _has_experts(model: nn.Module) -> bool:
    config = base_of(model).config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
