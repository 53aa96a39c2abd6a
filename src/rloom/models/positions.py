"""Positions of tokens: how far they may go, and those in several dimensions, which some models give to images.
Completions go on after the largest position of their prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rloom.models.load import context_length, has_position_table
from rloom.types import MicroBatch, PackedRow


def rope_index_of(model: Any) -> Callable[..., Any] | None:
    """The function that counts a model's positions in several dimensions; None for a model without such."""
    owners = (model, getattr(model, "model", None))
    return next(filter(None, (getattr(owner, "get_rope_index", None) for owner in owners)), None)


def prompt_positions(rope_index: Callable[..., Any], token_ids: list[int], inputs: Mapping[str, Tensor]) -> Tensor:
    """The positions of a prompt with images as its model counts them, (3, 1, P)."""
    ids = torch.tensor([token_ids])
    known = {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}
    positions, _ = rope_index(input_ids=ids, attention_mask=torch.ones_like(ids), **known)
    return positions


def image_positions(rope_index: Callable[..., Any], batch: MicroBatch, row: PackedRow) -> Tensor:
    """Positions of a packed row with images, (3, 1, T): the model counts each prompt's, and its completions go on after
    the largest of them."""
    prompts, completions = [], []
    for block, first in zip(row.blocks, batch.first_rows(), strict=True):
        rollout = batch.rollout
        positions = prompt_positions(rope_index, rollout.prompt_ids[first], rollout.prompt_inputs[first])
        prompts.append(positions)
        after = int(positions.max()) + 1
        completions += [torch.arange(after, after + length).expand(3, 1, length) for length in block.completions]
    return torch.cat([*prompts, *completions], dim=-1).to(row.input_ids.device, non_blocking=True)


def position_limit(model: Any) -> int | None:
    """How many positions there are, or up to which rows of a batch do not influence each other; None: no such limit.

    With dynamic and long RoPE the longest row of a batch decides the frequencies of all.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    limits = [config.max_position_embeddings for kind in kinds if kind.get("rope_type") == "dynamic"]
    limits += [
        kind.get("original_max_position_embeddings") or config.max_position_embeddings
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    if has_position_table(model):
        limits.append(context_length(model) or 0)
    return min((limit for limit in limits if limit), default=None)
