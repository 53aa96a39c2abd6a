"""Calling one reward on some completions, in the way that it is marked for: here, in threads, in workers, on the loop.

Every call ends in an [`Answer`]: what the function returned, or why it did not, what it logged, how long it took.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rloom.errors import RewardError, did_you_mean
from rloom.rewards.base import Reward, RewardBatch
from rloom.rewards.calling.call_options import is_coroutine_function
from rloom.rewards.calling.event_loop import start
from rloom.rewards.calling.worker_pool import WorkerGone, WorkerPool

TRIES = 4
"""Of a call, beside the last, that meets with CUDA graphs: at the beginning several are recorded in a row."""

CheckMetric = Callable[[str, Any], None] | None
"""Raises for a metric that a function may not log."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of one call. `failure` is "errors", "timeouts" or "crashes" where `error` is set."""

    values: Any = None
    error: BaseException | None = None
    failure: str = ""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Piece:
    """A call that is under way, or done, and the rows of the batch that it is for."""

    rows: list[int]
    future: Future[Any]
    read: Callable[[Future[Any]], Answer] = lambda future: future.result()

    def answer(self) -> Answer:
        """What came of it, when it is done."""
        try:
            return self.read(self.future)
        except CancelledError:  # by the function itself
            return Answer(error=RewardError("the call was cancelled"), failure="errors")


@dataclass(slots=True, kw_only=True)
class Options:
    """What holds for all rewards of a run, where a function's own marks do not say otherwise."""

    workers: int = 1
    time_limit: float = 60.0
    concurrency: int = 64


class Caller:
    """Starts calls of one reward."""

    def __init__(
        self,
        reward: Reward,
        name: str,
        options: Options,
        pool: WorkerPool,
        when: tuple[str, tuple[Any, ...]] | None = None,
        check_metric: CheckMetric = None,
    ) -> None:
        self.reward, self.name, self.options, self.pool, self.when = reward, name, options, pool, when
        self.check_metric = check_metric
        self.marks = reward.marks
        self.function = getattr(reward, "function", None)
        self.is_async = self.function is not None and is_coroutine_function(self.function)
        self.time_limit = self.marks.time_limit or options.time_limit
        self._threads: ThreadPoolExecutor | None = None
        self._at_start_error: BaseException | None = None
        self._gate: asyncio.Semaphore | None = None
        if self.marks.isolated and self.function is None:
            raise RewardError(f"isolated=True is for functions; '{name}' is a {type(reward).__name__}")
        self._key = pool.register(_by_name(reward), name, self.marks.at_start) if self.marks.isolated else None

    @property
    def streaming(self) -> bool:
        """Whether it may be called with a part of the completions, as soon as that part is there."""
        return self.marks.streaming or self.marks.isolated or self.marks.per_sample

    def begin(self, batch: RewardBatch) -> list[Piece]:
        """Start scoring a batch, or the rows of it that the reward is for. A plain function is called here and now."""
        rows = self._rows(batch)
        if not rows:
            return []
        if self.marks.isolated:
            return self._in_workers(batch, rows)
        parts = [[row] for row in rows] if self.marks.per_sample else [rows]
        whole = len(parts[0]) == len(batch)
        return [Piece(rows=part, future=self._start(batch if whole else batch.take(part))) for part in parts]

    def _rows(self, batch: RewardBatch) -> list[int]:
        if self.when is None:
            return list(range(len(batch)))
        column, values = self.when
        if column not in batch.columns:
            raise RewardError(
                f"rewards are routed by the column '{column}', which the data set does not have"
                f"{did_you_mean(column, batch.columns)} Its columns are: {', '.join(sorted(batch.columns)) or 'none'}"
            )
        return [row for row, value in enumerate(batch.columns[column]) if value in values]

    def _start(self, batch: RewardBatch) -> Future[Answer]:
        if self.is_async:
            return start(self._on_loop(batch))
        if self.streaming or self.marks.threads:
            return self._executor().submit(self.call, batch)
        answer: Future[Answer] = Future()
        answer.set_result(self.call(batch))
        return answer

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:  # a function that does not say that it may is never called twice at a time
            # Twice as many threads as cores: they wait for something most of the time.
            count = (self.marks.concurrency or 2 * self.options.workers) if self.marks.threads else 1
            self._threads = ThreadPoolExecutor(
                count, thread_name_prefix=f"rloom-{self.name}", initializer=self._begin_thread
            )
        return self._threads

    def _begin_thread(self) -> None:
        """What the function wants done first. Where that fails, calls do: a broken pool would end the run."""
        try:
            if self.marks.at_start is not None:
                self.marks.at_start()
        except (Exception, SystemExit) as error:
            self._at_start_error = _as_error(error)

    def call(self, batch: RewardBatch) -> Answer:
        """Call it here and now."""
        answer = Answer()
        began = time.perf_counter()
        try:
            if self._at_start_error is not None:
                raise self._at_start_error
            values = self._score(batch, answer)
            if isinstance(values, Awaitable):  # an async function in disguise (a lambda around one)
                values = start(_awaited(values)).result()
            answer.values = values
        except (Exception, SystemExit) as error:
            answer.error, answer.failure = _as_error(error), "errors"
        answer.seconds = time.perf_counter() - began
        return answer

    def _score(self, batch: RewardBatch, answer: Answer) -> Any:
        """Again, if a model of its own met with a CUDA graph that the engine recorded meanwhile."""
        for _ in range(TRIES):
            try:
                return self.reward.score(_recorded(batch, answer, self.check_metric))
            except RuntimeError as error:
                from rloom.models.capture import is_in_the_way, wait_for_others  # torch is there, after such an error

                if not is_in_the_way(error):
                    raise
                answer.extra.clear()
                answer.metrics.clear()
                wait_for_others()
        return self.reward.score(_recorded(batch, answer, self.check_metric))

    async def _on_loop(self, batch: RewardBatch) -> Answer:
        if self._gate is None:
            self._gate = asyncio.Semaphore(self.marks.concurrency or self.options.concurrency)
        answer = Answer()
        async with self._gate:
            began = time.perf_counter()
            try:
                call = self.reward.score(_recorded(batch, answer, self.check_metric))
                answer.values = await asyncio.wait_for(_awaited(call), self.marks.time_limit)
            except TimeoutError as error:
                late = self.marks.time_limit is not None and time.perf_counter() - began >= self.marks.time_limit
                answer.error, answer.failure = error, "timeouts" if late else "errors"
            except (Exception, SystemExit) as error:
                answer.error, answer.failure = _as_error(error), "errors"
            answer.seconds = time.perf_counter() - began
        return answer

    def _in_workers(self, batch: RewardBatch, rows: list[int]) -> list[Piece]:
        assert self._key is not None
        futures: list[Future[Any]] = []
        per_sample, shared = self._portable(batch)
        for first in range(0, len(rows), 64):  # the first are being scored while the others are made ready
            samples = [
                {name: [values[row]] for name, values in per_sample.items()} | shared
                for row in rows[first : first + 64]
            ]
            futures += self.pool.submit(self._key, samples, self.time_limit)
        return [Piece(rows=[row], future=f, read=self._from_worker) for row, f in zip(rows, futures, strict=True)]

    def _portable(self, batch: RewardBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments as they can travel to a worker: those with a value per sample, and those that all samples share."""
        arguments = self.reward.arguments(batch)  # type: ignore[attr-defined]
        shared: dict[str, Any] = {name: None for name in ("log_extra", "log_metric") if name in arguments}
        if "trainer_state" in arguments:
            shared["trainer_state"] = _snapshot(arguments["trainer_state"])
        return {name: values for name, values in arguments.items() if name not in shared}, shared

    def _from_worker(self, done: Future[dict[str, Any]]) -> Answer:
        error = done.exception()
        if isinstance(error, TimeoutError):
            return Answer(error=error, failure="timeouts", seconds=self.time_limit)
        if error is not None:
            return Answer(error=error, failure="crashes" if isinstance(error, WorkerGone) else "errors")
        reply = done.result()
        answer = Answer(seconds=reply["seconds"], extra=reply.get("extra", {}))
        answer.metrics = [(name, value) for name, value in reply.get("metrics", [])]
        if "error" in reply:
            kind, message, trace = reply["error"]
            answer.error = RewardError(f"{kind}: {message}\n\nin a worker process:\n{trace}")
            answer.failure = "errors"
        else:
            answer.values = _returned(reply["value"])
        return answer

    def close(self) -> None:
        """End its threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


def _by_name(reward: Any) -> Any:
    """A reward's function as one that takes all of its arguments by name, which is how workers call it."""
    function, positional = reward.function, reward.positional
    if not positional:
        return function
    return lambda **arguments: function(*[arguments.pop(name) for name in positional], **arguments)


async def _awaited(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except SystemExit as error:  # which would end the event loop on its way
        raise _as_error(error) from None


def _as_error(error: BaseException) -> BaseException:
    """sys.exit() in a reward is a failure like others; it does not end the run without a word."""
    return RewardError(f"it called sys.exit({error.code!r})") if isinstance(error, SystemExit) else error


def _recorded(batch: RewardBatch, answer: Answer, check_metric: CheckMetric) -> RewardBatch:
    """A copy for the function, with logging that is kept for later: calls may come from other threads, in any order."""
    count = len(batch)

    def log_extra(column: str, values: list[Any]) -> None:
        if len(values) != count:
            raise RewardError(f"log_extra({column!r}, …) got {len(values)} values for {count} completions")
        answer.extra[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        if check_metric is not None:
            check_metric(name, value)
        answer.metrics.append((name, value))

    return replace(batch.own(), log_extra=log_extra, log_metric=log_metric)


def _snapshot(state: Any) -> Any:
    """The trainer's state as plain numbers and texts: a worker needs no transformers to read them."""
    if state is None:
        return None
    plain = {k: v for k, v in vars(state).items() if v is None or isinstance(v, (int, float, str, bool))}
    return types.SimpleNamespace(**plain)


class Strange:
    """Stands for a value that a worker could not send, so that the complaint names its type."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text

    def __str__(self) -> str:
        return self.text


def _returned(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"type", "text"}:
        return type(value["type"], (Strange,), {})(value["type"], value["text"])
    return [_returned(v) for v in value] if isinstance(value, list) else value
