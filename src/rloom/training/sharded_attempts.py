"""Out of memory under FSDP2: how a process leaves a micro-batch, and joins the others again (`attempts.py`).

FSDP2 lets one set what gathers and what sums, and these count collectives and leave some out. Newer versions of torch
also forget a micro-batch that has failed when they are asked to. For 2.11, which cannot, `forget_by_hand` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param_group, _fsdp_state

from rloom.training.attempts import Attempts, Collectives
from rloom.training.processes import Processes

HOOKS = ("set_custom_all_gather", "set_custom_reduce_scatter")

FORGETS = hasattr(FSDPModule, "reset_iter_state")
"""Whether this version of torch can be asked to forget a micro-batch. Version 2.11 cannot."""

OF_MODEL = ("iter_forward_root",)
OF_TRANSFERS = (
    "all_gather_state",
    "post_forward_order",
    # one of them in 2.11, and all in newer versions
    "reduce_scatter_state",
    "reduce_scatter_states",
    "_last_post_reduce_events",
)
OF_WEIGHTS = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_post_forward_indices",
    "_reshard_after_forward_event",
)
"""What FSDP2 notes of a micro-batch: for the model, for what is sent, for the weights that are sent together."""


def _can_be_forgotten() -> bool:
    """Whether this version of torch notes a micro-batch where `forget_by_hand` looks for it."""
    state = _fsdp_state.FSDPState()
    return (
        all(hasattr(state, name) for name in ("_training_state", "_modules_to_run_forward", "_state_ctx", "_comm_ctx"))
        and all(hasattr(state._state_ctx, name) for name in (*OF_MODEL, "all_states"))
        and hasattr(state._state_ctx, "post_backward_final_callback_queued")
        and hasattr(_fsdp_param_group.FSDPParamGroup, "_to_sharded")
    )


CAN_BE_LEFT = all(hasattr(FSDPModule, name) for name in HOOKS) and (FORGETS or _can_be_forgotten())
"""Whether this version of torch lets a process leave a micro-batch and catch up."""

# Newer versions of torch warn about the older names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocating:
    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a collective, as torch's own has it."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocating):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return self.collectives.run(
            lambda: _all_gather(output_tensor, input_tensor, group=group, async_op=async_op), output_tensor
        )


class _Sum(_Allocating):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        return self.collectives.run(
            lambda: _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op), output_tensor
        )


class ShardedAttempts(Attempts):
    """Attempts on models that FSDP2 has sharded."""

    def __init__(self, models: Sequence[nn.Module], processes: Processes) -> None:
        super().__init__(processes)
        self.models = models
        gather: Any = _Gather(self.collectives)
        add_up: Any = _Sum(self.collectives)
        for module in (module for model in models for module in model.modules()):
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(add_up)

    def _drop_attempt(self) -> None:
        """Nothing: FSDP2 leaves gradients alone."""

    def _forget_micro_batch(self) -> None:
        """Let FSDP2 forget the micro-batch that has failed. Gradients that it has not summed yet are summed, and
        dropped, with those of the next, idle one."""
        roots: Sequence[Any] = self.models
        for root in roots:
            # Before the first forward there is nothing to forget, and FSDP2 would fail.
            if root._get_fsdp_state()._is_root is None:
                continue
            if FORGETS:
                root.reset_iter_state()
            else:
                forget_by_hand(root)


def forget_by_hand(root: Any) -> None:
    """Let a sharded model be as between two micro-batches: nothing is gathered or on its way, and none is under way."""
    if torch.cuda.is_available():
        # Collectives that this process has joined end, as the others join them too. Then nothing uses their memory.
        torch.cuda.synchronize()
    idle, model = _fsdp_common.TrainingState.IDLE, root._get_fsdp_state()
    _empty(model._state_ctx, OF_MODEL)
    _empty(model._comm_ctx, OF_TRANSFERS)
    # Autograd has dropped the call for the backward's end, which is asked for once in each.
    model._state_ctx.post_backward_final_callback_queued = False
    for layer in model._state_ctx.all_states:
        layer._modules_to_run_forward.clear()
        for weights in _groups(layer):
            # First of all: in a forward, some weights would not be let go of.
            weights._training_state = idle
            _empty(weights, OF_WEIGHTS)
            weights._to_sharded()
        layer._training_state = idle


def _groups(layer: Any) -> Sequence[Any]:
    """The weights of a layer that are sent together. In 2.11 these are all that it has."""
    found = getattr(layer, "_fsdp_param_groups", None)
    return [one for one in (layer._fsdp_param_group,) if one is not None] if found is None else found


def _empty(noted: Any, names: Sequence[str]) -> None:
    """Empty containers, and set all else to None.

    >>> from types import SimpleNamespace
    >>> noted = SimpleNamespace(order=[1], event="sent")
    >>> _empty(noted, ("order", "event", "of another version"))
    >>> noted
    namespace(order=[], event=None)
    """
    for name in names:
        if isinstance(value := getattr(noted, name, None), (list, dict)):
            value.clear()
        elif value is not None:
            setattr(noted, name, None)
