"""Reward functions in processes of their own: one that hangs or dies takes its sample with it, and nothing else.

Workers are started as fresh processes, so that this works after CUDA is in use and without importing the main script
again. Functions travel by cloudpickle, which takes closures, lambdas and what the main script defines.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.calling.worker_process import LOAD_SECONDS, WorkerGone, WorkerProcess

# How often loading a function is tried, where the worker dies meanwhile.
LOAD_TRIES = 3
# Samples that take no more than this many seconds together, and no more than so many, are handed to a worker at once.
AT_ONCE_SECONDS, MAX_AT_ONCE = 0.05, 64


@dataclass(slots=True)
class Task:
    """A sample to be scored."""

    key: int
    arguments: dict[str, Any]
    time_limit: float
    future: Future[dict[str, Any]]
    crashed: bool = False  # whether a worker has died over it already


class WorkerPool(AbstractContextManager["WorkerPool"]):
    """Worker processes, each behind a thread that waits for it. They start when first needed.

    Quick samples are handed over several at a time, slow ones one by one; the time limit is for each.

    >>> with WorkerPool(1) as pool:
    ...     key = pool.register(lambda completions: [len(c) for c in completions], "length")
    ...     [future.result()["value"] for future in pool.submit(key, [{"completions": ["four"]}], time_limit=60.0)]
    [[4]]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.functions: list[bytes] = []
        # About how long a sample of each function takes.
        self.seconds: list[float] = []
        self.restarts = 0
        self._tasks: deque[Task] = deque()
        self._closing = False
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._workers: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()
        # Functions that no worker could load.
        self._unloadable: set[int] = set()

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
        where there was no reply."""
        tasks = [Task(key, arguments, time_limit, Future()) for arguments in samples]
        with self._lock:
            self._tasks.extend(tasks)
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="rloom-worker")
        for _ in range(min(self.size, len(tasks))):
            self._threads.submit(self._work)
        return [task.future for task in tasks]

    def _work(self) -> None:
        while tasks := self._take():
            self._run([task for task in tasks if task.future.set_running_or_notify_cancel()])

    def _take(self) -> list[Task]:
        """The next sample, and as many of the same function as are quick; but no more than a worker's share."""
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
        """Have a worker score some samples. After one that hangs or dies, another goes on with the rest, one by one."""
        at_once = len(tasks)
        while tasks:
            left = tasks[:at_once]
            error = self._scored(left)
            del tasks[: min(at_once, len(tasks)) - len(left)]
            if error is not None:
                blamed = 0 if at_once == 1 or self._closing else _blamed(error)
                if blamed is not None and not self._may_try_again(tasks[0], error):
                    tasks.pop(min(blamed, len(tasks) - 1)).future.set_exception(error)
                at_once = 1

    def _may_try_again(self, task: Task, error: Exception) -> bool:
        """Whether a sample gets a second try: its worker may have been killed by somebody else, for its memory say."""
        if not isinstance(error, WorkerGone) or task.crashed or self._closing:
            return False
        task.crashed = True
        return True

    def _scored(self, tasks: list[Task]) -> Exception | None:
        """Have a worker score some samples. Those that are done are taken off the list; returns why others are not."""
        worker = None
        try:
            worker = self._worker(tasks[0].key)
            worker.send({"key": tasks[0].key, "samples": [task.arguments for task in tasks]}, tasks[0].time_limit)
            while tasks:
                replies = worker.replies(tasks[0].time_limit)
                for reply in replies[: len(tasks)]:
                    self._note_seconds(tasks[0].key, reply.get("seconds", 0.0))
                    tasks.pop(0).future.set_result(reply)
        except Exception as error:
            if worker is not None and not isinstance(error, RewardError):
                worker.kill()
            return error
        return None

    def _note_seconds(self, key: int, seconds: float) -> None:
        """A moving average, which begins with the first sample."""
        before = self.seconds[key]
        self.seconds[key] = seconds if before == AT_ONCE_SECONDS else 0.9 * before + 0.1 * seconds

    def _worker(self, key: int) -> WorkerProcess:
        """This thread's worker, with a function loaded. A worker that dies meanwhile is replaced: that may not be the
        function's fault."""
        tries = 1 if key in self._unloadable else LOAD_TRIES
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
                self._unloadable.add(key)
                how = f"took more than {LOAD_SECONDS:g} s" if isinstance(error, TimeoutError) else f"ended: {error}"
                raise RewardError(f"a worker process that was loading a reward function {how}") from None
        raise AssertionError("unreachable")

    def _running(self) -> WorkerProcess:
        """This thread's worker. A new one is started where there is none, or where it has died."""
        worker: WorkerProcess | None = getattr(self._local, "worker", None)
        if worker is not None and worker.has_ended:
            # What it had started may go on without it.
            worker.kill()
            self.restarts += 1
            worker = None
        if worker is None:
            worker = self._local.worker = WorkerProcess()
            self._workers.add(worker)
        return worker

    def close(self) -> None:
        """End all workers, also those in the middle of something."""
        self._closing = True
        with self._lock:
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            task.future.cancel()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in list(self._workers):
                # Its thread sees the end of the pipe. Only then are the pipes closed.
                worker.stop()
            self._threads.shutdown(wait=True)
            self._threads = None
        for worker in list(self._workers):
            worker.kill()
        self._local = threading.local()
        self._closing = False

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _blamed(error: Exception) -> int | None:
    """Which of several samples made a worker hang or die, counted from the first without a reply; None: not known.

    The replies of quick samples come several at a time. Of a hang the worker's own count says which sample it is. A
    worker may have died of any sample whose reply is missing: it dies again when they are scored one by one.
    """
    lost = getattr(error, "lost", 0)
    return None if isinstance(error, WorkerGone) and lost else lost
