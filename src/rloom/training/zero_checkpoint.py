"""Checkpoints under DeepSpeed, which hold nothing of how it has taken the model apart.

DeepSpeed itself would write a part for each process, from which only as many can go on. Here weights, with the bits of
their float32 masters, and moments are gathered one by one to the main process, which writes what one process writes
without DeepSpeed. Each process loads its parts of that. Gathering and setting is DeepSpeed's own (`deepspeed.utils`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils.deepspeed import DummyOptim
from torch import Tensor, nn
from torch.nn.functional import pad

from rloom.errors import ConfigError
from rloom.models.low_bits import LOW_BITS, with_low_bits
from rloom.models.master_weights import MASTERS
from rloom.printable import get_logger
from rloom.training.exchange import explaining_lost_peers
from rloom.training.processes import Processes
from rloom.training.whole_state import and_low_bits, methods_replaced, numbers_of, saved_weights

logger = get_logger(__name__)

LOSS_SCALER = "loss_scaler"
PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")
"""Fields of a schedule that have an entry for each of the optimizer's groups."""

Fields = dict[str, Any]


class WholeCheckpoints(Processes):
    """Processes under DeepSpeed, as far as they save and load."""

    def __init__(self, *place: int, own_files: bool = False, **options: Any) -> None:
        super().__init__(*place, **options)
        self.own_files = own_files

    def note_weights(self, model: nn.Module) -> None:
        """Note what the model is, before DeepSpeed takes it."""
        self._whole = ZeroState(model, main=self.is_main)

    def shard(self, model: nn.Module, *, with_reference: bool) -> None:
        """DeepSpeed takes the model apart when training begins."""
        self.note_weights(model)

    @contextmanager
    def preparing(self, accelerator: Accelerator) -> Iterator[None]:
        """Let accelerate hand the model to DeepSpeed."""
        with self._whole.preparing(accelerator):
            yield

    @contextmanager
    def whole_weights(self, model: nn.Module, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the model is saved, or loaded, as a whole, with its float32 masters."""
        with explaining_lost_peers(), self._whole.whole_weights(model, loading=loading):
            yield

    @contextmanager
    def whole_optimizer(self, optimizer: Any, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the optimizer's state is saved, or loaded, as without DeepSpeed."""
        with explaining_lost_peers(), self._whole.whole_optimizer(optimizer, loading=loading):
            yield

    def schedule(self, state: dict[str, Any], *, loading: bool = False) -> dict[str, Any]:
        """A schedule's state as it is saved, as without DeepSpeed, or (`loading`) as it is here."""
        return self._whole.schedule(state, loading=loading)


class ZeroState:
    """Saves and loads as a whole what DeepSpeed trains. All processes must call every method.

    It is made before DeepSpeed takes the model, and so knows the dtypes in which weights were loaded, and are saved.
    """

    def __init__(self, model: nn.Module, *, main: bool) -> None:
        self._main = main
        self._dtypes = {name: _saved_dtype(value.dtype) for name, value in model.state_dict().items()}
        self._halves = {id(p) for p in model.parameters() if p.dtype == torch.bfloat16}
        # The optimizer's groups of weights, for which it has flat buffers later.
        self._groups: list[dict[str, Any]] = []

    @contextmanager
    def preparing(self, accelerator: Accelerator) -> Iterator[None]:
        """Inside the block DeepSpeed takes the model. Note the optimizer's groups."""
        prepare = accelerator.prepare

        def noting(*things: Any, **options: Any) -> Any:
            for thing in things:
                if isinstance(thing, torch.optim.Optimizer):
                    self._groups = [{**group, "params": list(group["params"])} for group in thing.param_groups]
                elif isinstance(thing, DummyOptim):
                    self._groups = [{"params": list(thing.params)}]
            return prepare(*things, **options)

        with methods_replaced(accelerator, prepare=noting):
            yield

    @property
    def _params(self) -> list[Tensor]:
        return [p for group in self._groups for p in group["params"]]

    # -- weights

    @contextmanager
    def whole_weights(self, model: nn.Module, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the model is saved, or loaded, as a whole. What is saved is in the main process alone."""
        if "state_dict" in model.__dict__:
            # Inside of another such block.
            yield
            return
        present, own = model.state_dict, model.load_state_dict
        there = present()
        parameters = dict(model.named_parameters(remove_duplicate=False))

        def load(whole: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
            fitting = {name for name, p in parameters.items() if name in whole and whole[name].shape == _shape(p)}
            for name in whole:
                # peft loads the model's own weights together with an adapter: they stay as they are.
                if name in fitting and whole[name] is not there.get(name):
                    self._set_weight(parameters[name], whole[name])
            # Buffers, and an error for what does not fit. Parts may have been gathered before, and are not now.
            now = present()
            return own({name: now[name] if name in fitting else v for name, v in whole.items()}, *args, **kwargs)

        state = there if loading else saved_weights(model, self._dtypes, self._weight_on_main, _is_part)
        with methods_replaced(model, state_dict=lambda *args, **kwargs: state, load_state_dict=load):
            yield

    def _weight_on_main(self, p: Tensor) -> Tensor:
        return self._on_main(_weight(p))

    def _on_main(self, whole: Tensor) -> Tensor:
        return whole.detach().cpu() if self._main else whole.new_empty(0, device="cpu")

    @torch.no_grad()
    def _set_weight(self, p: Tensor, value: Tensor) -> None:
        """Write a weight's float32 master, and round it to what the model runs with."""
        import deepspeed  # type: ignore[import-not-found]
        from deepspeed.utils import (  # type: ignore[import-not-found]
            safe_set_full_fp32_param,
            safe_set_local_fp32_param,
        )

        value = value.to(p.device)
        if not _is_part(p):
            safe_set_full_fp32_param(p, value.float())
            p.copy_(value)
            return
        if p.requires_grad:
            safe_set_local_fp32_param(p, _part_of(p, value.float()))
        with deepspeed.zero.GatheredParameters([p], modifier_rank=0):
            if self._main:
                p.copy_(value)

    # -- the optimizer

    @contextmanager
    def whole_optimizer(self, optimizer: Any, *, loading: bool = False) -> Iterator[None]:
        """Inside the block the optimizer's state is saved, or loaded, as a whole, as one process' optimizer has it."""
        zero = optimizer.optimizer
        state = {} if loading else self._saved_state(zero)
        with methods_replaced(
            optimizer, state_dict=lambda: state, load_state_dict=lambda whole: self._load_state(zero, whole)
        ):
            yield

    def _saved_state(self, zero: Any) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        names, others = _fields_of(zero)
        _link(zero, self._params)
        state: dict[int, Fields] = {}
        for number, p in enumerate(self._params):
            gathered = {name: self._on_main(safe_get_full_optimizer_state(p, name)) for name in names}
            # A copy for each weight: the file would have one for all, which all of them would count up.
            values = copy.deepcopy(others) | gathered
            if id(p) in self._halves:
                values = and_low_bits(values, self._on_main(_weight(p)))
            if values:
                state[number] = values
        saved = {"state": state, "param_groups": self._saved_groups(zero)}
        if getattr(zero, "dynamic_loss_scale", False):
            saved[LOSS_SCALER] = {k: v for k, v in vars(zero.loss_scaler).items() if isinstance(v, int | float)}
        return saved

    def _saved_groups(self, zero: Any) -> list[Fields]:
        """Groups with the numbers of their weights. DeepSpeed has dropped empty ones, which are as they were."""
        present, first, saved = iter(zero.optimizer.param_groups), 0, []
        for group in self._groups:
            count = len(group["params"])
            options = next(present) if count else group
            saved.append({**options, "params": list(range(first, first + count))})
            first += count
        return saved

    @torch.no_grad()
    def _load_state(self, zero: Any, whole: dict[str, Any]) -> None:
        self._check_groups(whole)
        filled = [group for group in whole["param_groups"] if group["params"]]
        for group, saved in zip(zero.optimizer.param_groups, filled, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        rows = [(p, whole["state"].get(number, {})) for number, p in zip(numbers_of(whole), self._params, strict=True)]
        names = _make_room(zero, rows)
        _link(zero, self._params)
        masters = iter(whole.get(MASTERS) or ())
        for p, values in rows:
            self._set_master(p, values.get(LOW_BITS), next(masters, None) if id(p) in self._halves else None)
            for name in names:
                if name in values:
                    _set_field(p, name, values[name])
        if LOSS_SCALER in whole and getattr(zero, "dynamic_loss_scale", False):
            vars(zero.loss_scaler).update(whole[LOSS_SCALER])

    def _check_groups(self, whole: dict[str, Any]) -> None:
        found, own = ([len(g["params"]) for g in groups] for groups in (whole["param_groups"], self._groups))
        if found != own:
            raise ConfigError(
                f"the checkpoint's optimizer has groups of {found} weights, and this run's {own}: go on with the same "
                "model, and with an optimizer in DeepSpeed's configuration only where there was one before"
            )

    def _set_master(self, p: Tensor, low_bits: Any, master: Tensor | None) -> None:
        """Give the float32 master of a weight that was saved in bfloat16 the bits that are saved elsewhere."""
        if master is not None:
            self._set_weight(p, master)
        elif isinstance(low_bits, Tensor) and low_bits.dtype == torch.int16:
            self._set_weight(p, with_low_bits(_weight(p), low_bits.to(p.device)))

    # -- the schedule

    def schedule(self, state: Fields, *, loading: bool) -> Fields:
        """A schedule's state, as it is saved with entries for empty groups, and loaded without."""
        kept = [bool(group["params"]) for group in self._groups]
        return without_empty_groups(state, kept) if loading else with_empty_groups(state, kept)


def with_empty_groups(state: Fields, kept: list[bool]) -> Fields:
    """A schedule's state with entries for groups that DeepSpeed has dropped.

    >>> with_empty_groups({"last_epoch": 3, "base_lrs": [0.5]}, [True, False])
    {'last_epoch': 3, 'base_lrs': [0.5, 0.5]}
    """
    places = [max(sum(kept[: place + 1]) - 1, 0) for place in range(len(kept))]
    return {k: [v[place] for place in places] if k in PER_GROUP else v for k, v in state.items()}


def without_empty_groups(state: Fields, kept: list[bool]) -> Fields:
    """A schedule's state without them.

    >>> without_empty_groups({"last_epoch": 3, "base_lrs": [0.5, 0.25]}, [True, False])
    {'last_epoch': 3, 'base_lrs': [0.5]}
    """
    chosen = [place for place, is_kept in enumerate(kept) if is_kept]
    return {k: [v[place] for place in chosen] if k in PER_GROUP else v for k, v in state.items()}


# -- weights, and what DeepSpeed keeps for them


def _saved_dtype(dtype: torch.dtype) -> torch.dtype:
    """float16 weights are saved as float32. Nobody keeps the bits that they drop, as for bfloat16 ones."""
    return torch.float32 if dtype == torch.float16 else dtype


def _is_part(p: Tensor) -> bool:
    return hasattr(p, "ds_id")


def _shape(p: Tensor) -> torch.Size:
    return getattr(p, "ds_shape", p.shape)


def _weight(p: Tensor) -> Tensor:
    """A whole weight: its float32 master, or what is not trained, as it is. A number of -0 may become 0.

    DeepSpeed can be told to have masters in bfloat16; here they are float32 as well.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(p)
    if master is not None:
        return master.float()
    with deepspeed.zero.GatheredParameters([p]):
        return p.detach().clone()


def _part_of(p: Tensor, whole: Tensor) -> Tensor:
    """This process' part of a value for a weight under ZeRO-3. The last parts are filled up with zeros."""
    size, rank = p.ds_tensor.numel(), dist.get_rank(p.ds_process_group)  # type: ignore[attr-defined]
    part = whole.flatten()[rank * size : (rank + 1) * size]
    return pad(part, (0, size - part.numel()))


def _set_field(p: Tensor, name: str, value: Tensor) -> None:
    """Write a field of the optimizer's state for a weight. DeepSpeed's way for whole values cannot fill parts up."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    if _is_part(p):
        safe_set_local_optimizer_state(p, _part_of(p, value), name)
    else:
        safe_set_full_optimizer_state(p, value, name)


# -- the optimizer that DeepSpeed runs on flat buffers


def _buffers(zero: Any) -> list[Tensor]:
    """The flat float32 buffers that the optimizer steps."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        # ZeRO-3 hands them to the optimizer in a step alone.
        return list(zero.fp32_partitioned_groups_flat)
    return [p for group in zero.optimizer.param_groups for p in group["params"]]


def _fields_of(zero: Any) -> tuple[list[str], Fields]:
    """Names of the fields with an entry for each weight, and the other fields, which are the same in all buffers."""
    first = _buffers(zero)[0]
    state = dict(zero.optimizer.state.get(first, {}))
    # In one order in all processes, which gather them together.
    names = sorted(name for name, v in state.items() if isinstance(v, Tensor) and v.shape == first.shape)
    others = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in state.items() if name not in names}
    # DeepSpeed's own optimizers count in plain numbers, one of them by group.
    steps = others.get("step", zero.optimizer.param_groups[0].get("step"))
    return names, others if steps is None else {**others, "step": torch.tensor(float(steps))}


def _make_room(zero: Any, rows: list[tuple[Tensor, Fields]]) -> list[str]:
    """Give the optimizer, which has taken no step yet, its state. Returns the names of fields that are to be set."""
    states = [values for _, values in rows if values]
    if not states:
        return []
    found = {name for p, values in rows if _shape(p) for name, v in values.items() if _is_like(p, v)}
    names = sorted(found - {LOW_BITS})
    latest = max(states, key=lambda values: float(values.get("step", 0)))
    others = {name: v for name, v in latest.items() if name not in {*names, LOW_BITS}}
    _check_others(others, states)
    steps_in_numbers = type(zero.optimizer).__module__.startswith("deepspeed.")
    if "step" in others and steps_in_numbers:
        others["step"] = int(others["step"])
        for group in zero.optimizer.param_groups:
            group["step"] = others["step"]
    for buffer in _buffers(zero):
        zero.optimizer.state[buffer] = {name: torch.zeros_like(buffer) for name in names} | copy.deepcopy(others)
    return names


def _link(zero: Any, params: list[Tensor]) -> None:
    """Tell weights where their entries in the optimizer's state are.

    DeepSpeed does so after the first step of the first group, when other groups have no state yet (seen in 0.19.8).
    """
    buffers = _buffers(zero)
    for p in params:
        if (place := getattr(p, "_hp_mapping", None)) is not None:
            buffer = buffers[place.param_group_index]
            place.set_optim_state_fragment(buffer, zero.optimizer.state[buffer])


def _is_like(p: Tensor, value: Any) -> bool:
    return isinstance(value, Tensor) and value.shape == _shape(p)


def _check_others(others: Fields, states: list[Fields]) -> None:
    odd = [name for name, value in others.items() if isinstance(value, Tensor) and value.numel() > 1]
    if odd:
        raise ConfigError(
            f"the checkpoint's optimizer keeps {odd[0]} in another shape than its weights have, which DeepSpeed cannot "
            "go on with: leave deepspeed out, or shard with fsdp=True"
        )
    steps = {float(values.get("step", 0)) for values in states}
    if len(steps) > 1:
        logger.warning("weights were updated unequally often; DeepSpeed counts for all together: %d", max(steps))


# -- DeepSpeed's own files


def writes_itself(config: dict[str, Any]) -> bool:
    """Whether DeepSpeed has to write the optimizer's state itself: it lies on NVMe, or in two optimizers.

    >>> writes_itself({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    False
    """
    offload = config["zero_optimization"].get("offload_optimizer") or {}
    return offload.get("device") == "nvme" or offload.get("ratio", 1.0) != 1.0


def processes_in(folder: str | Path) -> int:
    """How many processes' parts DeepSpeed itself has written to a checkpoint; 0: none."""
    return len(list(Path(folder).glob("global_step*/*zero_pp_rank_*_optim_states.pt")))


def check_files(folder: Path, *, count: int, by_deepspeed: bool) -> None:
    """Refuse a checkpoint that this run cannot read. `count`: of processes under DeepSpeed, 0 without it.

    `by_deepspeed`: DeepSpeed has to read it.
    """
    found = processes_in(folder)
    if found and found != count:
        raise ConfigError(
            f"{folder} has DeepSpeed's own files, in parts for {found} process(es): go on with {found} under "
            "DeepSpeed. What rloom saves there, any number of processes goes on from, unless DeepSpeed offloads to NVMe"
        )
    if by_deepspeed and not found:
        raise ConfigError(
            f"{folder} is whole, and with offload_optimizer to NVMe, or in part, DeepSpeed goes on from its own files "
            "alone: offload to the cpu"
        )
