"""Heartbeats between processes, so that one that has stopped is named soon.

Without them the others would wait in a collective until `ddp_timeout`, half an hour, and not know for which process.
Each process sends its heartbeat from a thread, also while it is busy with a reward, a compilation or a checkpoint.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from rloom.printable import get_logger

logger = get_logger(__name__)

BEAT_SECONDS, SILENT_SECONDS = 5.0, 60.0
"""How often a process sends a heartbeat, and after what silence it is named."""
STORE_SECONDS = 20.0
"""How long a request to the store may take."""
ENDED = "ended"
SILENCE = (
    "has not been heard of for {:g} s, and the others wait for it: its machine or the process has stopped, or it runs "
    "code that blocks all of its threads"
)


class Heartbeat:
    """Sends this process' heartbeat and watches those of the others, through a store that all of them reach.

    A silent process is named, not ended: its machine may only be slow. Who waits for it gives up after `ddp_timeout`.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store, self.rank = store, rank
        self._heard = dict.fromkeys((other for other in range(count) if other != rank), time.monotonic())
        # The last heartbeat of each process: a count, its host and its process id.
        self._latest = dict.fromkeys(self._heard, "")
        self._named: set[int] = set()
        # When the store last answered.
        self._answered = time.monotonic()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Send and watch heartbeats until the process ends."""
        for work in (self._beat, self._watch):
            thread = threading.Thread(target=work, name=f"rloom-heart{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Announce that this process has ended, so that the others do not report it as silent."""
        if not self._over.is_set():
            self._over.set()
            for thread in self._threads:
                # A heartbeat that is still on its way would overwrite the announcement.
                thread.join(2.0)
            # One that waits for a store that does not answer keeps it locked.
            if not any(thread.is_alive() for thread in self._threads):
                self._send(ENDED)

    # -- sending and receiving

    def _beat(self) -> None:
        count = 0
        while not self._over.is_set():
            count += 1
            if not self._send(f"{count} on {socket.gethostname()}, pid {os.getpid()}") or not self._receive():
                # The store is gone. The connections are gone too, and their error comes sooner.
                return
            self._over.wait(BEAT_SECONDS)

    def _send(self, what: str) -> bool:
        """Write this process' heartbeat. False if the store is gone."""
        try:
            self._store.set(f"rloom-beat-{self.rank}", what)
            return True
        except Exception:
            # torch's stores raise errors of several kinds, and other stores may raise any.
            return False

    def _receive(self) -> bool:
        """Read the heartbeats of the others. False if the store is gone."""
        try:
            for other in self._heard:
                key = f"rloom-beat-{other}"
                beat = self._store.get(key).decode() if self._store.check([key]) else ""
                if beat != self._latest[other]:
                    self._latest[other], self._heard[other] = beat, time.monotonic()
            self._answered = time.monotonic()
            return True
        except Exception:
            self._over.set()
            return False

    # -- watching

    def _watch(self) -> None:
        """Name silent processes by the clock alone: a store does not answer if its own process has stopped."""
        looked = time.monotonic()
        while not self._over.wait(min(1.0, BEAT_SECONDS)):
            now = time.monotonic()
            # This process itself was stopped, and could not hear the others.
            if now - looked > SILENT_SECONDS / 2:
                self._heard, self._answered = dict.fromkeys(self._heard, now), now
            looked = now
            self._name(self.silent())

    def _name(self, silent: list[int]) -> None:
        """Report processes that have become silent, and those that are heard of again."""
        for other in sorted(set(silent) - self._named):
            self._say(other, silent, SILENCE.format(SILENT_SECONDS))
        for other in sorted(self._named - set(silent)):
            self._say(other, silent, "is heard of again")
        self._named = set(silent)

    def silent(self) -> list[int]:
        """The processes that have not been heard of for too long."""
        now = time.monotonic()
        if not self._threads:
            return []
        if now - self._answered > SILENT_SECONDS:
            # Process 0 keeps the store, unless the launcher does.
            return [0] if self.rank else []
        late = [other for other, heard in self._heard.items() if now - heard > SILENT_SECONDS]
        return [other for other in late if self._latest[other] != ENDED]

    def name(self, other: int) -> str:
        """A process with its host and process id, as far as they are known."""
        _, _, place = self._latest[other].partition(" ")
        return f"process {other} ({place.removeprefix('on ')})" if place else f"process {other}"

    def _say(self, other: int, silent: list[int], what: str) -> None:
        """Print a line about a process. Only the first of the processes that are left prints it."""
        gone = {other, *silent, *(before for before, beat in self._latest.items() if beat == ENDED)}
        if all(before in gone for before in range(self.rank)):
            print(f"rloom: {self.name(other)} {what}", file=sys.stderr, flush=True)


def begin(store: Any, rank: int, count: int) -> Heartbeat:
    """Start a heartbeat over a connection of its own: the process' main connection may block while it waits."""
    try:
        own = store.clone()
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        # Stores of some kinds cannot be cloned.
        logger.warning("a process that stops is noticed after ddp_timeout only: %s", error)
        return Heartbeat(store, rank, count)
    own.set_timeout(timedelta(seconds=STORE_SECONDS))
    heart = Heartbeat(own, rank, count)
    heart.start()
    return heart
