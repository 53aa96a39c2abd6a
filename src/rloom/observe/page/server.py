"""Serves the page of runs: fixed files, and JSON about the runs. It only reads.

Completions are hostile input. They travel as JSON, and a strict policy (CSP) forbids whatever could run them. Only this
machine is answered, by its own names, which keeps out pages of others that point their own name here (DNS rebinding).
Elsewhere a token is asked for.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from rloom.errors import DataError
from rloom.observe.page import answers
from rloom.observe.page.live import LiveRun, live_runs
from rloom.observe.page.query import Query
from rloom.observe.row_json import strict_json

STATIC = files("rloom.observe.page") / "static"
SCRIPTS = (
    "uplot.js", "source.js", "charts.js", "curves.js", "spread.js", "tokens.js", "completions.js", "facts.js",
    "page.js",
)  # fmt: skip
STYLES = ("uplot.css", "page.css")
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def page_html() -> str:
    """The page itself, with its styles and scripts by name."""
    styles = "\n".join(f'<link rel="stylesheet" href="{name}">' for name in STYLES)
    scripts = "\n".join(f'<script src="{name}" defer></script>' for name in SCRIPTS)
    text = (STATIC / "page.html").read_text(encoding="utf-8")
    return text.replace("<!-- styles -->", styles).replace("<!-- scripts -->", scripts)


class PageServer(ThreadingHTTPServer):
    """Serves runs. Beyond the loopback it makes a token, which the first address carries and a cookie keeps.

    Args:
        folders: of the runs.
        host, port: where to listen; port 0 takes a free one.
    """

    daemon_threads = True

    def __init__(self, folders: Sequence[str], host: str = "127.0.0.1", port: int = 0) -> None:
        self.runs = live_runs(folders)
        loopback = is_loopback(host)
        self.token = None if loopback else secrets.token_urlsafe(24)
        self.address_family = _family(host)
        super().__init__((host, port), Handler)
        bound = self.server_address[1]
        self.cookie = f"rloom_{bound}"
        shown = f"[{host}]" if ":" in host else host
        self.names = own_names(shown) if loopback else None
        self.url = f"http://{shown}:{bound}/" + (f"?token={self.token}" if self.token else "")

    def begin(self) -> None:
        """Read the lines of stores without an index, or without a filter of texts, in the background."""
        for run in self.runs:
            threading.Thread(target=run.keep_preparing, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away."""


def is_loopback(host: str) -> bool:
    """Whether an address is of this machine alone.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0"), is_loopback("::1")
    (True, True, False, True)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def own_names(host: str) -> set[str]:
    """What a browser on this machine may call a server on the loopback.

    >>> sorted(own_names("127.0.0.2"))
    ['127.0.0.1', '127.0.0.2', '[::1]', 'localhost']
    """
    return {host.lower(), "127.0.0.1", "localhost", "[::1]"}


def without_port(host: str) -> str:
    """The name in a header `Host`. Its port may be any: a tunnel has one of its own at the browser's end. A foreign
    page that points its name here (DNS rebinding) still sends that name.

    >>> [without_port(host) for host in ("localhost:8080", "127.0.0.1", "[::1]:80", "evil.com:8080", "localhost:a")]
    ['localhost', '127.0.0.1', '[::1]', 'evil.com', 'localhost:a']
    """
    return re.sub(r":\d*\Z", "", host)


def _family(host: str) -> Any:
    import socket

    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "rloom", ""

    def do_GET(self) -> None:
        """Answer with a file, or with JSON."""
        address = urlsplit(self.path)
        given = dict(parse_qsl(address.query))
        if not self._is_welcome(given):
            self._send(HTTPStatus.FORBIDDEN, b"not allowed: use the address that rloom show printed", "text/plain")
        elif self.server.token and "token" in given:
            self._keep_token()
        elif address.path.startswith("/api/"):
            self._answer(address.path.removeprefix("/api/"), given)
        else:
            self._file(address.path)

    # -- who may ask

    def _is_welcome(self, given: dict[str, str]) -> bool:
        if self.server.names is not None and without_port(self.headers.get("Host", "")) not in self.server.names:
            return False
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return False
        return self.server.token is None or any(
            hmac.compare_digest(one.encode(), self.server.token.encode())
            for one in (given.get("token", ""), self._cookie())
        )

    def _cookie(self) -> str:
        try:
            found = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _keep_token(self) -> None:
        """Put the token into a cookie, and the address without it into the browser's bar and history."""
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", "/")
        cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
        self.send_header("Set-Cookie", cookie)
        self.send_header("Content-Length", "0")
        self._end(HEADERS)

    # -- what is answered

    def _file(self, path: str) -> None:
        name = path.removeprefix("/") or "page.html"
        if name == "page.html":
            self._send(HTTPStatus.OK, page_html().encode(), TYPES["html"])
        elif name in (*SCRIPTS, *STYLES):
            self._send(HTTPStatus.OK, (STATIC / name).read_bytes(), TYPES[name.rpartition(".")[2]])
        else:
            self._send(HTTPStatus.NOT_FOUND, b"there is no such file", "text/plain")

    def _answer(self, what: str, given: dict[str, str]) -> None:
        status, found = HTTPStatus.NOT_FOUND, '{"error": "there is no such answer"}'
        try:
            if what in ANSWERS:
                status, found = HTTPStatus.OK, strict_json(ANSWERS[what](self.server, given))
        except (DataError, ValueError, OSError) as error:
            status, found = HTTPStatus.BAD_REQUEST, strict_json({"error": str(error)})
        except RecursionError:
            # The store of an older version may hold such a row.
            status, found = HTTPStatus.BAD_REQUEST, '{"error": "a row here is nested too deeply to be shown"}'
        self._send(status, found.encode(), "application/json")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self._end(HEADERS)
        self.wfile.write(body)

    def _end(self, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a page that looks every second would fill the terminal."""


# -- answers by name


def _run_of(server: PageServer, given: dict[str, str]) -> LiveRun:
    number = given.pop("run", "0")
    if not number.isdecimal() or int(number) >= len(server.runs):
        raise DataError(f"there is no run {number!r}: there are {len(server.runs)}")
    return server.runs[int(number)]


def _whole(given: dict[str, str], name: str) -> int:
    value = given.get(name, "")
    if not value.isdecimal():
        raise DataError(f"{name} is a whole number, not {value!r}")
    return int(value)


def _runs(server: PageServer, given: dict[str, str]) -> Any:
    return {"runs": [answers.run_info(run, number) for number, run in enumerate(server.runs)]}


def _facts(server: PageServer, given: dict[str, str]) -> Any:
    return answers.facts(_run_of(server, given))


def _metrics(server: PageServer, given: dict[str, str]) -> Any:
    run = _run_of(server, given)
    return answers.metrics(run, _whole(given, "after") if "after" in given else 0)


def _rows(server: PageServer, given: dict[str, str]) -> Any:
    return answers.rows(_run_of(server, given), Query.of(given))


def _group(server: PageServer, given: dict[str, str]) -> Any:
    run = _run_of(server, given)
    return answers.group(run, _whole(given, "step"), _whole(given, "group"), given.get("mode", "train"))


def _prompt(server: PageServer, given: dict[str, str]) -> Any:
    return answers.prompt_course(_run_of(server, given), Query.of(given))


def _distribution(server: PageServer, given: dict[str, str]) -> Any:
    run, name = _run_of(server, given), given.pop("column", "reward")
    return answers.distribution(run, name, Query.of(given))


ANSWERS: dict[str, Callable[[PageServer, dict[str, str]], Any]] = {
    "runs": _runs,
    "facts": _facts,
    "metrics": _metrics,
    "rows": _rows,
    "group": _group,
    "prompt": _prompt,
    "distribution": _distribution,
}
