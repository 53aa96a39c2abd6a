"""The scores of completions by all reward functions: one record, which goes to the rollout, the log and the store."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Scored:
    """Scores of N completions by F reward functions, with what went wrong, what it cost and what they logged."""

    scores: Tensor  # (N, F) float32, NaN for None
    failed: Tensor  # (N, F), where a call failed
    reasons: dict[int, dict[str, str]] = field(default_factory=dict)  # row → function → why it gave no score
    costs: list[tuple[str, float]] = field(default_factory=list)  # metrics: seconds, failures, shares of None
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns that functions added, a value per completion
    logged: list[tuple[str, float]] = field(default_factory=list)  # metrics that functions logged

    @classmethod
    def nothing(cls, count: int, num_rewards: int) -> Scored:
        """The record of so many completions, before any function has scored one."""
        shape = (count, num_rewards)
        return cls(scores=torch.full(shape, torch.nan), failed=torch.zeros(shape, dtype=torch.bool))

    def note_failure(self, index: int, name: str, rows: Sequence[int], reason: str) -> None:
        """Note that a function's call for these rows failed."""
        self.failed[list(rows), index] = True
        for row in rows:
            self.reasons.setdefault(row, {})[name] = reason

    def note_cost(self, name: str, column: Sequence[float], failures: dict[str, int], seconds: float) -> None:
        """Note how long one function's calls took, how many completions it gave no score, and what failed by kind."""
        self.costs.append((f"rewards/{name}/time", seconds))
        none = sum(math.isnan(value) for value in column)
        if none:
            self.costs.append((f"rewards/{name}/none_ratio", none / len(column)))
        self.costs += [(f"rewards/{name}/{kind}", float(count)) for kind, count in failures.items()]

    def add_column(self, column: str, values: Sequence[Any]) -> None:
        """Add a column that a function logged. Two functions may choose the same name, and both columns are kept.

        >>> scored = Scored.nothing(1, 2)
        >>> scored.add_column("why", ["a"])
        >>> scored.add_column("why", ["b"])
        >>> scored.extra
        {'why': ['a'], 'why (2)': ['b']}
        """
        names = itertools.chain([column], (f"{column} ({n})" for n in itertools.count(2)))
        self.extra[next(name for name in names if name not in self.extra)] = list(values)
