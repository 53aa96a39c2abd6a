"""The requests of one rollout, spread over vLLM servers: each is answered once, whichever server is lost meanwhile."""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

from rloom.errors import EngineError
from rloom.generation.vllm.client import STARTING, Client, ServerError
from rloom.printable import get_logger

logger = get_logger(__name__)

# Requests under way at one server.
AT_ONCE = 256
# Between two looks at whether servers that say nothing still live.
LOOK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request: an answer, or the error in its place."""

    number: int
    client: Client
    answer: Any = None
    error: Exception | None = None


class Dispatch:
    """POSTs requests to several servers, and takes those of a lost server to the others.

    A server is lost when its connection breaks or when it is silent for `patience` seconds: it answers neither a
    request nor a question for its health. One that is busy may take as long as it likes. A server that is well and
    answers with an error is not lost: another would say the same, so the error is raised.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        path: str,
        content: Callable[[Client, int], Any],
        count: int,
        *,
        patience: float,
    ) -> None:
        self.clients = list(clients)  # those that are not lost
        self._path, self._content, self._count, self._patience = path, content, count, patience
        self._todo, self._replies = deque(range(count)), queue.SimpleQueue[Reply]()
        self._open: dict[HTTPConnection, Client] = {}  # of requests under way
        self._ended = False

    def replies(self) -> Generator[Reply, None, None]:
        """Each request's answer, as they come. When nobody asks on, servers are left alone, and stop."""
        clients, left = list(self.clients), set(range(self._count))
        # Taken before the first thread starts, which would take some too.
        first = [self._todo.popleft() for _ in range(min(AT_ONCE * len(clients), self._count))]
        try:
            for index, number in enumerate(first):
                self._start(clients[index % len(clients)], number)
            while left:
                reply = self._next()
                if reply.error is not None:
                    self._ask_another(reply)
                # A server that was thought lost may have answered after all.
                elif reply.number in left:
                    left.discard(reply.number)
                    yield reply
        finally:
            self.end()

    def end(self) -> None:
        """Hang up: vLLM stops what it generates for somebody who is gone."""
        self._ended = True
        self._todo.clear()
        self._hang_up(self._open.values())

    # -- threads that ask

    def _start(self, client: Client, number: int) -> None:
        # Daemons: a thread that hangs must not keep the process from ending.
        threading.Thread(target=self._work, args=(client, number), name="rloom-vllm", daemon=True).start()

    def _work(self, client: Client, number: int) -> None:
        """Make this request and then others, until there is none or something went wrong."""
        while True:
            try:
                self._replies.put(Reply(number, client, answer=self._ask(client, number)))
            except Exception as error:
                self._replies.put(Reply(number, client, error=error))
                return
            try:
                number = self._todo.popleft()
            except IndexError:
                return

    def _ask(self, client: Client, number: int) -> Any:
        with closing(client.connection(None)) as connection:
            # What goes wrong here goes wrong again when the request is sent, which has words for it.
            with suppress(OSError):
                connection.connect()
            self._open[connection] = client
            try:
                # Looked at after the connection can be hung up: either `end` sees it, or this sees the end.
                if self._ended:
                    raise EngineError("called off")
                return client.ask(connection, "POST", self._path, self._content(client, number))
            finally:
                self._open.pop(connection, None)

    # -- servers that are lost

    def _next(self) -> Reply:
        while True:
            try:
                return self._replies.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self._look()

    def _look(self) -> None:
        for client in list(self.clients):
            try:
                client.wait(self._patience)
            except EngineError as error:
                self._lose(client, error)

    def _ask_another(self, reply: Reply) -> None:
        error = reply.error
        assert error is not None
        if not isinstance(error, EngineError) or _is_answer(error, reply.client):
            raise error
        if reply.client in self.clients:
            self._lose(reply.client, error)
        self._start(self.clients[reply.number % len(self.clients)], reply.number)

    def _lose(self, client: Client, error: EngineError) -> None:
        if len(self.clients) == 1:
            raise error
        self.clients.remove(client)
        # Its other requests fail now, and are asked of others.
        self._hang_up([client])
        logger.warning(
            "left out for the rest of this rollout, its requests go to %d others: %s", len(self.clients), error
        )

    def _hang_up(self, clients: Any) -> None:
        gone = list(clients)
        for connection, client in list(self._open.items()):
            # It may have ended by itself.
            if client in gone:
                with suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _is_answer(error: EngineError, client: Client) -> bool:
    """Whether a server that is well has refused a request. One whose engine has died answers too, with 500."""
    if not isinstance(error, ServerError) or error.status in STARTING:
        return False
    return error.status < 500 or client.is_up()
