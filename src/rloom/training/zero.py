"""Processes under DeepSpeed: ZeRO-1 shards the optimizer's state, ZeRO-2 gradients too, ZeRO-3 all.

As under FSDP2 (`sharded.py`), processes run an update in step, and under ZeRO-3 a whole copy of the weights runs what
needs no gradient. The model is loaded and checked as a whole in each process; DeepSpeed takes it apart when training
begins. DeepSpeed keeps float32 weights of its own and takes the optimizer's steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from packaging.version import Version
from torch import Tensor, nn

from rloom.config import RLOOConfig
from rloom.errors import ConfigError
from rloom.training.budget import TokenBudget
from rloom.training.processes import Processes, T
from rloom.training.sharded import ShardedProcesses
from rloom.training.whole_copy import WholeCopy, cast, lacking_room, size_of
from rloom.training.zero_attempts import ZeroAttempts
from rloom.training.zero_engine import UnderDeepSpeed


class ZeroProcesses(UnderDeepSpeed, ShardedProcesses):
    """Processes under DeepSpeed. `stage`: 1, 2 or 3."""

    is_sharded = repeats_together = False

    def __init__(self, *place: int, stage: int, **options: Any) -> None:
        super().__init__(*place, **options)
        self.stage, self.how = stage, f" under DeepSpeed's ZeRO-{stage}"
        self.is_layered &= stage == 3

    def plan(self) -> str:
        """How the model is distributed by what this process was told."""
        dtype = self.half or "their own dtype"
        return f"ZeRO-{self.stage}, gathered in {dtype}, DeepSpeed's own files: {self.own_files}"

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
        """Make the whole copy under ZeRO-3, or else a frozen one in parts. DeepSpeed shards the model when training
        begins."""
        if self.stage == 3 and not self.is_layered:
            half = self._prepare_dtypes(model)
            self._copy = WholeCopy(model, half=half, device=self._own_device)
            weights = dict(model.named_parameters())
            self._copy.fill(weights, weights.__getitem__)
        elif self.is_layered and with_reference:
            frozen = copy.deepcopy(model).cpu()
            if (half := self._prepare_dtypes(model)) is not None:
                cast(frozen.parameters(), half)
            self.place_frozen(frozen, self._own_device)
        self._model = model
        self.note_weights(model)

    @contextmanager
    def preparing(self, accelerator: Accelerator) -> Iterator[None]:
        """Let accelerate hand the model to DeepSpeed, and be ready for one of the processes to run out of memory."""
        with super().preparing(accelerator):
            yield
        self.can_repeat = self.repeats_together = not self.any(not self.can_repeat)
        self._attempts = ZeroAttempts(self._engine, self) if self.can_repeat else None

    def retrying(self, budget: TokenBudget, work: Callable[[], T], **options: Any) -> T:
        """Do some work in all processes. Where one runs out of memory, all undo and repeat it.

        But for passes of a reference that runs layer by layer: that is FSDP2's, and its collectives are not counted.
        """
        if self._frozen is not None and not options.get("gradient", True):
            return self.only_once(budget, work)
        return super().retrying(budget, work, **options)

    @torch.no_grad()
    def gather_weights(self) -> None:
        """Fill the whole copy from the parts of all processes. All of them: DeepSpeed may have cast what is frozen."""
        if self._model is None or self._copy is None:
            return
        parts = dict(self._model.named_parameters())

        self._copy.fill(parts, lambda name: self.whole(parts[name]))

    def as_number(self, norm: Any) -> Any:
        """The norm, as DeepSpeed has computed it."""
        return norm

    def own_part(self, p: Tensor) -> Tensor:
        """What this process holds of a weight. A frozen model is in parts by FSDP2."""
        return p.ds_tensor if hasattr(p, "ds_tensor") else super().own_part(p)

    def is_part(self, p: Tensor) -> bool:
        """Whether this process holds a part of a weight alone."""
        return hasattr(p, "ds_id")

    def whole(self, p: Tensor) -> Tensor:
        """A weight as a whole. All processes must ask for it."""
        with _gathered(p):
            return p.data.clone()

    def check_same_weights(self, model: nn.Module) -> None:
        """Compare whole weights; parts are in one process alone."""
        if self.stage < 3:
            Processes.check_same_weights(self, model)


OLDEST = "0.19.8"


def check_version() -> None:
    """Refuse a DeepSpeed that makes updates whose gradient is not finite (seen in 0.19.6): they destroy all weights."""
    found = version("deepspeed")
    if Version(found) < Version(OLDEST):
        raise ConfigError(
            f"DeepSpeed {found} does not skip updates whose gradient is not finite: pip install 'deepspeed>={OLDEST}'"
        )


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
