"""TrainingArguments' own options, with other defaults or other limits here."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env

from rloom.config.topic import Topic, option
from rloom.cpu_bfloat16 import make_bfloat16_safe
from rloom.errors import ConfigError, MissingExtraError
from rloom.printable import get_logger

logger = get_logger(__name__)

YES, NO = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
"""How a text says whether, as transformers reads flags."""

FSDP_WORDS = ("full_shard", "shard_grad_op", "offload", "auto_wrap")
"""What older scripts set `fsdp` to, of FSDP 2."""


@dataclass
class TrainingTopic(Topic):
    """Options of TrainingArguments with TRL's defaults."""

    learning_rate: float = option(1e-6, "Initial learning rate.")
    logging_steps: float = option(10, "Updates between two logs; below 1: as a share of the run.")
    gradient_checkpointing: bool = option(True, "Recompute activations in the backward pass to save memory.")
    bf16: bool | None = option(
        None,
        "bfloat16 mixed precision. Unset: as the launcher asks; else on, unless fp16 is set or the device does "
        "not do bfloat16 fast.",
    )
    lr_scheduler_kwargs: dict | str | None = option(None, "Further arguments of the learning-rate schedule.")
    remove_unused_columns: bool | None = option(
        False, "Keep only the prompt (and images); reward functions then see no other column."
    )

    def resolve_precision(self) -> None:
        """`bf16`, before TrainingArguments looks at it."""
        # transformers would restart training with smaller batches, which cuts groups apart.
        if self.auto_find_batch_size:
            logger.warning(
                "auto_find_batch_size: micro-batches shrink by themselves here, and batches stay as they are"
            )
            self.auto_find_batch_size = False
        self._agree_with_launcher(os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        if self.bf16 is None:
            self.bf16 = not self.fp16 and bf16_is_fast(self.use_cpu)
        # transformers wants to be told that there is no GPU.
        if self.bf16 and not torch.accelerator.is_available():
            self.use_cpu = True
        if self.bf16 and self.use_cpu:
            make_bfloat16_safe()

    def _agree_with_launcher(self, asked: str) -> None:
        """Take the precision of `accelerate launch` where none is set. transformers would take it for a False too."""
        if asked not in ("no", "bf16", "fp16"):
            raise ConfigError(f"the launcher's mixed_precision: {asked} is not supported; set it to bf16 there")
        if asked == "no" or self.bf16 or self.fp16:
            return
        if self.bf16 is not None:
            raise ConfigError(
                f"bf16=False, and the launcher's configuration has mixed_precision: {asked}: leave bf16 unset, or set "
                'mixed_precision: "no" there'
            )
        self.bf16, self.fp16 = asked == "bf16", asked == "fp16"

    def resolve_sharding(self) -> None:
        """`fsdp` and `deepspeed`, before TrainingArguments looks at them."""
        if isinstance(self.fsdp, str):
            self.fsdp = _read_fsdp(self.fsdp)
        if self.fsdp and self.deepspeed:
            raise ConfigError("fsdp and deepspeed both shard: leave one of them out")
        # accelerate's launcher names DeepSpeed by itself.
        launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
        if (self.deepspeed or launched) and importlib.util.find_spec("deepspeed") is None:
            raise MissingExtraError('DeepSpeed is asked for and is not installed: pip install "deepspeed>=0.19.8"')
        # accelerate then leaves DeepSpeed out, and says nothing: each process would hold all.
        if (self.deepspeed or launched) and parse_flag_from_env("ACCELERATE_USE_CPU"):
            raise ConfigError(
                "DeepSpeed is asked for, and accelerate leaves it out where the environment has ACCELERATE_USE_CPU: "
                "unset that, and set RLOOConfig(use_cpu=True), or leave DeepSpeed out"
            )
        if isinstance(self.deepspeed, str) and self.deepspeed.endswith(".json") and not Path(self.deepspeed).is_file():
            raise ConfigError(f"deepspeed: there is no file {self.deepspeed} (docs/recipes.md shows one)")

    def _process_fsdp_args(self) -> Any:
        """transformers' own, without its warning that checkpointed layers are gathered once more: those that are
        sharded by FSDP2, as here, are there already when they are run again in the backward pass."""
        own, self.gradient_checkpointing = self.gradient_checkpointing, False
        try:
            return super()._process_fsdp_args()
        finally:
            self.gradient_checkpointing = own

    def check_training(self) -> None:
        """What transformers can do and this trainer cannot."""
        if str(self.optim).rsplit(".", 1)[-1].lower() in ("lomo", "adalomo"):
            raise ConfigError(
                "LOMO updates weights inside the backward pass, which an update of several micro-batches cannot do; "
                'set optim="adamw_torch"'
            )
        parallelism = self.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ConfigError("context and sequence parallelism are not supported; set cp_size=1 and sp_size=1")


def _read_fsdp(text: str) -> Any:
    """`fsdp` as a text, which a flag gives: whether to shard, or the words of older scripts.

    >>> _read_fsdp("True"), _read_fsdp("no"), _read_fsdp("full_shard auto_wrap")
    (True, None, 'full_shard auto_wrap')
    """
    word = text.strip().lower()
    if word in YES:
        return True
    if word in NO:
        return None
    if unknown := [one for one in word.split() if one not in FSDP_WORDS]:
        raise ConfigError(f"fsdp must be true or false, not {unknown[0]}; fsdp_config has what else there is to set")
    return word or None


def bf16_is_fast(use_cpu: bool) -> bool:
    """Whether bfloat16 autocast pays on the device that training will run on.

    On a CPU without native bfloat16 it is several times slower than float32 (docs/architecture.md has the number),
    and on GPUs before Ampere it is emulated; TRL turns it on everywhere.
    """
    if use_cpu or not torch.accelerator.is_available():
        return False
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
