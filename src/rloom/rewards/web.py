"""Asking a service on the web: JSON out, JSON in, within a time, again when it makes sense, and never for ever."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
import weakref
from typing import Any
from urllib.parse import urlsplit

from rloom.errors import RewardError, needs_extra

logger = logging.getLogger(__name__)

AGAIN = {408, 425, 429, 500, 502, 503, 504}
"""Answers after which asking again makes sense."""
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


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
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RewardError(f"{url!r} is no address: http://host:port/path")
        for name, value in {"timeout": timeout, "requests_per_minute": requests_per_minute}.items():
            if value is not None and not value > 0:
                raise RewardError(f"{name} must be above 0, not {value}")
        if retries < 0:
            raise RewardError(f"retries must not be negative, not {retries}")
        self.url, self.headers, self.timeout, self.retries, self.backoff = url, headers or {}, timeout, retries, backoff
        self.interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self.max_bytes, self.local = max_bytes, parts.hostname in LOOPBACK
        if "Authorization" in self.headers and parts.scheme == "http" and not self.local:
            logger.warning("a token is sent to %s unencrypted; use https, or a tunnel", parts.hostname)
        self.tries = 0
        self._client: Any = None
        self._lock = threading.Lock()
        self._next = 0.0

    def __reduce__(self) -> Any:
        raise TypeError("a connection cannot be sent to another process")

    def post(self, payload: Any) -> Any:
        """The answer to a request; a [`RewardError`] when there is none to be had."""
        body = json.dumps(payload).encode()
        for attempt in range(self.retries + 1):
            try:
                return self._try(body)
            except Unavailable as error:
                if attempt == self.retries:
                    raise RewardError(f"{self.url}: no answer after {attempt + 1} tries; the last: {error}") from None
                wait = max(self.backoff * 2**attempt * (1 + random.random() / 4), error.wait)
                logger.info("%s: %s; trying again in %.1f seconds", self.url, error, wait)
                time.sleep(min(wait, 60.0))
        raise AssertionError

    def _try(self, body: bytes) -> Any:
        import httpx

        self._wait_for_turn()
        end = time.monotonic() + self.timeout
        headers = {"Content-Type": "application/json", **self.headers}
        received = bytearray()
        try:
            with self._connected().stream("POST", self.url, content=body, headers=headers) as response:
                for part in response.iter_bytes():
                    received += part
                    if time.monotonic() > end:  # one that sends a byte now and then never runs into httpx's own limits
                        raise Unavailable(f"not done after {self.timeout:g} seconds")
                    if len(received) > self.max_bytes:
                        raise RewardError(f"{self.url} answered more than {self.max_bytes} bytes")
        except httpx.TimeoutException:
            raise Unavailable(f"not done after {self.timeout:g} seconds") from None
        except httpx.HTTPError as error:
            raise Unavailable(f"{type(error).__name__}: {error}") from None
        return self._read(response, bytes(received))

    def _read(self, response: Any, received: bytes) -> Any:
        text = received[:300].decode("utf-8", "replace").strip()
        if response.status_code in AGAIN:
            raise Unavailable(f"{response.status_code} {text}", wait=_seconds(response.headers.get("Retry-After")))
        if response.status_code != 200:
            hint = ": is the token right?" if response.status_code in (401, 403) else ""
            raise RewardError(f"{self.url} answered {response.status_code}{hint} {text}")
        try:
            return json.loads(received)
        except ValueError as error:
            raise Unavailable(f"half an answer, or none in JSON ({error}): {text[:100]!r}") from None

    def _wait_for_turn(self) -> None:
        with self._lock:
            self.tries += 1
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self.interval
        time.sleep(turn - now)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                try:
                    import httpx
                except ImportError:
                    raise needs_extra("a reward over HTTP", "httpx", "http") from None
                limits = httpx.Limits(max_connections=256)
                self._client = httpx.Client(
                    timeout=self.timeout, limits=limits, follow_redirects=False, trust_env=not self.local
                )
                weakref.finalize(self, self._client.close)
            return self._client


def _seconds(value: str | None) -> float:
    """What a Retry-After header says, where it says it in seconds.

    >>> _seconds("3"), _seconds("Wed, 21 Oct 2026 07:28:00 GMT"), _seconds(None)
    (3.0, 0.0, 0.0)
    """
    try:
        return max(0.0, float(value or 0.0))
    except ValueError:
        return 0.0
