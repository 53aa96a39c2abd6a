"""One event loop for all asynchronous rewards, in a thread of its own.

A loop that lives as long as the process lets users keep HTTP sessions and semaphores between steps, and works where
the main thread already runs a loop (a notebook).
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="rloom-rewards", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """For ever: a reward that calls sys.exit() would end the loop, and all that wait for it would wait on."""
    while not loop.is_closed():
        with contextlib.suppress(SystemExit):
            loop.run_forever()


def start(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Run a coroutine on that loop.

    >>> start(asyncio.sleep(0, "done")).result()
    'done'
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())
