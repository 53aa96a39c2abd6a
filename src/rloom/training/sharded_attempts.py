"""Out of memory under FSDP2: how a process leaves a micro-batch, and joins the others again (`attempts.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rloom.training.attempts import Attempts, Collectives
from rloom.training.processes import Processes

HOOKS = ("set_custom_all_gather", "set_custom_reduce_scatter", "reset_iter_state")

CAN_BE_LEFT = all(hasattr(FSDPModule, name) for name in HOOKS)
"""Whether this version of torch lets a process leave a micro-batch and catch up. Version 2.11 does not."""

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

    def _forget_micro_batch(self) -> None:
        """Let FSDP2 forget the micro-batch that has failed. Gradients that it has not summed yet are summed, and
        dropped, with those of the next, idle one."""
        roots: Sequence[Any] = self.models
        for root in roots:
            # Before the first forward there is nothing to forget, and FSDP2 would fail.
            if root._get_fsdp_state()._is_root is not None:
                root.reset_iter_state()
