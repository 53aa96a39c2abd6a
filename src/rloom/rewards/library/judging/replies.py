"""What a judge's reply says: a score, or which of two completions is better."""

from __future__ import annotations

import json
import re
from typing import Any

DECODER = json.JSONDecoder()
MAX_BRACES = 200


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that stand in a text by themselves, in order; what is quoted within one is a part of it.

    >>> _objects('So: {"reason": "it says {1}, and {\\\\"score\\\\": 10}", "score": 2}')[0]["score"]
    2
    """
    found: list[dict[str, Any]] = []
    # The end of the last one that was found.
    end = 0
    start = text.find("{")
    for _ in range(MAX_BRACES):
        if start < 0:
            break
        try:
            content, after = DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        # Else it stands within an object that is broken.
        if text.count("{", end, start) == text.count("}", end, start):
            found.append(content)
            end = after
        start = text.find("{", after)
    return found


def _field(text: str, name: str) -> Any:
    """The value of that name in the last JSON object of a text that has one; None if there is none."""
    return next((content[name] for content in reversed(_objects(text[-20000:])) if name in content), None)


def read_score(text: str, low: float, high: float) -> float | None:
    """The score in a judge's reply; None where there is none, or none on the scale.

    >>> read_score('Well. {"reason": "good", "score": 8}', 1, 10), read_score("Score: 7/10", 1, 10)
    (8.0, 7.0)
    >>> read_score("I like it a lot!", 1, 10), read_score('{"score": 11}', 1, 10)
    (None, None)
    """
    value = _field(text, "score")
    # An object that is broken says nothing.
    if isinstance(value, bool) or (value is None and "{" in text):
        return None
    if value is None:
        found = re.findall(r"score\W{0,5}(-?\d+(?:\.\d+)?)", text[-2000:], re.IGNORECASE)
        value = found[-1] if found else text.strip()
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if low <= number <= high else None


def read_preference(text: str) -> float | None:
    """1 where the first answer is called better, 0 where the second is, 0.5 for a tie, None for anything else.

    >>> read_preference('{"better": "A"}'), read_preference('{"better": "tie"}'), read_preference("Both have merits.")
    (1.0, 0.5, None)
    """
    value = _field(text, "better")
    said = str(text.strip() if value is None else value).strip().strip("\"'.").lower()
    return {"a": 1.0, "b": 0.0, "tie": 0.5}.get(said)
