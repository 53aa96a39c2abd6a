"""LoRA adapters and quantized weights: the configs, with defaults that hold for RLOO."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch

from rloom.errors import ConfigError, check_choice, needs_extra


def lora(**options: Any) -> Any:
    """A peft LoraConfig for a causal language model, unless told otherwise; every linear layer unless told otherwise.

    >>> config = lora(r=8)
    >>> config.r, config.target_modules, str(config.task_type)
    (8, 'all-linear', 'CAUSAL_LM')
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise needs_extra("LoRA", "peft", "peft") from error
    defaults = {
        "task_type": "CAUSAL_LM",
        "r": 16,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "target_modules": "all-linear",
        "bias": "none",
    }
    return LoraConfig(**{**defaults, **options})


def quantization_config(
    *,
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    quant_type: str = "nf4",
    nested: bool = False,
    dtype: Any = None,
) -> Any:
    """bitsandbytes' config: 4-bit weights are computed with in `dtype`, or bfloat16 where that is fast.

    >>> quantization_config(load_in_4bit=True).bnb_4bit_quant_type
    'nf4'
    """
    if load_in_4bit and load_in_8bit:
        raise ConfigError("load_in_4bit and load_in_8bit exclude each other: give one of them")
    check_choice("bnb_4bit_quant_type", quant_type, ("nf4", "fp4"))
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise needs_extra("a quantized model", "bitsandbytes", "bnb") from error
    from transformers import BitsAndBytesConfig

    if load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=named if isinstance(named, torch.dtype) else fast_dtype(),
    )


def fast_dtype() -> torch.dtype:
    """bfloat16 where the GPU has it, else float32."""
    return torch.bfloat16 if torch.cuda.is_available() and is_bf16_supported() else torch.float32


def keep_differentiable(model: Any) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for inference on the CPU, and undo it where it was done.

    On CPUs with bfloat16 instructions it repacks a layer at its first forward in evaluation mode, here the first
    generation, for a kernel that has no backward: from then on nothing behind that layer would get a gradient.
    """
    for module in model.modules():
        if not hasattr(module, "support_avx512bf16_for_cpu"):
            continue
        module.support_avx512bf16_for_cpu = False
        weight = module.weight
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse as unpacked

            weight.data, weight.quant_state = unpacked(weight.data, weight.quant_state)


def is_bf16_supported() -> bool:
    """Whether bfloat16 training pays here: for `bf16=is_bf16_supported(), fp16=not is_bf16_supported()`.

    On a GPU it says whether the hardware has bfloat16. Without one it is True: fp16 training needs a GPU, and
    bfloat16 at least runs.

    >>> is_bf16_supported() in (True, False)
    True
    """
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def save_merged(model: Any, processing_class: Any, folder: Any) -> None:
    """Write the model with its adapter folded into the weights, as `transformers` loads it.

    The model in memory stays as it was. Weights that are quantized are merged as they are: peft rounds the result to
    the same format.
    """
    # Here, since `load.py` needs this module.
    from rloom.models.load import is_peft_model
    from rloom.models.split_weights import split_of

    if not is_peft_model(model):
        raise ConfigError("there is no adapter to merge: the model is not a PeftModel")
    active, split = model.active_adapter, split_of(model)
    with nullcontext() if split is None else split.as_float32(on_host=False):
        merged = copy.deepcopy(model).merge_and_unload(adapter_names=[active])
    merged.save_pretrained(str(folder))
    if processing_class is not None:
        processing_class.save_pretrained(str(folder))
