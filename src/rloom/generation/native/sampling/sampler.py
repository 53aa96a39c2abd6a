"""Drawing tokens from logits: temperature, filters, the draw itself, and what is remembered of it.

    z = logits / temperature,  plain = log softmax(z) over the whole vocabulary
    the draw is from softmax(z) over the tokens that the filters leave

Order and meaning of the filters are `model.generate`'s: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.generation.base import Sampling
from rloom.generation.native.sampling.noise import uniform
from rloom.models.triton_support import runs_kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token per row, (B,) each."""

    tokens: Tensor  # int64
    logprobs: Tensor  # of the plain distribution
    drawn_logprobs: Tensor  # of the one that was drawn from
    entropies: Tensor  # of the plain distribution

    def stats(self) -> Tensor:
        """What is remembered of a draw, (B, 3)."""
        return torch.stack([self.logprobs, self.drawn_logprobs, self.entropies], -1)


class Sampler:
    """Draws with fixed options. Temperature 0 takes the likeliest token, and its log-probabilities are at 1."""

    def __init__(self, sampling: Sampling, never: Sequence[int] = ()) -> None:
        self.greedy = sampling.temperature == 0.0
        self.temperature = sampling.temperature or 1.0
        self.top_k, self.top_p, self.min_p = sampling.top_k, sampling.top_p, sampling.min_p
        self.penalty = sampling.repetition_penalty
        # Tokens that are not drawn.
        self.never = torch.tensor(list(never), dtype=torch.long) if never else None
        # Whether only tokens from some logit upwards are drawn.
        self.bounded = bool(self.top_k) or self.top_p < 1.0 or bool(self.min_p)
        self.filters = self.bounded or self.penalty != 1.0 or bool(never)

    def __call__(self, logits: Tensor, keys: Tensor, positions: Tensor, seen: Tensor | None = None) -> Drawn:
        """From logits (B, V); `seen` (B, V) marks tokens that the repetition penalty is about."""
        if runs_kernels(logits.device):
            from rloom.generation.native.kernels.draw import draw

            return draw(logits, self.changed(logits, seen), keys, positions, self)
        z = logits.float() / self.temperature
        kept = self.filtered(logits, seen) if self.filters else z
        tokens = kept.argmax(-1) if self.greedy else _inverse(kept, uniform(keys, positions))
        plain = z.log_softmax(-1)
        chosen = tokens.unsqueeze(-1)
        logprobs = plain.gather(-1, chosen).squeeze(-1)
        drawn = kept.log_softmax(-1).gather(-1, chosen).squeeze(-1) if self.filters else logprobs
        return Drawn(tokens=tokens, logprobs=logprobs, drawn_logprobs=drawn, entropies=-(plain.exp() * plain).sum(-1))

    def filtered(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Logits over the temperature as they are drawn from, −inf for tokens that the filters take out."""
        changed = self.changed(logits, seen)
        z = (logits.float() if changed is None else changed) / self.temperature
        if self.top_k:
            least = z.topk(min(self.top_k, z.shape[-1])).values[..., -1:]
            z = z.masked_fill(z < least, -torch.inf)
        if self.top_p < 1.0:
            z = z.masked_fill(~_nucleus(z, self.top_p), -torch.inf)
        if self.min_p:
            p = z.softmax(-1)
            z = z.masked_fill(p < self.min_p * p.amax(-1, keepdim=True), -torch.inf)
        return z

    def changed(self, logits: Tensor, seen: Tensor | None = None) -> Tensor | None:
        """Logits with the repetition penalty, −inf for tokens that are never drawn; None if they stay what they are."""
        penalised = seen is not None and self.penalty != 1.0
        if not penalised and self.never is None:
            return None
        z = logits.float()
        if penalised:
            z = torch.where(seen, torch.where(z < 0, z * self.penalty, z / self.penalty), z)  # type: ignore[arg-type]
        return z if self.never is None else z.index_fill(-1, self.never, -torch.inf)


def _nucleus(z: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens whose probability reaches top_p; never empty."""
    ordered, order = z.sort(-1)
    # Ascending: what a token and all less likely ones have together.
    before = ordered.softmax(-1).cumsum(-1)
    kept = before > 1.0 - top_p
    kept[..., -1] = True
    return torch.zeros_like(kept).scatter(-1, order, kept)


def _inverse(z: Tensor, u: Tensor) -> Tensor:
    """The token at which the summed probability passes u, (B,)."""
    p = z.softmax(-1)
    sums = p.cumsum(-1)
    passed = (sums > u.unsqueeze(-1) * sums[:, -1:]) & (p > 0)
    first = passed.int().argmax(-1)
    # Rounding may leave no token: then it is the likeliest.
    return torch.where(passed.any(-1), first, z.argmax(-1))
