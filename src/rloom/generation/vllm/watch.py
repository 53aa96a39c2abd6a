"""Whether servers that generate are what they were: each is asked every few seconds, and after its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rloom.errors import EngineError
from rloom.generation.vllm.client import HEALTH_SECONDS, Client, LostWeights
from rloom.printable import get_logger

logger = get_logger(__name__)

# Between two looks at a server.
LOOK_SECONDS = 5.0


@dataclass(slots=True)
class _Seen:
    """What was found at one server."""

    asked: float | None = None  # when it was first asked what it has not answered
    error: Exception | None = None  # what came instead of an answer
    lost: LostWeights | None = None  # why it can be used no more, though it answers
    # Of the last time that its weights were asked for after an answer.
    lock: threading.Lock = field(default_factory=threading.Lock)
    confirmed: float = 0.0
    why_not: Exception | None = None


class Watch:
    """Looks at each server in a thread of its own, so that a silent one keeps nobody from the answers of others.

    `confirm` raises `LostWeights` where a server does not have the weights that it was sent, and another error where it
    does not answer.
    """

    def __init__(self, clients: Sequence[Client], patience: float, confirm: Callable[[Client], None]) -> None:
        self._patience, self._confirm = patience, confirm
        self._seen = {client: _Seen() for client in clients}
        self._over = threading.Event()

    def start(self) -> None:
        """Look from now on."""
        for client in self._seen:
            threading.Thread(target=self._watch, args=(client,), name="rloom-vllm-watch", daemon=True).start()

    def end(self) -> None:
        """Ask no more."""
        self._over.set()

    def answered(self, client: Client) -> None:
        """Raise what is wrong with an answer that a server has just given: it may have been started again unnoticed,
        as behind an address that leads to another machine from now on."""
        seen, came = self._seen[client], time.monotonic()
        with seen.lock:
            # One question does for all answers that came before it.
            if seen.confirmed <= came:
                seen.confirmed, seen.why_not = time.monotonic(), None
                try:
                    self._confirm(client)
                except Exception as error:
                    seen.why_not = error
            if seen.why_not is not None:
                raise seen.why_not
        seen.asked = None

    def why_lost(self, client: Client) -> EngineError | None:
        """Why a server cannot be used any more: it has been silent for too long, or is not what it was."""
        seen = self._seen[client]
        if seen.lost is not None:
            return seen.lost
        asked = seen.asked
        if asked is None or time.monotonic() - asked < self._patience:
            return None
        said = seen.error or f"the vLLM server at {client.address} does not answer"
        return EngineError(f"{said}; waited {self._patience:g} s (vllm_server_timeout)")

    def _watch(self, client: Client) -> None:
        seen = self._seen[client]
        while not self._over.wait(min(LOOK_SECONDS, self._patience)):
            if seen.asked is None:
                seen.asked, seen.error = time.monotonic(), None
            try:
                client.get("/health", timeout=HEALTH_SECONDS)
                self._confirm(client)
            except LostWeights as error:
                seen.lost = error
                return
            except Exception as error:
                self._tell(seen, error)
            else:
                seen.asked = None

    def _tell(self, seen: _Seen, error: Exception) -> None:
        # Not of one that has answered a request meanwhile.
        if seen.error is None and seen.asked is not None and not self._over.is_set():
            logger.warning("%s; waiting for it, up to %g s (vllm_server_timeout)", error, self._patience)
        seen.error = error
