"""The trainer's side of one worker process (worker.py): started by path, asked over a pipe, killed when it hangs."""

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
import time
import weakref
from pathlib import Path
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.pipes import Deadline

WORKER = Path(__file__).with_name("worker.py")
LOAD_SECONDS = 300.0
# How many samples of a message a worker has begun, and when (monotonic clock) the latest. As in worker.py.
PROGRESS = struct.Struct("Qd")


class WorkerGone(Exception):
    """The worker died in the middle of a sample."""


class WorkerProcess:
    """One worker process, the pipes to it, and a few bytes of shared memory in which it says how far it is."""

    def __init__(self) -> None:
        request_read, self.request = os.pipe()
        self.reply, reply_write = os.pipe()
        os.set_blocking(self.request, False)
        with tempfile.TemporaryFile() as shared:
            shared.truncate(PROGRESS.size)
            self.progress = mmap.mmap(shared.fileno(), PROGRESS.size)
            self.process = self._start(request_read, reply_write, shared.fileno())
        os.close(request_read)
        os.close(reply_write)
        self.loaded: set[int] = set()
        self.received = bytearray()
        # Samples of the present message.
        self.replied = self.requested = 0
        # Ends the process and closes the pipes.
        self.kill = weakref.finalize(self, _close_all, self.request, self.reply, self.process)

    @staticmethod
    def _start(*fds: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            # So that what it starts can be killed with it.
            start_new_session=True,
        )

    def load(self, key: int, function: bytes) -> None:
        """Give it a function. What that imports is not the sample's time."""
        self.send({"key": key, "function": function, "path": sys.path}, LOAD_SECONDS)
        (reply,) = self.replies(LOAD_SECONDS)
        if "error" in reply:
            raise RewardError(f"a worker process cannot load a reward function: {reply['error'][2]}")
        self.loaded.add(key)

    def send(self, request: dict[str, Any], seconds: float) -> None:
        """Send a request within `seconds`."""
        deadline = Deadline(seconds)
        self.replied, self.requested = 0, len(request.get("samples", ()))
        # It is idle, and does not write there now.
        PROGRESS.pack_into(self.progress, 0, 0, 0.0)
        body = _pickled(request)
        data = memoryview(struct.pack(">I", len(body)) + body)
        try:
            while data:
                data = data[deadline.write(self.request, data) :]
        except BrokenPipeError:
            raise WorkerGone(self._how_it_ended()) from None

    def replies(self, seconds: float) -> list[dict[str, Any]]:
        """The next replies, one or more. `TimeoutError` where a sample takes more than `seconds`: its `lost` says how
        many samples before it are done, whose replies had not been sent."""
        try:
            replies = json.loads(self._message(seconds))
        except ValueError:
            replies = None
        except (TimeoutError, WorkerGone) as error:
            error.lost = max(0, self._begun()[0] - self.replied - 1)  # type: ignore[union-attr]
            raise
        if not isinstance(replies, list) or not replies or not all(isinstance(reply, dict) for reply in replies):
            raise WorkerGone("it answered something else")
        self.replied += len(replies)
        return replies

    def _message(self, seconds: float) -> bytes:
        """One message. What came of it stays in `received` until it is whole."""
        deadline, count = Deadline(seconds), self.replied
        while True:
            size = struct.unpack(">I", self.received[:4])[0] + 4 if len(self.received) >= 4 else 4
            if len(self.received) >= size > 4:
                break
            try:
                part = deadline.read(self.reply, 2**18)
            except TimeoutError:
                begun, since = self._begun()
                # Where it is still at the sample that was waited for all the time, that one is late.
                if begun <= count + 1:
                    raise
                deadline, count = Deadline(seconds - (time.monotonic() - since)), begun - 1
                continue
            if not part:
                raise WorkerGone(self._how_it_ended())
            self.received += part
        data = bytes(self.received[4:size])
        del self.received[:size]
        return data

    def _begun(self) -> tuple[int, float]:
        """How many samples of the message it has begun, and when the latest."""
        begun, since = PROGRESS.unpack_from(self.progress)
        # The function may write there too: it must not buy itself time with a clock that is ahead, or more samples.
        return min(begun, self.requested), min(since, time.monotonic())

    def _how_it_ended(self) -> str:
        _stop(self.process, wait=True)
        code = self.process.wait()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        """Kill the process and what it started: a loop in C would not hear a polite request."""
        _stop(self.process)

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, found out without freeing its number for another process."""
        if self.process.returncode is not None or not hasattr(os, "waitid"):
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop(process: subprocess.Popen[bytes], *, wait: bool = False) -> None:
    """Kill a process and what it started. With `wait`, let the process end by itself first, so that its exit code is
    its own."""
    # Once it was waited for, its number may be another's.
    if process.returncode is not None:
        return
    if wait and hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _close_all(request: int, reply: int, process: subprocess.Popen[bytes]) -> None:
    _stop(process)
    process.wait()
    os.close(request)
    os.close(reply)


def _pickled(request: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps(request, protocol=5)
    except Exception:
        # A column holds a lambda, say.
        import cloudpickle

        return cloudpickle.dumps(request)


def _has_fileno(stream: Any) -> bool:
    try:
        stream.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    return True
