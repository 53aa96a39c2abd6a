"""A judge's replies, kept in a file, so that nothing is asked (and paid) twice."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

from rloom.errors import RewardError
from rloom.printable import get_logger

logger = get_logger(__name__)

# How long a cache is waited for that another process writes to.
LOCKED_SECONDS = 30.0


class ReplyCache:
    """Replies by request, in a file that several runs may share. A cache that fails does not end the run: replies are
    then asked for again."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._failed = False
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(path, check_same_thread=False, timeout=LOCKED_SECONDS, isolation_level=None)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT)")
            self._base.execute("SELECT answer FROM answers WHERE key = ''").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise RewardError(f"judge: the cache {path} {_wrong_with(error)}; choose another file") from None

    def get(self, request: dict[str, Any]) -> str | None:
        """The reply to a request; None if it is new."""
        row = self._execute("SELECT answer FROM answers WHERE key = ?", _key(request))
        try:
            return None if row is None else json.loads(row[0])
        except (TypeError, ValueError):
            # It is damaged: as if it were not there.
            return None

    def put(self, request: dict[str, Any], reply: str) -> None:
        """Keep a reply."""
        self._execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", _key(request), json.dumps(reply))

    def _execute(self, command: str, *values: str) -> Any:
        try:
            with self._lock:
                return self._base.execute(command, values).fetchone()
        except sqlite3.Error as error:
            if not self._failed:
                self._failed = True
                logger.warning("judge: the cache %s %s: answers are asked for anew", self.path, _wrong_with(error))
            return None


def _key(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _wrong_with(error: Exception) -> str:
    """What is wrong with a cache, in words."""
    if isinstance(error, OSError):
        return f"cannot be opened ({error.strerror})"
    if "locked" in str(error):
        return f"is locked: another process has been writing to it for more than {LOCKED_SECONDS:g} s"
    if any(words in str(error) for words in ("unable to open", "readonly", "disk I/O", "is full")):
        return f"cannot be used ({error})"
    return f"is no cache of ours ({error})"
