"""The requests of one rollout, spread over vLLM servers: each is answered once, whichever server is lost meanwhile."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from typing import Any

from rloom.errors import EngineError
from rloom.generation.vllm.client import HEALTH_SECONDS, STARTING, Client, OtherWeights, ServerError
from rloom.generation.vllm.requests import check_answer
from rloom.generation.vllm.watch import Watch
from rloom.printable import get_logger

try:
    import resource
except ImportError:
    # Windows has no limit of this kind.
    resource = None  # type: ignore[assignment]

logger = get_logger(__name__)

# Requests under way at one server.
REQUESTS_PER_SERVER = 256
# Between two looks at what was found out about servers that say nothing.
LOOK_SECONDS = 1.0
# A server on a machine that is gone does not even refuse.
CONNECT_SECONDS = 10.0
# How often a request is made to servers that are well, and fails all the same.
TRIES = 3
# A connection over which nothing comes is tried after so many seconds, then so often, so many times. Else nobody would
# notice that the machine at its other end, or a gateway between, has forgotten it.
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request: an answer, or the error in its place."""

    number: int
    client: Client
    answer: Any = None
    error: Exception | None = None


def _believe(client: Client) -> None:
    """Of servers that do not say which weights they have."""


class Dispatch:
    """POSTs requests for completions to several servers, and takes those of a lost server to the others.

    An answer counts if `confirm` raises nothing afterwards: the server still has the weights that it was sent. A
    request that fails is made again where its server is well by `still_well` (which is told how long it may wait for
    an answer); else the server is lost. It is lost too when it is silent for `patience` seconds, in which it answers
    neither requests nor looks at it (see `Watch`). One that is busy may take as long as it likes. A server that is well
    and refuses a request is not lost: another would say the same, so the error is raised.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        path: str,
        content: Callable[[Client, int], Any],
        count: int,
        *,
        patience: float,
        still_well: Callable[[Client, float], bool] = Client.is_up,
        confirm: Callable[[Client], None] = _believe,
    ) -> None:
        self.clients = list(clients)  # those that are not lost
        self._path, self._content, self._count, self._patience = path, content, count, patience
        self._still_well, self._watch = still_well, Watch(clients, patience, confirm)
        self._todo, self._replies = deque(range(count)), queue.SimpleQueue[Reply]()
        self._open: dict[HTTPConnection, Client] = {}  # of requests under way
        self._failures: Counter[int] = Counter()  # of each request, at servers that were well
        self._ended = False

    def replies(self) -> Generator[Reply, None, None]:
        """Each request's answer, as they come. When nobody asks on, servers are left alone, and stop."""
        clients, left = list(self.clients), self._count
        # Taken before the first thread starts, which would take some too.
        first = [
            self._todo.popleft() for _ in range(min(requests_per_server(len(clients)) * len(clients), self._count))
        ]
        self._watch.start()
        try:
            for index, number in enumerate(first):
                self._start(clients[index % len(clients)], number)
            while left:
                reply = self._next()
                if self._is_good(reply):
                    left -= 1
                    yield reply
                else:
                    self._ask_again(reply)
        finally:
            self.end()

    def end(self) -> None:
        """Hang up: vLLM stops what it generates for somebody who is gone."""
        self._ended = True
        self._todo.clear()
        self._watch.end()
        self._hang_up(self._open.values())

    # -- threads that ask

    def _start(self, client: Client, number: int, wait: float = 0.0) -> None:
        # Daemons: a thread that hangs must not keep the process from ending.
        threading.Thread(target=self._work, args=(client, number, wait), name="rloom-vllm", daemon=True).start()

    def _work(self, client: Client, number: int, wait: float) -> None:
        """Make this request and then others, until there is none or something went wrong."""
        time.sleep(wait)
        while True:
            try:
                answer = self._ask(client, number)
                self._watch.answered(client)
            except Exception as error:
                self._replies.put(Reply(number, client, error=error))
                return
            self._replies.put(Reply(number, client, answer=answer))
            if client not in self.clients:
                return
            try:
                number = self._todo.popleft()
            except IndexError:
                return

    def _ask(self, client: Client, number: int) -> Any:
        with closing(client.connection(CONNECT_SECONDS)) as connection:
            try:
                connection.connect()
            except (OSError, HTTPException) as error:
                raise client.unreachable(error) from error
            # From here on it may take as long as it likes.
            connection.timeout = None
            connection.sock.settimeout(None)
            _keep_alive(connection.sock)
            self._open[connection] = client
            try:
                # Looked at after the connection can be hung up: either `end` sees it, or this sees the end.
                if self._ended:
                    raise EngineError("called off")
                answer = client.ask(connection, "POST", self._path, self._content(client, number))
            finally:
                self._open.pop(connection, None)
        check_answer(answer, client.address)
        return answer

    # -- servers that are lost

    def _next(self) -> Reply:
        while True:
            for client in list(self.clients):
                error = self._watch.why_lost(client)
                if error is not None:
                    self._lose(client, error)
            with suppress(queue.Empty):
                return self._replies.get(timeout=LOOK_SECONDS)

    def _is_good(self, reply: Reply) -> bool:
        """Whether a reply is an answer that can be used. If not, the request has to be made again; its server is lost
        by then, or well."""
        client, error = reply.client, reply.error
        if client not in self.clients:
            return False
        if error is None:
            return True
        if not isinstance(error, EngineError):
            raise error
        # Another takes the place of a busy one at once, but nobody that of the last one.
        is_well = self._still_well(client, HEALTH_SECONDS if len(self.clients) > 1 else self._patience)
        if is_well and isinstance(error, ServerError) and error.status not in STARTING:
            raise error
        self._failures[reply.number] += is_well
        if not is_well or self._failures[reply.number] == TRIES:
            self._lose(client, error)
        return False

    def _ask_again(self, reply: Reply) -> None:
        """Make a request again: at the same server if that is well, else at another."""
        is_lost = reply.client not in self.clients
        client = self.clients[reply.number % len(self.clients)] if is_lost else reply.client
        # What has just failed may be better in a moment.
        self._start(client, reply.number, wait=0.0 if is_lost else float(self._failures[reply.number] - 1))

    def _lose(self, client: Client, error: EngineError) -> None:
        if isinstance(error, OtherWeights):
            raise error
        if len(self.clients) == 1:
            raise EngineError(
                f"{error}. There is no other server: when it is up again, go on with resume_from_checkpoint='auto'"
            ) from error
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


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        # Not every system knows all of them.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def requests_per_server(servers: int) -> int:
    """Requests under way at each of so many servers. Each is an open file, of which half are left to others.

    >>> 1 <= requests_per_server(10_000) <= requests_per_server(1) <= REQUESTS_PER_SERVER
    True
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else -1
    # -1: there is no limit.
    return REQUESTS_PER_SERVER if limit < 0 else max(1, min(REQUESTS_PER_SERVER, limit // 2 // servers))
