"""How far a proof on the very model goes across its attention window: one that does not arrive gives wrong numbers."""

from __future__ import annotations

from typing import Any

from rloom.printable import get_logger

logger = get_logger(__name__)

LONGEST = 8192
"""Windows up to this are crossed, on a GPU."""

TRIED_ON_CPU = 10**11
"""Tokens times weights: ten to twenty seconds."""


def window_to_cross(model: Any, config: Any) -> int:
    """The attention window of a model, if a prompt that is longer can be run, and soon enough; else 0.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    >>> config = MistralConfig(**sizes, num_hidden_layers=1, vocab_size=9, sliding_window=4096)
    >>> window_to_cross(MistralForCausalLM(config), config)
    4096
    """
    window = getattr(config, "sliding_window", None) or 0
    limit = getattr(config, "max_position_embeddings", None) or 1024
    if window > limit - 16:
        return 0
    weights = list(model.parameters())
    most = LONGEST if weights[0].device.type != "cpu" else min(LONGEST, TRIED_ON_CPU // sum(p.numel() for p in weights))
    if window > most:
        logger.info("a window of %d tokens was not tried out: that would take long here", window)
        return 0
    return window
