"""Addresses and headers of services: what is sent, and what of it must never be shown."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit, urlunsplit

from rloom.errors import RewardError

SECRET_INSIDE = re.compile(r"://\S*[@?]|(token|key|password)[\"']?\s*[=:]", re.IGNORECASE)
"""An address with a login or a query, or a key that is given by name, somewhere in a text."""

LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def bearer(token: str | None, where: str) -> dict[str, str]:
    """The header for a token; no header for no token. Error messages never hold the token itself.

    >>> bearer(" abc\\n", "the environment's TOKEN"), bearer("", "here")
    ({'Authorization': 'Bearer abc'}, {})
    """
    # Files and shells like to add a line's end.
    token = (token or "").strip()
    if not token:
        return {}
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise RewardError(f"the token in {where} holds blanks or characters beyond ASCII, which no header can carry")
    return {"Authorization": f"Bearer {token}"}


def redacted(parts: SplitResult) -> str:
    """An address as it may be shown: without user, password and query.

    >>> redacted(urlsplit("https://me:pw@host:1/score?key=s"))
    'https://host:1/score'
    """
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return urlunsplit((parts.scheme, f"{host}:{parts.port}" if parts.port else host, parts.path, "", ""))


def may_hold_secret(value: Any) -> bool:
    """Whether a text, or one inside lists and dicts, may hold a password or a key.

    >>> may_hold_secret(["length()", "https://me:pw@host/score"]), may_hold_secret({"a": "https://host/?key=s"})
    (True, True)
    >>> may_hold_secret("judge(api_key='s')"), may_hold_secret(["length(maximum=4)", "https://host:1/score", 3])
    (True, False)
    """
    if isinstance(value, Mapping):
        return any(map(may_hold_secret, value.values()))
    if isinstance(value, list | tuple):
        return any(map(may_hold_secret, value))
    return isinstance(value, str) and bool(SECRET_INSIDE.search(value))


def parse_address(url: str) -> SplitResult:
    """The parts of an address. The error message for a bad address shows nothing that may be secret."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if not usable:
        raise RewardError(f"{re.sub('//.*@', '//', url.split('?')[0])!r} is no address: http://host:port/path")
    return parts


def login(parts: SplitResult) -> dict[str, str]:
    """User and password of an address, as a header for basic authentication."""
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {"Authorization": "Basic " + base64.b64encode(pair.encode()).decode()}


def check_headers(headers: dict[str, str]) -> None:
    """Refuse headers that cannot be sent."""
    for name, value in headers.items():
        if not isinstance(value, str) or not re.fullmatch(r"[\t\x20-\x7e]*", value):
            raise RewardError(f"the header {name!r} has a value that no header can carry: a text of ASCII, on one line")


def secrets_of(parts: SplitResult, headers: dict[str, str]) -> list[str]:
    """What must not be shown of an address and of headers: as it is, and as it stands in JSON and in addresses; the
    longest first. A key has over 3 characters. Whatever a header's name is, a long value may be a key.

    >>> secrets_of(urlsplit("https://host"), {"Cookie": 'to"ken', "Accept": "all"})
    ['to%22ken', 'to\\\\"ken', 'to"ken']
    """
    keys = ("authorization", "x-api-key", "api-key", "cookie")
    found = [value.split(" ")[-1] for name, value in headers.items() if name.lower() in keys or len(value) >= 12]
    found += [parts.query, *(value for _, value in parse_qsl(parts.query))]
    found += [parts.password or "", unquote(parts.password or "")]
    forms = {form for s in found if len(s) > 3 for form in (s, json.dumps(s)[1:-1], quote(s, safe=""))}
    return sorted(forms, key=lambda form: (-len(form), form))
