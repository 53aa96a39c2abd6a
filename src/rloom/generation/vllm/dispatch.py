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
from rloom.generation.vllm.client import STARTING, Client, ServerError
from rloom.printable import get_logger

try:
    import resource
except ImportError:
    # Windows has no limit of this kind.
    resource = None  # type: ignore[assignment]

logger = get_logger(__name__)

# Requests under way at one server.
REQUESTS_PER_SERVER = 256
# Between two looks at whether servers that say nothing still live.
HEALTH_SECONDS = 5.0
# A server on a machine that is gone does not even refuse.
CONNECT_SECONDS = 10.0
# How often a request is made to servers that are well, and fails all the same.
TRIES = 3


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a request: an answer, or the error in its place."""

    number: int
    client: Client
    answer: Any = None
    error: Exception | None = None
    in_doubt: bool = False  # another request to this server had failed when the answer came


class Dispatch:
    """POSTs requests to several servers, and takes those of a lost server to the others.

    A request that fails puts its server in doubt: it may have been started again, with other weights. If it is well by
    `still_well`, the request is made again; else the server is lost, and what it has answered since is not used. It is
    lost too when it is silent for `patience` seconds: it answers neither a request nor a question for its health. One
    that is busy may take as long as it likes. A server that is well and refuses a request is not lost: another would
    say the same, so the error is raised.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        path: str,
        content: Callable[[Client, int], Any],
        count: int,
        *,
        patience: float,
        still_well: Callable[[Client], bool] = Client.is_up,
    ) -> None:
        self.clients = list(clients)  # those that are not lost
        self._path, self._content, self._count, self._patience = path, content, count, patience
        self._still_well = still_well
        self._todo, self._replies = deque(range(count)), queue.SimpleQueue[Reply]()
        self._open: dict[HTTPConnection, Client] = {}  # of requests under way
        self._doubted: set[Client] = set()
        self._failures: Counter[int] = Counter()  # of each request, at servers that were well
        self._ended = False

    def replies(self) -> Generator[Reply, None, None]:
        """Each request's answer, as they come. When nobody asks on, servers are left alone, and stop."""
        clients, left = list(self.clients), self._count
        # Taken before the first thread starts, which would take some too.
        first = [
            self._todo.popleft() for _ in range(min(requests_per_server(len(clients)) * len(clients), self._count))
        ]
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
            except Exception as error:
                # Before anything else: a server that was started again answers from now on.
                self._doubted.add(client)
                self._replies.put(Reply(number, client, error=error))
                return
            self._replies.put(Reply(number, client, answer=answer, in_doubt=client in self._doubted))
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
            self._open[connection] = client
            try:
                # Looked at after the connection can be hung up: either `end` sees it, or this sees the end.
                if self._ended:
                    raise EngineError("called off")
                answer = client.ask(connection, "POST", self._path, self._content(client, number))
            finally:
                self._open.pop(connection, None)
        if _was_aborted(answer):
            raise EngineError(
                f"the vLLM server at {client.address} has aborted a request: it is being stopped, or was told to pause"
            )
        return answer

    # -- servers that are lost

    def _next(self) -> Reply:
        while True:
            try:
                return self._replies.get(timeout=HEALTH_SECONDS)
            except queue.Empty:
                self._look()

    def _look(self) -> None:
        for client in list(self.clients):
            try:
                client.wait(self._patience)
            except EngineError as error:
                self._lose(client, error)

    def _is_good(self, reply: Reply) -> bool:
        """Whether a reply is an answer that can be used. If not, the request has to be made again; its server is lost
        by then, or well."""
        client, error = reply.client, reply.error
        if error is None and not reply.in_doubt:
            return True
        if client not in self.clients:
            return False
        if error is not None and not isinstance(error, EngineError):
            raise error
        is_well = self._still_well(client)
        if error is None:
            if not is_well:
                self._lose(client, EngineError(f"the vLLM server at {client.address} was started again"))
            return is_well
        if is_well and isinstance(error, ServerError) and error.status not in STARTING:
            raise error
        self._failures[reply.number] += is_well
        if is_well and self._failures[reply.number] < TRIES:
            self._doubted.discard(client)
        else:
            self._lose(client, error)
        return False

    def _ask_again(self, reply: Reply) -> None:
        """Make a request again: at the same server if that is well, else at another."""
        is_lost = reply.client not in self.clients
        client = self.clients[reply.number % len(self.clients)] if is_lost else reply.client
        # What has just failed may be better in a moment.
        self._start(client, reply.number, wait=0.0 if is_lost else float(self._failures[reply.number] - 1))

    def _lose(self, client: Client, error: EngineError) -> None:
        if len(self.clients) == 1:
            raise EngineError(
                f"{error}. There is no other server: start it again, and go on with resume_from_checkpoint='auto'"
            ) from error
        self._doubted.add(client)
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


def requests_per_server(servers: int) -> int:
    """Requests under way at each of so many servers. Each is an open file, of which half are left to others.

    >>> 1 <= requests_per_server(10_000) <= requests_per_server(1) <= REQUESTS_PER_SERVER
    True
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else -1
    # -1: there is no limit.
    return REQUESTS_PER_SERVER if limit < 0 else max(1, min(REQUESTS_PER_SERVER, limit // 2 // servers))


def _was_aborted(answer: Any) -> bool:
    """Whether a server has ended a completion by itself: vLLM does so when it is stopped, and answers with 200.

    >>> _was_aborted({"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}), _was_aborted(None)
    (True, False)
    """
    choices = answer.get("choices", ()) if isinstance(answer, dict) else ()
    return any(choice.get("finish_reason") == "abort" for choice in choices)
