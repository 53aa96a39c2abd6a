"""The HTTP side of a vLLM server: plain requests, and words for what goes wrong."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rloom.errors import EngineError

HOW_TO_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs (docs/generation.md)"
)

# Requests under way.
AT_ONCE = 256
# Between two looks at whether the server still lives.
LOOK_SECONDS = 5.0
# The server is still starting, or has died. The first and the last come from a proxy before it.
STARTING = (502, 503, 504)


class ServerError(EngineError):
    """The server answered, with an error."""

    def __init__(self, status: int, path: str, text: str) -> None:
        self.status = status
        self.unknown = status in (404, 405)  # it does not have such a path
        super().__init__(f"the vLLM server answered {path} with {status}: {text[:500]}")


class Client:
    """Asks one server. Proxies of the environment are not used: it is on this machine or in this network."""

    def __init__(self, address: str, timeout: float = 240.0) -> None:
        self.timeout = timeout  # of calls that do not generate
        if not address.startswith(("http://", "https://")):
            address = f"http://{address}"
        self.address = address.rstrip("/")
        try:
            self._connection(None)
        # A port that is no number, no host.
        except (ValueError, HTTPException) as error:
            raise EngineError(f"{address!r} is no address of a vLLM server: {error}") from error

    def get(self, path: str, timeout: float | None = 30.0) -> Any:
        """The answer to a GET, as JSON where it is."""
        with closing(self._connection(timeout)) as connection:
            return self._ask(connection, "GET", path)

    def tell(self, path: str, content: Any) -> None:
        """A POST whose answer is only whether it was heard."""
        with closing(self._connection(self.timeout)) as connection:
            self._raw(connection, "POST", path, content)

    def _connection(self, timeout: float | None) -> HTTPConnection:
        parts = urlsplit(self.address)
        make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        if not parts.hostname:
            raise ValueError("it names no host")
        return make(parts.hostname, parts.port, timeout=timeout)

    def _ask(self, connection: HTTPConnection, method: str, path: str, content: Any = None) -> Any:
        body = self._raw(connection, method, path, content)
        try:
            return json.loads(body) if body else None
        except ValueError as error:
            raise EngineError(f"{self.address}{path} did not answer with JSON: is it a vLLM server?") from error

    def _raw(self, connection: HTTPConnection, method: str, path: str, content: Any = None) -> bytes:
        data = None if method == "GET" else json.dumps({} if content is None else content).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, urlsplit(self.address).path + path, data, headers)
            with connection.getresponse() as answer:
                body = answer.read()
        except TimeoutError as error:
            raise EngineError(
                f"the vLLM server at {self.address} did not answer {path} within {connection.timeout:g} s: see its "
                "messages, or raise vllm_server_timeout"
            ) from error
        # Refused, reset, no such host; or the server went in the middle of an answer.
        except (OSError, HTTPException) as error:
            raise EngineError(
                f"the vLLM server at {self.address} cannot be reached: {type(error).__name__}: {error}"
            ) from error
        if not 200 <= answer.status < 300:
            raise ServerError(answer.status, path, body.decode(errors="replace"))
        return body

    def wait(self, seconds: float) -> None:
        """Until the server is up; an error says what to do if that takes longer."""
        end = time.monotonic() + seconds
        while True:
            try:
                self.get("/health", timeout=max(1.0, min(10.0, seconds)))
                return
            except ServerError as error:
                if error.status not in STARTING:
                    raise EngineError(f"{error}. Is {self.address} a vLLM server?") from error
                last: EngineError = error
            except EngineError as error:
                last = error
            if time.monotonic() >= end:
                raise EngineError(
                    f"{last}; waited {seconds:g} s (vllm_server_timeout). Is it running? Else {HOW_TO_START}"
                ) from last
            time.sleep(min(1.0, max(0.0, end - time.monotonic()) + 0.01))

    def developer(self, method: str, path: str, content: Any = None) -> Any:
        """A call that the server knows in developer mode only."""
        try:
            with closing(self._connection(self.timeout)) as connection:
                return self._ask(connection, method, path, content)
        except ServerError as error:
            if not error.unknown:
                raise
            raise EngineError(
                f"the vLLM server at {self.address} does not know {path}, by which weights reach it: it is not in "
                f"developer mode, or older than 0.22; {HOW_TO_START}"
            ) from error

    def post_all(
        self, path: str, contents: Sequence[Any], *, patience: float
    ) -> Generator[tuple[int, Any], None, None]:
        """Each request's number and answer, as they come. A server that is silent for `patience` seconds is an error;
        one that is busy may take as long as it likes. When nobody asks on, the server is left, and stops."""
        calls = _Calls(self, path, contents)
        # Daemons: a thread that hangs must not keep the process from ending.
        for _ in range(min(AT_ONCE, len(contents))):
            threading.Thread(target=calls.work, name="rloom-vllm", daemon=True).start()
        try:
            for _ in contents:
                number, answer = self._next(calls.answers, patience)
                if isinstance(answer, Exception):
                    raise answer
                yield number, answer
        finally:
            calls.end()

    def _next(self, answers: queue.SimpleQueue[tuple[int, Any]], patience: float) -> tuple[int, Any]:
        while True:
            try:
                return answers.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self.wait(patience)


class _Calls:
    """Requests that several threads make, and what they need to be called off."""

    def __init__(self, client: Client, path: str, contents: Sequence[Any]) -> None:
        self.client, self.path = client, path
        self.todo, self.answers = deque(enumerate(contents)), queue.SimpleQueue[tuple[int, Any]]()
        self.connections: set[HTTPConnection] = set()  # of requests under way
        self.ended = False

    def work(self) -> None:
        """Make one request after the other, until there is none."""
        while True:
            try:
                number, content = self.todo.popleft()
            except IndexError:
                return
            try:
                self.answers.put((number, self._ask(content)))
            except Exception as error:
                self.answers.put((number, error))

    def _ask(self, content: Any) -> Any:
        with closing(self.client._connection(None)) as connection:
            # What goes wrong here goes wrong again when the request is sent, which has words for it.
            with suppress(OSError):
                connection.connect()
            self.connections.add(connection)
            try:
                # Looked at after the connection can be hung up: either `end` sees it, or this sees the end.
                if self.ended:
                    raise EngineError("called off")
                return self.client._ask(connection, "POST", self.path, content)
            finally:
                self.connections.discard(connection)

    def end(self) -> None:
        """Hang up: vLLM stops what it generates for somebody who is gone."""
        self.ended = True
        self.todo.clear()
        for connection in list(self.connections):
            # It may have ended by itself.
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
