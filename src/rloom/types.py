"""The records that all parts share: prompts, completions, rollouts, micro-batches.

They are plain data: no model, no device logic, no I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

EOS, LENGTH, STOP_STRING, ABORTED = "eos", "length", "stop_string", "aborted"
"""Why a completion ended."""


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A prompt: text or messages, its token ids, and the data set's other columns."""

    content: str | list[dict[str, Any]]
    token_ids: list[int]
    columns: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)  # image tensors, by the names in the model's forward
    images: list[Any] = field(default_factory=list)
    number: int | None = None  # its place among the prompts of all processes; None: its place in the list

    @property
    def conversational(self) -> bool:
        """Whether the prompt is a list of messages."""
        return not isinstance(self.content, str)


@dataclass(slots=True, kw_only=True)
class Completion:
    """Sampled tokens (the end token included), why they ended, their text, and their log-probabilities.

    `mask` says which tokens the policy drew; None means all. The others, such as a tool's answer, are read by the
    policy and never trained on: losses, KL, entropy, lengths and denominators leave them out. `logprobs` has an entry
    for every token; entries of tokens that the policy did not draw are ignored.
    """

    token_ids: list[int]
    stop_reason: str
    text: str = ""
    logprobs: list[float] | None = None  # under softmax(logits / temperature), before any filter
    drawn_logprobs: list[float] | None = None  # of the filtered distribution that was sampled from, if it differs
    entropies: list[float] | None = None
    mask: list[bool] | None = None  # (T,)

    def __post_init__(self) -> None:
        if self.mask is not None and len(self.mask) != len(self.token_ids):
            raise ValueError(f"a mask of {len(self.mask)} entries for a completion of {len(self.token_ids)} tokens")

    @property
    def num_drawn(self) -> int:
        """Tokens that the policy drew: the length of the completion, as it is logged and regularised."""
        return len(self.token_ids) if self.mask is None else sum(self.mask)

    @property
    def drawn_ids(self) -> list[int]:
        """The tokens that the policy drew."""
        return drawn_of(self.token_ids, self.mask)

    @property
    def truncated(self) -> bool:
        """Whether the completion was cut off rather than ended by itself."""
        return self.stop_reason in (LENGTH, ABORTED)


@dataclass(slots=True, kw_only=True)
class Group:
    """The completions of one prompt: usually K, fewer when the engine could not give all."""

    prompt: Prompt
    completions: list[Completion]


@dataclass(slots=True, kw_only=True)
class Record:
    """What the table and the store show about one completion, once its advantage is known."""

    group: int  # its number, in the order in which groups were sampled
    prompt: Prompt
    completion: Completion
    reply: Any  # the completion as rewards see it: a text or a message
    scores: dict[str, float]
    failures: dict[str, str]  # why a reward failed, by its name
    reward: float
    extra: dict[str, Any]  # what reward functions added, by column
    advantage: float | None = None
    tokens: dict[str, Any] | None = None  # values of its tokens, where they are stored


@dataclass(slots=True, kw_only=True)
class Rollout:
    """Scored groups as flat rows: row i is a completion, `groups[i]` the number of its group.

    The collector fills in tokens and scores. The credit assigner fills in `policy_logprobs`, `reference_logprobs`, `kl`
    and `advantages`, before the first update or from its forward. Values per token have an entry for each of the D_i
    tokens that the policy drew.
    """

    prompt_ids: list[list[int]]  # one per row; rows of a group share the list
    completion_ids: list[list[int]]
    groups: Tensor  # (N,) long
    scores: Tensor  # (N, F), NaN where a function did not apply
    score: Tensor  # (N,) weighted, shaped, normalised, clipped; NaN: no score
    trained: list[bool]  # False where the row is left out of the loss (masked, empty)
    sampling_logprobs: list[list[float]] | None = None
    num_groups: int = 0  # including groups without a completion, which have no row
    ended: list[bool] | None = None  # whether it ended with an end token
    masks: list[list[bool] | None] = field(default_factory=list)  # which tokens the policy drew; None: all
    prompt_inputs: list[dict[str, Tensor]] = field(default_factory=list)  # image tensors; rows of a group share them
    policy_logprobs: list[Tensor | None] = field(default_factory=list)  # (D_i,) each, at the rollout's weights
    reference_logprobs: list[Tensor | None] = field(default_factory=list)  # (D_i,) each
    kl: list[Tensor | None] = field(default_factory=list)  # (D_i,) each
    advantages: list[Tensor | None] = field(default_factory=list)  # () or (D_i,) each
    total: Tensor | None = None  # (N,) weighted sum of scores for the log, until the first use
    records: list[Record] = field(default_factory=list)  # one per row, until the first use
    drawn: list[Record] = field(default_factory=list)  # the same, and those of groups that were replaced

    def __post_init__(self) -> None:
        if not self.prompt_inputs:
            self.prompt_inputs = [{} for _ in self.completion_ids]
        for name in ("masks", "policy_logprobs", "reference_logprobs", "kl", "advantages"):
            if not getattr(self, name):
                setattr(self, name, [None] * len(self))

    @classmethod
    def of(cls, groups: Sequence[Group], *, train_truncated: bool) -> Rollout:
        """A rollout of these groups without scores. `train_truncated`: whether truncated completions are trained on."""
        flat = [(number, group.prompt, c) for number, group in enumerate(groups) for c in group.completions]
        unknown = torch.full((len(flat),), torch.nan)
        logprobs = [None if c.logprobs is None else drawn_of(c.logprobs, c.mask) for _, _, c in flat]
        return cls(
            prompt_ids=[prompt.token_ids for _, prompt, _ in flat],
            completion_ids=[c.token_ids for _, _, c in flat],
            groups=torch.tensor([number for number, _, _ in flat]),
            scores=unknown.unsqueeze(-1),
            score=unknown,
            trained=[c.num_drawn > 0 and (train_truncated or not c.truncated) for _, _, c in flat],
            num_groups=len(groups),
            sampling_logprobs=None if any(p is None for p in logprobs) else logprobs,  # type: ignore[arg-type]
            ended=[c.stop_reason == EOS for _, _, c in flat],
            masks=[c.mask for _, _, c in flat],
            prompt_inputs=[prompt.inputs for _, prompt, _ in flat],
        )

    def __len__(self) -> int:
        return len(self.completion_ids)

    def drawn_ids(self, row: int) -> list[int]:
        """The tokens of a completion that the policy drew."""
        return drawn_of(self.completion_ids[row], self.masks[row])

    def degenerate(self) -> list[bool]:
        """For each group, whether its scores are all equal. Such a group teaches nothing, except through the KL."""
        sizes = self.groups.bincount(minlength=self.num_groups).tolist()
        known = [part[~part.isnan()] for part in self.score.split(sizes)]
        return [not bool((part != part[:1]).any()) for part in known]

    def rows(self, part: int, parts: int) -> range:
        """The rows of part number `part`, of `parts` equal contiguous ones."""
        return range(part * len(self) // parts, (part + 1) * len(self) // parts)


def drawn_of(values: list[T], mask: list[bool] | None) -> list[T]:
    """The entries of tokens that the policy drew.

    >>> drawn_of([5, 6, 7], [True, False, True])
    [5, 7]
    """
    return values if mask is None else list(itertools.compress(values, mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The places of one prompt and some of its completions in a packed row."""

    start: int  # start of the prompt
    prompt: int  # tokens of the prompt
    first: int  # start of the first completion; the others follow it
    completions: tuple[int, ...]  # tokens of each completion


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A micro-batch as one row of T tokens in which each prompt stands once: all prompts, then all completions."""

    blocks: tuple[Block, ...]
    num_prompt_tokens: int  # where the completions begin
    input_ids: Tensor  # (1, T)
    position_ids: Tensor  # (1, T)
    source: Tensor  # (N,) the position whose hidden state predicts each token that the policy drew


@dataclass(slots=True, kw_only=True)
class Share:
    """Some rows of one rollout, as an update uses them."""

    rollout: Rollout
    rows: range


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Rows of one rollout for one forward, packed (each prompt once) or padded (a row per completion).

    Tables are (B, C): a line per completion, a column per token that the policy drew. `completion_mask` is 1 where
    there is such a token.
    """

    rollout: Rollout
    rows: list[int]
    lengths: list[int]  # tokens of each completion that the policy drew
    completion_mask: Tensor  # (B, C) float
    targets: Tensor  # (N,) the tokens that the policy drew, line by line
    flat: Tensor  # (N,) the place of each target in the flattened table
    first: bool = False  # no update has used these rows: their log-probabilities here are the old policy's
    one_forward: bool = False  # their advantages come from this forward
    idle: bool = False  # nothing is learnt from it: other processes need this one to run the model
    packed: PackedRow | None = None
    input_ids: Tensor | None = None  # (B, P + C), prompts padded on the left, completions on the right
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    width: int = 0  # padded: tokens of the longest completion
    places: Tensor | None = None  # (N,) padded: the place of each target in the flattened (B, width)
    prompt_inputs: dict[str, Tensor] = field(default_factory=dict)  # image tensors, joined

    @property
    def num_tokens(self) -> int:
        """Tokens in the micro-batch that the policy drew."""
        return sum(self.lengths)

    def first_rows(self) -> list[int]:
        """For each block of a packed row, its first row in the rollout."""
        assert self.packed is not None
        sizes = [len(block.completions) for block in self.packed.blocks]
        return [self.rows[sum(sizes[:index])] for index in range(len(sizes))]

    def to_table(self, values: Tensor) -> Tensor:
        """Values of the targets as a table, (N,) → (B, C), zero elsewhere. It is differentiable."""
        table = values.new_zeros(self.completion_mask.numel()).index_copy(0, self.flat, values)
        return table.view(self.completion_mask.shape)
