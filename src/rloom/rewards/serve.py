"""A reward as a service, for [`rloom.rewards.http`] and anybody who speaks its JSON. Standard library only."""

from __future__ import annotations

import hmac
import json
import math
import re
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rloom.errors import RewardError
from rloom.gpu_of_threads import on_this_gpu
from rloom.printable import get_logger
from rloom.rewards.base import RewardBatch, shown
from rloom.rewards.calling.addresses import LOOPBACK
from rloom.rewards.calling.reward_set import RewardSet

logger = get_logger(__name__)

MAX_BODY = 256 * 2**20
FIELDS = ("prompts", "completions", "completion_ids", "columns")
# Names of this machine, as a Host header has them: all of it, since what is parsed may hide another behind it.
OWN_HOST = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE)


class BadRequest(Exception):
    """What the client did wrong, with the status to answer."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class RewardServer(ThreadingHTTPServer):
    """Answers POST /score with a reward's scores, and GET /health.

    Without a token it listens on a loopback address alone: whoever can reach it could otherwise have code run that the
    reward runs, and read what it knows.
    """

    daemon_threads = True

    def __init__(
        self, rewards: RewardSet, *, host: str = "127.0.0.1", port: int = 8000, token: str | None = None
    ) -> None:
        if host not in LOOPBACK and not (token or "").strip():
            raise RewardError(
                f"serving on {host}, which other machines can reach, needs a token: set the environment variable "
                "RLOOM_REWARD_TOKEN here and where the trainer runs"
            )
        self.rewards, self.token = rewards, (token or "").strip() or None
        # A plain function is never called twice at a time; what runs in workers or threads sorts that out itself.
        one_by_one = any(not (c.options.isolated or c.options.threads or c.is_async) for c in rewards.callers)
        self.lock: AbstractContextManager[Any] = threading.Lock() if one_by_one else nullcontext()
        self._answer_one = on_this_gpu(super().process_request_thread)
        super().__init__((host, port), Handler)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection, in a thread of its own."""
        self._answer_one(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error. That a client hangs up is not one."""
        error = sys.exception()
        if isinstance(error, (ConnectionError, TimeoutError)):
            logger.debug("a client hung up: %s", error)
        else:
            logger.exception("a request failed")

    def score(self, request: Any) -> list[float | None]:
        """Scores for a request's completions; null where there is none."""
        batch = _batch(request)
        if not len(batch):
            return []
        with self.lock:
            scores = self.rewards.score(batch).scores
        return [None if math.isnan(value) else value for value in scores[:, 0].tolist()]


def _batch(request: Any) -> RewardBatch:
    if not isinstance(request, dict) or not isinstance(request.get("completions"), list):
        raise BadRequest('a JSON object with a list "completions" is expected')
    unknown = [name for name in request if name not in FIELDS]
    if unknown:
        raise BadRequest(
            f'unknown field "{unknown[0]}"; known are {", ".join(FIELDS)} (further columns go in "columns")'
        )
    count = len(request["completions"])
    columns = request.get("columns", {})
    if not isinstance(columns, dict):
        raise BadRequest('"columns" is an object of lists')
    prompts, ids = request.get("prompts", [""] * count), request.get("completion_ids", [[]] * count)
    for name, values in {"prompts": prompts, "completion_ids": ids, **columns}.items():
        if not isinstance(values, list) or len(values) != count:
            raise BadRequest(f'"{name}" is no list of {count} values, one per completion')
    return RewardBatch(prompts=prompts, completions=request["completions"], completion_ids=ids, columns=columns)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: RewardServer
    protocol_version = "HTTP/1.1"
    # A client that says nothing does not hold a thread for ever.
    timeout = 60
    server_version, sys_version = "rloom", ""

    def do_GET(self) -> None:
        """Say that the service is up, and by which function it scores."""
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            # A body that nobody reads would be taken for the next request.
            self.close_connection = True
        if self.path != "/health":
            return self._answer(404, {"error": "GET /health and POST /score are all there is"})
        try:
            self._check_host()
        except BadRequest as error:
            return self._answer(error.status, {"error": str(error)})
        return self._answer(200, {"status": "ok", "reward": self.server.rewards.names[0]})

    def do_POST(self) -> None:
        """Score the completions of a request."""
        try:
            self._check()
            request = self._request()
            self._answer(200, {"scores": self.server.score(request)})
        except BadRequest as error:
            # The body may not have been read.
            self.close_connection = True
            self._answer(error.status, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            # The reward itself failed, which asking again does not mend. The service goes on.
            logger.exception("the reward failed")
            self._answer(422, {"error": f"{type(error).__name__}: {shown(error, 2000)}"})

    def _check(self) -> None:
        if self.path != "/score":
            raise BadRequest("POST /score is all there is", 404)
        given = self.headers.get("Authorization", "").encode()
        if self.server.token and not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            raise BadRequest("the token is missing or wrong", 401)
        self._check_host()
        # A page in a browser cannot send this type unasked.
        if self.headers.get_content_type() != "application/json":
            raise BadRequest("the Content-Type must be application/json", 415)

    def _check_host(self) -> None:
        """Without a token, the Host header must name this machine: a browser sends the name of the page's own host."""
        named = OWN_HOST.fullmatch(self.headers.get("Host", ""))
        if not self.server.token and named is None:
            raise BadRequest("without a token, the Host must be this machine's own", 403)

    def _request(self) -> Any:
        length = self.headers.get("Content-Length", "")
        # `\d` would take digits of other scripts too.
        if not re.fullmatch("[0-9]{1,18}", length):
            raise BadRequest("a Content-Length is needed", 411)
        if int(length) > MAX_BODY:
            raise BadRequest(f"more than {MAX_BODY} bytes; send fewer completions at a time", 413)
        try:
            return json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"not JSON: {error}") from None

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Write to the log rather than to the terminal."""
        logger.info(format, *args)
