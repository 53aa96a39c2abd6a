"""What an engine is: prompts in, groups of token ids out. Text is decoded by whoever needs it, never re-tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rloom.types import EOS, LENGTH, Completion, Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn. `extra` holds options of one engine alone."""

    max_completion_length: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """Generates groups of completions with the policy's current weights."""

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's group as it finishes, in any order; equal `seed` and weights, equal tokens."""
        ...


def cut_at_end(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> Completion:
    """The completion up to its first end token, which belongs to it.

    The position of the first end token decides, not equality with the padding token: in many models they are the same.

    >>> cut_at_end([5, 6, 2, 2, 2], eos_token_ids=[2])
    Completion(token_ids=[5, 6, 2], stop_reason='eos', text='', logprobs=None, drawn_logprobs=None, entropies=None)
    """
    for position, token in enumerate(tokens):
        if token in eos_token_ids:
            return Completion(token_ids=list(tokens[: position + 1]), stop_reason=EOS)
    return Completion(token_ids=list(tokens), stop_reason=LENGTH)
