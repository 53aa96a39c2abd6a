"""How a reward is called and what it may return."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol

from torch import Tensor

from rloom.errors import RewardError
from rloom.rewards.marks import Marks


@dataclass(slots=True, kw_only=True)
class RewardBatch:
    """The completions to score, flat: one entry per completion. `columns` are the data set's other columns."""

    prompts: list[Any]
    completions: list[Any]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    trainer_state: Any = None
    log_extra: Callable[[str, list[Any]], None] | None = None
    log_metric: Callable[[str, float], None] | None = None
    check_metric: Callable[[str, Any], None] | None = None  # raises where `log_metric` would

    def __len__(self) -> int:
        return len(self.completions)

    def take(self, rows: Sequence[int]) -> RewardBatch:
        """Some of the completions, as a batch of their own."""
        return replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            completions=[self.completions[row] for row in rows],
            completion_ids=[self.completion_ids[row] for row in rows],
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
        )

    def arguments(self) -> dict[str, Any]:
        """All that a reward function may ask for, by name."""
        return {
            **self.columns,
            "prompts": self.prompts,
            "completions": self.completions,
            "completion_ids": self.completion_ids,
            "trainer_state": self.trainer_state,
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }


class Reward(Protocol):
    """One source of scores."""

    name: str
    marks: Marks

    def score(self, batch: RewardBatch) -> Any:
        """One number, or None for "not applicable", per completion; or a coroutine that returns that."""
        ...


def one_per_completion(values: Any, name: str, expected: int) -> list[Any]:
    """A reward's return value as a list of the right length, or an error that names the function."""
    if hasattr(values, "detach"):
        values = values.detach()
    if getattr(values, "ndim", 1) != 1:
        raise RewardError(
            f"The reward function '{name}' returned an array of shape {tuple(values.shape)}; one number per completion "
            f"is expected, {expected} in all"
        )
    if isinstance(values, (str, bytes, Mapping, Set)) or not hasattr(values, "__len__"):
        if values is None:
            raise RewardError(f"The reward function '{name}' returned None, a NoneType: is a `return` missing?")
        raise RewardError(
            f"The reward function '{name}' returned {type(values).__name__} {str(values)[:60]!r}; it must return a "
            f"list with one number (or None) per completion, {expected} in all"
        )
    if isinstance(values, Tensor):
        values = values.tolist()
    if len(values) != expected:
        raise RewardError(
            f"The reward function '{name}' returned {len(values)} rewards, but {expected} were expected (one per "
            "prompt-completion pair)"
        )
    return list(values)


def as_score(value: Any, name: str, index: int) -> float | None:
    """One sample's value as a float or None, or an error that names the function and the sample."""
    if value is None:
        return None
    if isinstance(value, Tensor) or (hasattr(value, "item") and not isinstance(value, Real)):
        value = value.item()
    if not isinstance(value, Real):
        raise RewardError(
            f"The reward function '{name}' returned {type(value).__name__} {str(value)[:60]!r} for sample {index}; "
            "a reward is a number, or None where the function does not apply"
        )
    number = float(value)
    if not math.isfinite(number):
        what = "NaN" if math.isnan(number) else "infinity"
        raise RewardError(
            f"The reward function '{name}' returned {what} for sample {index}; return None where there is no score"
        )
    return number


def unique_names(names: list[str]) -> list[str]:
    """Names with a number added where one appears again, so that no metric overwrites another.

    >>> unique_names(["length", "length"])
    ['length', 'length_2']
    """
    counts: dict[str, int] = {}
    result = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        result.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return result
