"""Event loops in threads of their own: one for all asynchronous rewards, one for all requests over HTTP.

A loop that lives as long as the process lets users keep HTTP sessions and semaphores between steps, and works where
the main thread already runs a loop (a notebook).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rloom.gpu_of_threads import on_this_gpu


class BackgroundLoop:
    """A loop in a thread of its own, started when it is first asked, by whichever thread asks first.

    >>> BackgroundLoop("doctest").start(asyncio.sleep(0, "done")).result()
    'done'
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        # Several threads may ask at once, and what one loop made no other can use.
        self._lock = threading.Lock()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine there."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running())

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # As asyncio's own, for `asyncio.to_thread`.
                threads = ThreadPoolExecutor(thread_name_prefix="asyncio", initializer=on_this_gpu(lambda: None))
                self._loop.set_default_executor(threads)
                run = on_this_gpu(_run)
                threading.Thread(target=run, args=(self._loop,), name=self.name, daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run for ever: a function that calls sys.exit() would end the loop, and all that wait for it would wait on."""
    while not loop.is_closed():
        with contextlib.suppress(SystemExit):
            loop.run_forever()


# The loop of asynchronous reward functions.
reward_loop = BackgroundLoop("rloom-rewards")
