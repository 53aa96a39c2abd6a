"""Defaults for the options of speed and memory, from the model and the GPU.

They never depend on the clock or on free memory, so that two runs of one seed have the same micro-batches, and so the
same bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

TOKENS_ON_CPU = 8192
LEAST_TOKENS = 8192
MOST_TOKENS = 32_768
"""Limits of a micro-batch on a GPU, before it is rounded to whole groups."""

HOST_SECONDS = 8e-3
"""Time that a slow host needs to launch a layer forward, forward again and backward. An H200's took 7.6 to 11 ms."""

CLOCK = 1.7e9
"""Cycles per second."""
PER_PROCESSOR = {7: 512, 8: 1024, 9: 4096, 10: 8192, 12: 1024}
"""Half-precision operations per cycle of a multiprocessor, by compute capability."""

IN_FLOAT32 = 256
"""The same in float32 without tensor cores, for any GPU."""

REACHED = 0.45
"""The share of these operations that a whole update reaches."""

KEPT_LOGITS = 3 << 30
"""Bytes that a micro-batch's logits may take if they are kept for the backward."""


def micro_batch_tokens(
    model: Any, device: torch.device, *, group: int, checkpointed: bool, in_float32: bool = False
) -> int:
    """Tokens per micro-batch: so many that the GPU takes longer to run a layer than the host takes to launch it. More
    would take memory and gain next to nothing.

    `group`: tokens of the largest group. The result is a multiple of it where possible, since whole groups save a
    forward. `checkpointed`: whether activations are computed again in the backward; if not, they take several times the
    memory per token. `in_float32`: whether products are in float32, which keeps a GPU busy for longer.
    """
    if device.type != "cuda":
        return TOKENS_ON_CPU
    layers = max(1, model.config.get_text_config().num_hidden_layers)
    # Operations per token and layer, for two forwards and a backward.
    operations = 8 * model.num_parameters(exclude_embeddings=True) / layers
    tokens = _power_above(HOST_SECONDS * _operations_per_second(device, in_float32) / operations)
    tokens = min(max(tokens, LEAST_TOKENS), MOST_TOKENS)
    if not checkpointed:
        tokens = max(tokens // 4, LEAST_TOKENS)
    if group <= tokens:
        return -(-tokens // group) * group
    return group if group <= max(2 * tokens, MOST_TOKENS) else tokens


def keeps_logits(
    model: Any, device: torch.device, *, tokens: int, trained_share: float, in_float32: bool = False
) -> bool:
    """Whether logits are kept for the backward: if they take little memory, and no more than float32 weights.
    `trained_share`: the share of a micro-batch's tokens that have logits."""
    vocabulary = model.config.get_text_config().vocab_size
    each = 4 if in_float32 else 2
    room = min(KEPT_LOGITS, 4 * model.num_parameters(exclude_embeddings=True))
    return device.type == "cuda" and tokens * trained_share * vocabulary * each <= room


def _power_above(count: float) -> int:
    """The smallest power of two that is not below `count`.

    >>> _power_above(5000.0)
    8192
    """
    return 1 << max(0, int(count) - 1).bit_length()


@functools.cache
def _operations_per_second(device: torch.device, in_float32: bool) -> float:
    """The speed that an update reaches on this GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    half = 2048 if (major, minor) == (8, 0) else PER_PROCESSOR.get(major, 4096)
    each = IN_FLOAT32 if in_float32 else half
    return torch.cuda.get_device_properties(device).multi_processor_count * each * CLOCK * REACHED
