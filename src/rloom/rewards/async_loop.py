"""One event loop for all asynchronous rewards, in a thread of its own.

A loop that lives as long as the process lets users keep HTTP sessions and semaphores between steps, and works where
the main thread already runs a loop (a notebook).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from functools import cache
from typing import Any


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rloom-rewards", daemon=True).start()
    return loop


def run_all(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Run them side by side and return their results in order; the first failure is raised."""

    async def gather() -> list[Any]:
        return list(await asyncio.gather(*awaitables))

    return asyncio.run_coroutine_threadsafe(gather(), _loop()).result()
