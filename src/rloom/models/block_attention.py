"""Packed attention in plain torch, block by block: a prompt on itself, then its completions on that and themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rloom.types import PackedRow


def attend_blocks(
    query: Tensor,  # (H, T, D)
    key: Tensor,  # (H_kv, T, D)
    value: Tensor,
    row: PackedRow,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """The attention's output, (H, T, D). Completions of a block are padded to one length: prompts never are."""
    repeat = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(repeat, 0), value.repeat_interleave(repeat, 0)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout": dropout}
    prompts: list[Tensor] = []
    completions: list[Tensor] = []
    for block in row.blocks:
        q, k, v = (x[:, block.start : block.start + block.prompt].unsqueeze(0) for x in (query, key, value))
        prompts.append(_attend(q, k, v, _causal(block.prompt, 0, window, q.device), **options)[0])  # (H, P, D)
        # A prompt alone, as generation begins with it.
        if not block.completions:
            continue
        end = block.first + sum(block.completions)
        own = [_stack(x[:, block.first : end], block.completions) for x in (query, key, value)]  # (K, H, C, D)
        count, _, width, _ = own[0].shape
        keys = torch.cat([k.expand(count, -1, -1, -1), own[1]], 2)  # (K, H, P + C, D)
        values = torch.cat([v.expand(count, -1, -1, -1), own[2]], 2)
        mask = _causal(width, block.prompt, window, q.device)
        out = _attend(own[0], keys, values, mask, **options)
        completions += [out[i, :, :length] for i, length in enumerate(block.completions)]
    return torch.cat(prompts + completions, 1)


def _stack(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """(H, ΣC, D) → (K, H, C, D), zero-padded at the end, which a causal mask never looks at."""
    width = max(lengths)
    pieces = x.split(list(lengths), 1)
    return torch.stack([F.pad(piece, (0, 0, 0, width - piece.shape[1])) for piece in pieces])


def _causal(queries: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Which query (rows) sees which key, (Q, before + Q): all that came before it, within the window."""
    own = torch.arange(before, before + queries, device=device).unsqueeze(1)
    other = torch.arange(before + queries, device=device).unsqueeze(0)
    seen = other <= own
    return seen if window is None else seen & (other > own - window)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """(B, H, Q, D). The library's kernel, or plain arithmetic where it knows no soft-cap or sink."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # One more column, which takes probability and gives nothing.
        column = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return F.dropout(weights, dropout).to(q.dtype) @ v
