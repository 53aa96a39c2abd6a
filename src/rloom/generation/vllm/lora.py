"""A LoRA adapter as vLLM takes it: a folder with a few matrices, in the place of all of the model's weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rloom.generation.native.layers.lora import adds_nothing, is_plain_lora, parts_of
from rloom.generation.vllm.weights import Whole, are_renamed, is_wrapped
from rloom.models.checksums import checksums_of
from rloom.models.load import base_of, is_peft_model

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM makes room for; an adapter takes the next larger one."""


def why_merged(model: Any) -> str | None:
    """Why the adapter cannot be sent alone and must be merged into weights; None if it can."""
    base = base_of(model)
    layers = dict(_wrapped(base))
    for name, layer in layers.items():
        if not (is_plain_lora(layer) or adds_nothing(layer)) or type(layer.base_layer) is not nn.Linear:
            return f"vLLM knows plain LoRA on linear layers alone, and {name} has something else"
    if base.get_output_embeddings() in layers.values():
        return "vLLM takes no adapter on the output layer"
    others = [name for name, p in model.named_parameters() if p.requires_grad and ".lora_" not in name]
    if others:
        return f"{others[0]} is trained too, which is no part of the adapter"
    if largest_rank(model) > RANKS[-1]:
        return f"vLLM knows ranks of up to {RANKS[-1]}"
    if are_renamed(base):
        return "this model's layers have other names in memory than in checkpoints"
    return None


def adapter_rank(model: Any) -> int:
    """The largest rank of any layer, the adapters in use taken together; 0 if none is in use."""
    layers = [parts_of(layer) for _, layer in _active(base_of(model))]
    return max((sum(down.shape[0] for down, _, _ in parts) for parts in layers), default=0)


def largest_rank(model: Any) -> int:
    """That, or the largest of a single adapter: one that is switched off now may be switched on later."""
    ranks = [down.weight.shape[0] for _, layer in _wrapped(base_of(model)) for down in layer.lora_A.values()]
    return max(adapter_rank(model), *ranks, 1)


def reserved_rank(rank: int) -> int:
    """The rank that vLLM reserves memory for, so that an adapter of this rank fits.

    >>> reserved_rank(4), reserved_rank(16), reserved_rank(17)
    (8, 16, 32)
    """
    return next(room for room in RANKS if room >= rank)


def is_active(model: Any) -> bool:
    """Whether the adapter is switched on."""
    return is_peft_model(model) and next(_active(base_of(model)), None) is not None


@torch.no_grad()
def write_adapter(model: Any, folder: Path, dtype: torch.dtype, shift: float = 0.0, whole: Whole | None = None) -> Path:
    """Write the adapters in use as one, as peft would. Their ranks are put side by side, and their scales multiplied
    in. A `shift` of what they add makes another adapter. `whole` gives a weight of which the model has a part."""
    rank = adapter_rank(model)
    tensors, names = dict[str, Tensor](), set[str]()
    for name, layer in _active(base_of(model)):
        parts = parts_of(layer)
        if whole is not None:
            parts = [(whole(down), whole(up), scale) for down, up, scale in parts]
        down, up = _joined(parts, rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = down.to("cpu", dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = (up + shift).to("cpu", dtype)
        names.add(name.rpartition(".")[2])
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(names), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    # By default only its owner may read it, and a server may be another user's.
    weights.chmod(folder.stat().st_mode & 0o666)
    return folder


def base_fingerprint(model: nn.Module) -> tuple[Any, ...]:
    """What changes whenever a weight that is not the adapter's does."""
    return tuple(checksums_of(tensor for name, tensor in model.state_dict().items() if ".lora_" not in name))


def _wrapped(base: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, module) for name, module in base.named_modules() if is_wrapped(module))


def _active(base: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in _wrapped(base) if is_plain_lora(layer))


def _joined(parts: list[tuple[Tensor, Tensor, float]], rank: int) -> tuple[Tensor, Tensor]:
    """Down (rank, in) and up (out, rank), with zeros where the layer's own rank is smaller."""
    down = torch.cat([down.float() for down, _, _ in parts])
    up = torch.cat([scaling * up.float() for _, up, scaling in parts], dim=1)
    missing = rank - down.shape[0]
    return nn.functional.pad(down, (0, 0, 0, missing)), nn.functional.pad(up, (0, missing))
