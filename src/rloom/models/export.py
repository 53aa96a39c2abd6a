"""Saving a trained model for use elsewhere, by the names that scripts for Unsloth end with: merged, and as GGUF.

Adapters are folded into their base in float32, quantized bases are unpacked first, and the sum is rounded once.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from rloom.errors import ConfigError, RloomError, check_choice
from rloom.printable import printable

SAVE_METHODS = ("merged_16bit", "lora")
CONVERTED = {
    "not_quantized": "bf16",
    "fast_quantized": "q8_0",
    "f32": "f32",
    "f16": "f16",
    "bf16": "bf16",
    "q8_0": "q8_0",
}
"""Formats that llama.cpp's converter writes itself, under Unsloth's names."""
QUANTIZED = {"quantized": "q4_k_m"} | {
    name: name
    for name in ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m", "q5_0", "q5_1", "q5_k_s",
                 "q5_k_m", "q6_k", "iq2_xxs", "iq2_xs", "iq3_xxs", "iq4_nl", "iq4_xs")
}  # fmt: skip
"""Formats that are made by `llama-quantize` of a converted file."""
CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf.py")
FOLDER_VARIABLE = "LLAMA_CPP"


def add_saving(model: Any) -> Any:
    """Give a model `save_pretrained_merged` and `save_pretrained_gguf`. Returns the model."""
    # Partials, and not methods: they survive copying and pickling of the model that they belong to.
    model.save_pretrained_merged = functools.partial(save_pretrained_merged, model)
    model.save_pretrained_gguf = functools.partial(save_pretrained_gguf, model)
    return model


def save_pretrained_merged(
    model: Any, save_directory: str | os.PathLike[str], tokenizer: Any = None, save_method: str = "merged_16bit"
) -> None:
    """Write the model as `transformers` loads it, with its adapter folded in, in 16 bits; or, as "lora", the adapter.

    ```python
    model, tokenizer = FastLanguageModel.from_pretrained("Qwen/Qwen3-4B", load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(model)
    model.save_pretrained_merged("merged", tokenizer, save_method="merged_16bit")
    ```
    """
    from rloom.models.load import is_peft_model

    check_choice("save_method", save_method, SAVE_METHODS)
    if save_method == "lora":
        if not is_peft_model(model):
            raise ConfigError('save_method="lora" saves an adapter, and the model has none')
        model.save_pretrained(str(save_directory))
    else:
        merged_16bit(model).save_pretrained(str(save_directory))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(save_directory))


def merged_16bit(model: Any) -> Any:
    """A copy of the model without an adapter and unquantized, in bfloat16, or in float16 where the model is."""
    from rloom.models.load import is_peft_model
    from rloom.models.split_weights import split_of

    adapted = is_peft_model(model)
    if not adapted and any(hasattr(module, "base_layer") for module in model.modules()):
        raise ConfigError("the model has adapter layers and is no PeftModel: call it on the model that has the adapter")
    dtype = torch.float16 if model.dtype is torch.float16 else torch.bfloat16
    split = split_of(model)
    with nullcontext() if split is None else split.as_float32(on_host=False):
        made = copy.deepcopy(model)
    if getattr(model, "is_quantized", False) or getattr(model, "is_loaded_in_4bit", False):
        made = _unpacked(made, adapted)
    elif adapted:
        made = made.float().merge_and_unload(adapter_names=[model.active_adapter])
    # The copy is nobody's to call these on.
    for name in ("save_pretrained_merged", "save_pretrained_gguf"):
        made.__dict__.pop(name, None)
    return made.to(dtype)


def _unpacked(model: Any, adapted: bool) -> Any:
    """A quantized model in float32, with its adapter added to the unpacked weights: a sum in 4 bits would lose it."""
    changes = _changes(model) if adapted else {}
    base = model.unload() if adapted else model
    base = base.dequantize(dtype=torch.float32)
    with torch.no_grad():
        for name, change in changes.items():
            weight = base.get_submodule(name).weight
            weight.data = weight.data.float() + change.to(weight.device)
    return base


def _changes(model: Any) -> dict[str, torch.Tensor]:
    """What the active adapter adds to each layer's weight, by the layer's name in the base model."""
    active = model.active_adapter
    config = model.peft_config[active]
    if getattr(config, "use_dora", False) or getattr(config, "modules_to_save", None) or config.bias != "none":
        raise ConfigError("an adapter with DoRA, biases or modules_to_save is not merged into a quantized base")
    layers = {n: m for n, m in model.get_base_model().named_modules() if hasattr(m, "get_delta_weight")}
    with torch.no_grad():
        return {n: m.float().get_delta_weight(active).float() for n, m in layers.items() if active in m.lora_A}


def save_pretrained_gguf(
    model: Any,
    save_directory: str | os.PathLike[str],
    tokenizer: Any = None,
    quantization_method: str | Sequence[str] = "fast_quantized",
) -> list[Path]:
    """Write the merged model as GGUF, by llama.cpp's own programs. Returns the files.

    They are looked for on the PATH, and in the folder that the environment's `LLAMA_CPP` names. `quantization_method`
    is one or several of Unsloth's names: "q8_0", "q4_k_m", "bf16", …

    ```python
    model.save_pretrained_gguf("gguf", tokenizer, quantization_method="q4_k_m")
    ```
    """
    methods = [quantization_method] if isinstance(quantization_method, str) else list(quantization_method)
    for method in methods:
        check_choice("quantization_method", method, (*CONVERTED, *QUANTIZED))
    if tokenizer is None:
        raise ConfigError("a GGUF file holds the tokenizer too: pass it as the second argument")
    # What is missing is told before anything is merged.
    converter = _converter()
    quantizer = _quantizer() if any(method in QUANTIZED for method in methods) else ""
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as merged:
        save_pretrained_merged(model, merged, tokenizer)
        return [_gguf(Path(merged), folder, method, converter, quantizer) for method in methods]


def _gguf(merged: Path, folder: Path, method: str, converter: Path, quantizer: str) -> Path:
    """One file in the format that is asked for."""
    kind = CONVERTED.get(method) or QUANTIZED[method]
    target = folder / f"{folder.resolve().name}.{kind.upper()}.gguf"
    first = target if method in CONVERTED else merged / "whole.gguf"
    kind_first = kind if method in CONVERTED else "bf16"
    if first is target or not first.exists():
        _run([sys.executable, str(converter), str(merged), "--outfile", str(first), "--outtype", kind_first])
    if first is not target:
        _run([quantizer, str(first), str(target), kind.upper()])
    return target


def _found(names: Sequence[str]) -> str | None:
    own = os.environ.get(FOLDER_VARIABLE)
    for name in names:
        for place in [own, os.path.join(own, "build", "bin")] if own else []:
            if os.path.isfile(os.path.join(place, name)):
                return os.path.join(place, name)
        # A script that is not executable is run by Python all the same.
        if found := shutil.which(name, mode=os.F_OK):
            return found
    return None


def _converter() -> Path:
    found = _found(CONVERTERS)
    if found is None:
        raise ConfigError(
            f"llama.cpp's {CONVERTERS[0]} is not installed: put it on the PATH, or name the folder of llama.cpp in "
            f"the environment's {FOLDER_VARIABLE}. save_pretrained_merged(…) writes what it converts"
        )
    return Path(found)


def _quantizer() -> str:
    found = _found(["llama-quantize"])
    if found is None:
        formats = ", ".join(CONVERTED)
        raise ConfigError(f"llama.cpp's llama-quantize is not installed, and without it there are only {formats}")
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = printable((done.stderr or done.stdout)[-2000:].strip())
        raise RloomError(
            f"{os.path.basename(command[1] if command[0] == sys.executable else command[0])} failed: {said}"
        )
