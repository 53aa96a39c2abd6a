"""Plays a run's stored completions and scores back, in place of the engine and the rewards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.data.images import without_images
from rloom.errors import DataError
from rloom.observe.runs import RunReader
from rloom.rewards.scored import Scored
from rloom.types import Completion, Group, Prompt


class StoredEngine:
    """Yields the completions that a run has stored for its current step, in their order."""

    keyed_by_prompt = False
    takes_images = True

    def __init__(self, run: RunReader, trainer: Any) -> None:
        self.run, self.trainer = run, trainer
        self.played: list[dict[str, Any]] = []  # the rows of the latest rollout
        self._step = -1
        self._left: list[list[dict[str, Any]]] = []  # groups of the step that have not been played yet

    def words(self) -> str:
        """What generates, in one line."""
        return f"completions of {self.run.folder}"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's stored group."""
        groups = [self._next_group(prompt) for prompt in prompts]
        self.played = [row for group in groups for row in group]
        for prompt, group in zip(prompts, groups, strict=True):
            yield Group(prompt=prompt, completions=[_completion(row) for row in group])

    def _next_group(self, prompt: Prompt) -> list[dict[str, Any]]:
        step = self.trainer.state.global_step + 1
        if step != self._step:
            self._step, self._left = step, stored_groups(self.run, step)
        group = self._left.pop(0) if self._left else []
        asked = json.loads(json.dumps(without_images(prompt.content), default=str))
        if not group or group[0].get("prompt") != asked:
            stored = group[0].get("prompt") if group else "nothing more"
            raise DataError(
                f"{self.run.folder} has stored {stored!r} for update {step}, and the data gives {asked!r}: "
                "replay needs the run's data, options and number of processes"
            )
        return group


def stored_groups(run: RunReader, step: int) -> list[list[dict[str, Any]]]:
    """The rows of a step, group by group."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in run.completions(step=step, mode="train"):
        groups.setdefault(row["group"], []).append(row)
    if any("token_ids" not in row for group in groups.values() for row in group):
        raise DataError(
            f"{run.folder} has stored no tokens for update {step}: it was trained with store_completions=False, "
            "or by an older version"
        )
    return list(groups.values())


def _completion(row: dict[str, Any]) -> Completion:
    return Completion(token_ids=list(row["token_ids"]), stop_reason=row["stop_reason"], mask=row.get("mask"))


class StoredRewards:
    """Gives the stored scores of what a [`StoredEngine`] has just played. Stands for the rewards and for a scoring."""

    streaming = False

    def __init__(self, engine: StoredEngine, names: list[str]) -> None:
        self.engine, self.names = engine, names
        self.scored: Scored | None = None

    def begin(self) -> StoredRewards:
        """The scoring of the next rollout."""
        self.scored = None
        return self

    def cancel(self) -> None:
        """Nothing is running."""

    def score(self, *inputs: Any) -> Tensor:
        """Scores (N, F), NaN for None. What failed then has failed again."""
        rows = self.engine.played
        scored = Scored.nothing(len(rows), len(self.names))
        scored.scores = torch.tensor([[_number(row["scores"].get(name)) for name in self.names] for row in rows])
        for number, row in enumerate(rows):
            for name, reason in (row.get("failures") or {}).items():
                scored.note_failure(self.names.index(name), name, [number], reason)
        columns = dict.fromkeys(name for row in rows for name in row.get("extra") or {})
        scored.extra = {name: [(row.get("extra") or {}).get(name) for row in rows] for name in columns}
        self.scored = scored
        return scored.scores


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
