"""Does vLLM draw from the policy? A few completions of its are compared with the policy's own forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rloom.generation.base import Sampling
from rloom.models.verify import Tolerance, allowed_difference, evaluating, plain_logits, probe_tokens
from rloom.types import Completion, Prompt

SEED, TOKENS, COMPLETIONS = 0, 8, 2
PROMPT_LENGTHS = (3, 24)

OTHER = 0.05
"""Added to all numbers of an adapter, it makes another one. What vLLM draws with that must differ, or it uses none."""


@dataclass(slots=True, kw_only=True)
class Probe:
    """What vLLM was asked, what it answered, and the log-probabilities of that by the policy's own forward (`own`).

    `rounding`, which costs a forward, is how far they move in the mean when the policy rounds otherwise.
    """

    prompts: list[Prompt]
    completions: list[list[Completion]]
    own: list[float]
    rounding: Callable[[], float] = lambda: 0.0

    @property
    def theirs(self) -> list[float]:
        """vLLM's log-probabilities, token by token."""
        return [value for group in self.completions for c in group for value in c.logprobs or ()]

    @property
    def tokens(self) -> list[list[int]]:
        """What was drawn."""
        return [c.token_ids for group in self.completions for c in group]

    def difference(self) -> float:
        """Mean over the tokens of how far the two are apart."""
        return mean_difference(self.own, self.theirs)

    def why_not(self, dtype: torch.dtype) -> str | None:
        """None if vLLM draws from the policy, else what is wrong."""
        found, allowed = self.difference(), Tolerance.VLLM_FLOAT32
        if dtype != torch.float32:
            allowed = allowed_difference(Tolerance.VLLM, found, self.rounding)
        if found <= allowed:
            return None
        return (
            f"its log-probabilities are {found:.2g} per token off those of the policy's own forward (allowed: "
            f"{allowed:g}), so that it would draw from another model"
        )


def mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """The mean of how far numbers of the same place are apart.

    >>> mean_difference([1.0, 2.0], [1.5, 1.0])
    0.75
    """
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def probe_sampling(sampling: Sampling) -> Sampling:
    """As in training, but short and without filters: a plain forward has no log-probabilities of filtered tokens."""
    return replace(
        sampling, max_completion_length=TOKENS, temperature=sampling.temperature or 1.0, eos_token_ids=(), top_p=1.0,
        top_k=0, min_p=None, repetition_penalty=1.0, extra={},
    )  # fmt: skip


def probe_prompts(model: Any) -> list[Prompt]:
    """A short and a longer one, of tokens that any vocabulary has."""
    return [
        Prompt(content="", token_ids=tokens) for tokens in probe_tokens(model.config.get_text_config(), *PROMPT_LENGTHS)
    ]


@torch.no_grad()
def own_logprobs(
    model: Any, prompts: Sequence[Prompt], groups: Sequence[Sequence[Completion]], temperature: float
) -> list[float]:
    """Log-probabilities of what was drawn by a plain forward, token by token."""
    found: list[float] = []
    with evaluating(model):
        for prompt, group in zip(prompts, groups, strict=True):
            for completion in group:
                logits = plain_logits(model, prompt.token_ids, completion.token_ids)[:-1].float() / temperature
                drawn = torch.tensor(completion.token_ids, device=logits.device).unsqueeze(1)
                found += logits.log_softmax(-1).gather(1, drawn).squeeze(1).tolist()
    return found
