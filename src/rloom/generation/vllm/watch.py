"""Whether servers that generate are what they were: each is asked every few seconds, and after its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rloom.errors import EngineError
from rloom.generation.vllm.client import HEALTH_SECONDS, Client, LostWeights
from rloom.printable import get_logger

logger = get_logger(__name__)

# Between two looks at a server.
WATCH_SECONDS = 5.0


class Question:
    """A question for which many threads wait: one that is put after they have come does for all of them."""

    def __init__(self, put: Callable[[float], None]) -> None:
        self._put = put
        self._lock = threading.Lock()
        self._put_at = 0.0
        self._error: Exception | None = None

    def ask(self, seconds: float) -> None:
        """Raise what the question raises, which may take so many seconds to be answered."""
        came = time.monotonic()
        with self._lock:
            if self._put_at <= came:
                self._put_at, self._error = time.monotonic(), None
                try:
                    self._put(seconds)
                except Exception as error:
                    # It does for those, too, that have come meanwhile: else each would wait as long again.
                    self._put_at, self._error = time.monotonic(), error
            if self._error is not None:
                raise self._error


class _Server:
    """One server, and what was found out about it."""

    def __init__(self, client: Client, confirm: Callable[[Client, float], None]) -> None:
        self.client, self._confirm = client, confirm
        self.after_answers = Question(lambda seconds: confirm(client, seconds))
        self.after_failures = Question(self.look)
        self.asked: float | None = None  # when it was first asked what it has not answered
        self.error: Exception | None = None  # what came instead of an answer
        self.lost: LostWeights | None = None  # why it can be used no more, though it answers

    def look(self, seconds: float) -> None:
        """Raise what is wrong with it. Each of two questions may take so many seconds to be answered."""
        self.client.check_health(seconds)
        self._confirm(self.client, seconds)


class Watch:
    """Looks at each server in a thread of its own, so that a silent one keeps nobody from the answers of others.

    `confirm` raises `LostWeights` where a server does not have the weights that it was sent, and another error where it
    does not answer within some seconds.
    """

    def __init__(self, clients: Sequence[Client], patience: float, confirm: Callable[[Client, float], None]) -> None:
        self._patience = patience
        self._servers = {client: _Server(client, confirm) for client in clients}
        self._over = threading.Event()

    def start(self) -> None:
        """Look from now on."""
        for server in self._servers.values():
            threading.Thread(target=self._watch, args=(server,), name="rloom-vllm-watch", daemon=True).start()

    def end(self) -> None:
        """Ask no more."""
        self._over.set()

    def answered(self, client: Client) -> None:
        """Raise what is wrong with an answer that a server has just given: it may have been started again unnoticed,
        as behind an address that leads to another machine from now on."""
        server = self._servers[client]
        server.after_answers.ask(self._patience)
        server.asked = None

    def failed(self, client: Client, seconds: float) -> Exception | None:
        """What is wrong with a server at which a request has just failed; None where it is well. It may take so many
        seconds to say so."""
        try:
            self._servers[client].after_failures.ask(seconds)
        except Exception as error:
            return error
        return None

    def why_lost(self, client: Client) -> EngineError | None:
        """Why a server cannot be used any more: it has been silent for too long, or is not what it was."""
        server = self._servers[client]
        if server.lost is not None:
            return server.lost
        asked = server.asked
        if asked is None or time.monotonic() - asked < self._patience:
            return None
        said = server.error or f"the vLLM server at {client.address} does not answer"
        return EngineError(f"{said}; waited {self._patience:g} s (vllm_server_timeout)")

    def _watch(self, server: _Server) -> None:
        seconds = HEALTH_SECONDS
        while not self._over.wait(min(WATCH_SECONDS, self._patience)):
            if server.asked is None:
                server.asked, server.error = time.monotonic(), None
            try:
                server.look(seconds)
            except LostWeights as error:
                server.lost = error
                return
            except Exception as error:
                self._tell(server, error)
                # It may be slow to say anything, and well.
                seconds = min(2 * seconds, self._patience)
            else:
                server.asked, seconds = None, HEALTH_SECONDS

    def _tell(self, server: _Server, error: Exception) -> None:
        # Not of one that has answered a request meanwhile.
        if server.error is None and server.asked is not None and not self._over.is_set():
            logger.warning("%s; waiting for it, up to %g s (vllm_server_timeout)", error, self._patience)
        server.error = error
