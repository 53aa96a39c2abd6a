"""The data that every part shares. Plain records: no model, no device logic, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

EOS, LENGTH, STOP_STRING, ABORTED = "eos", "length", "stop_string", "aborted"
"""Why a completion ended."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    """What the policy is given: text or messages, its token ids, and the data set's other columns."""

    content: str | list[dict[str, Any]]
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)

    @property
    def conversational(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.content, str)


@dataclass(slots=True, kw_only=True)
class Completion:
    """Sampled tokens (the end token included), why they ended, their text, their sampling log-probabilities."""

    token_ids: list[int]
    stop_reason: str
    text: str = ""
    logprobs: list[float] | None = None

    @property
    def truncated(self) -> bool:
        """Whether the completion was cut off rather than ended by itself."""
        return self.stop_reason in (LENGTH, ABORTED)


@dataclass(slots=True, kw_only=True)
class Group:
    """The completions of one prompt. Usually K of them; fewer when some could not be had."""

    prompt: Prompt
    completions: list[Completion]


@dataclass(slots=True, kw_only=True)
class Rollout:
    """One step's scored groups as flat rows: row i is a completion, `groups[i]` its prompt's number.

    What is known from the scores alone is filled when the rollout is collected. `policy_logprobs`, `kl` and
    `advantages` are the learner's: filled before the first update (two passes) or by it (one forward).
    """

    prompt_ids: list[list[int]]  # one per row; rows of a group share the list
    completion_ids: list[list[int]]
    groups: Tensor  # (N,) long
    scores: Tensor  # (N, F), NaN where a function did not apply
    score: Tensor  # (N,) weighted, shaped, normalised, clipped; NaN: unscorable
    trained: Tensor  # (N,) bool: False where the row is left out of the loss (masked, empty)
    sampling_logprobs: list[list[float]] | None = None
    policy_logprobs: list[Tensor | None] = field(default_factory=list)  # (T_i,) each, at the rollout's weights
    reference_logprobs: list[Tensor | None] = field(default_factory=list)  # (T_i,) each
    kl: list[Tensor | None] = field(default_factory=list)  # (T_i,) each
    advantages: list[Tensor | None] = field(default_factory=list)  # () or (T_i,) each
    logged: bool = False  # whether the advantages are in the table of completions

    def __post_init__(self) -> None:
        for name in ("policy_logprobs", "reference_logprobs", "kl", "advantages"):
            if not getattr(self, name):
                setattr(self, name, [None] * len(self))

    def __len__(self) -> int:
        return len(self.completion_ids)

    def rows(self, part: int, parts: int) -> range:
        """The rows of one of `parts` equal contiguous shares."""
        return range(part * len(self) // parts, (part + 1) * len(self) // parts)


@dataclass(slots=True, kw_only=True)
class Share:
    """Some rows of one rollout, as an update uses them."""

    rollout: Rollout
    rows: range


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows of one rollout padded into tensors for one forward: prompts on the left, completions on the right."""

    rollout: Rollout
    rows: list[int]
    input_ids: Tensor  # (B, P + C)
    attention_mask: Tensor  # (B, P + C)
    position_ids: Tensor  # (B, P + C)
    completion_ids: Tensor  # (B, C)
    completion_mask: Tensor  # (B, C) float
    lengths: list[int]  # completion lengths

    @property
    def num_tokens(self) -> int:
        """Completion tokens in the micro-batch."""
        return sum(self.lengths)
