"""Asking a service on the web: JSON out, JSON in, within a time, again when it makes sense, and never for ever."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import random
import threading
import time
import weakref
import zlib
from typing import TYPE_CHECKING, Any

from rloom.errors import RewardError, needs_extra
from rloom.printable import get_logger
from rloom.rewards.calling.addresses import LOOPBACK, check_headers, login, parse_address, redacted, secrets_of
from rloom.rewards.calling.event_loop import BackgroundLoop

if TYPE_CHECKING:
    import httpx

logger = get_logger(__name__)

# Status codes after which asking again makes sense.
AGAIN = {408, 425, 429, 500, 502, 503, 504}


# An event loop for requests alone: only there can one be cut off in the middle of whatever it waits for.
_requests = BackgroundLoop("rloom-web")


class Unavailable(Exception):
    """No answer this time; another try may succeed. `wait` is what the service asked for, in seconds."""

    def __init__(self, message: str, wait: float = 0.0) -> None:
        super().__init__(message)
        self.wait = wait


class JsonService:
    """Posts JSON to one address, with retries that wait longer each time.

    Args:
        url: the address.
        headers: sent with each request, an authorization among them.
        timeout: seconds for one try, from the first byte sent to the last received.
        retries: further tries after the first.
        backoff: seconds before the second try; twice as long before each next one, and a little by chance.
        requests_per_minute: the most that are sent; None: no limit.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 0.5,
        requests_per_minute: float | None = None,
        max_bytes: int = 64 * 2**20,
    ) -> None:
        parts = parse_address(url)
        for name, value in {"timeout": timeout, "requests_per_minute": requests_per_minute}.items():
            if value is not None and not value > 0:
                raise RewardError(f"{name} must be above 0, not {value}")
        if retries < 0:
            raise RewardError(f"retries must not be negative, not {retries}")
        self.headers = {**login(parts), **(headers or {})}
        check_headers(self.headers)
        # The address for messages. The one to send to has the query too, which may be a key.
        self.url = redacted(parts)
        self._query = parts.query
        self._target = self.url + (f"?{parts.query}" if parts.query else "")
        self._secrets = secrets_of(parts, self.headers)
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self.max_bytes, self.local = max_bytes, parts.hostname in LOOPBACK
        if "Authorization" in self.headers and parts.scheme == "http" and not self.local:
            logger.warning("a token is sent to %s unencrypted; use https, or a tunnel", parts.hostname)
        self.tries = 0
        self._client: httpx.AsyncClient | None = None
        self._lock = threading.Lock()
        self._next = 0.0

    def __reduce__(self) -> Any:
        raise TypeError("a connection cannot be sent to another process")

    def post(self, payload: Any) -> Any:
        """The answer to a request; a [`RewardError`] when there is none after all tries."""
        body = json.dumps(payload).encode()
        for attempt in itertools.count():
            self._wait_for_turn()
            try:
                return _requests.start(self._try(self._connected(), body)).result()
            except Unavailable as error:
                if attempt == self.retries:
                    raise RewardError(f"{self.url}: no answer after {attempt + 1} tries; the last: {error}") from None
                wait = max(self.backoff * 2**attempt * (1 + random.random() / 4), error.wait)
                logger.info("%s: %s; trying again in %.1f seconds", self.url, error, wait)
                time.sleep(min(wait, 60.0))
        raise AssertionError("unreachable")

    async def _try(self, client: httpx.AsyncClient, body: bytes) -> Any:
        """One try with one deadline. httpx's own limits are per read, so a service that sends a byte now and then would
        never meet them."""
        import httpx

        try:
            response, received = await asyncio.wait_for(self._send(client, body), self.timeout)
        except (TimeoutError, httpx.TimeoutException):
            raise Unavailable(f"not done after {self.timeout:g} seconds") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(self.safe(f"{type(error).__name__}: {error}")) from None
        return self._read(response, received)

    async def _send(self, client: httpx.AsyncClient, body: bytes) -> tuple[httpx.Response, bytes]:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "gzip", **self.headers}
        received = bytearray()
        async with client.stream("POST", self._target, content=body, headers=headers) as response:
            async for part in response.aiter_raw():
                received += part
                if len(received) > self.max_bytes:
                    raise self._too_much()
        return response, self._unpacked(response.headers.get("Content-Encoding", ""), bytes(received))

    def _unpacked(self, encoding: str, received: bytes) -> bytes:
        """The uncompressed body. A few kilobytes may unpack to gigabytes, so no more than is allowed is unpacked."""
        if encoding.strip().lower() in ("", "identity"):
            return received
        if encoding.strip().lower() != "gzip":
            raise RewardError(
                f"{self.url} answered in an encoding that was not asked for: {self.safe(encoding)[:80]!r}"
            )
        try:
            content = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(received, self.max_bytes + 1)
        except zlib.error as error:
            raise Unavailable(f"half an answer, or none in gzip ({error})") from None
        if len(content) > self.max_bytes:
            raise self._too_much()
        return content

    def _too_much(self) -> RewardError:
        return RewardError(f"{self.url} answered more than {self.max_bytes} bytes")

    def safe(self, value: Any) -> Any:
        """A value from outside with secrets taken out: a service may echo what it was sent."""
        if isinstance(value, str):
            return functools.reduce(lambda text, secret: text.replace(secret, "…"), self._secrets, value)
        if isinstance(value, list):
            return [self.safe(v) for v in value]
        return {self.safe(k): self.safe(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _read(self, response: httpx.Response, received: bytes) -> Any:
        # Cut only after secrets are out: half of one would not be found.
        text = self.safe(received[:10_000].decode("utf-8", "replace").strip())[:300]
        if response.status_code in AGAIN:
            raise Unavailable(f"{response.status_code} {text}", wait=_seconds(response.headers.get("Retry-After")))
        if response.status_code != 200:
            hint = ": is the token right?" if response.status_code in (401, 403) else ""
            raise RewardError(f"{self.url} answered {response.status_code}{hint} {text}")
        try:
            return json.loads(received)
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"half an answer, or none in JSON ({error}): {text[:100]!r}") from None

    def _wait_for_turn(self) -> None:
        with self._lock:
            self.tries += 1
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self.interval
        time.sleep(turn - now)

    def _connected(self) -> httpx.AsyncClient:
        with self._lock:
            if self._client is None:
                try:
                    import httpx
                except ImportError:
                    raise needs_extra("a reward over HTTP", "httpx", "http") from None
                limits = httpx.Limits(max_connections=256)
                self._client = httpx.AsyncClient(
                    timeout=self.timeout, limits=limits, follow_redirects=False, trust_env=not self.local
                )
                if self._query:
                    # httpx logs the address of each request, and the query may be a key.
                    query = self._query
                    logging.getLogger("httpx").addFilter(lambda record: query not in record.getMessage())
                weakref.finalize(self, lambda client: _requests.start(client.aclose()), self._client)
            return self._client


def _seconds(value: str | None) -> float:
    """The seconds in a Retry-After header; 0 where it holds a date or nothing.

    >>> _seconds("3"), _seconds("Wed, 21 Oct 2026 07:28:00 GMT"), _seconds(None)
    (3.0, 0.0, 0.0)
    """
    try:
        return max(0.0, float(value or 0.0))
    except ValueError:
        return 0.0
