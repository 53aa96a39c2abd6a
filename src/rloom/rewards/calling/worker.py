"""A worker process: loads reward functions and calls them, one sample at a time.

It is started by path, so that nothing of the trainer comes with it: no torch, no main script. Requests come pickled;
replies go back as JSON, since the function that wrote them may not be trusted.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import json
import mmap
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1
# As in worker_process.py.
PROGRESS = struct.Struct("Qd")
TOGETHER_SECONDS = 0.02


def read(requests: BinaryIO) -> bytes | None:
    """One message; None at the end."""
    header = requests.read(4)
    if len(header) < 4:
        return None
    (size,) = struct.unpack(">I", header)
    body = requests.read(size)
    return body if len(body) == size else None


def write(fd: int, replies: list[str]) -> None:
    """One message: several replies, each as JSON."""
    body = f"[{','.join(replies)}]".encode()
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[os.write(fd, data) :]


def plain(value: Any, depth: int = 0) -> Any:
    """What a function returned, as JSON. What JSON does not know becomes its type's name and its text.

    >>> plain((1, None, 2.5)), plain([{1}])
    ([1, None, 2.5], [{'type': 'set', 'text': '{1}'}])
    """
    if hasattr(value, "detach"):
        value = value.detach()
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, (list, tuple)) and depth < 2:
        return [plain(v, depth + 1) for v in value]
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)
        except Exception:
            # It is no number.
            pass
    try:
        return {"type": type(value).__name__, "text": str(value)[:100]}
    except Exception:
        # A class of the user's own may refuse even that.
        return {"type": type(value).__name__, "text": ""}


def call(function: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Call a function with a sample; its value, or its exception, and what it logged."""
    extra: dict[str, Any] = {}
    metrics: list[Any] = []

    def log_extra(column: str, values: Any) -> None:
        if len(values) != 1:
            raise ValueError(f"log_extra({column!r}, …) got {len(values)} values for 1 completions")
        extra[str(column)] = [_text(v) for v in values]

    if "log_extra" in arguments:
        arguments["log_extra"] = log_extra
    if "log_metric" in arguments:
        arguments["log_metric"] = lambda name, value: metrics.append([str(name), plain(value)])
    began = time.perf_counter()
    try:
        value = function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        reply: dict[str, Any] = {"value": plain(value)}
    except BaseException as error:
        reply = {"error": described(error)}
    return {**reply, "extra": extra, "metrics": metrics, "seconds": time.perf_counter() - began}


def described(error: BaseException) -> list[str]:
    """An exception's class, message and traceback; only the class, where the exception cannot be shown."""
    try:
        told = traceback.TracebackException.from_exception(error)
        # The user's frames, as in frames.py.
        own = [frame for frame in told.stack if not frame.filename.startswith((__file__, *libraries(), "<frozen"))]
        told.stack = traceback.StackSummary.from_list(own or told.stack)
        return [type(error).__name__, str(error)[:1000], "".join(told.format())[-4000:]]
    except Exception:
        return [type(error).__name__, "", ""]


def libraries() -> set[str]:
    """The folders of Python's own modules and of installed packages."""
    import sysconfig

    return {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}


def as_json(reply: dict[str, Any]) -> str:
    """A reply as JSON, or the error that prevents it: the samples after it must not wait for it."""
    try:
        return json.dumps(reply)
    except Exception as error:
        return json.dumps({"error": described(error), "seconds": reply["seconds"]})


async def _awaited(value: Any) -> Any:
    return await value


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, float, bool)) else str(value)


def score(function: Any, samples: list[dict[str, Any]], progress: mmap.mmap, write_fd: int) -> None:
    """Call a function on each sample. Quick replies are sent together: who reads them needs a core too.

    Before each sample the other side is told, in shared memory, which it is and when it began.
    """
    replies: list[str] = []
    sent = time.monotonic()
    for number, arguments in enumerate(samples, 1):
        now = time.monotonic()
        if replies and now - sent > TOGETHER_SECONDS:
            write(write_fd, replies)
            replies, sent = [], now
        PROGRESS.pack_into(progress, 0, number, now)
        replies.append(as_json(call(function, arguments)))
    write(write_fd, replies)


def main(read_fd: int, write_fd: int, progress_fd: int) -> None:
    """Serve until the other side hangs up, or dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Ctrl-C is the trainer's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    progress = mmap.mmap(progress_fd, PROGRESS.size)
    os.close(progress_fd)
    functions: dict[int, Any] = {}
    warm: set[int] = set()
    with open(read_fd, "rb") as requests:
        while (message := read(requests)) is not None:
            try:
                request = pickle.loads(message)
                if "samples" not in request:
                    functions[request["key"]] = load(request)
                    write(write_fd, [as_json({"loaded": True})])
                    continue
                score(functions[request["key"]], request["samples"], progress, write_fd)
                # What the function imported stays: the garbage collector need not look at it again.
                if request["key"] not in warm:
                    warm.add(request["key"])
                    gc.freeze()
            except BaseException as error:
                write(write_fd, [as_json({"error": described(error), "seconds": 0.0})])


def load(request: dict[str, Any]) -> Any:
    """The function in a request, after its `at_start` was called."""
    sys.path[:] = request["path"]
    function, at_start = pickle.loads(request["function"])
    if at_start is not None:
        at_start()
    return function


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
