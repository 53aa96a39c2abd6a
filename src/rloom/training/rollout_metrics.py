"""Metrics of a rollout: lengths, scores and costs of its completions.

With several processes, they cover the completions of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rloom.algo import masked_std
from rloom.observe.metric_table import is_total
from rloom.rewards.library.size import repeated_share
from rloom.rewards.scored import Scored
from rloom.types import Group

Report = list[tuple[str, float]]
"""Metrics by name, in the order in which they were noted."""


@dataclass(slots=True, kw_only=True)
class RolloutMetrics:
    """What a rollout's metrics are computed from."""

    lengths: Tensor  # (N,) tokens that the policy drew
    repetition: Tensor  # (N,) the share of their pairs of neighbours that stood there before
    ended: Tensor  # (N,) whether they ended by themselves
    scores: Tensor  # (N, F)
    total: Tensor  # (N,)
    sizes: list[int]  # completions of each group
    asked: int  # completions that were asked for
    num_tokens: int  # of prompts and completions
    report: Report = field(default_factory=list)  # seconds, failures and ratios of the rewards' calls
    logged: Report = field(default_factory=list)  # metrics that the rewards logged
    totals: dict[str, float] = field(default_factory=dict)  # running totals that the rewards logged

    @classmethod
    def of(cls, groups: Sequence[Group], scored: Scored, total: Tensor, asked: int) -> RolloutMetrics:
        """The metrics of some groups. `asked`: completions that were asked for in each."""
        completions = [c for group in groups for c in group.completions]
        return cls(
            lengths=torch.tensor([float(c.num_drawn) for c in completions]),
            repetition=torch.tensor([repeated_share(c.drawn_ids, 2) for c in completions]),
            ended=torch.tensor([not c.truncated for c in completions]),
            scores=scored.scores,
            total=total,
            sizes=[len(group.completions) for group in groups],
            asked=asked * len(groups),
            num_tokens=sum(len(g.prompt.token_ids) + len(c.token_ids) for g in groups for c in g.completions),
            report=list(scored.costs),
            logged=[(name, value) for name, value in scored.logged if not is_total(name)],
            totals=_largest([(name, value) for name, value in scored.logged if is_total(name)]),
        )

    @classmethod
    def nothing(cls, num_rewards: int) -> RolloutMetrics:
        """The metrics of no completions."""
        empty = torch.zeros(0)
        scores = torch.zeros(0, num_rewards)
        return cls(
            lengths=empty,
            repetition=empty,
            ended=empty.bool(),
            scores=scores,
            total=empty,
            sizes=[],
            asked=0,
            num_tokens=0,
        )

    @classmethod
    def joined(cls, several: Sequence[RolloutMetrics]) -> RolloutMetrics:
        """Join the parts of several processes, as if one process had all completions."""
        return cls(
            lengths=torch.cat([one.lengths for one in several]),
            repetition=torch.cat([one.repetition for one in several]),
            ended=torch.cat([one.ended for one in several]),
            scores=torch.cat([one.scores for one in several]),
            total=torch.cat([one.total for one in several]),
            sizes=[size for one in several for size in one.sizes],
            asked=sum(one.asked for one in several),
            num_tokens=sum(one.num_tokens for one in several),
            report=joined_reports([(one.report, len(one.lengths)) for one in several]),
            logged=[entry for one in several for entry in one.logged],
            totals=_summed([one.totals for one in several]),
        )

    def record(self, names: Sequence[str], add: Callable[[str, Any], None]) -> None:
        """Call `add(name, value)` for each metric. `names` are those of the rewards."""
        if not len(self.lengths):
            return
        add("completions/mean_length", self.lengths.mean())
        add("completions/min_length", self.lengths.min())
        add("completions/max_length", self.lengths.max())
        add("completions/clipped_ratio", (~self.ended).float().mean())
        finished = self.lengths[self.ended] if self.ended.any() else torch.zeros(1)
        add("completions/mean_terminated_length", finished.mean())
        add("completions/min_terminated_length", finished.min())
        add("completions/max_terminated_length", finished.max())
        add("completions/repetition", self.repetition.mean())
        self._record_scores(names, add)

    def _record_scores(self, names: Sequence[str], add: Callable[[str, Any], None]) -> None:
        for index, name in enumerate(names):
            add(f"rewards/{name}/mean", self.scores[:, index].nanmean())
            add(f"rewards/{name}/std", masked_std(self.scores[:, index]))
        for name, value in self.report:
            add(name, value)
        add("reward", self.total.nanmean())
        add("reward_std", masked_std(self.total))
        spreads = [masked_std(part) for part in self.total.split(self.sizes)]
        equal = [bool(torch.isclose(s, torch.zeros(()))) for s in spreads]
        add("frac_reward_zero_std", sum(equal) / len(equal))
        missing = self.asked - sum(self.sizes)
        unscored = int(self.total.isnan().sum())
        if missing or unscored:
            add("completions/unscored_ratio", (missing + unscored) / self.asked)


def _largest(entries: Report) -> dict[str, float]:
    """The largest value of each name.

    >>> _largest([("a", 1.0), ("a", 3.0), ("b", 2.0)])
    {'a': 3.0, 'b': 2.0}
    """
    return dict(sorted(entries, key=lambda entry: entry[1]))


def _summed(several: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in several for name in one)
    return {name: sum(one.get(name, 0.0) for one in several) for name in names}


def joined_reports(several: Sequence[tuple[Report, int]]) -> Report:
    """Join the reports of several processes, each given with its number of completions.

    Seconds and failures are summed. Ratios are weighted by the number of completions. A name that a process did not
    report counts as 0 there.

    >>> joined_reports([([("time", 1.0), ("none_ratio", 0.5)], 4), ([("time", 2.0)], 12)])
    [('time', 3.0), ('none_ratio', 0.125)]
    """
    found: dict[str, float] = {}
    completions = max(1, sum(count for _, count in several))
    for report, count in several:
        for name, value in report:
            part = value * count / completions if name.endswith("_ratio") else value
            found[name] = found.get(name, 0.0) + part
    return list(found.items())
