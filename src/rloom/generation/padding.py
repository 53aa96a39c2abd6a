"""Prompts padded on the left, as `model.generate` and the library's caches want them."""

from __future__ import annotations

import torch
from torch import Tensor


def pad_left(rows: list[list[int]], pad: int, multiple: int | None = None) -> tuple[Tensor, Tensor]:
    """Rows of one width, and their mask, (B, P) each.

    >>> pad_left([[5, 6], [7]], pad=0)
    (tensor([[5, 6],
            [0, 7]]), tensor([[1, 1],
            [0, 1]]))
    """
    width = max(map(len, rows))
    if multiple:
        width = -(-width // multiple) * multiple
    input_ids = torch.full((len(rows), width), pad, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(rows):
        input_ids[row, width - len(tokens) :] = torch.tensor(tokens)
        attention_mask[row, width - len(tokens) :] = 1
    return input_ids, attention_mask
