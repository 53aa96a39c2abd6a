"""All rewards of a run: calls them, checks what they return, and keeps one column of scores each."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rloom.errors import RewardError
from rloom.printable import get_logger
from rloom.rewards.base import Reward, RewardBatch, as_score, one_per_completion, unique_names
from rloom.rewards.calling.caller import Answer, Caller, Options, Piece
from rloom.rewards.calling.worker_pool import WorkerPool
from rloom.rewards.scored import Scored

logger = get_logger(__name__)

REASON = 500
"""So much of an exception's message is kept for each sample; the whole is in the log, or in what is raised."""
Part = tuple[int, RewardBatch, list[list[Piece]]]
"""A group's position, its completions, and for each reward the calls that are under way for it."""


class RewardSet:
    """All rewards of a run.

    `score` scores completions that are all there; `begin` begins with a rollout whose groups are still to come.

    Args:
        rewards: what scores.
        weights: one per reward; None: 1 each.
        when: for each reward (column, values), the rows that it is for; None: all.
        on_error: what a failing function costs: "raise" (the run), "none" (its samples' scores), or a number that they
            get instead. A sample that hung or killed its worker never costs the run.
        workers: worker processes, and threads for functions that take them; None: one per core, at most 8.
        time_limit: seconds per sample for isolated functions that do not say.
        concurrency: calls of an async function at a time, where it does not say.
        table_columns: names that functions may not give to columns of their own.
        check_metric: raises [`RewardError`] for a metric that functions may not log, by name and value.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        weights: Sequence[float] | None,
        *,
        when: Sequence[tuple[str, tuple[Any, ...]] | None] | None = None,
        on_error: str | float = "raise",
        workers: int | None = None,
        time_limit: float = 60.0,
        concurrency: int = 64,
        table_columns: Collection[str] = (),
        check_metric: Callable[[str, Any], None] | None = None,
    ) -> None:
        if not rewards:
            raise RewardError("no reward function: pass at least one as `reward_funcs`")
        if weights is not None and len(weights) != len(rewards):
            raise RewardError(
                f"Number of reward weights ({len(weights)}) must match number of reward functions ({len(rewards)})"
            )
        self.rewards = list(rewards)
        self.names = unique_names([reward.name for reward in rewards])
        self.weights = torch.tensor(weights if weights is not None else [1.0] * len(rewards), dtype=torch.float32)
        self.on_error, self.table_columns, self.check_metric = on_error, table_columns, check_metric
        options = Options(workers=workers or min(_cores(), 8), time_limit=time_limit, concurrency=concurrency)
        self.pool = WorkerPool(options.workers)
        routes = list(when) if when is not None else [None] * len(self.rewards)
        self.callers = [
            Caller(reward, name, options, self.pool, route, check_metric)
            for reward, name, route in zip(self.rewards, self.names, routes, strict=True)
        ]

    @property
    def streaming(self) -> bool:
        """Whether any reward can begin before all completions are there."""
        return any(caller.streaming for caller in self.callers)

    def begin(self) -> Scoring:
        """The scoring of one rollout, whose groups can be added as they come."""
        return Scoring(self)

    def score(self, batch: RewardBatch) -> Scored:
        """What all rewards say about a batch of completions that is there as a whole."""
        return self.begin().score(batch)

    def close(self) -> None:
        """End worker processes and threads. They start again when needed."""
        self.pool.close()
        for caller in self.callers:
            caller.close()


class Scoring:
    """The scoring of one rollout: `add` each group as it comes, then `score` all of them.

    Rewards that are marked for it are called per group, while generation goes on; others by `score`, once, with all
    completions.
    """

    def __init__(self, rewards: RewardSet) -> None:
        self.rewards, self.callers, self.names = rewards, rewards.callers, rewards.names
        self.scored: Scored | None = None  # what the last call of `score` returned
        self._parts: list[Part] = []
        self._unseen: list[tuple[int, Piece, RewardBatch]] = []  # calls under way, whose failure should be seen early

    # -- while groups come in

    def add(self, position: int, group: RewardBatch) -> None:
        """Start scoring a group with the rewards that are marked for it. `position` is its place in the batch.

        Where a failure stops the run, one of an earlier group does so here: there is no use in generating the rest.
        """
        group = group.own()
        pieces = [caller.begin(group) if caller.streaming else [] for caller in self.callers]
        self._parts.append((position, group, pieces))
        self._unseen += [(index, piece, group) for index, several in enumerate(pieces) for piece in several]
        if self.rewards.on_error == "raise":
            self._raise_early()

    def _raise_early(self) -> None:
        done = [entry for entry in self._unseen if entry[1].future.done()]
        self._unseen = [entry for entry in self._unseen if not entry[1].future.done()]
        for index, piece, group in done:
            answer = piece.answer()
            if answer.error is not None and answer.failure == "errors":
                self._failed(index, answer.error, answer.failure, piece.rows, group, {})

    def cancel(self) -> None:
        """Let go of groups that will not be asked for: generation failed, or somebody else scored them."""
        _cancel(self._parts)
        self._parts, self._unseen = [], []

    # -- when all are there

    def score(self, batch: RewardBatch) -> Scored:
        """What all rewards say about the batch. Calls that `add` has begun for the same completions are taken over."""
        parts, self._parts, self._unseen = sorted(self._parts, key=lambda part: part[0]), [], []
        if not _are_of(parts, batch):  # nothing, or something else, was added before
            _cancel(parts)
            parts = []
        self.scored = scored = Scored.nothing(len(batch), len(self.callers))
        # What runs elsewhere is started first, so that it goes on while plain functions run here.
        order = sorted(range(len(self.callers)), key=lambda index: self._runs_here(self.callers[index]))
        begun = {index: self._pieces(index, batch, parts) for index in order}
        columns = [self._settled(index, begun[index], batch, scored) for index in range(len(self.callers))]
        scored.scores = torch.tensor(columns, dtype=torch.float32).T.contiguous()
        _warn_unscored(scored.scores, batch)
        return scored

    @staticmethod
    def _runs_here(caller: Caller) -> bool:
        return not (caller.streaming or caller.is_async or caller.marks.threads)

    def _pieces(self, index: int, batch: RewardBatch, parts: list[Part]) -> list[Piece]:
        if not parts or not self.callers[index].streaming:
            return self.callers[index].begin(batch)
        pieces, first = [], 0
        for _, group, several in parts:
            pieces += [replace(p, rows=[first + row for row in p.rows]) for p in several[index]]
            first += len(group)
        return pieces

    def _settled(self, index: int, pieces: list[Piece], batch: RewardBatch, scored: Scored) -> list[float]:
        """One reward's column of scores, from the answers of its calls; the rest goes into the record, in the batch's
        order."""
        column: list[float] = [math.nan] * len(batch)
        failures: dict[str, int] = {}
        extra: dict[str, list[Any]] = {}
        seconds = 0.0
        wait([piece.future for piece in pieces[-1:]])  # to wake up once, not for each: others need the time
        for piece in pieces:
            answer = piece.answer()
            seconds += answer.seconds
            for row, value in zip(piece.rows, self._values(index, answer, piece.rows, batch, failures), strict=True):
                column[row] = math.nan if value is None else value
            for title, values in answer.extra.items():
                for row, value in zip(piece.rows, values, strict=True):
                    extra.setdefault(title, [None] * len(batch))[row] = value
            self._take_logged(index, answer.metrics, batch, scored)
        self._take_columns(index, extra, batch, scored)
        scored.note_cost(self.names[index], column, failures, seconds)
        return column

    def _take_logged(self, index: int, metrics: list[tuple[str, Any]], batch: RewardBatch, scored: Scored) -> None:
        check = self.rewards.check_metric
        try:
            for name, value in metrics:
                if check is not None:  # what a worker sent was not checked yet
                    check(name, value)
                scored.logged.append((name, float(value)))
        except RewardError as error:
            raise _noted(error, self.names[index], batch) from None

    def _take_columns(self, index: int, extra: dict[str, list[Any]], batch: RewardBatch, scored: Scored) -> None:
        for column, values in extra.items():
            if column in self.rewards.table_columns or column in self.names:
                error = RewardError(
                    f"log_extra({column!r}, …): that column of the table is the trainer's own; choose another"
                )
                raise _noted(error, self.names[index], batch)
            scored.add_column(column, values)

    def _values(
        self, index: int, answer: Answer, rows: list[int], batch: RewardBatch, failures: dict[str, int]
    ) -> list[float | None]:
        """The values of one call, or what its failure costs."""
        name = self.names[index]
        if answer.error is not None:
            self._failed(index, answer.error, answer.failure, rows, batch, failures)
            return [self._instead] * len(rows)
        try:
            values = one_per_completion(answer.values, name, len(rows))
        except RewardError as error:
            self._failed(index, error, "errors", rows, batch, failures)
            return [self._instead] * len(rows)
        result = []
        for row, value in zip(rows, values, strict=True):
            try:
                result.append(as_score(value, name, row))
            except RewardError as error:
                self._failed(index, error, "errors", [row], batch, failures)
                result.append(self._instead)
        return result

    @property
    def _instead(self) -> float | None:
        on_error = self.rewards.on_error
        return None if isinstance(on_error, str) else float(on_error)

    def _failed(
        self,
        index: int,
        error: BaseException,
        kind: str,
        rows: list[int],
        batch: RewardBatch,
        failures: dict[str, int],
    ) -> None:
        """Raise, or count and say so: once per rollout and kind, with the first sample's prompt."""
        name = self.names[index]
        if self.scored is not None:
            reason = f"{kind}: {type(error).__name__}: {_message(error):.{REASON}}"
            self.scored.note_failure(index, name, rows, reason)
        if kind == "errors" and self.rewards.on_error == "raise":
            if len(rows) < len(batch):
                error.add_note(f"sample {rows[0]}: its prompt begins {str(batch.prompts[rows[0]])[:100]!r}")
            raise _noted(error, name, batch)
        failures[kind] = failures.get(kind, 0) + len(rows)
        if failures[kind] > len(rows):
            return
        what, why = {
            "errors": ("failed", f": {type(error).__name__}: {_message(error)}"),
            "timeouts": (f"was not done after {self.callers[index].time_limit:g} seconds and was cut off", ""),
            "crashes": ("took its worker process with it", f": {_message(error)}"),
        }[kind]
        cost = "no score" if self._instead is None else f"the score {self._instead:g}"
        logger.warning(
            "The reward function '%s' %s on %s %s%s\nFurther ones in this rollout are counted in rewards/%s/%s. The "
            "sample's prompt begins: %.200r, its completion: %.200r",
            name, what, _samples(rows), cost, why, name, kind, str(batch.prompts[rows[0]]),
            str(batch.completions[rows[0]]),
        )  # fmt: skip


def _samples(rows: list[int]) -> str:
    """
    >>> _samples([3]), _samples([0, 1, 2])
    ('sample 3, which gets', 'samples 0 to 2, which get')
    """
    return f"sample {rows[0]}, which gets" if len(rows) == 1 else f"samples {rows[0]} to {rows[-1]}, which get"


def _are_of(parts: list[Part], batch: RewardBatch) -> bool:
    """Whether what was streamed is what is asked for now; a trainer of the user's own may have changed it since."""
    starts = list(itertools.accumulate((len(group) for _, group, _ in parts), initial=0))
    return starts[-1] == len(batch) and all(
        group.holds_the_same(batch.take(range(first, first + len(group))))
        for first, (_, group, _) in zip(starts, parts, strict=False)
    )


def _cancel(parts: list[Part]) -> None:
    for _, _, pieces in parts:
        for piece in (p for several in pieces for p in several):
            piece.future.cancel()


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an exception of the user's own
        return ""


def _cores() -> int:
    """The cores that this process may use, where the system tells; its share of them, where a launcher has started
    several on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def _noted(error: BaseException, name: str, batch: RewardBatch) -> BaseException:
    kind = "texts, since the prompts are texts" if isinstance(batch.prompts[0], str) else "lists of messages"
    error.add_note(f"in the reward '{name}', on {len(batch)} completions, which are {kind}")
    return error


def _warn_unscored(scores: Tensor, batch: RewardBatch) -> None:
    unscored = scores.isnan().all(1).nonzero().flatten().tolist()
    if not unscored:
        return
    index = unscored[0]
    row = {name: values[index] for name, values in batch.columns.items()}
    row |= {"prompt": batch.prompts[index], "completion": batch.completions[index]}
    logger.warning(
        "All reward functions returned None for the following kwargs:\n%.2000s\n%d of %d completions in this rollout "
        "have no score: they are left out of their siblings' baseline and get advantage 0.",
        row,
        len(unscored),
        len(batch),
    )
