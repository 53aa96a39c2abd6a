"""Reward functions in processes of their own: one that hangs or dies takes its sample with it, and nothing else.

Workers are started as fresh processes, so that this works after CUDA is in use and without importing the main script
again. Functions travel by cloudpickle, which takes closures, lambdas and what the main script defines.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.sandbox.sandbox import TimeLeft

WORKER = Path(__file__).with_name("worker.py")
LOAD_SECONDS, LOAD_TRIES = 300.0, 3
AT_ONCE_SECONDS, MAX_AT_ONCE = 0.05, 64
"""Samples that take so long together, and so many at most, are handed to a worker at once."""
PROGRESS = struct.Struct("Qd")
"""How many samples of a message a worker has begun, and when (monotonic clock) the latest."""


class WorkerGone(Exception):
    """The worker ended by itself in the middle of a sample."""


@dataclass(slots=True)
class Task:
    """A sample to be scored."""

    key: int
    arguments: dict[str, Any]
    time_limit: float
    answer: Future[dict[str, Any]]
    crashed: bool = False  # whether a worker has ended over it already


class WorkerPool:
    """Worker processes, each behind a thread that waits for it. They start when first needed.

    Quick samples are handed over several at a time, slow ones one by one; the time limit is for each.

    >>> with WorkerPool(1) as pool:
    ...     key = pool.register(lambda completions: [len(c) for c in completions], "length")
    ...     [answer.result()["value"] for answer in pool.submit(key, [{"completions": ["four"]}], time_limit=60.0)]
    [[4]]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.functions: list[bytes] = []
        self.seconds: list[float] = []  # that a sample of each function takes, about
        self.restarts = 0
        self._tasks: deque[Task] = deque()
        self._closing = False
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._ends_workers: set[int] = set()  # functions that no worker could load

    def register(self, function: Any, name: str, at_start: Callable[[], None] | None = None) -> int:
        """Make a function known to the workers; returns the key to call it by. `at_start` is called first in each."""
        import cloudpickle

        try:
            self.functions.append(cloudpickle.dumps((function, at_start)))
            self.seconds.append(AT_ONCE_SECONDS)
        except Exception as error:
            raise RewardError(
                f"The reward function '{name}' cannot be sent to a worker process: {type(error).__name__}: {error}. "
                "Let it open locks, connections and models on its first call or in at_start=… instead of holding "
                "them, or leave out isolated=True"
            ) from error
        return len(self.functions) - 1

    def submit(self, key: int, samples: list[dict[str, Any]], time_limit: float) -> list[Future[dict[str, Any]]]:
        """Call a function on each sample, in workers that are free. A future raises `TimeoutError` or [`WorkerGone`]
        where there was no answer."""
        tasks = [Task(key, arguments, time_limit, Future()) for arguments in samples]
        with self._lock:
            self._tasks.extend(tasks)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="rloom-worker")
        for _ in range(min(self.size, len(tasks))):
            self._threads.submit(self._work)
        return [task.answer for task in tasks]

    def _work(self) -> None:
        while tasks := self._take():
            self._run([task for task in tasks if task.answer.set_running_or_notify_cancel()])

    def _take(self) -> list[Task]:
        """The next sample, and as many of the same kind as are done in no time; but no more than one's share."""
        with self._lock:
            if not self._tasks:
                return []
            taken = [self._tasks.popleft()]
            quick = int(AT_ONCE_SECONDS / max(self.seconds[taken[0].key], 1e-6))
            limit = min(quick, MAX_AT_ONCE, len(self._tasks) // self.size)
            while len(taken) < limit and self._tasks[0].key == taken[0].key:
                taken.append(self._tasks.popleft())
            return taken

    def _run(self, tasks: list[Task]) -> None:
        """Have one worker do some samples; after one that hangs or dies, another goes on with the rest, one by one."""
        at_once = len(tasks)
        while tasks:
            left = tasks[:at_once]
            error = self._answered(left)
            del tasks[: min(at_once, len(tasks)) - len(left)]
            if error is not None:
                blamed = 0 if at_once == 1 or self._closing else _blamed(error)
                if blamed is not None and not self._may_try_again(tasks[0], error):
                    tasks.pop(min(blamed, len(tasks) - 1)).answer.set_exception(error)
                at_once = 1

    def _may_try_again(self, task: Task, error: Exception) -> bool:
        """A worker that ended may have been killed by somebody else, for its memory say: once more, in another one."""
        if not isinstance(error, WorkerGone) or task.crashed or self._closing:
            return False
        task.crashed = True
        return True

    def _answered(self, tasks: list[Task]) -> Exception | None:
        """Have a worker do some samples. Those that it answered are taken off the list; says why there are others."""
        worker = None
        try:
            worker = self._worker(tasks[0].key)
            worker.ask({"key": tasks[0].key, "samples": [task.arguments for task in tasks]}, tasks[0].time_limit)
            while tasks:
                answers = worker.answers(tasks[0].time_limit)
                for answer in answers[: len(tasks)]:
                    self._note(tasks[0].key, answer)
                    tasks.pop(0).answer.set_result(answer)
        except Exception as error:
            if worker is not None and not isinstance(error, RewardError):
                worker.kill()
            return error
        return None

    def _note(self, key: int, answer: dict[str, Any]) -> None:
        seconds = answer.get("seconds", 0.0)
        self.seconds[key] = seconds if self.seconds[key] == AT_ONCE_SECONDS else 0.9 * self.seconds[key] + 0.1 * seconds

    def _worker(self, key: int) -> Worker:
        """This thread's worker, with a function loaded. One that ends meanwhile is started again: it may not have been
        the function's doing."""
        tries = 1 if key in self._ends_workers else LOAD_TRIES
        for left in reversed(range(tries)):
            worker = self._running()
            try:
                if key not in worker.loaded:
                    worker.load(key, self.functions[key])
                return worker
            except (TimeoutError, WorkerGone) as error:
                worker.kill()
                if left and not self._closing and isinstance(error, WorkerGone):
                    continue
                self._ends_workers.add(key)
                how = f"took more than {LOAD_SECONDS:g} s" if isinstance(error, TimeoutError) else f"ended: {error}"
                raise RewardError(f"a worker process that was loading a reward function {how}") from None
        raise AssertionError("unreachable")

    def _running(self) -> Worker:
        """This thread's worker: a new one where there is none, or no more."""
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is not None and _ended(worker.process):
            worker.kill()  # what it had started may go on without it
            self.restarts += 1
            worker = None
        if worker is None:
            worker = self._local.worker = Worker()
            self._workers.add(worker)
        return worker

    def close(self) -> None:
        """End all workers, also those in the middle of something."""
        self._closing = True
        with self._lock:
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            task.answer.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in list(self._workers):
                worker.stop()  # its thread sees the end of the pipe; only then are the pipes closed
            self._threads.shutdown(wait=True)
            self._threads = None
        for worker in list(self._workers):
            worker.kill()
        self._local = threading.local()
        self._closing = False

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _blamed(error: Exception) -> int | None:
    """Which of several samples made a worker hang or die, counted from the first that has no answer; None: not known.

    The answers of quick samples come several at a time. Of a hang the worker's own count says which it is; whoever
    broke the worker may be any of those whose answers are missing, and breaks it again when they are done one by one.
    """
    lost = getattr(error, "lost", 0)
    return None if isinstance(error, WorkerGone) and lost else lost


class Worker:
    """One worker process, the pipes to it, and a few bytes of shared memory in which it says how far it is."""

    def __init__(self) -> None:
        request_read, self.request = os.pipe()
        self.answers_fd, answer_write = os.pipe()
        os.set_blocking(self.request, False)
        with tempfile.TemporaryFile() as shared:
            shared.truncate(PROGRESS.size)
            self.progress = mmap.mmap(shared.fileno(), PROGRESS.size)
            self.process = self._start(request_read, answer_write, shared.fileno())
        os.close(request_read)
        os.close(answer_write)
        self.loaded: set[int] = set()
        self.received = bytearray()
        self.answered = self.asked = 0  # samples of the present message
        self._close = weakref.finalize(self, _close_all, self.request, self.answers_fd, self.process)

    @staticmethod
    def _start(*fds: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # so that what it starts can be killed with it
        )

    def load(self, key: int, function: bytes) -> None:
        """Give it a function; what that imports is not the sample's time."""
        self.ask({"key": key, "function": function, "path": sys.path}, LOAD_SECONDS)
        (answer,) = self.answers(LOAD_SECONDS)
        if "error" in answer:
            raise RewardError(f"a worker process cannot load a reward function: {answer['error'][2]}")
        self.loaded.add(key)

    def ask(self, request: dict[str, Any], seconds: float) -> None:
        """Send a request within `seconds`."""
        left = TimeLeft(seconds)
        self.answered, self.asked = 0, len(request.get("samples", ()))
        PROGRESS.pack_into(self.progress, 0, 0, 0.0)  # it is idle, and does not write there now
        body = _pickled(request)
        data = memoryview(struct.pack(">I", len(body)) + body)
        try:
            while data:
                data = data[left.write(self.request, data) :]
        except BrokenPipeError:
            raise WorkerGone(self._how()) from None

    def answers(self, seconds: float) -> list[dict[str, Any]]:
        """The next answers, one or more. `TimeoutError` where a sample takes more than `seconds`: its `lost` says how
        many samples before it are done, whose answers had not been sent."""
        try:
            answers = json.loads(self._frame(seconds))
        except ValueError:
            answers = None
        except (TimeoutError, WorkerGone) as error:
            error.lost = max(0, self._begun()[0] - self.answered - 1)  # type: ignore[union-attr]
            raise
        if not isinstance(answers, list) or not answers or not all(isinstance(a, dict) for a in answers):
            raise WorkerGone("it answered something else")
        self.answered += len(answers)
        return answers

    def _frame(self, seconds: float) -> bytes:
        """One message; what came of it stays in `received` until it is whole."""
        left, count = TimeLeft(seconds), self.answered
        while True:
            size = struct.unpack(">I", self.received[:4])[0] + 4 if len(self.received) >= 4 else 4
            if len(self.received) >= size > 4:
                break
            try:
                part = left.read(self.answers_fd, 2**18)
            except TimeoutError:
                begun, since = self._begun()
                if begun <= count + 1:  # the one that was waited for all the time
                    raise
                left, count = TimeLeft(seconds - (time.monotonic() - since)), begun - 1
                continue
            if not part:
                raise WorkerGone(self._how())
            self.received += part
        data = bytes(self.received[4:size])
        del self.received[:size]
        return data

    def _begun(self) -> tuple[int, float]:
        """How many samples of the message it has begun, and when the latest."""
        begun, since = PROGRESS.unpack_from(self.progress)
        # The function may write there too: it must not buy itself time with a clock that is ahead, or more samples.
        return min(begun, self.asked), min(since, time.monotonic())

    def _how(self) -> str:
        _stop(self.process, wait=True)
        code = self.process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End the process and what it started; a loop in C does not wait to be asked."""
        _stop(self.process)

    def kill(self) -> None:
        """End it, and close the pipes."""
        self._close()


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether a process is over, found out without taking its number away from it."""
    if process.returncode is not None or not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop(process: subprocess.Popen[bytes], *, wait: bool = False) -> None:
    """Kill a process and what it started. With `wait`, it is about to end by itself, in a way that is worth knowing."""
    if process.returncode is not None:  # its number may be another's by now
        return
    if wait and hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _close_all(request: int, answers: int, process: subprocess.Popen[bytes]) -> None:
    _stop(process)
    process.wait()
    os.close(request)
    os.close(answers)


def _pickled(request: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(request, protocol=5)
    except Exception:  # a column that holds a lambda, say
        import cloudpickle

        return cloudpickle.dumps(request)


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
