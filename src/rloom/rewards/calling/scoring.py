"""The scoring of one rollout: calls reward functions, checks what they return, and decides what a failure costs."""

from __future__ import annotations

import math
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rloom.errors import RewardError
from rloom.printable import get_logger
from rloom.rewards.base import RewardBatch, as_score, one_per_completion
from rloom.rewards.calling.caller import CallResult, PendingCall
from rloom.rewards.calling.frames import reward_frames
from rloom.rewards.calling.still_running import StillRunning
from rloom.rewards.scored import Scored

if TYPE_CHECKING:
    from rloom.rewards.calling.reward_set import RewardSet

logger = get_logger(__name__)

# Characters of an exception's message that are kept for each sample; the whole is in the log, or in what is raised.
MAX_REASON = 500


@dataclass(slots=True, kw_only=True)
class StreamedGroup:
    """A group that was handed over while others were still being generated."""

    position: int  # its place in the rollout
    batch: RewardBatch
    calls: list[list[PendingCall]]  # for each reward function

    def cancel(self) -> None:
        """Call off what has not begun."""
        for call in (call for calls in self.calls for call in calls):
            call.future.cancel()


class Scoring:
    """The scoring of one rollout: `add` each group as it comes, then `score` all of them.

    Streaming functions are called per group, while generation goes on; others by `score`, once, with all completions.
    """

    def __init__(self, rewards: RewardSet) -> None:
        self.rewards, self.callers = rewards, rewards.callers
        # What the last call of `score` returned.
        self.scored: Scored | None = None
        self._groups: list[StreamedGroup] = []
        # Calls under way, whose failure should be seen early.
        self._unseen: list[tuple[int, PendingCall, RewardBatch]] = []

    # -- while groups come in

    def add(self, position: int, group: RewardBatch) -> None:
        """Start scoring a group with the streaming functions. `position` is its place in the batch.

        Where a failure stops the run, one of an earlier group does so here: there is no use in generating the rest.
        """
        group = group.own()
        calls = [caller.begin(group) if caller.streaming else [] for caller in self.callers]
        self._groups.append(StreamedGroup(position=position, batch=group, calls=calls))
        self._unseen += [(index, call, group) for index, several in enumerate(calls) for call in several]
        if self.rewards.on_error == "raise":
            self._raise_early()

    def _raise_early(self) -> None:
        done = [entry for entry in self._unseen if entry[1].future.done()]
        self._unseen = [entry for entry in self._unseen if not entry[1].future.done()]
        for index, call, group in done:
            result = call.result()
            if result.error is not None and result.failure == "errors":
                scored = Scored.nothing(len(group), len(self.callers))
                _Column(self.rewards, index, group, scored).fail(result.error, result.failure, call.rows)

    def cancel(self) -> None:
        """Let go of groups that will not be asked for: generation failed, or somebody else scored them."""
        for group in self._groups:
            group.cancel()
        self._groups, self._unseen = [], []

    # -- when all are there

    def score(self, batch: RewardBatch) -> Scored:
        """The scores of the batch. Calls that `add` has begun for the same completions are taken over."""
        self._groups.sort(key=lambda group: group.position)
        # Nothing was added before, or other completions than these.
        if not _are_of(self._groups, batch):
            self.cancel()
        groups, self._groups, self._unseen = self._groups, [], []
        self.scored = scored = Scored.nothing(len(batch), len(self.callers))
        # What runs elsewhere is started first, so that it goes on while plain functions run here.
        order = sorted(range(len(self.callers)), key=lambda index: self.callers[index].runs_here)
        with StillRunning() as watch:
            begun = {index: self._calls(index, batch, groups, watch) for index in order}
            columns = [self._column(index, batch, begun[index], watch) for index in range(len(self.callers))]
        scored.scores = torch.tensor(columns, dtype=torch.float32).T.contiguous()
        _warn_unscored(scored.scores, batch)
        return scored

    def _column(self, index: int, batch: RewardBatch, calls: list[PendingCall], watch: StillRunning) -> list[float]:
        assert self.scored is not None
        column = _Column(self.rewards, index, batch, self.scored).of(calls)
        watch.end(self.rewards.names[index])
        return column

    def _calls(
        self, index: int, batch: RewardBatch, groups: list[StreamedGroup], watch: StillRunning
    ) -> list[PendingCall]:
        """The calls of one function, which is watched from here on: a plain one runs here and now."""
        name = self.rewards.names[index]
        watch.begin(name, count=len(batch))
        calls = self._begun_calls(index, batch, groups)
        watch.begun(name, [(len(call.rows), call.future) for call in calls])
        return calls

    def _begun_calls(self, index: int, batch: RewardBatch, groups: list[StreamedGroup]) -> list[PendingCall]:
        """The calls of one function, whose rows are those of the whole batch."""
        if not groups or not self.callers[index].streaming:
            return self.callers[index].begin(batch)
        calls, first = [], 0
        for group in groups:
            calls += [replace(call, rows=[first + row for row in call.rows]) for call in group.calls[index]]
            first += len(group.batch)
        return calls


class _Column:
    """One function's column of scores, made from the results of its calls. What else they say goes into the record."""

    def __init__(self, rewards: RewardSet, index: int, batch: RewardBatch, scored: Scored) -> None:
        self.rewards, self.index, self.batch, self.scored = rewards, index, batch, scored
        self.name = rewards.names[index]
        self.failures: dict[str, int] = {}

    def of(self, calls: list[PendingCall]) -> list[float]:
        """The scores; NaN for None."""
        column = [math.nan] * len(self.batch)
        extra: dict[str, list[Any]] = {}
        seconds = 0.0
        # Wait for the last first, to wake up once and not for each: others need the time.
        wait([call.future for call in calls[-1:]])
        for call in calls:
            result = call.result()
            seconds += result.seconds
            for row, value in zip(call.rows, self._values(result, call.rows), strict=True):
                column[row] = math.nan if value is None else value
            for title, values in result.extra.items():
                for row, value in zip(call.rows, values, strict=True):
                    extra.setdefault(title, [None] * len(self.batch))[row] = value
            self._log_metrics(result.metrics)
        self._add_columns(extra)
        self.scored.note_cost(self.name, column, self.failures, seconds)
        return column

    def _log_metrics(self, metrics: list[tuple[str, Any]]) -> None:
        try:
            for name, value in metrics:
                # What a worker sent was not checked yet.
                if self.rewards.check_metric is not None:
                    self.rewards.check_metric(name, value)
                self.scored.logged.append((name, float(value)))
        except RewardError as error:
            raise self._noted(error) from None

    def _add_columns(self, extra: dict[str, list[Any]]) -> None:
        for column, values in extra.items():
            if column in self.rewards.table_columns or column in self.rewards.names:
                raise self._noted(
                    RewardError(
                        f"log_extra({column!r}, …): that column of the table is the trainer's own; choose another"
                    )
                )
            self.scored.add_column(column, values)

    def _values(self, result: CallResult, rows: list[int]) -> list[float | None]:
        """The values of one call, or what its failure costs."""
        if result.error is not None:
            return self.fail(result.error, result.failure, rows)
        try:
            values = one_per_completion(result.values, self.name, len(rows))
        except RewardError as error:
            return self.fail(error, "errors", rows)
        scores: list[float | None] = []
        for row, value in zip(rows, values, strict=True):
            try:
                scores.append(as_score(value, self.name, row))
            except RewardError as error:
                scores += self.fail(error, "errors", [row])
        return scores

    def fail(self, error: BaseException, kind: str, rows: list[int]) -> list[float | None]:
        """The scores of rows on which a call failed. Raises where failures end the run; else counts them, and warns of
        the first of each kind in a rollout."""
        reason = f"{kind}: {type(error).__name__}: {_message(error):.{MAX_REASON}}"
        self.scored.note_failure(self.index, self.name, rows, reason)
        if kind == "errors" and self.rewards.on_error == "raise":
            if len(rows) < len(self.batch):
                error.add_note(f"sample {rows[0]}: its prompt begins {str(self.batch.prompts[rows[0]])[:100]!r}")
            raise self._noted(error)
        if kind not in self.failures:
            self._warn(error, kind, rows)
        self.failures[kind] = self.failures.get(kind, 0) + len(rows)
        return [self.rewards.score_on_error] * len(rows)

    def _warn(self, error: BaseException, kind: str, rows: list[int]) -> None:
        limit = self.rewards.callers[self.index].time_limit
        frames = self.rewards.told_once(reward_frames(error))
        what, why = {
            "errors": ("failed", f": {type(error).__name__}: {_message(error)}{frames and f'{chr(10)}{frames}'}"),
            "timeouts": (
                f"was not done after {limit:g} seconds and was cut off",
                "",
            ),
            "crashes": ("took its worker process with it", f": {_message(error)}"),
        }[kind]
        instead = self.rewards.score_on_error
        logger.warning(
            "The reward function '%s' %s on %s %s%s\nFurther ones in this rollout are counted in rewards/%s/%s. The "
            "sample's prompt begins: %.200r, its completion: %.200r",
            self.name, what, _samples(rows), "no score" if instead is None else f"the score {instead:g}", why,
            self.name, kind, str(self.batch.prompts[rows[0]]), str(self.batch.completions[rows[0]]),
        )  # fmt: skip

    def _noted(self, error: BaseException) -> BaseException:
        kind = "texts, since the prompts are texts" if isinstance(self.batch.prompts[0], str) else "lists of messages"
        error.add_note(f"in the reward '{self.name}', on {len(self.batch)} completions, which are {kind}")
        return error


def _samples(rows: list[int]) -> str:
    """
    >>> _samples([3]), _samples([0, 1, 2])
    ('sample 3, which gets', 'samples 0 to 2, which get')
    """
    return f"sample {rows[0]}, which gets" if len(rows) == 1 else f"samples {rows[0]} to {rows[-1]}, which get"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        # An exception of the user's own may refuse even that.
        return ""


def _are_of(groups: list[StreamedGroup], batch: RewardBatch) -> bool:
    """Whether what was streamed is what is asked for now; a trainer of the user's own may have changed it since."""
    first = 0
    for group in groups:
        if not group.batch.holds_the_same(batch.take(range(first, min(first + len(group.batch), len(batch))))):
            return False
        first += len(group.batch)
    return first == len(batch)


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
