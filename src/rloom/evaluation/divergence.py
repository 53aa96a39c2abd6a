"""Measures the KL of a model from a reference, on completions of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROWS_PER_FORWARD = 8


def divergence(
    model: Any, reference: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]], *, temperature: float
) -> list[float]:
    """Σ_t log π(y_t) − log π_ref(y_t) of each completion. Its mean estimates the KL of whole completions, in nats."""
    ours = sums(model, prompts, completions, temperature)
    theirs = sums(reference, prompts, completions, temperature)
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def sums(model: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]], temperature: float) -> list[float]:
    """The log-probability of each completion under softmax(logits / temperature)."""
    result: list[float] = []
    for start in range(0, len(prompts), ROWS_PER_FORWARD):
        some = slice(start, start + ROWS_PER_FORWARD)
        result += _sums(model, prompts[some], completions[some], temperature)
    return result


@torch.inference_mode()
def _sums(
    model: Any, prompts: Sequence[list[int]], completions: Sequence[list[int]], temperature: float
) -> list[float]:
    device = next(model.parameters()).device
    rows = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    ids = _padded(rows).to(device)  # (B, T)
    mask = _padded([[1] * len(row) for row in rows]).to(device)
    own = _padded([[0] * len(p) + [1] * len(c) for p, c in zip(prompts, completions, strict=True)]).to(device)
    model.eval()
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float() / temperature
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)  # (B, T − 1)
    return (logprobs * own[:, 1:]).sum(-1).tolist()


def _padded(rows: Sequence[list[int]]) -> Tensor:
    """Pad rows with zeros on the right, where padding does not change the tokens before it."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])
