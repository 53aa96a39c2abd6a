"""Processes that train together hear from each other every few seconds, so that one that has stopped is named soon.

Without it the others would wait in a sum or a gather until `ddp_timeout`, half an hour, and then not know for whom.
Each process beats from a thread of its own: one that is busy in a reward, a compilation or a checkpoint is still heard.
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
"""How often a process beats, and after what silence it is named."""
STORE_SECONDS = 20.0
ENDED = "ended"
SILENCE = (
    "has not been heard of for {:g} s, and the others wait for it: its machine or the process is stopped, or something "
    "in it lets no other thread run"
)


class Heartbeat:
    """This process' beat, and what it hears of the others, through a store that all of them reach.

    Nobody is ended for being silent: a machine may only be slow, and who waits gives up after `ddp_timeout` anyway.
    """

    def __init__(self, store: Any, rank: int, count: int) -> None:
        self._store, self.rank = store, rank
        self._heard = dict.fromkeys((other for other in range(count) if other != rank), time.monotonic())
        self._said = dict.fromkeys(self._heard, "")  # what each said last: a count, its host and its number there
        self._named: set[int] = set()
        self._answered = time.monotonic()  # when the store last did
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Beat and listen, until the process ends."""
        for work in (self._beat, self._watch):
            thread = threading.Thread(target=work, name=f"rloom-heart{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)
        atexit.register(self.stop)

    def stop(self) -> None:
        """Say that this process has ended, in order that nobody misses it."""
        if not self._over.is_set():
            self._over.set()
            for thread in self._threads:
                thread.join(2.0)  # a beat that is on its way would be the last word
            self._tell(ENDED)

    # -- beating

    def _beat(self) -> None:
        count = 0
        while not self._over.is_set():
            count += 1
            if not self._tell(f"{count} on {socket.gethostname()}, pid {os.getpid()}") or not self._listen():
                return  # the store is gone; so are the connections, which says it more quickly
            self._over.wait(BEAT_SECONDS)

    def _tell(self, what: str) -> bool:
        try:
            self._store.set(f"rloom-beat-{self.rank}", what)
            return True
        except Exception:  # of torch's own kinds, or whatever a store of another kind raises
            return False

    def _listen(self) -> bool:
        try:
            for other in self._heard:
                key = f"rloom-beat-{other}"
                said = self._store.get(key).decode() if self._store.check([key]) else ""
                if said != self._said[other]:
                    self._said[other], self._heard[other] = said, time.monotonic()
            self._answered = time.monotonic()
            return True
        except Exception:
            self._over.set()
            return False

    # -- listening

    def _watch(self) -> None:
        """By the clock alone: a store that a stopped process keeps does not answer either."""
        looked = time.monotonic()
        while not self._over.wait(min(1.0, BEAT_SECONDS)):
            now = time.monotonic()
            if now - looked > SILENT_SECONDS / 2:  # this process itself was stopped, and has heard nobody meanwhile
                self._heard, self._answered = dict.fromkeys(self._heard, now), now
            looked = now
            self._name(self.silent())

    def _name(self, silent: list[int]) -> None:
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
            return [0] if self.rank else []  # who keeps the store, if it is not the launcher
        late = [other for other, heard in self._heard.items() if now - heard > SILENT_SECONDS]
        return [other for other in late if self._said[other] != ENDED]

    def name(self, other: int) -> str:
        """A process with its place, as far as it told that."""
        _, _, place = self._said[other].partition(" ")
        return f"process {other} ({place.removeprefix('on ')})" if place else f"process {other}"

    def _say(self, other: int, silent: list[int], what: str) -> None:
        """Once: by the first of those that are left."""
        gone = {other, *silent, *(before for before, said in self._said.items() if said == ENDED)}
        if all(before in gone for before in range(self.rank)):
            print(f"rloom: {self.name(other)} {what}", file=sys.stderr, flush=True)


def begin(store: Any, rank: int, count: int) -> Heartbeat:
    """A heartbeat over a connection of its own: the process' waits for others on theirs."""
    try:
        own = store.clone()
    except (AttributeError, NotImplementedError, RuntimeError) as error:  # a store of another kind
        logger.warning("a process that stops is noticed after ddp_timeout only: %s", error)
        return Heartbeat(store, rank, count)
    own.set_timeout(timedelta(seconds=STORE_SECONDS))
    heart = Heartbeat(own, rank, count)
    heart.start()
    return heart
