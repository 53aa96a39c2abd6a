"""The requests of one rollout, spread over vLLM servers: each is answered once, whichever server is lost meanwhile."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import Any

from rloom.errors import EngineError
from rloom.generation.vllm.client import HEALTH_SECONDS, STARTING, Client, LostWeights, OtherWeights, ServerError
from rloom.generation.vllm.requests import UnusableAnswerError
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
# How often a request is made to a server that is well, and fails all the same.
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
    # After an error: what is wrong with the server; None where it is well. It had so many seconds to say so.
    server_error: Exception | None = None
    seconds: float = 0.0


def _believe(client: Client, seconds: float) -> None:
    """Of servers that do not say which weights they have."""


class Dispatch:
    """POSTs requests for completions to several servers, and takes those of a lost server to the others.

    `read` makes of an answer what replies have, or raises what is wrong with it. An answer counts if `confirm` raises
    nothing afterwards: the server still has the weights that it was sent. A request that fails is made again where its
    server is well, three times in all; else the server is lost. It is lost too when it is silent for `patience`
    seconds, in which it answers neither requests nor looks at it (see `Watch`). One that is busy may take as long as it
    likes. A server that is well and refuses a request is not lost: another would say the same, so the error is raised.

    Each request belongs to one server at a time, and what another says of it is not looked at: nothing waits for
    threads that hang at a server which is lost.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        path: str,
        content: Callable[[Client, int], Any],
        count: int,
        *,
        read: Callable[[Client, Any], Any],
        patience: float,
        confirm: Callable[[Client, float], None] = _believe,
    ) -> None:
        self.clients = list(clients)  # those that are not lost
        self._path, self._content, self._read, self._count = path, content, read, count
        self._patience, self._watch = patience, Watch(clients, patience, confirm)
        self._replies = queue.SimpleQueue[Reply]()
        self._failures: Counter[tuple[int, Client]] = Counter()  # of requests, at servers that were well
        self._over = threading.Event()
        # What follows is changed by all threads.
        self._lock = threading.Lock()
        self._todo = deque(range(count))
        self._asked: dict[int, Client] = {}  # requests under way, and the server to which each belongs
        self._open: dict[socket.socket, Client] = {}  # their connections

    def replies(self) -> Generator[Reply, None, None]:
        """Each request's answer, as they come. When nobody asks on, servers are left alone, and stop."""
        clients, left = list(self.clients), self._count
        # Taken before the first thread starts, which would take some too.
        first = itertools.islice(itertools.cycle(clients), requests_per_server(len(clients)) * len(clients))
        asked = [(client, number) for client in first if (number := self._take(client)) is not None]
        try:
            self._watch.start()
            for client, number in asked:
                self._start(client, number)
            while left:
                reply = self._next()
                if self._counts(reply):
                    left -= 1
                    yield reply
        finally:
            self.end()

    def end(self) -> None:
        """Hang up: vLLM stops what it generates for somebody who is gone."""
        self._over.set()
        self._watch.end()
        with self._lock:
            self._todo.clear()
            self._asked.clear()
        self._hang_up(None)

    # -- threads that ask

    def _start(self, client: Client, number: int, wait: float = 0.0) -> None:
        # Daemons: a thread that hangs must not keep the process from ending.
        threading.Thread(target=self._work, args=(client, number, wait), name="rloom-vllm", daemon=True).start()

    def _take(self, client: Client) -> int | None:
        """The next request, which is this server's from now on; None if there is none, or the server is lost."""
        with self._lock:
            if client not in self.clients or not self._todo:
                return None
            number = self._todo.popleft()
            self._asked[number] = client
            return number

    def _work(self, client: Client, first: int, wait: float) -> None:
        """Make this request and then others, until there is none or something went wrong."""
        number: int | None = first
        self._over.wait(wait)
        while number is not None:
            try:
                answer = self._ask(client, number)
                self._watch.answered(client)
            except Exception as error:
                # Another takes the place of a busy one at once, but nobody that of the last one.
                seconds = HEALTH_SECONDS if len(self.clients) > 1 else self._patience
                self._judge(Reply(number, client, error=error), seconds)
                return
            self._replies.put(Reply(number, client, answer=answer))
            number = self._take(client)

    def _ask(self, client: Client, number: int) -> Any:
        with closing(client.connection(CONNECT_SECONDS)) as connection:
            try:
                connection.connect()
            except (OSError, HTTPException) as error:
                raise client.unreachable(error) from error
            # The connection lets go of it where the server will close it after its answer.
            held = connection.sock
            # From here on it may take as long as it likes.
            connection.timeout = None
            held.settimeout(None)
            _keep_alive(held)
            with self._lock:
                self._open[held] = client
            try:
                # Looked at after the connection can be hung up: either who does sees it, or this sees the end.
                if self._asked.get(number) is not client:
                    raise EngineError("called off")
                answer = client.ask(connection, "POST", self._path, self._content(client, number))
            finally:
                with self._lock:
                    self._open.pop(held, None)
        return self._read(client, answer)

    def _judge(self, reply: Reply, seconds: float) -> None:
        """Find out what is wrong with the server at which a request has failed, and hand the reply on."""
        server_error: Exception | None = None
        if isinstance(reply.error, LostWeights):
            server_error = reply.error
        elif self._asked.get(reply.number) is reply.client:
            server_error = self._watch.failed(reply.client, seconds)
        self._replies.put(replace(reply, server_error=server_error, seconds=seconds))

    # -- servers that are lost

    def _next(self) -> Reply:
        """The next reply. Servers that say nothing are found out while it is waited for."""
        began, told = time.monotonic(), False
        while True:
            for client in list(self.clients):
                error = self._watch.why_lost(client)
                if error is not None:
                    self._lose(client, error)
            with suppress(queue.Empty):
                return self._replies.get(timeout=LOOK_SECONDS)
            if not told and time.monotonic() - began > self._patience:
                told = True
                self._tell_waiting()

    def _tell_waiting(self) -> None:
        out = Counter(client.address for client in list(self._asked.values()))
        waiting = ", ".join(f"{count} at {address}" for address, count in sorted(out.items()))
        logger.warning(
            "no completions for %g s; requests that are not answered: %s. Their servers say that they are well: long "
            "completions, or requests that were lost on the way",
            self._patience,
            waiting,
        )

    def _counts(self, reply: Reply) -> bool:
        """Whether a reply is an answer that can be used. If not, its request is made again."""
        # Of a server that is lost: another has been asked.
        if self._asked.get(reply.number) is not reply.client:
            return False
        if reply.error is None:
            with self._lock:
                del self._asked[reply.number]
            return True
        if isinstance(reply.server_error, LostWeights):
            self._lose(reply.client, reply.server_error)
        elif not isinstance(reply.error, EngineError):
            raise reply.error
        elif reply.server_error is not None:
            self._lose_unless_last(reply, reply.error)
        elif _is_final(reply.error):
            raise reply.error
        else:
            self._try_again(reply.number, reply.client, reply.error)
        return False

    def _lose_unless_last(self, reply: Reply, error: EngineError) -> None:
        """Leave a server out that does not say it is well; the last one is given more time to say so."""
        if len(self.clients) > 1 or reply.seconds >= self._patience:
            self._lose(reply.client, error)
            return
        threading.Thread(target=self._judge, args=(reply, self._patience), name="rloom-vllm", daemon=True).start()

    def _try_again(self, number: int, client: Client, error: EngineError) -> None:
        """Make a request again at a server that is well, or leave it out if that does not help."""
        self._failures[number, client] += 1
        if self._failures[number, client] == TRIES:
            self._lose(client, error)
        else:
            # What has just failed may be better in a moment.
            self._start(client, number, wait=float(self._failures[number, client] - 1))

    def _lose(self, client: Client, error: EngineError) -> None:
        """Leave a server out, and ask others for what it has not answered."""
        if isinstance(error, OtherWeights):
            raise error
        if len(self.clients) == 1:
            raise EngineError(
                f"{error}. There is no other server: when it is well again, go on with resume_from_checkpoint='auto'"
            ) from error
        with self._lock:
            self.clients.remove(client)
            moved = [number for number, asked in self._asked.items() if asked is client]
            for number in moved:
                self._asked[number] = self.clients[number % len(self.clients)]
        self._hang_up(client)
        logger.warning(
            "left out for the rest of this rollout, its requests go to %d others: %s", len(self.clients), error
        )
        for number in moved:
            self._start(self._asked[number], number)

    def _hang_up(self, client: Client | None) -> None:
        """Break the connections to a server, or to all."""
        with self._lock:
            gone = [held for held, other in self._open.items() if client in (None, other)]
        for held in gone:
            # It may have ended by itself.
            with suppress(OSError):
                held.shutdown(socket.SHUT_RDWR)


def _is_final(error: EngineError) -> bool:
    """Whether a server that is well would say the same again, and so would others."""
    return isinstance(error, UnusableAnswerError) or (isinstance(error, ServerError) and error.status not in STARTING)


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
