"""Processes under DeepSpeed: ZeRO-1 shards the optimizer's state, ZeRO-2 gradients too, ZeRO-3 all.

As under FSDP2 (`sharded.py`), processes run an update in step, and under ZeRO-3 a whole copy of the weights runs what
needs no gradient. The model is loaded and checked as a whole in each process; DeepSpeed takes it apart when training
begins. DeepSpeed keeps float32 weights of its own and takes the optimizer's steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rloom.config import RLOOConfig
from rloom.models.low_bits import Piece, Value
from rloom.training.processes import Processes
from rloom.training.sharded import ShardedProcesses
from rloom.training.whole_copy import WholeCopy, lacking_room, size_of
from rloom.training.zero_checkpoint import WholeCheckpoints


class DeepSpeedProcess(WholeCheckpoints):
    """One process under DeepSpeed (ZeRO-1, ZeRO-2), which keeps gradients and float32 weights in buffers of its own."""

    external_optimizer = True
    can_repeat = False
    cannot_repeat = "under DeepSpeed"

    def share_weights(self, model: nn.Module) -> None:
        """Bring the model to the device. transformers leaves it on the host for DeepSpeed; it is run before that."""
        model.to(self._device)

    def backward(self, accelerator: Accelerator, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Run a micro-batch backward. DeepSpeed takes the optimizer's step itself after the last one."""
        accelerator.sync_gradients = last
        accelerator.backward(loss, scale_wrt_gas=False)


class ZeroProcesses(WholeCheckpoints, ShardedProcesses):
    """Processes under DeepSpeed. `stage`: 1, 2 or 3."""

    external_optimizer = True
    can_repeat = repeats_together = False
    cannot_repeat = "under DeepSpeed"
    is_sharded = False

    def __init__(self, *place: int, stage: int, **options: Any) -> None:
        super().__init__(*place, **options)
        self.stage = stage
        self.is_layered &= stage == 3

    def choose_copy(self, model: nn.Module, device: torch.device, *, by_servers: bool) -> None:
        """Under ZeRO-1 and ZeRO-2 each process has the whole model."""
        if self.stage == 3:
            super().choose_copy(model, device, by_servers=by_servers)

    def share_weights(self, model: nn.Module) -> None:
        """Copy the main process' weights to all, which each has as a whole until training begins.

        transformers leaves a model on the host that DeepSpeed will take. Here it is run before that, where it fits.
        """
        if self.stage != 3 or (
            self.is_layered and lacking_room(size_of(model.parameters(), None), self._own_device) is None
        ):
            model.to(self._own_device)
        Processes.share_weights(self, model)

    def shard(self, model: nn.Module, *, with_reference: bool) -> None:
        """Make the whole copy under ZeRO-3. DeepSpeed shards the model when training begins."""
        if self.stage == 3 and not self.is_layered:
            half = self._prepare_dtypes(model)
            self._copy = WholeCopy(model, half=half, device=self._own_device)
            weights = dict(model.named_parameters())
            self._copy.fill(weights, weights.__getitem__)
        self._model = model
        self.note_weights(model)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Fill the whole copy from the parts of all processes. All of them: DeepSpeed may have cast what is frozen."""
        if self._model is None or self._copy is None:
            return
        parts = dict(self._model.named_parameters())

        self._copy.fill(parts, lambda name: self.whole(parts[name]))

    def backward(self, accelerator: Accelerator, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Run a micro-batch backward. DeepSpeed takes the optimizer's step after the last one, with the mean of the
        processes' gradients: the loss is scaled so that it is their sum."""
        accelerator.sync_gradients = last
        accelerator.backward(loss * self.count, scale_wrt_gas=False)

    def as_number(self, norm: Any) -> Any:
        """The norm, as DeepSpeed has computed it."""
        return norm

    def own_part(self, p: Tensor) -> Tensor:
        """What this process holds of a weight."""
        return getattr(p, "ds_tensor", p)

    def is_part(self, p: Tensor) -> bool:
        """Whether this process holds a part of a weight alone."""
        return hasattr(p, "ds_id")

    def whole(self, p: Tensor) -> Tensor:
        """A weight as a whole. All processes must ask for it."""
        with _gathered(p):
            return p.data.clone()

    def values_of(self, optimizer: Any) -> Value:
        """Whole weights, gathered for each piece of them that is asked for."""

        def value(p: Tensor, piece: Piece) -> Tensor:
            with _gathered(p):
                return p.data[piece].clone()

        return value

    def check_same_weights(self, model: nn.Module) -> None:
        """Compare whole weights; parts are in one process alone."""
        if self.stage < 3:
            Processes.check_same_weights(self, model)


def settle_stage(plugin: Any) -> bool:
    """Let DeepSpeed run as ZeRO-2 where its ZeRO-1 would be wrong. Returns whether it does.

    Where gradients are added up in a dtype of their own (`grad_accum_dtype`), ZeRO-1 uses another optimizer of
    DeepSpeed's, which counts some of our micro-batches twice (seen in 0.19.8). ZeRO-2 computes what ZeRO-1 should, with
    less memory, and sums gradients after each micro-batch instead of once.

    >>> from types import SimpleNamespace
    >>> config = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
    >>> plugin = SimpleNamespace(zero_stage=1, deepspeed_config=config)
    >>> settle_stage(plugin), plugin.zero_stage, config["zero_optimization"]
    (True, 2, {'stage': 2})
    """
    config = plugin.deepspeed_config
    if plugin.zero_stage != 1 or not config.get("data_types", {}).get("grad_accum_dtype"):
        return False
    plugin.zero_stage = config["zero_optimization"]["stage"] = 2
    return True


def complete_config(config: dict[str, Any], args: RLOOConfig) -> None:
    """Fill in what a configuration of DeepSpeed leaves open: the gradient is clipped as the options say, and saved
    models have their weights.

    >>> from types import SimpleNamespace
    >>> config = {"zero_optimization": {"stage": 3}}
    >>> complete_config(config, SimpleNamespace(max_grad_norm=1.0))
    >>> config
    {'zero_optimization': {'stage': 3, 'stage3_gather_16bit_weights_on_model_save': True}, 'gradient_clipping': 1.0}
    """
    if config["zero_optimization"].get("stage") == 3:
        config["zero_optimization"].setdefault("stage3_gather_16bit_weights_on_model_save", True)
    config.setdefault("gradient_clipping", args.max_grad_norm)


@contextmanager
def _gathered(p: Tensor) -> Iterator[None]:
    """The weight as a whole inside the block."""
    if not hasattr(p, "ds_id"):
        yield
        return
    import deepspeed  # type: ignore[import-not-found]

    with deepspeed.zero.GatheredParameters([p]):
        yield
