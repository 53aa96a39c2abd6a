"""Collects the values of one evaluation per prompt, and estimates its metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rloom.evaluation.statistics import Estimate, estimate, over_prompts, pass_at, per_token
from rloom.observe.completions import sendable_values
from rloom.printable import get_logger
from rloom.types import Prompt, Rollout

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class WinRate:
    """How often a judge prefers our completions. `replies` gives the opponent's, `compare` the share that ours win."""

    replies: Callable[[Sequence[Prompt]], list[Any]]
    compare: Callable[[list[Any], list[Any], list[Any]], list[float]]

    def measure(self, prompts: Sequence[Prompt], ours: list[Any]) -> Estimate:
        """The win rate over the prompts that the opponent has a reply to."""
        pairs = zip(prompts, ours, self.replies(prompts), strict=True)
        compared = [(prompt.content, our, their) for prompt, our, their in pairs if their is not None]
        if len(compared) < len(prompts):
            logger.warning("%d of %d prompts have no text to compare with", len(prompts) - len(compared), len(prompts))
        contents, mine, theirs = (list(column) for column in zip(*compared, strict=True)) if compared else ([], [], [])
        return estimate(self.compare(contents, mine, theirs) if compared else [math.nan])


@dataclass(slots=True, kw_only=True)
class Measured:
    """The values of evaluation batches, by the names of the metrics."""

    reward_names: Sequence[str]
    win_rate_of: WinRate | None = None
    prompts: list[Prompt] = field(default_factory=list)
    firsts: list[Any] = field(default_factory=list)  # each prompt's first completion, as rewards see it
    values: dict[str, list[list[float]]] = field(default_factory=dict)  # by name, per prompt
    kl: list[list[float]] = field(default_factory=list)  # sums over whole completions, per prompt
    tokens: int = 0  # of the completions that have a KL

    def add(self, rollout: Rollout) -> None:
        """Add a batch whose records have not been written yet. Its KL is added where there is a reference."""
        scores, records = rollout.scores, rollout.records
        named = {f"rewards/{name}/mean": scores[:, i].tolist() for i, name in enumerate(self.reward_names)}
        assert rollout.total is not None
        named["reward"] = rollout.total.tolist()
        named["completions/mean_length"] = [float(len(rollout.drawn_ids(row))) for row in range(len(rollout))]
        named["completions/clipped_ratio"] = [float(record.completion.truncated) for record in records]
        groups: list[list[int]] = [[] for _ in range(rollout.num_groups)]
        for row, group in enumerate(rollout.groups.tolist()):
            groups[group].append(row)
        for name, column in named.items():
            self._extend(name, [[column[row] for row in rows] for rows in groups])
        self._add_kl(rollout)
        if self.win_rate_of is not None:
            firsts = [records[rows[0]] for rows in groups if rows]
            self.prompts += [record.prompt for record in firsts]
            self.firsts += [record.reply for record in firsts]

    def _extend(self, name: str, groups: list[list[float]]) -> None:
        self.values.setdefault(name, []).extend(groups)

    def _add_kl(self, rollout: Rollout) -> None:
        per_group: dict[int, list[float]] = {}
        for group, kl in zip(rollout.groups.tolist(), rollout.kl, strict=True):
            if kl is not None:
                per_group.setdefault(group, []).append(float(kl.sum()))
                self.tokens += len(kl)
        self.kl += per_group.values()

    def join(self, several: Sequence[Measured]) -> None:
        """Add what other processes, or earlier batches, have measured."""
        for one in several:
            self.prompts += one.prompts
            self.firsts += one.firsts
            for name, groups in one.values.items():
                self._extend(name, groups)
            self.kl += one.kl
            self.tokens += one.tokens

    def sendable(self) -> Measured:
        """A copy that can be sent to another process. The judge is left out, and columns are made sendable."""
        prompts = [replace(p, columns=sendable_values(p.columns), images=[]) for p in self.prompts]
        return replace(self, win_rate_of=None, prompts=prompts)

    def estimates(self) -> dict[str, Estimate]:
        """The estimates of all metrics by name, except the win rate."""
        found = {name: over_prompts(groups) for name, groups in self.values.items()}
        for name in self.reward_names:
            for k, rate in pass_at(self.values.get(f"rewards/{name}/mean", [])).items():
                found[f"rewards/{name}/pass@{k}"] = rate
        if self.kl:
            found["kl"] = per_token(over_prompts(self.kl), self.tokens / sum(map(len, self.kl)))
        return found

    def win_rate(self) -> Estimate | None:
        """The share of prompts on which the judge prefers our first completion; None without a judge."""
        if self.win_rate_of is None or not self.prompts:
            return None
        return self.win_rate_of.measure(self.prompts, self.firsts)
