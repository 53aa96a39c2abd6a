"""The policy's weights as vLLM takes them: under a checkpoint's names, adapters merged in; whether they changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rloom.errors import EngineError
from rloom.models.checksums import checksums_of
from rloom.models.load import base_of, has_virtual_tokens, is_peft_model
from rloom.printable import get_logger

logger = get_logger(__name__)

Whole = Callable[[Tensor], Tensor]
"""Gives a weight as a whole, of which the model has a part."""


def check_sendable(model: Any) -> None:
    """Refuse weights that another engine cannot be given."""
    if getattr(base_of(model), "is_quantized", False) or getattr(model, "is_loaded_in_4bit", False):
        raise EngineError("vLLM is given the policy's weights, and quantized ones cannot be handed over yet")
    if has_virtual_tokens(model):
        raise EngineError("the adapter puts virtual tokens before each prompt, which vLLM knows nothing of")


def check_taken(names: set[str], taken: Collection[str] | None) -> None:
    """Refuse to go on where vLLM has not found all of its weights in the policy's. Some models do not say which they
    took (None): the comparison of log-probabilities remains."""
    missing = sorted(names - set(taken)) if taken is not None else []
    if missing:
        raise EngineError(f"vLLM did not find {len(missing)} of its weights in the policy's, such as {missing[0]}")


def hint_rounding(model: Any, dtype: torch.dtype, reason: str) -> None:
    """Say that an adapter is merged in, why, and what that costs in half precision."""
    if is_peft_model(model) and dtype == torch.float32:
        logger.warning("vLLM is given all weights with the adapter merged in, at every update (%s)", reason)
    elif is_peft_model(model):
        logger.warning(
            "vLLM is given all weights with the adapter merged in, in %s, at every update (%s): what the adapter adds "
            "to a weight is lost where that is less than a few thousandths of it. `mismatch` shows how much that is; "
            "engine='native' samples from the adapter itself",
            str(dtype).removeprefix("torch."),
            reason,
        )


@torch.no_grad()
def checkpoint_weights(
    model: Any, known: Collection[str], *, adapters: bool = True, whole: Whole | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as `save_pretrained` would write them, adapters merged in, or left out. The model stays as it
    is. `whole` gives a weight as a whole, where there is a part of it in the model.

    Layers with an adapter are merged one at a time, in copies. Where the library keeps weights in memory under other
    names than in checkpoints (mixtures of experts, vision-language models), all are converted at once. `known` are
    vLLM's own names of its weights: the second name of tied weights is left out where it is none of these.
    """
    base = base_of(model)
    second = {name for name in _second_names(base) if not any(one.endswith(name) for one in known)}
    weights = ((name, tensor) for name, tensor in _merged_weights(base, adapters, whole) if name not in second)
    if not are_renamed(base):
        yield from weights
        return
    from transformers.core_model_loading import revert_weight_conversion

    if whole is not None:
        # All of them together may be more than the device holds.
        weights = ((name, tensor.cpu()) for name, tensor in weights)
    yield from revert_weight_conversion(base, dict(weights)).items()


def unties_embeddings(model: Any) -> bool:
    """Whether an adapter makes an output layer differ from the input embeddings that it is tied to."""
    base = base_of(model)
    if not getattr(base.config.get_text_config(), "tie_word_embeddings", False) or not is_peft_model(model):
        return False
    inside, outside = base.get_input_embeddings(), base.get_output_embeddings()
    return any(is_wrapped(module) for module in (inside, outside))


def _second_names(base: Any) -> set[str]:
    """Of weights that are the same tensor as an earlier one."""
    seen: set[int] = set()
    found = set()
    for name, tensor in base.named_parameters(remove_duplicate=False):
        if id(tensor) in seen:
            found.add(name)
        seen.add(id(tensor))
    return found


def are_renamed(base: Any) -> bool:
    """Tried on tensors without data, under the names that they have without an adapter."""
    from transformers.core_model_loading import revert_weight_conversion

    own = {
        name.replace(".base_layer.", "."): torch.empty(tensor.shape, device="meta")
        for name, tensor in base.state_dict().items()
        if ".lora_" not in name
    }
    return set(revert_weight_conversion(base, dict(own))) != set(own)


def _merged_weights(
    module: nn.Module, adapters: bool, whole: Whole | None, prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Tied weights come under each of their names."""
    if is_wrapped(module):
        yield from _merged_weights(_as_used(module, adapters, whole), adapters, whole, prefix)
        return
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, (tensor if whole is None else whole(tensor)).detach()
    for name, child in module.named_children():
        yield from _merged_weights(child, adapters, whole, f"{prefix}{name}.")


def is_wrapped(module: Any) -> bool:
    """Whether peft has put something around a layer."""
    return hasattr(module, "base_layer") or hasattr(module, "original_module")


def _as_used(module: Any, adapters: bool, whole: Whole | None) -> nn.Module:
    """The layer that does what peft's does: with the adapter merged in, or the copy that is trained in its place."""
    if not adapters and not getattr(module, "merged", True):
        return module.base_layer
    if hasattr(module, "modules_to_save"):
        active = module.active_adapters
        trained = bool(active) and not module.disable_adapters and active[0] in module.modules_to_save
        return module.modules_to_save[active[0]] if trained else module.original_module
    layer = _copied(getattr(module, "token_adapter", module), whole)
    # There may be one adapter inside another.
    while hasattr(layer, "base_layer"):
        if not hasattr(layer, "merge"):
            raise EngineError(f"the adapter's {type(layer).__name__} cannot be merged into the weights that vLLM needs")
        if adapters and not layer.disable_adapters:
            layer.merge()
        elif layer.merged:
            layer.unmerge()
        layer = layer.base_layer
    return layer


def _copied(layer: nn.Module, whole: Whole | None) -> Any:
    if whole is None:
        return copy.deepcopy(layer)
    # Clones: what has been gathered already is the model's own memory.
    weights = {id(p): nn.Parameter(whole(p).detach().clone(), requires_grad=False) for p in layer.parameters()}
    return copy.deepcopy(layer, weights)


# -- whether they changed


@torch.no_grad()
def fingerprint(model: nn.Module, parts: Iterable[Tensor] | None = None) -> tuple[Any, ...]:
    """What changes whenever a weight does, computed from the very bits, and from which adapters are used and how much.
    `parts` are what this process holds of the weights, where that is not all of them.

    Counters would do for less: torch's own of in-place changes is not moved by `.data` and by kernels of others, and
    counting updates misses what a callback or a loaded checkpoint does. A stale sampler is not worth the millisecond.

    >>> layer = nn.Linear(2, 2)
    >>> before = fingerprint(layer)
    >>> _ = layer.weight.data[0, 1].add_(1e-3)
    >>> before == fingerprint(layer), fingerprint(layer) == fingerprint(layer)
    (False, True)
    """
    bits = checksums_of((*(model.parameters() if parts is None else parts), *_saved_buffers(model)))
    return (*bits, *(_adapters_of(module) for module in model.modules() if is_wrapped(module)))


def _saved_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Those that are part of a checkpoint. Others, such as a rotary embedding's frequencies, may depend on what a
    process has run last, and no server is sent them."""
    for module in model.modules():
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield tensor


def _adapters_of(module: Any) -> str:
    """The adapters that a layer uses now, and how much of each: none of that is in a weight."""
    scaling = getattr(module, "scaling", None)
    return f"{getattr(module, 'active_adapters', None)} {getattr(module, 'disable_adapters', None)} {scaling}"
