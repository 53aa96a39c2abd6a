"""The HTTP side of a vLLM server: plain requests, and words for what goes wrong."""

from __future__ import annotations

import json
import queue
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from rloom.errors import EngineError

HOW_TO_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs (docs/generation.md)"
)

AT_ONCE = 256  # requests under way
LOOK_SECONDS = 5.0  # between two looks at whether the server still lives


class ServerError(EngineError):
    """The server answered, with an error."""

    def __init__(self, status: int, path: str, text: str) -> None:
        self.status = status
        super().__init__(f"the vLLM server answered {path} with {status}: {text[:500]}")


class Client:
    """Asks one server. Proxies of the environment are not used: it is on this machine or in this network."""

    def __init__(self, address: str, timeout: float = 240.0) -> None:
        self.timeout = timeout  # of calls that do not generate
        if not address.startswith(("http://", "https://")):
            address = f"http://{address}"
        self.address = address.rstrip("/")
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def get(self, path: str, timeout: float | None = 30.0) -> Any:
        """The answer to a GET, as JSON where it is."""
        return self._ask(urllib.request.Request(self.address + path), path, timeout)

    def post(self, path: str, content: Any = None, timeout: float | None = None) -> Any:
        """The answer to a POST; without a time limit unless one is given."""
        data = json.dumps({} if content is None else content).encode()
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self.address + path, data, headers), path, timeout)

    def _ask(self, request: urllib.request.Request, path: str, timeout: float | None) -> Any:
        try:
            with self._open(request, timeout=timeout) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(error.code, path, error.read().decode(errors="replace")) from error
        except TimeoutError as error:
            raise EngineError(
                f"the vLLM server at {self.address} did not answer {path} within {timeout:g} s: see its messages, or "
                "raise vllm_server_timeout"
            ) from error
        except OSError as error:  # refused, reset, no such host
            raise EngineError(f"the vLLM server at {self.address} cannot be reached: {error}") from error
        try:
            return json.loads(body) if body else None
        except ValueError as error:
            raise EngineError(f"{self.address}{path} did not answer with JSON: is it a vLLM server?") from error

    def wait(self, seconds: float) -> None:
        """Until the server is up; an error says what to do if that takes longer."""
        end = time.monotonic() + seconds
        while True:
            try:
                self.get("/health", timeout=max(1.0, min(10.0, seconds)))
                return
            except ServerError as error:
                if error.status != 503:  # 503: it is still starting, or has died
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
            return self.get(path, self.timeout) if method == "GET" else self.post(path, content, self.timeout)
        except ServerError as error:
            if error.status in (404, 405):
                raise EngineError(
                    f"the vLLM server at {self.address} does not know {path}, by which weights reach it: it is not in "
                    f"developer mode, or older than 0.32; {HOW_TO_START}"
                ) from error
            raise

    def post_all(self, path: str, contents: Sequence[Any], *, patience: float) -> Iterator[tuple[int, Any]]:
        """Each request's number and answer, as they come. A server that is silent for `patience` seconds is an error;
        one that is busy may take as long as it likes."""
        todo, answers = deque(enumerate(contents)), queue.SimpleQueue[tuple[int, Any]]()

        def work() -> None:
            while todo:
                try:
                    number, content = todo.popleft()
                except IndexError:  # another was faster
                    return
                try:
                    answers.put((number, self.post(path, content)))
                except Exception as error:
                    answers.put((number, error))

        for _ in range(min(AT_ONCE, len(contents))):  # daemons: one that hangs must not keep the process from ending
            threading.Thread(target=work, name="rloom-vllm", daemon=True).start()
        try:
            for _ in contents:
                number, answer = self._next(answers, patience)
                if isinstance(answer, Exception):
                    raise answer
                yield number, answer
        finally:
            todo.clear()

    def _next(self, answers: queue.SimpleQueue[tuple[int, Any]], patience: float) -> tuple[int, Any]:
        while True:
            try:
                return answers.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                self.wait(patience)
