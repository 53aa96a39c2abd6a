"""A value of the table of completions as text that can be shown anywhere."""

from __future__ import annotations

from typing import Any

from rloom.printable import printable


def as_text(value: Any) -> str:
    """Numbers short, messages with their roles, control characters spelt out.

    >>> as_text([1, 2])
    '[1, 2]'
    >>> as_text(0.51234), as_text(None), as_text([{"role": "user", "content": "Hi"}]), as_text("a\\x1b[2J")
    ('0.51', '–', 'user: Hi', 'a\\\\x1b[2J')
    """
    if isinstance(value, float):
        return "–" if value != value else f"{value:.2f}"
    if isinstance(value, list) and all(isinstance(m, dict) for m in value):  # messages
        return printable("\n".join(f"{m.get('role')}: {m.get('content')}" for m in value))
    return "–" if value is None else printable(str(value))
