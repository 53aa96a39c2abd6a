"""The HTTP side of a vLLM server: plain requests, and words for what goes wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rloom.errors import EngineError
from rloom.printable import get_logger

logger = get_logger(__name__)

T = TypeVar("T")

HOW_TO_START = (
    "start it with `rloom vllm-serve MODEL`, or VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode "
    "processed_logprobs (docs/generation.md)"
)

# A server that is well says so within this time, or another one is asked.
HEALTH_SECONDS = 5.0
# A server that is waited for is named after this time.
PATIENT_SECONDS = 3.0
# The server is still starting, or has died. The first and the last come from a proxy before it.
STARTING = (502, 503, 504)


class ServerError(EngineError):
    """The server answered, with an error."""

    def __init__(self, status: int, path: str, text: str, address: str = "") -> None:
        self.status = status
        self.unknown = status in (404, 405)  # it does not have such a path
        where = f" at {address}" if address else ""
        super().__init__(f"the vLLM server{where} answered {path} with {status}: {text[:500]}")


class UnreachableError(EngineError):
    """There was no answer: the connection broke, or there is none."""


class SilentError(UnreachableError):
    """There was no answer in time."""


class LostWeights(EngineError):
    """The server answers, and does not have the weights that it was sent: it was started again."""


class BeingSent(LostWeights):
    """The server is being sent weights at the moment. `names`: what it calls them meanwhile."""

    def __init__(self, address: str, names: frozenset[str]) -> None:
        self.names = names
        super().__init__(f"the vLLM server at {address} is being sent weights")


class OtherWeights(LostWeights):
    """Somebody else has sent the server weights: two runs use it."""


class Client:
    """Asks one server. Proxies of the environment are not used: it is on this machine or in this network."""

    def __init__(self, address: str, timeout: float = 240.0) -> None:
        self.timeout = timeout  # of calls that do not generate
        if not address.startswith(("http://", "https://")):
            address = f"http://{address}"
        self.address = address.rstrip("/")
        try:
            self.connection(None)
        # A port that is no number, no host.
        except (ValueError, HTTPException) as error:
            raise EngineError(f"{address!r} is no address of a vLLM server: {error}") from error

    def get(self, path: str, timeout: float | None = 30.0) -> Any:
        """The answer to a GET: JSON, or nothing."""
        return self._twice(lambda: self._get(path, timeout))

    def _get(self, path: str, timeout: float | None) -> Any:
        with closing(self.connection(timeout)) as connection:
            return self.ask(connection, "GET", path)

    def tell(self, path: str, content: Any) -> None:
        """A POST whose answer is only whether it was heard."""
        with closing(self.connection(self.timeout)) as connection:
            self._raw(connection, "POST", path, content)

    def is_up(self, seconds: float = HEALTH_SECONDS) -> bool:
        """Whether the server answers within this time that it is well."""
        try:
            self.check_health(seconds)
        except EngineError:
            return False
        return True

    def check_health(self, seconds: float) -> None:
        """Raise what is wrong where the server does not answer within this time that it is well."""
        self._twice(lambda: self._ask_health(seconds))

    def _ask_health(self, seconds: float) -> None:
        with closing(self.connection(seconds)) as connection:
            self._raw(connection, "GET", "/health")

    def _twice(self, call: Callable[[], T]) -> T:
        """A call that may be made again where its connection breaks: one that does says nothing about the server."""
        try:
            return call()
        except SilentError:
            raise
        except UnreachableError:
            return call()

    @contextmanager
    def reading(self, path: str, answer: Any) -> Iterator[None]:
        """Around what reads an answer: one that has not what is looked for is shown."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"the vLLM server at {self.address} has answered {path} with {json.dumps(answer)[:500]}, which cannot "
                f"be read ({type(error).__name__}: {error}): is it a vLLM server?"
            ) from error

    def connection(self, timeout: float | None) -> HTTPConnection:
        """A connection to the server, not yet open."""
        parts = urlsplit(self.address)
        make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        if not parts.hostname:
            raise ValueError("it names no host")
        return make(parts.hostname, parts.port, timeout=timeout)

    def ask(self, connection: HTTPConnection, method: str, path: str, content: Any = None) -> Any:
        """The answer to a request over this connection: JSON, or nothing."""
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
        # Refused, reset, no such host; or the server went in the middle of an answer.
        except (OSError, HTTPException) as error:
            # The kernel has a time limit too, where we have none.
            if isinstance(error, TimeoutError) and connection.timeout is not None:
                raise SilentError(
                    f"the vLLM server at {self.address} did not answer {path} within {connection.timeout:g} s: see its "
                    "messages, or raise vllm_server_timeout"
                ) from error
            raise self.unreachable(error) from error
        if not 200 <= answer.status < 300:
            raise ServerError(answer.status, path, body.decode(errors="replace"), self.address)
        return body

    def unreachable(self, error: Exception) -> UnreachableError:
        """What to raise where there is no connection, or none any more."""
        return UnreachableError(f"the vLLM server at {self.address} cannot be reached: {type(error).__name__}: {error}")

    def wait(self, seconds: float) -> None:
        """Until the server is up; an error says what to do if that takes longer."""
        began, told = time.monotonic(), False
        end = began + seconds
        while True:
            try:
                self.check_health(max(1.0, min(10.0, seconds)))
                return
            except ServerError as error:
                if error.status not in STARTING:
                    raise EngineError(f"{error}. Is a vLLM server at {self.address}?") from error
                last: EngineError = error
            except EngineError as error:
                last = error
            if time.monotonic() >= end:
                raise EngineError(
                    f"{last}; waited {seconds:g} s (vllm_server_timeout). Is it running? Else {HOW_TO_START}"
                ) from last
            if not told and time.monotonic() - began > PATIENT_SECONDS:
                told = True
                logger.warning(
                    "waiting for the vLLM server at %s, up to %g s (vllm_server_timeout)", self.address, seconds
                )
            time.sleep(min(1.0, max(0.0, end - time.monotonic()) + 0.01))

    def developer(
        self, method: str, path: str, content: Any = None, *, seconds: float | None = None, twice: bool = False
    ) -> Any:
        """A call that the server knows in developer mode only. It may take `seconds`, or else `timeout`. `twice`: it
        may be made again, as every GET may."""

        def call() -> Any:
            with closing(self.connection(seconds or self.timeout)) as connection:
                return self.ask(connection, method, path, content)

        try:
            return self._twice(call) if twice or method == "GET" else call()
        except ServerError as error:
            if not error.unknown:
                raise
            raise EngineError(
                f"the vLLM server at {self.address} does not know {path}, by which weights reach it: it is not in "
                f"developer mode, or older than 0.22; {HOW_TO_START}"
            ) from error
