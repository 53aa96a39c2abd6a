"""What a reward function is given, and what it may return: a score for each completion."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from rloom.errors import RewardError
from rloom.printable import printable
from rloom.rewards.calling.call_options import CallOptions


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

    def own(self) -> RewardBatch:
        """A copy with lists and dicts of its own: what a function does to them does not reach the data set, the other
        functions, or the log."""
        return replace(
            self,
            prompts=own(self.prompts),
            completions=own(self.completions),
            # They are many, and hold numbers alone: one level is enough.
            completion_ids=[list(x) if type(x) is list else x for x in self.completion_ids],
            columns=own(self.columns),
        )

    def holds_the_same(self, other: RewardBatch) -> bool:
        """Whether prompts, completions and columns are equal; what cannot be compared counts as different."""
        try:
            return bool(
                self.prompts == other.prompts
                and self.completions == other.completions
                and self.completion_ids == other.completion_ids
                and self.columns == other.columns
            )
        except Exception:
            # The comparison of arrays has no one answer.
            return False

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


def own(value: Any) -> Any:
    """Copy lists and dicts at every depth. What is in them is not copied.

    >>> messages = [{"content": "a"}]
    >>> own(messages) == messages, own(messages)[0] is messages[0]
    (True, False)
    """
    if type(value) is list:
        return [own(v) for v in value]
    if type(value) is dict:
        return {k: own(v) for k, v in value.items()}
    return value


class Reward(Protocol):
    """One source of scores: a function, a model, an object, a service."""

    name: str
    call_options: CallOptions

    def score(self, batch: RewardBatch) -> Any:
        """One number, or None for "not applicable", per completion; or a coroutine that returns that."""
        ...


LARGEST = torch.finfo(torch.float32).max


def shown(value: Any, limit: int = 60) -> str:
    """The beginning of a value as text, for a message. A value of the user's own may refuse even that."""
    try:
        return str(value)[:limit]
    except Exception as error:
        return f"(whose text cannot be had: {type(error).__name__})"


def one_per_completion(values: Any, name: str, expected: int) -> list[Any]:
    """What a reward function returned, as a list of the right length; or an error that names the function."""
    try:
        return _one_per_completion(values, name, expected)
    except RewardError:
        raise
    except Exception as error:
        # It is an object that only looks like a list.
        raise RewardError(
            f"The reward function '{name}' returned {type(values).__name__}, which cannot be read as a list of "
            f"{expected} numbers: {type(error).__name__}: {shown(error)}"
        ) from None


def _one_per_completion(values: Any, name: str, expected: int) -> list[Any]:
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
            f"The reward function '{name}' returned {type(values).__name__} {shown(values)!r}; it must return a "
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
    """One sample's score as a float or None; or an error that names the function and the sample."""
    if value is None:
        return None
    try:
        if isinstance(value, Tensor) or (hasattr(value, "item") and not isinstance(value, Real)):
            value = value.item()
        number = float(value) if isinstance(value, Real) else None
    except Exception:
        # A tensor holds several numbers, say, or a whole number has a thousand digits.
        number = None
    if number is None:
        raise RewardError(
            f"The reward function '{name}' returned {type(value).__name__} {shown(value)!r} for sample {index}; "
            "a score is a number that fits in a float, or None where the function does not apply"
        )
    # Scores are kept in float32.
    if math.isfinite(number) and abs(number) > LARGEST:
        raise RewardError(
            f"The reward function '{name}' returned {number:g} for sample {index}, which is infinity in float32"
        )
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
    for name in map(printable, names):
        counts[name] = counts.get(name, 0) + 1
        result.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return result
