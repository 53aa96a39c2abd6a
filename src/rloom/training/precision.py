"""Decides in which precision a run holds its weights and computes.

The decision is made once, when the trainer is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from transformers import Trainer

from rloom.errors import ConfigError
from rloom.models.load import base_of, is_peft_model
from rloom.models.optimizers import can_keep_low_bits
from rloom.models.reference import adapter_parameters
from rloom.models.split_weights import SplitWeights, kept_in_float32, split_of
from rloom.models.verify import evaluating
from rloom.printable import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The decision, and in `words` what it means."""

    split: SplitWeights | None
    words: str
    in_float32: bool = False  # whether matrix products are in float32
    asked_autocast: Any = None  # accelerate's handler for models other than the policy

    @contextmanager
    def for_other_models(self, accelerator: Any) -> Iterator[None]:
        """Models that are prepared inside the block, such as reward models, run under autocast as the options say."""
        own, accelerator.autocast_handler = accelerator.autocast_handler, self.asked_autocast
        try:
            yield
        finally:
            accelerator.autocast_handler = own


SPLIT = "float32 weights, held as bfloat16 and the 16 bits that it drops"


def choose_precision(trainer: Any, *, loaded_with: Any, own_optimizer: bool) -> Precision:
    """Under `bf16=True`, split float32 weights into bfloat16 and the 16 dropped bits, unless something needs float32.

    `loaded_with`: arguments of `from_pretrained`, where the model was given by name. `own_optimizer`: the user passed
    an optimizer, which does not know about the dropped bits.
    """
    args, model, asked = trainer.args, trainer.model, trainer.accelerator.autocast_handler
    if trainer.processes.is_sharded:
        half = trainer.accelerator.mixed_precision == "bf16" or _dtype_of(model) == torch.bfloat16
        run = "run in bfloat16" if half else "run in float32"
        words = f"float32 weights, sharded over {trainer.processes.count} processes by FSDP2 and {run}"
        return Precision(split=None, words=words, in_float32=not half, asked_autocast=asked)
    asked_dtype = (loaded_with or {}).get("dtype") or (loaded_with or {}).get("torch_dtype")
    reason, before = _why_not_split(trainer, asked_dtype, own_optimizer), split_of(model)
    if before is not None and reason is not None:
        before.undo()
    elif before is not None:
        _leave_dtypes_to(trainer)
        return Precision(split=before, words=SPLIT, asked_autocast=asked)
    leave = [*kept_in_float32(base_of(model)), *(adapter_parameters(model).values() if is_peft_model(model) else ())]
    left = {id(p) for p in leave}
    if all(p.dtype != torch.float32 or id(p) in left for p in model.parameters()):
        if args.split_weights:
            raise ConfigError("split_weights=True: the model has no float32 weights to split; leave it unset")
        _leave_dtypes_to(trainer)
        words = f"weights in {_name(_dtype_of(model))}{_learns(model)}"
        return Precision(split=None, words=words, asked_autocast=asked)
    if reason is None:
        split = SplitWeights(model, leave)
        _leave_dtypes_to(trainer)
        if _runs(trainer) is not None:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            return Precision(split=split, words=SPLIT, asked_autocast=asked)
        split.undo()
        reason = "the model does not run with bfloat16 weights"
    if args.split_weights:
        raise ConfigError(f"split_weights=True: {reason}; leave it unset")
    if args.bf16 or args.fp16:
        kind = "bfloat16" if args.bf16 else "float16"
        words = f"float32 weights, cast to {kind} for each product ({reason})"
        return Precision(split=None, words=words, asked_autocast=asked)
    words = f"weights and arithmetic in float32{_why_not_half(args.device)}"
    return Precision(split=None, words=words, in_float32=True, asked_autocast=asked)


def _why_not_split(trainer: Any, asked_dtype: Any, own_optimizer: bool) -> str | None:
    """The reason for not splitting weights; None if they are to be split."""
    args = trainer.args
    if not args.bf16:
        return "fp16=True" if args.fp16 else "bf16 is off"
    if trainer.processes.external_optimizer:
        return "DeepSpeed keeps weights of its own"
    if own_optimizer:
        return "the optimizer that was passed in updates float32 weights"
    if not can_keep_low_bits(*Trainer.get_optimizer_cls_and_kwargs(args, trainer.model)):
        return f"optim={str(args.optim).rsplit('.', 1)[-1].lower()} chooses its parameters itself"
    if args.split_weights is not None:
        return None if args.split_weights else "split_weights=False"
    if str(asked_dtype).removeprefix("torch.") == "float32":
        return "dtype float32 was asked for"
    if args.device.type != "cuda":
        return "on a CPU"
    return None


def _leave_dtypes_to(trainer: Any) -> None:
    """Turn autocast off for a model whose weights are all bfloat16, if it runs without.

    Such a model computes in bfloat16 by itself. Autocast would cast to float32 and back for norms and sums. Some models
    need autocast: float32 position tables turn what they are added to into float32.
    """
    model = trainer.model
    half = {p.dtype for p in model.parameters() if p.is_floating_point()} == {torch.bfloat16}
    if not (trainer.args.bf16 and half):
        return
    asked, trainer.accelerator.autocast_handler = trainer.accelerator.autocast_handler, AutocastKwargs(enabled=False)
    if _runs(trainer) != torch.bfloat16:
        trainer.accelerator.autocast_handler = asked


@torch.no_grad()
def _runs(trainer: Any) -> torch.dtype | None:
    """The dtype of the model's logits with its present weights and autocast; None if it does not run."""
    model = trainer.model
    try:
        ids = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
        with evaluating(model), trainer.accelerator.autocast():
            return model(input_ids=ids).logits.dtype
    except Exception as error:
        # Mixed dtypes raise errors of many kinds. Anything else that is wrong will be raised again in use.
        logger.debug("the model does not run with these dtypes: %s", error)
        return None


def _why_not_half(device: torch.device) -> str:
    """A note about the option that would be faster on this GPU."""
    if device.type != "cuda":
        return ""
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return " (bf16=True is several times faster)"
    return " (this GPU does no bfloat16: fp16=True is faster)"


def _dtype_of(model: Any) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _learns(model: Any) -> str:
    """A note that bfloat16 weights keep the 16 dropped bits, so that small updates are not lost."""
    trained = any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    return ", and the 16 bits that it drops beside them" if trained else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
