"""Log-probabilities of completions under a model, from padded micro-batches.

They are of softmax(logits / temperature) over the whole vocabulary, whatever top-k or top-p did to sampling.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloom.models.load import is_peft_model
from rloom.types import MicroBatch


@dataclass(slots=True, kw_only=True)
class TokenStats:
    """What one forward says about the completion tokens, (B, C) each."""

    logprobs: Tensor
    entropy: Tensor  # detached
    logits: Tensor | None = None  # (B, C, V), kept for the exact KL only
    aux_loss: Tensor | None = None  # (), a mixture of experts' load balancing


def forward_arguments(model: Any) -> frozenset[str]:
    """The names of the optional arguments that the model's forward takes."""
    base = model.get_base_model() if is_peft_model(model) else model
    return frozenset(inspect.signature(base.forward).parameters)


def token_stats(
    model: Any,
    batch: MicroBatch,
    *,
    temperature: float,
    accepts: frozenset[str],
    keep_logits: bool = False,
    with_aux_loss: bool = False,
) -> TokenStats:
    """One forward over a micro-batch: log-probability and entropy of each completion token.

    log π(y_t) = z_t[y_t] − logsumexp(z_t),   z = logits / temperature,   H_t = logsumexp(z_t) − Σ_v π(v) z_t[v]
    """
    width = batch.completion_ids.shape[1]
    optional = {"position_ids": batch.position_ids, "logits_to_keep": width + 1, "use_cache": False}
    inputs = {name: value for name, value in optional.items() if name in accepts}
    if with_aux_loss:
        inputs["output_router_logits"] = True
    outputs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **inputs)
    # The token at position t is predicted at t − 1: drop the last position, keep the C before it.
    logits = outputs.logits[:, -width - 1 : -1].float() / temperature
    normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, batch.completion_ids.unsqueeze(-1)).squeeze(-1) - normalizer
    with torch.no_grad():
        entropy = normalizer - (torch.softmax(logits, -1) * logits).sum(-1)
    return TokenStats(
        logprobs=logprobs,
        entropy=entropy,
        logits=logits if keep_logits else None,
        aux_loss=outputs.aux_loss if with_aux_loss else None,
    )
