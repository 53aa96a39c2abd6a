"""How a reward is called and what it may return."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor

from rloom.errors import RewardError

logger = logging.getLogger(__name__)


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

    def score(self, batch: RewardBatch) -> Any:
        """One number, or None for "not applicable", per completion; or a coroutine that returns that."""
        ...


def checked(values: Any, name: str, expected: int) -> list[float | None]:
    """A reward's return value as floats and Nones, or an error that names the function and the sample."""
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
    return [_checked_one(value, name, index) for index, value in enumerate(values)]


def _checked_one(value: Any, name: str, index: int) -> float | None:
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


class RewardSet:
    """All rewards of a run: calls them, checks what they return, and keeps one column of scores each."""

    def __init__(self, rewards: Sequence[Reward], weights: Sequence[float] | None) -> None:
        if not rewards:
            raise RewardError("no reward function: pass at least one as `reward_funcs`")
        if weights is not None and len(weights) != len(rewards):
            raise RewardError(
                f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(rewards)})"
            )
        self.rewards = list(rewards)
        self.names = _unique([reward.name for reward in rewards])
        self.weights = torch.tensor(weights if weights is not None else [1.0] * len(rewards), dtype=torch.float32)

    def score(self, batch: RewardBatch) -> Tensor:
        """Scores (N, F) in float32, NaN for None. Coroutines run side by side, after the plain functions."""
        columns: list[Any] = [self._score(reward, batch) for reward in self.rewards]
        columns = _await_all(columns)
        values = [checked(c, name, len(batch)) for c, name in zip(columns, self.names, strict=True)]
        scores = torch.tensor(
            [[math.nan if v is None else v for v in column] for column in values], dtype=torch.float32
        ).T.contiguous()
        _warn_unscored(scores, batch)
        return scores

    def _score(self, reward: Reward, batch: RewardBatch) -> Any:
        try:
            return reward.score(batch)
        except Exception as error:
            kind = "texts, since the prompts are texts" if isinstance(batch.prompts[0], str) else "lists of messages"
            error.add_note(f"in the reward '{reward.name}', on {len(batch)} completions, which are {kind}")
            raise


def _await_all(columns: list[Any]) -> list[Any]:
    pending = [c for c in columns if hasattr(c, "__await__")]
    if not pending:
        return columns
    from rloom.rewards.async_loop import run_all

    done = iter(run_all(pending))
    return [next(done) if hasattr(c, "__await__") else c for c in columns]


def _unique(names: list[str]) -> list[str]:
    """Names with a number added where one appears again, so that no metric overwrites another."""
    counts: dict[str, int] = {}
    result = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        result.append(name if counts[name] == 1 else f"{name}_{counts[name]}")
    return result


def _warn_unscored(scores: Tensor, batch: RewardBatch) -> None:
    unscored = scores.isnan().all(1).nonzero().flatten().tolist()
    if not unscored:
        return
    index = unscored[0]
    row = {name: values[index] for name, values in batch.columns.items()}
    row |= {"prompt": batch.prompts[index], "completion": batch.completions[index]}
    logger.warning(
        "All reward functions returned None for the following kwargs:\n%s\n%d of %d completions in this rollout have "
        "no score: they are left out of their siblings' baseline and get advantage 0.",
        row,
        len(unscored),
        len(batch),
    )
