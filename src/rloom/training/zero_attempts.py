"""Out of memory under DeepSpeed: how a process leaves an update, and joins the others again (`attempts.py`).

DeepSpeed keeps gradients in buckets and partitions of its own. A failed update is dropped there by hand
(`drop_gradients`). That is all that one process needs.

With several, DeepSpeed's collectives are counted where all of them come by, in the object behind `deepspeed.comm`.
ZeRO-1 sums gradients after the last micro-batch, ZeRO-2 and ZeRO-3 in each. ZeRO-3 also gathers layers, and which of
them it gathers depends on what it has recorded and kept of the micro-batches before. So a process that has failed runs
the whole attempt again, in idle micro-batches and from the same beginning (`Gathered`), and leaves out all collectives
that it has had. An attempt begins with no weight gathered, and ends so where it has failed: what was left out is zeros.

This was tried with DeepSpeed 0.19.8. Where something that it takes is not there, or an option is in use under which
more would have to be undone, `can_be_left` says no.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rloom.training.attempts import Attempts
from rloom.training.processes import Processes

OF_ALL = ("ipg_buckets", "micro_step_id", "params_already_reduced", "averaged_gradients", "_backward_hook_state")
OF_STAGES_1_AND_2 = (
    "_release_ipg_buffers",
    "extra_large_param_to_reduce",
    "previous_reduced_grads",
    "all_grad_tensors",
    "cpu_offload",
)
OF_STAGE_3 = ("grad_partitions_flat_buffer", "parameter_offload", "offload_optimizer")
OF_OPTIMIZER = {
    "DeepSpeedZeroOptimizer": OF_STAGES_1_AND_2,
    "DeepSpeedZeroOptimizer_Stage3": OF_STAGE_3,
}
"""What an optimizer of DeepSpeed's must have to be cleaned, by its class. Others are not known here."""

OF_MODEL = ("ds_inflight_param_registry", "_external_params", "ds_recompute_parameters")
"""What ZeRO-3 keeps in a model."""

ELSEWHERE = (
    "zenflow",
    "swap_optimizer",
    "params_in_nvme_and_cpu",
    "all2all_process_group",
    "has_moe_layers",
    "use_muon",
)
"""Options of an optimizer under which more is kept, as in files, or other collectives are used."""

COLLECTIVES = {
    "all_gather_into_tensor": "output_tensor",
    "reduce_scatter_tensor": "output_tensor",
    "all_reduce": "tensor",
    "reduce": "tensor",
    "broadcast": "tensor",
}
"""What DeepSpeed's backend does between processes in an update, each with the name of its first argument."""


def can_be_left(engine: Any) -> bool:
    """Whether an update that has failed in this engine of DeepSpeed's can be dropped."""
    optimizer, backend = engine.optimizer, _backend()
    needed = OF_OPTIMIZER.get(type(optimizer).__name__)
    return (
        needed is not None
        and all(hasattr(optimizer, name) for name in (*OF_ALL, *needed))
        and not any(getattr(optimizer, name, None) for name in ELSEWHERE)
        and "Muon" not in type(optimizer.optimizer).__name__
        # Timers that have been started cannot be started again.
        and not _says(engine, "wall_clock_breakdown")
        and not _says(engine, "is_deepcompile_enabled")
        and all(hasattr(backend, name) for name in COLLECTIVES)
        and _says(backend, "has_all_gather_into_tensor")
        and _says(backend, "has_reduce_scatter_tensor")
        and (needed is not OF_STAGE_3 or _gathers_plainly(engine))
    )


def _gathers_plainly(engine: Any) -> bool:
    """Whether ZeRO-3 gathers weights as they are, from all processes, and `Gathered` knows how."""
    from deepspeed.runtime.zero import parameter_offload, partition_parameters  # type: ignore[import-not-found]

    offload = engine.optimizer.parameter_offload
    return (
        hasattr(parameter_offload, "FWD_MODULE_STACK")
        and hasattr(partition_parameters, "free_param")
        and all(hasattr(engine.module, name) for name in OF_MODEL)
        and hasattr(offload, "get_param_coordinator")
        and getattr(engine.optimizer, "zero_hpz_partition_size", 1) == 1
        and not getattr(offload, "zero_quantized_weights", False)
        and not getattr(offload, "zero_quantized_nontrainable_weights", False)
    )


def _says(thing: Any, name: str) -> bool:
    """What a method without arguments returns; False where there is none."""
    return bool(getattr(thing, name, bool)())


def drop_gradients(engine: Any) -> None:
    """Drop all that DeepSpeed has of the gradients of this update, also of one that failed in the middle."""
    optimizer = engine.optimizer
    if torch.cuda.is_available():
        # Copies and collectives of other streams may still use what is dropped.
        torch.cuda.synchronize()
    # Gradients of a backward that has failed are there still, and the optimizer's method cannot remove them on a CPU.
    engine.zero_grad()
    optimizer.zero_grad(set_to_none=True)
    if hasattr(optimizer, "parameter_offload"):
        _drop_stage_3(optimizer)
    else:
        _drop_stage_1_and_2(optimizer)
    reduced = optimizer.params_already_reduced
    for key in reduced if isinstance(reduced, dict) else range(len(reduced)):
        reduced[key] = False
    # Where DeepSpeed thinks it is in a backward.
    state = optimizer._backward_hook_state
    state.backward_active_depth = state.remaining_grad_acc_hooks = 0
    state.reset_for_new_step()


def _drop_stage_1_and_2(optimizer: Any) -> None:
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear()
        bucket.index = 0
    optimizer._release_ipg_buffers()
    optimizer.extra_large_param_to_reduce.clear()
    optimizer.previous_reduced_grads.clear()
    # The next micro-batch is the first one, which overwrites.
    optimizer.micro_step_id = -1
    for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
        for group in gradients:
            gradients[group] = None
    if optimizer.cpu_offload:
        optimizer.reset_cpu_buffers()
        optimizer._offload_accumulated_param_ids = set()


def _drop_stage_3(optimizer: Any) -> None:
    for bucket in optimizer.ipg_buckets.values():
        bucket.clear_params()
    # `zero_grad` has set the number of the micro-batch back to the first one, which overwrites. A weight that no
    # micro-batch uses would keep what is here.
    optimizer.grad_partitions_flat_buffer.zero_()
    if optimizer.offload_optimizer:
        optimizer.reset_cpu_buffers()
        optimizer._offload_boundary_param_ids = set()


class Gathered:
    """The weights that ZeRO-3 has gathered, and what it knows of the order in which it will."""

    def __init__(self, engine: Any) -> None:
        from deepspeed.runtime.zero import parameter_offload, partition_parameters

        self._module, self._stack = engine.module, parameter_offload.FWD_MODULE_STACK
        self._free, self._absent = partition_parameters.free_param, partition_parameters.ZeroParamStatus.NOT_AVAILABLE
        self._coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
        self._begun: dict[str, Any] = {}
        self._depth = 0
        # Weights that modules use although others own them. DeepSpeed finds them when they are used first, and gathers
        # them earlier from then on.
        self._external: list[dict[Any, Any]] = []

    def begin(self) -> None:
        """An attempt begins here, with nothing gathered."""
        self.release()
        self._begun, self._depth = _copied(vars(self._coordinator)), len(self._stack)
        self._external = [dict(module._external_params) for module in self._module.modules()]

    def go_back(self) -> None:
        """After a failure: let all be as at the attempt's beginning."""
        self.release()
        vars(self._coordinator).update(_copied(self._begun))
        del self._stack[self._depth :]
        for module, external in zip(self._module.modules(), self._external, strict=True):
            module._external_params = dict(external)
            module._parameters._in_forward = False
            module.ds_recompute_parameters.clear()
            if "applied_pre_backward_ref_cnt" in vars(module):
                module.applied_pre_backward_ref_cnt = 0

    def release(self) -> None:
        """Let go of all weights that are gathered, or on their way. The small ones that DeepSpeed would keep too."""
        for p in self._module.parameters():
            p.ds_active_sub_modules.clear()
            if p.ds_status != self._absent:
                self._free(p)
        self._module.ds_inflight_param_registry.clear()


class ZeroAttempts(Attempts):
    """Attempts under DeepSpeed."""

    def __init__(self, engine: Any, processes: Processes) -> None:
        super().__init__(processes)
        self.engine = engine
        self._gathered = Gathered(engine) if hasattr(engine.optimizer, "parameter_offload") else None
        # What processes were told in an attempt, by the number of the collective. They are few numbers, that DeepSpeed
        # compares; those that are left out are told again.
        self._heard: dict[int, Tensor] = {}

    def retrying(self, *work: Any, **options: Any) -> Any:
        """Do some work in all processes. Meanwhile DeepSpeed's collectives are counted."""
        with self._in_front():
            return super().retrying(*work, **options)

    @contextmanager
    def _in_front(self) -> Iterator[None]:
        """Be in front of DeepSpeed's collectives inside the block. Work may have parts that are repeated by
        themselves."""
        backend = _backend()
        names = [name for name in COLLECTIVES if name not in vars(backend)]
        for name in names:
            setattr(backend, name, functools.partial(self._run, name, getattr(backend, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(backend, name)

    def begin(self, rounds: int) -> None:
        """All processes run so many micro-batches now."""
        super().begin(rounds)
        self._heard.clear()
        if self._gathered is not None:
            self._gathered.begin()

    def micro_batch_done(self) -> None:
        """Nothing: collectives are counted over the attempt."""

    def _run(self, name: str, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """A collective of DeepSpeed's."""
        tensor = args[0] if args else options[COLLECTIVES[name]]
        number = self.collectives.done
        result = self.collectives.run(lambda: run(*args, **options), tensor)
        if name == "broadcast" and self.left is not None:
            if number in self._heard:
                tensor.copy_(self._heard[number])
            self._heard[number] = tensor.clone()
        return _Done() if number < self.collectives.left_out else result

    def _stands_in(self, gradient: bool) -> bool:
        return False

    def _forget_micro_batch(self) -> None:
        """Let DeepSpeed forget the attempt, so that it can be run again from its beginning."""
        drop_gradients(self.engine)
        if self._gathered is not None:
            self._gathered.go_back()

    def _drop_attempt(self) -> None:
        drop_gradients(self.engine)
        if self._gathered is not None:
            self._gathered.release()


class _Done:
    """Stands for a collective under way that was left out."""

    def wait(self) -> None:
        pass


def _backend() -> Any:
    """The object behind `deepspeed.comm`."""
    from deepspeed.comm import comm  # type: ignore[import-not-found]

    return comm.cdb


def _copied(value: Any) -> Any:
    """A copy of containers, and of those in them. All else is itself.

    >>> record = {"order": [1], "queues": {0: deque([2])}}
    >>> kept = _copied(record)
    >>> record["order"].append(3), record["queues"][0].popleft()
    (None, 2)
    >>> kept
    {'order': [1], 'queues': {0: deque([2])}}
    """
    if isinstance(value, dict):
        found = copy.copy(value)
        for key, one in value.items():
            found[key] = _copied(one)
        return found
    return copy.copy(value) if isinstance(value, (list, deque, set)) else value
