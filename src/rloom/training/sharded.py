"""Processes that each hold a part of the model: FSDP2, by torch's `fully_shard`.

Each of N processes holds 1/N of every weight, of its gradient and of the optimizer's state. A layer is gathered while
it runs, forward or backward. So in an update all processes must run the model equally often (`rounds`).

What runs without gradient (generation, the reference's and the first pass, evaluation) runs on a whole copy of the
weights in each process, which is filled from the parts before each rollout and each evaluation. There, processes need
not be in step.

The model is loaded, checked and copied as a whole in each process, and is sharded when the trainer has been built.
accelerate is not told: it would take the model apart before the checks, and on a CPU it would silently not shard.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer

from rloom.config import RLOOConfig
from rloom.data.datasets import image_column
from rloom.errors import ConfigError
from rloom.models.load import is_peft_model
from rloom.models.low_bits import Piece, Value
from rloom.training.processes import Processes, together

LAUNCHED_WITH_FSDP = "ACCELERATE_USE_FSDP"
"""Set to "true" by `accelerate launch` with a configuration for FSDP."""


def asks_to_shard(args: RLOOConfig) -> bool:
    """Whether the options or the launcher ask for FSDP."""
    return bool(args.fsdp) or os.environ.get(LAUNCHED_WITH_FSDP, "").lower() == "true"


def reshards(args: RLOOConfig) -> bool:
    """Whether a layer is let go after its forward, and gathered again for its backward."""
    asked = (args.fsdp_config or {}).get("reshard_after_forward", os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"))
    return str(asked).lower() != "false"


def load_in_every_process() -> None:
    """Let every process read the weights of models. `accelerate launch` asks transformers to leave them out in all
    processes but one, since accelerate would send them; models of rewards would then have random weights."""
    if "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    # Under ZeRO-3 transformers would take models apart while it loads them.
    unset_hf_deepspeed_config()


@contextmanager
def hidden_from_accelerate(args: RLOOConfig) -> Iterator[None]:
    """Keep accelerate from sharding models, inside the block in which its `Accelerator` is made."""
    options, launched = args.fsdp_plugin_args, os.environ.pop(LAUNCHED_WITH_FSDP, None)
    args.fsdp_plugin_args = None
    try:
        yield
    finally:
        args.fsdp_plugin_args = options
        if launched is not None:
            os.environ[LAUNCHED_WITH_FSDP] = launched


class ShardedProcesses(Processes):
    """Processes under FSDP2. See the module's docstring."""

    is_sharded = True
    can_repeat = False

    def __init__(self, *place: int, half: torch.dtype | None, reshard: bool = True, **options: Any) -> None:
        super().__init__(*place, **options)
        # The dtype in which weights are gathered and run; None: their own.
        self._half, self._reshard = half, reshard
        self._model: nn.Module | None = None
        self._copy: nn.Module | None = None
        # The dtypes of the weights that were loaded, in which they are saved.
        self._dtypes: dict[str, torch.dtype] = {}
        self._is_filled = False

    # -- the whole copy

    def without_gradient(self, model: nn.Module) -> nn.Module:
        """The whole copy, in this process alone."""
        if self._copy is None:
            # In evaluation mode: there is no dropout where nothing is learnt.
            self._copy = copy.deepcopy(model).requires_grad_(False).eval()
            if self._half is not None:
                self._copy.to(self._half)
        return self._copy

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Fill the whole copy from the parts of all processes. Weights that are not trained are there already."""
        if self._model is None or self._copy is None:
            return
        copies = dict(self._copy.named_parameters())
        with together():
            for name, p in self._model.named_parameters():
                if p.requires_grad or not self._is_filled:
                    copies[name].copy_(_whole(p))
        self._is_filled = True

    # -- sharding

    def shard(self, model: nn.Module) -> None:
        """Shard the model in place, layer by layer. It stays the same object."""
        mesh = init_device_mesh(self._device.type if self._device else "cpu", (self.count,))
        self._dtypes = {name: value.dtype for name, value in model.state_dict().items()}
        half = None if is_peft_model(model) else self._half or _half_of(model)
        for p in model.parameters():
            # The parts are what is trained: bfloat16 would round small updates away.
            if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16):
                p.data = p.data.float()
        policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
        for layer in _layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=self._reshard)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # Gradients are added up, as losses have denominators that cover all processes.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._model = model

    # -- an update

    def rounds(self, count: int) -> int:
        """The largest number of micro-batches that a process has, at least 1."""
        return max(1, *self.gather(count))

    def in_step(self) -> AbstractContextManager[None]:
        """Layers are gathered inside the block, from all processes."""
        return together()

    def backward(self, accelerator: Accelerator, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Run a micro-batch backward, which adds its gradients to the parts that other processes hold."""
        accelerator.backward(loss)

    def add_up(self, parameters: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """The summed loss. Gradients have been summed by each backward."""
        loss = loss.clone()
        with together():
            dist.all_reduce(loss)
        return loss

    def as_number(self, norm: Any) -> Any:
        """The norm of the whole gradient."""
        return _whole(norm)

    def check_same_weights(self, model: nn.Module) -> None:
        """Nothing to compare: each part is in one process alone."""

    def own_part(self, p: Tensor) -> Tensor:
        """What this process holds of a weight."""
        return p.to_local() if isinstance(p, DTensor) else p

    def values_of(self, optimizer: Any) -> Value:
        """Whole weights, each gathered once for all pieces of it that are asked for."""
        latest: list[Tensor] = []

        def value(p: Tensor, piece: Piece) -> Tensor:
            if not latest or latest[0] is not p:
                with together():
                    latest[:] = [p, _whole(p)]
            return latest[1][piece]

        return value

    # -- saving and loading

    @contextmanager
    def whole_weights(self, model: nn.Module, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the model is saved, or loaded, as a whole: files say nothing of processes."""
        there, own, state = model.state_dict(), model.load_state_dict, dict[str, Tensor]()
        if not loading:
            state = {name: value.to(self._dtypes[name]) for name, value in self._gathered(there)}

        def load(whole: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            parts = {name: _part_like(there.get(name), value) for name, value in whole.items()}
            return own(parts, *args, **kwargs)

        with _methods_replaced(model, state_dict=lambda *args, **kwargs: state, load_state_dict=load):
            yield

    @contextmanager
    def whole_optimizer(self, optimizer: Any, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the optimizer's state is saved, or loaded, as a whole."""
        state, own = optimizer.state_dict(), optimizer.load_state_dict
        if not loading:
            state["state"] = {index: dict(self._gathered(values)) for index, values in state["state"].items()}

        def load(whole: dict[str, Any]) -> Any:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [number for group in whole["param_groups"] for number in group["params"]]
            for number, p in zip(numbers, params, strict=True):
                values = whole["state"].get(number, {})
                values |= {name: _part_like(p, value) for name, value in values.items() if _is_like(p, value)}
            return own(whole)

        with _methods_replaced(optimizer, state_dict=lambda: state, load_state_dict=load):
            yield

    def _gathered(self, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """The values as a whole, on the host. Weights that share their memory share it afterwards."""
        known: dict[int, Tensor] = {}
        for name, value in values.items():
            if not isinstance(value, DTensor):
                yield name, value
                continue
            place = value.to_local().data_ptr()
            if place not in known or not place:
                with together():
                    known[place] = _whole(value).detach().cpu()
            yield name, known[place]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _is_like(p: Tensor, value: Any) -> bool:
    """Whether a value of an optimizer's state has an entry for each of a weight's."""
    return isinstance(value, Tensor) and value.shape == p.shape


def _part_like(p: Tensor | None, value: Tensor) -> Tensor:
    """This process' part of a whole value, cut as the weight is."""
    if not isinstance(p, DTensor):
        return value
    whole = value.to(p.device, p.dtype if value.is_floating_point() else value.dtype)
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _half_of(model: nn.Module) -> torch.dtype | None:
    """The half-precision dtype of the trained weights, if they have one."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    return next(iter(dtypes & {torch.bfloat16, torch.float16}), None)


@contextmanager
def _methods_replaced(thing: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Let an object have these methods meanwhile."""
    for name, method in methods.items():
        setattr(thing, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(thing, name)


def check_sharding(trainer: Any) -> None:
    """Refuse what does not go together with sharded weights."""
    args = trainer.args
    options = args.fsdp_config or {}
    version = str(options.get("version", os.environ.get("FSDP_VERSION", "2")))
    if version != "2":
        raise ConfigError(f"fsdp_version {version}: rloom shards by FSDP2; set it to 2")
    if options.get("cpu_offload") or os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true":
        raise ConfigError("FSDP with weights on the host is not supported: leave cpu_offload out, or train with LoRA")
    unsupported = {
        "fp16=True": args.fp16,
        "split_weights=True": bool(args.split_weights),
        "a quantized model": getattr(trainer.model, "is_quantized", False),
        "optimizers=(…)": trainer.optimizer is not None,
        "a column of images": image_column(trainer.train_dataset, trainer.eval_dataset) is not None,
    }
    for what, asked in unsupported.items():
        if asked:
            raise ConfigError(
                f"{what} does not go together with FSDP yet: leave one of them out. Without FSDP each process holds "
                "the whole model"
            )
