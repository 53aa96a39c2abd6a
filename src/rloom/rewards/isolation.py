"""Reward functions in processes of their own: one that hangs or dies takes its sample with it, and nothing else.

Workers are started as fresh processes, so that this works after CUDA is in use and without importing the main script
again. Functions travel by cloudpickle, which takes closures, lambdas and what the main script defines.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.sandbox import TimeLeft

WORKER = Path(__file__).with_name("worker.py")
LOAD_SECONDS = 300.0


class WorkerGone(Exception):
    """The worker ended by itself in the middle of a sample."""


class WorkerPool:
    """Worker processes, each behind a thread that waits for it. They start when first needed.

    >>> with WorkerPool(1) as pool:
    ...     key = pool.register(lambda completions: [len(c) for c in completions], "length")
    ...     pool.submit(key, {"completions": ["four"]}, time_limit=60.0).result()["value"]
    [4]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.functions: list[bytes] = []
        self.restarts = 0
        self._threads: ThreadPoolExecutor | None = None
        self._local = threading.local()
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()

    def register(self, function: Any, name: str) -> int:
        """Make a function known to the workers; returns the key to call it by."""
        import cloudpickle

        try:
            self.functions.append(cloudpickle.dumps(function))
        except Exception as error:
            raise RewardError(
                f"The reward function '{name}' cannot be sent to a worker process: {type(error).__name__}: {error}. "
                "Let it open locks, connections and models on its first call instead of holding them, or leave out "
                "isolated=True"
            ) from error
        return len(self.functions) - 1

    def submit(self, key: int, arguments: dict[str, Any], time_limit: float) -> Future[dict[str, Any]]:
        """Call a function in the next free worker. `TimeoutError` or [`WorkerGone`] where there was no answer."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.size, thread_name_prefix="rloom-worker")
        return self._threads.submit(self._call, key, arguments, time_limit)

    def _call(self, key: int, arguments: dict[str, Any], time_limit: float) -> dict[str, Any]:
        worker: Worker | None = getattr(self._local, "worker", None)
        if worker is None or worker.process.poll() is not None:
            self.restarts += worker is not None
            worker = self._local.worker = Worker()
            self._workers.add(worker)
        try:
            if key not in worker.loaded:
                worker.load(key, self.functions[key])
            return worker.ask({"key": key, "arguments": arguments}, time_limit)
        except (TimeoutError, WorkerGone):
            worker.kill()
            raise

    def close(self) -> None:
        """End all workers, also those in the middle of something."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            for worker in list(self._workers):
                worker.stop()  # its thread sees the end of the pipe; only then are the pipes closed
            self._threads.shutdown(wait=True)
            self._threads = None
        for worker in list(self._workers):
            worker.kill()
        self._local = threading.local()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Worker:
    """One worker process and the pipes to it."""

    def __init__(self) -> None:
        request_read, self.request = os.pipe()
        self.answer, answer_write = os.pipe()
        os.set_blocking(self.request, False)
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), str(request_read), str(answer_write)],
            pass_fds=(request_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # so that what it starts can be killed with it
        )
        os.close(request_read)
        os.close(answer_write)
        self.loaded: set[int] = set()
        self._close = weakref.finalize(self, _close_all, self.request, self.answer, self.process)

    def load(self, key: int, function: bytes) -> None:
        """Give it a function; what that imports is not the sample's time."""
        answer = self.ask({"key": key, "function": function, "path": sys.path}, LOAD_SECONDS)
        if "error" in answer:
            raise RewardError(f"a worker process cannot load a reward function: {answer['error'][2]}")
        self.loaded.add(key)

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer within `seconds`."""
        left = TimeLeft(seconds)
        body = _pickled(request)
        data = memoryview(struct.pack(">I", len(body)) + body)
        try:
            while data:
                data = data[left.write(self.request, data) :]
            (size,) = struct.unpack(">I", self._read(4, left))
            answer = json.loads(self._read(size, left))
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise WorkerGone(self._how()) from None
        if not isinstance(answer, dict):
            raise WorkerGone("it answered something else")
        return answer

    def _read(self, size: int, left: TimeLeft) -> bytes:
        parts = []
        while size:
            part = left.read(self.answer, min(size, 2**20))
            if not part:
                raise WorkerGone(self._how())
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _how(self) -> str:
        code = self.process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """End the process and what it started; a loop in C does not wait to be asked."""
        _stop(self.process)

    def kill(self) -> None:
        """End it, and close the pipes."""
        self._close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # else its number may be another's by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _close_all(request: int, answer: int, process: subprocess.Popen[bytes]) -> None:
    _stop(process)
    process.wait()
    os.close(request)
    os.close(answer)


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
