"""Joins the image tensors of several prompts into those of a batch.

A processor is called for one prompt at a time, so that its tensors hold only that prompt's images. Prompts are then
joined along the first dimension: images, patches or prompts, whatever the architecture counts there. The model assigns
them by the order of the placeholders among the tokens. Other dimensions are padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Inputs with an entry for each token of the prompt, 0 for text."""

PADDING = {"image_position_ids": -1}
"""The padding value of inputs whose padding is not 0."""

Inputs = Mapping[str, Tensor]


def join(rows: Sequence[Inputs], left: int, right: int) -> dict[str, Tensor]:
    """Join the inputs of padded rows: prompts are padded on the left to `left` tokens, and `right` tokens follow.

    >>> a = {"pixel_values": torch.ones(2, 3), "token_type_ids": torch.tensor([[1, 1]])}
    >>> b = {"pixel_values": torch.ones(1, 4), "token_type_ids": torch.tensor([[1]])}
    >>> joined = join([a, b], left=3, right=1)
    >>> joined["pixel_values"].shape, joined["token_type_ids"].tolist()
    (torch.Size([3, 4]), [[0, 1, 1, 0], [0, 0, 1, 0]])
    """
    joined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name in PER_TOKEN:
            joined[name] = _along_tokens([row.get(name) for row in rows], left, right)
        else:
            joined[name] = _one_after_another([row[name] for row in rows if name in row], PADDING.get(name, 0))
    return joined


def join_packed(prompts: Sequence[Inputs], lengths: Sequence[int], total: int) -> dict[str, Tensor]:
    """Join the inputs of a packed row of `total` tokens that begins with prompts of these lengths.

    >>> a = {"pixel_values": torch.ones(2, 3), "token_type_ids": torch.tensor([[0, 1]])}
    >>> b = {"pixel_values": torch.ones(1, 3), "token_type_ids": torch.tensor([[1]])}
    >>> joined = join_packed([a, b], lengths=[2, 1], total=5)
    >>> joined["pixel_values"].shape, joined["token_type_ids"].tolist()
    (torch.Size([3, 3]), [[0, 1, 1, 0, 0]])
    """
    joined = {name: value for name, value in join(prompts, max(lengths), 0).items() if name not in PER_TOKEN}
    for name in PER_TOKEN:
        if any(name in prompt for prompt in prompts):
            parts = [
                prompt.get(name, torch.zeros(1, n, dtype=torch.long))
                for prompt, n in zip(prompts, lengths, strict=True)
            ]
            joined[name] = torch.cat([*parts, parts[0].new_zeros(1, total - sum(lengths))], dim=1)
    return joined


def _along_tokens(values: Sequence[Tensor | None], left: int, right: int) -> Tensor:
    """Values per token as a table, aligned with prompts that end at column `left`."""
    table = torch.zeros(len(values), left + right, dtype=torch.long)
    for line, value in enumerate(values):
        if value is not None:
            table[line, left - value.shape[-1] : left] = value[0]
    return table


def _one_after_another(values: Sequence[Tensor], fill: int) -> Tensor:
    """Join tensors along the first dimension; the others are padded to the largest."""
    shape = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    return torch.cat([_grown(value, shape, fill) for value in values])


def _grown(value: Tensor, shape: list[int], fill: int) -> Tensor:
    if list(value.shape[1:]) == shape:
        return value
    grown = value.new_full((value.shape[0], *shape), fill)
    grown[tuple(slice(size) for size in value.shape)] = value
    return grown


def fitted_to(model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """The inputs on the model's device, with images in the model's dtype."""
    device = next(model.parameters()).device
    dtype = getattr(model, "dtype", torch.float32)
    return {
        name: value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
        for name, value in inputs.items()
    }


def placeholder_ids(config: Any) -> tuple[int, ...]:
    """Placeholder tokens of images, videos and audio. Sampled, they would refer to images that do not exist."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
    found = [getattr(config, name, None) for name in names]
    return tuple(sorted({token for token in found if isinstance(token, int)}))
