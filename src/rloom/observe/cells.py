"""Formats a value of the table of completions as printable text."""

from __future__ import annotations

from typing import Any

from rloom.printable import printable


def as_text(value: Any) -> str:
    """A value as text: numbers are short, messages have their roles, control characters are escaped.

    >>> as_text([1, 2])
    '[1, 2]'
    >>> as_text(0.51234), as_text(None), as_text([{"role": "user", "content": "Hi"}]), as_text("a\\x1b[2J")
    ('0.51', '–', 'user: Hi', 'a\\\\x1b[2J')
    """
    if isinstance(value, float):
        return "–" if value != value else f"{value:.2f}"
    # A list of dicts is a list of messages.
    if isinstance(value, list) and all(isinstance(m, dict) for m in value):
        return printable("\n".join(f"{m.get('role')}: {m.get('content')}" for m in value))
    return "–" if value is None else printable(str(value))
