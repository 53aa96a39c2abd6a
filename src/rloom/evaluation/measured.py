"""What one evaluation saw, prompt by prompt, and the numbers that it comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rloom.evaluation.statistics import Estimate, estimate, over_prompts, pass_at, per_token
from rloom.printable import get_logger
from rloom.types import Group, Prompt, Rollout

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Contest:
    """Whose completions a judge compares with ours: `replies` says theirs, `compare` how often ours are better."""

    replies: Callable[[Sequence[Prompt]], list[Any]]
    compare: Callable[[list[Any], list[Any], list[Any]], list[float]]

    def held(self, prompts: Sequence[Prompt], ours: list[Any]) -> Estimate:
        """The win rate; over prompts that there is a reply to."""
        pairs = zip(prompts, ours, self.replies(prompts), strict=True)
        held = [(prompt.content, our, their) for prompt, our, their in pairs if their is not None]
        if len(held) < len(prompts):
            logger.warning("%d of %d prompts have no text to compare with", len(prompts) - len(held), len(prompts))
        contents, mine, theirs = (list(column) for column in zip(*held, strict=True)) if held else ([], [], [])
        return estimate(self.compare(contents, mine, theirs) if held else [math.nan])


@dataclass(slots=True, kw_only=True)
class Measured:
    """Collects what evaluation batches show; names are those of the metrics."""

    reward_names: Sequence[str]
    contest: Contest | None = None
    prompts: list[Prompt] = field(default_factory=list)
    firsts: list[Any] = field(default_factory=list)  # each prompt's first completion, as rewards see it
    values: dict[str, list[list[float]]] = field(default_factory=dict)  # by name, per prompt
    kl: list[list[float]] = field(default_factory=list)  # of whole completions, per prompt
    tokens: int = 0  # of the completions that have a KL

    def add(self, groups: Sequence[Group], scores: Tensor, total: Tensor, replies: Sequence[Any]) -> None:
        """A batch: scores (N, F), their weighted sum (N,) and the completions as rewards see them."""
        sizes = [len(group.completions) for group in groups]
        named = {f"rewards/{name}/mean": scores[:, i] for i, name in enumerate(self.reward_names)} | {"reward": total}
        for name, column in named.items():
            self._extend(name, [part.tolist() for part in column.split(sizes)])
        completions = [group.completions for group in groups]
        self._extend("completions/mean_length", [[float(len(c.token_ids)) for c in each] for each in completions])
        self._extend("completions/clipped_ratio", [[float(c.truncated) for c in each] for each in completions])
        if self.contest is not None:
            first = [sum(sizes[:i]) for i in range(len(sizes))]
            there = [i for i, size in enumerate(sizes) if size]
            self.prompts += [groups[i].prompt for i in there]
            self.firsts += [replies[first[i]] for i in there]

    def _extend(self, name: str, groups: list[list[float]]) -> None:
        self.values.setdefault(name, []).extend(groups)

    def add_kl(self, rollout: Rollout) -> None:
        """The KL of the same batch, where there is a reference."""
        per_group: dict[int, list[float]] = {}
        for group, kl in zip(rollout.groups.tolist(), rollout.kl, strict=True):
            if kl is not None:
                per_group.setdefault(group, []).append(float(kl.sum()))
                self.tokens += len(kl)
        self.kl += per_group.values()

    def join(self, several: Sequence[Measured]) -> None:
        """Take in what other processes have measured, or this one earlier."""
        for one in several:
            self.prompts += one.prompts
            self.firsts += one.firsts
            for name, groups in one.values.items():
                self._extend(name, groups)
            self.kl += one.kl
            self.tokens += one.tokens

    def estimates(self) -> dict[str, Estimate]:
        """All numbers by name, but the win rate."""
        found = {name: over_prompts(groups) for name, groups in self.values.items()}
        for name in self.reward_names:
            for k, rate in pass_at(self.values.get(f"rewards/{name}/mean", [])).items():
                found[f"rewards/{name}/pass@{k}"] = rate
        if self.kl:
            found["kl"] = per_token(over_prompts(self.kl), self.tokens / sum(map(len, self.kl)))
        return found

    def win_rate(self) -> Estimate | None:
        """The share of prompts on which the judge prefers our first completion; None without a judge."""
        return self.contest.held(self.prompts, self.firsts) if self.contest is not None and self.prompts else None
