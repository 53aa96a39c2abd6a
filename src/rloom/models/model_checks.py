"""Checks of the very model before it is trained: is the head known, and are packed rows right?

Packed rows give wrong numbers, without an error, in architectures that keep other state than keys and values
(convolutions, recurrences) or that do not go through transformers' attention interface. `verify.py` says how the checks
compare.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from rloom.data.batching import Batcher
from rloom.errors import ConfigError
from rloom.models.attention import num_calls, packed_attention, running
from rloom.models.fused import FusedLayers
from rloom.models.load import base_of, has_virtual_tokens, keeps_other_state
from rloom.models.logprobs import Forward
from rloom.models.mask_probe import sees_ahead
from rloom.models.verify import (
    Tolerance,
    allowed_difference,
    difference,
    evaluating,
    plain_logits,
    probe_length,
    probe_tokens,
    raise_in_step,
    rounded_otherwise,
    window_to_cross,
)
from rloom.printable import get_logger
from rloom.types import Completion, Group, MicroBatch, Prompt, Rollout

logger = get_logger(__name__)

PROMPT_LENGTH = 24
"""Tokens of the longer prompt, where no window has to be crossed."""

WITH_GRADIENT = 1024
"""Gradients are compared up to a window of so many tokens: the activations of a longer one take much memory."""


def proves_packing(model: Any, layers: FusedLayers | None = None) -> bool:
    """Whether packed rows may be used for this model, with these layers if there are any; says why not otherwise."""
    reason = why_not_packed(model, layers=layers)
    if reason is not None and layers is not None:
        logger.warning("norms, rotations and activations are not run by kernels: with those, %s", reason)
    elif reason is not None:
        logger.warning("training uses padded micro-batches, which are slower: %s", reason)
    return reason is None


def proves_packed_images(model: Any, rollout: Rollout) -> bool:
    """Whether packed rows may be used for prompts with images too, tried on some of this rollout's; says why not."""
    reason = why_not_packed(model, _shortest_with_images(rollout))
    if reason is not None:
        logger.warning("prompts with images are trained on in padded micro-batches, which are slower: %s", reason)
    return reason is None


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model that does more to its logits than training knows of: its log-probabilities would be wrong."""
    base = base_of(model)
    if has_virtual_tokens(model) or base.get_output_embeddings() is None:
        return
    prompt, completion = probe_tokens(base.config.get_text_config(), 4, 6)
    device = next(model.parameters()).device
    batch = Batcher(packed=False, pad_token_id=0).make(_rollout((prompt, {}, [completion])), [0], device)
    with evaluating(model):
        ours = Forward(model, temperature=1.0)(model, batch).logprobs[0]
        logits = plain_logits(model, prompt, completion)[:-1].float()
    error = difference(ours, logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1))
    if error > Tolerance.HEAD:
        raise ConfigError(
            f"{type(base).__name__} does something to its logits that this version does not know: log-probabilities "
            f"would be off by {error:.1e}. It cannot be trained with rloom yet"
        )


def why_not_packed(model: Any, rollout: Rollout | None = None, layers: FusedLayers | None = None) -> str | None:
    """None if a packed and a padded forward agree in log-probabilities and in a gradient, else what went wrong.

    Tried on `rollout`, or on one of random tokens; the packed one with `layers`, if there are any.
    """
    base = base_of(model)
    name = type(base).__name__
    if has_virtual_tokens(model):
        return "the adapter puts virtual tokens before each prompt"
    if base.get_output_embeddings() is None:
        return f"{name} names no output head"
    if keeps_other_state(base):
        return f"{name} keeps other state than keys and values"
    try:
        with evaluating(model):
            if rollout is None:
                return _why_not_packed_text(model, layers)
            if sees_ahead(model, rollout.prompt_ids[0], rollout.prompt_inputs[0]):
                return f"image tokens of {name} see each other both ways"
            return _compare(model, rollout)
    except Exception as error:
        raise_in_step(model, error, "packing=False does without")
        # Whatever an architecture does not like about packed rows, padded ones remain.
        logger.debug("the packed forward failed", exc_info=True)
        return f"{name} does not run on packed rows ({type(error).__name__}: {str(error)[:120]})"


def _why_not_packed_text(model: Any, layers: FusedLayers | None) -> str | None:
    """Random tokens, across the window if there is one; across a long one in a second run, without gradients."""
    config = base_of(model).config.get_text_config()
    window = window_to_cross(model, config)
    long = window > WITH_GRADIENT
    reason = _compare(model, _random_rollout(config, 0 if long else window), layers=layers)
    if reason is not None or not long:
        return reason
    try:
        return _compare(model, _random_rollout(config, window), with_gradient=False)
    except torch.OutOfMemoryError as error:
        raise_in_step(model, error, "packing=False does without")
        logger.info("a window of %d tokens was not tried out: there is no memory for it", window)
        return None


def _compare(
    model: Any, rollout: Rollout, *, with_gradient: bool = True, layers: FusedLayers | None = None
) -> str | None:
    """None if this rollout gives the same in a packed row and in padded ones, else what differs."""
    base, device = base_of(model), next(model.parameters()).device
    probe = _probe_parameter(model) if with_gradient else None
    padded, packed = (_batch(rollout, device, packed=packed) for packed in (False, True))
    plain = _run(model, padded, probe)
    ours, calls = _run_packed(model, packed, probe, layers)
    num_layers = base.config.get_text_config().num_hidden_layers
    if calls != num_layers:
        return f"{calls} of {num_layers} layers of {type(base).__name__} go through the attention interface"
    error, gradient_error = map(difference, ours, plain)

    def own_rounding() -> float:
        with rounded_otherwise(model):
            shaken, shaken_gradient = map(difference, _run(model, padded, probe), plain)
        return max(shaken, shaken_gradient / 2)

    allowed = Tolerance.FLOAT32
    if base.get_output_embeddings().weight.dtype != torch.float32 or torch.is_autocast_enabled(device.type):
        # Sharded weights are gathered in forwards: all processes run as many, whatever each has found.
        found = math.inf if isinstance(model, FSDPModule) else max(error, gradient_error / 2)
        allowed = allowed_difference(Tolerance.PACKED, found, own_rounding)
    if error < allowed and gradient_error < 2 * allowed:
        return None
    return (
        f"packed and padded forwards of {type(base).__name__} differ by {error:.1e}, gradients by {gradient_error:.1e}"
    )


def _run(model: Any, batch: MicroBatch, probe: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities, and the gradient of their sum with respect to `probe`; a zero for that if there is none."""
    with torch.set_grad_enabled(probe is not None):
        logprobs = Forward(model, temperature=1.0)(model, batch).logprobs
        return logprobs, _gradient(model, logprobs, probe)


def _gradient(model: Any, logprobs: Tensor, probe: Tensor | None) -> Tensor:
    if probe is None:
        return torch.zeros(1)
    if not isinstance(probe, DTensor):
        return torch.autograd.grad(logprobs.sum(), probe)[0]
    # A sharded weight has its gradient after a backward alone: the graph is of the gathered one.
    logprobs.sum().backward()
    assert isinstance(probe.grad, DTensor)
    gradient = probe.grad.full_tensor()
    model.zero_grad(set_to_none=True)
    return gradient


def _run_packed(
    model: Any, batch: MicroBatch, probe: Tensor | None, layers: FusedLayers | None
) -> tuple[tuple[Tensor, Tensor], int]:
    """The same over a packed row, and how many attention calls were made."""
    assert batch.packed is not None
    with torch.set_grad_enabled(probe is not None), packed_attention([base_of(model)], layers), running(batch.packed):
        logprobs = Forward(model, temperature=1.0)(model, batch).logprobs
        # Counted before the backward, in which checkpointed layers run again.
        calls = num_calls()
        return (logprobs, _gradient(model, logprobs, probe)), calls


def _batch(rollout: Rollout, device: torch.device, *, packed: bool) -> MicroBatch:
    batcher = Batcher(packed=packed, pad_token_id=0)
    batcher.images_packed = packed
    return batcher.make(rollout, range(len(rollout)), device)


def _random_rollout(config: PretrainedConfig, window: int) -> Rollout:
    """Two prompts of different lengths with two completions each, the longer across the window if there is one."""
    length = probe_length(config, PROMPT_LENGTH, window)
    one, other, *completions = probe_tokens(config, length, 4, 5, 3, 6, 2)
    return _rollout((one, {}, completions[:2]), (other, {}, completions[2:]))


def _shortest_with_images(rollout: Rollout) -> Rollout:
    """The two shortest prompts with images, with two completions each, made of those that they got."""
    shortest: dict[int, int] = {}  # a row of each group
    for row in sorted(range(len(rollout)), key=lambda row: len(rollout.prompt_ids[row])):
        if rollout.prompt_inputs[row] and rollout.completion_ids[row]:
            shortest.setdefault(int(rollout.groups[row]), row)
    groups = []
    for row, (first, second) in zip(list(shortest.values())[:2], ((5, 3), (6, 2)), strict=False):
        tokens = rollout.completion_ids[row] * 6
        groups.append((rollout.prompt_ids[row], rollout.prompt_inputs[row], [tokens[:first], tokens[1 : 1 + second]]))
    return _rollout(*groups)


def _rollout(*groups: tuple[list[int], dict[str, Tensor], list[list[int]]]) -> Rollout:
    """A rollout of prompts, each with the tensors of its images and its completions."""
    return Rollout.of(
        [
            Group(
                prompt=Prompt(content="", token_ids=prompt, inputs=images),
                completions=[Completion(token_ids=tokens, stop_reason="length") for tokens in completions],
            )
            for prompt, images, completions in groups
        ],
        train_truncated=True,
    )


def _probe_parameter(model: Any) -> Tensor | None:
    """A parameter deep in the model whose gradient passes through attention: the first trainable one of a layer.

    None where all of the decoder is frozen.
    """
    # A vision tower's parameters have no part in text.
    decoder = {id(p) for p in base_of(model).get_decoder().parameters()}
    trainable = [
        (n, p) for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point() and id(p) in decoder
    ]
    inner = [p for n, p in trainable if ".0." in n and p.dim() == 2]
    return next(iter(inner or [p for _, p in trainable]), None)
