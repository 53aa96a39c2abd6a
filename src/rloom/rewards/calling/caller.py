"""Calling one reward function on some completions, in the way that it asks for: here, in threads, in worker processes,
on the event loop.

Every call ends in a [`CallResult`]: what the function returned, or why it did not, what it logged, how long it took.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rloom.errors import RewardError, did_you_mean
from rloom.gpu_of_threads import on_this_gpu
from rloom.rewards.base import Reward, RewardBatch
from rloom.rewards.calling.call_options import is_coroutine_function
from rloom.rewards.calling.event_loop import reward_loop
from rloom.rewards.calling.worker_pool import WorkerPool
from rloom.rewards.calling.worker_process import WorkerGone

# How often a call is repeated that met with the recording of a CUDA graph: at first several are recorded in a row.
RETRIES = 4
# How many samples are made ready for workers at a time: the first are scored while the others are made ready.
SAMPLES_AT_ONCE = 64

# Raises for a metric that a function may not log.
CheckMetric = Callable[[str, Any], None] | None


@dataclass(slots=True, kw_only=True)
class CallResult:
    """What came of one call. `failure` is "errors", "timeouts" or "crashes" where `error` is set."""

    values: Any = None
    error: BaseException | None = None
    failure: str = ""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: list[tuple[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """A call that is under way, or done, and the rows of the batch that it is for."""

    rows: list[int]
    future: Future[Any]
    read: Callable[[Future[Any]], CallResult] = lambda future: future.result()

    def result(self) -> CallResult:
        """What came of it. Waits until it is done."""
        try:
            return self.read(self.future)
        except CancelledError:
            # The function itself has cancelled it.
            return CallResult(error=RewardError("the call was cancelled"), failure="errors")


@dataclass(slots=True, kw_only=True)
class CallDefaults:
    """What holds for all reward functions of a run, where their own call options do not say otherwise."""

    workers: int = 1
    time_limit: float = 60.0
    concurrency: int = 64


class Caller:
    """Starts calls of one reward function."""

    def __init__(
        self,
        reward: Reward,
        name: str,
        defaults: CallDefaults,
        pool: WorkerPool,
        when: tuple[str, tuple[Any, ...]] | None = None,
        check_metric: CheckMetric = None,
    ) -> None:
        self.reward, self.name, self.defaults, self.pool, self.when = reward, name, defaults, pool, when
        self.check_metric = check_metric
        self.options = reward.call_options
        self.function = getattr(reward, "function", None)
        self.is_async = self.function is not None and is_coroutine_function(self.function)
        self.time_limit = self.options.time_limit or defaults.time_limit
        self._threads: ThreadPoolExecutor | None = None
        self._at_start_error: BaseException | None = None
        self._semaphore: asyncio.Semaphore | None = None
        if self.options.isolated and self.function is None:
            raise RewardError(f"isolated=True is for functions; '{name}' is a {type(reward).__name__}")
        self._key = pool.register(_by_name(reward), name, self.options.at_start) if self.options.isolated else -1

    @property
    def streaming(self) -> bool:
        """Whether it may be called with a part of the completions, as soon as that part is there."""
        return self.options.streaming or self.options.isolated or self.options.per_sample

    @property
    def runs_here(self) -> bool:
        """Whether `begin` calls the function itself, and returns only after it."""
        return not (self.streaming or self.is_async or self.options.threads)

    def begin(self, batch: RewardBatch) -> list[PendingCall]:
        """Start scoring a batch, or the rows of it that the function is for. A plain function is called at once."""
        rows = self._rows(batch)
        if not rows:
            return []
        if self.options.isolated:
            return self._in_workers(batch, rows)
        parts = [[row] for row in rows] if self.options.per_sample else [rows]
        whole = len(parts[0]) == len(batch)
        return [PendingCall(rows=part, future=self._start(batch if whole else batch.take(part))) for part in parts]

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

    def _start(self, batch: RewardBatch) -> Future[CallResult]:
        if self.is_async:
            return reward_loop.start(self._on_loop(batch))
        if not self.runs_here:
            return self._executor().submit(self.call, batch)
        done: Future[CallResult] = Future()
        done.set_result(self.call(batch))
        return done

    # -- in this process

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # Twice as many threads as cores, since they wait for something most of the time. A function that does not
            # say that it may is never called twice at a time.
            count = (self.options.concurrency or 2 * self.defaults.workers) if self.options.threads else 1
            self._threads = ThreadPoolExecutor(
                count, thread_name_prefix=f"rloom-{self.name}", initializer=on_this_gpu(self._begin_thread)
            )
        return self._threads

    def _begin_thread(self) -> None:
        """Call `at_start`. Its failure is raised by the calls that follow: a broken pool would end the run."""
        try:
            if self.options.at_start is not None:
                self.options.at_start()
        except (Exception, SystemExit) as error:
            self._at_start_error = _as_error(error)

    def call(self, batch: RewardBatch) -> CallResult:
        """Call it here and now."""
        result = CallResult()
        with _timed(result):
            if self._at_start_error is not None:
                raise self._at_start_error
            values = self._score(batch, result)
            # A lambda around an async function is not known to be one.
            is_coroutine = isinstance(values, Awaitable)
            result.values = reward_loop.start(_awaited(values)).result() if is_coroutine else values
        return result

    def _score(self, batch: RewardBatch, result: CallResult) -> Any:
        """Call the function; again, if a model of its own met with a CUDA graph that the engine recorded meanwhile."""
        for retries_left in reversed(range(RETRIES + 1)):
            try:
                return self.reward.score(_recorded(batch, result, self.check_metric))
            except RuntimeError as error:
                # torch is there, after such an error.
                from rloom.models.capture import is_in_the_way, wait_for_others

                if not retries_left or not is_in_the_way(error):
                    raise
                result.extra.clear()
                result.metrics.clear()
                wait_for_others()
        raise AssertionError("unreachable")

    async def _on_loop(self, batch: RewardBatch) -> CallResult:
        if self._semaphore is None:
            self._semaphore = asyncio.Semaphore(self.options.concurrency or self.defaults.concurrency)
        result, limit = CallResult(), self.options.time_limit
        async with self._semaphore:
            with _timed(result):
                call = self.reward.score(_recorded(batch, result, self.check_metric))
                result.values = await asyncio.wait_for(_awaited(call), limit)
        if isinstance(result.error, TimeoutError) and limit is not None and result.seconds >= limit:
            result.failure = "timeouts"
        return result

    # -- in worker processes

    def _in_workers(self, batch: RewardBatch, rows: list[int]) -> list[PendingCall]:
        futures: list[Future[Any]] = []
        per_sample, shared = self._portable(batch)
        for first in range(0, len(rows), SAMPLES_AT_ONCE):
            samples = [
                {name: [values[row]] for name, values in per_sample.items()} | shared
                for row in rows[first : first + SAMPLES_AT_ONCE]
            ]
            futures += self.pool.submit(self._key, samples, self.time_limit)
        return [PendingCall(rows=[row], future=f, read=self._from_worker) for row, f in zip(rows, futures, strict=True)]

    def _portable(self, batch: RewardBatch) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments as they can travel to a worker: those with a value per sample, and those that all samples share."""
        arguments = self.reward.arguments(batch)  # type: ignore[attr-defined]
        shared: dict[str, Any] = {name: None for name in ("log_extra", "log_metric") if name in arguments}
        if "trainer_state" in arguments:
            shared["trainer_state"] = _snapshot(arguments["trainer_state"])
        return {name: values for name, values in arguments.items() if name not in shared}, shared

    def _from_worker(self, done: Future[dict[str, Any]]) -> CallResult:
        error = done.exception()
        if isinstance(error, TimeoutError):
            return CallResult(error=error, failure="timeouts", seconds=self.time_limit)
        if error is not None:
            return CallResult(error=error, failure="crashes" if isinstance(error, WorkerGone) else "errors")
        reply = done.result()
        metrics = [(name, value) for name, value in reply.get("metrics", [])]
        result = CallResult(seconds=reply["seconds"], extra=reply.get("extra", {}), metrics=metrics)
        if "error" in reply:
            kind, message, trace = reply["error"]
            result.error = RewardError(f"{kind}: {message}\n\nin a worker process:\n{trace}")
            result.failure = "errors"
        else:
            result.values = _returned(reply["value"])
        return result

    def close(self) -> None:
        """End its threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


@contextmanager
def _timed(result: CallResult) -> Iterator[None]:
    """Note how long a call takes, and its exception as its failure."""
    began = time.perf_counter()
    try:
        yield
    except (Exception, SystemExit) as error:
        result.error, result.failure = _as_error(error), "errors"
    result.seconds = time.perf_counter() - began


def _by_name(reward: Any) -> Any:
    """A reward's function as one that takes all of its arguments by name, which is how workers call it."""
    function, positional = reward.function, reward.positional
    if not positional:
        return function
    return lambda **arguments: function(*[arguments.pop(name) for name in positional], **arguments)


async def _awaited(value: Awaitable[Any]) -> Any:
    try:
        return await value
    except SystemExit as error:
        # It would end the event loop on its way.
        raise _as_error(error) from None


def _as_error(error: BaseException) -> BaseException:
    """sys.exit() in a reward function is a failure like others: it does not end the run without a word."""
    return RewardError(f"it called sys.exit({error.code!r})") if isinstance(error, SystemExit) else error


def _recorded(batch: RewardBatch, result: CallResult, check_metric: CheckMetric) -> RewardBatch:
    """A copy for the function. What it logs is kept for later: calls may come from other threads, in any order."""
    count = len(batch)

    def log_extra(column: str, values: list[Any]) -> None:
        if len(values) != count:
            raise RewardError(f"log_extra({column!r}, …) got {len(values)} values for {count} completions")
        result.extra[column] = list(values)

    def log_metric(name: str, value: float) -> None:
        if check_metric is not None:
            check_metric(name, value)
        result.metrics.append((name, value))

    return replace(batch.own(), log_extra=log_extra, log_metric=log_metric)


def _snapshot(state: Any) -> Any:
    """The trainer's state as plain numbers and texts, so that a worker needs no transformers to read them."""
    if state is None:
        return None
    plain = {k: v for k, v in vars(state).items() if v is None or isinstance(v, (int, float, str, bool))}
    return types.SimpleNamespace(**plain)


def _returned(value: Any) -> Any:
    """What a function returned, as its worker sent it. A value that JSON does not know is replaced by one with the same
    type name and text, so that the error message shows these."""
    if isinstance(value, dict) and set(value) == {"type", "text"}:
        return type(value["type"], (), {"__str__": lambda _: value["text"]})()
    return [_returned(v) for v in value] if isinstance(value, list) else value
