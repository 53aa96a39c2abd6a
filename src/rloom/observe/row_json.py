"""A completion's row as a line of JSON, whatever the user's texts and columns hold."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import numpy as np

TEXTS = ("prompt", "completion", "extra", "token_ids", "mask")
"""Fields that hold the user's or the model's texts, also as tokens."""
LARGEST = float(np.finfo(np.float32).max)
DEEPEST = 100
"""Levels of lists and dicts that a row may have. Parsers give up at some 1,000, and code that calls itself before."""


def packed_ids(token_ids: list[int]) -> str:
    """Token ids as text: 32 bits each, which is quicker to write than digits.

    >>> packed_ids([5, 2])
    'BQAAAAIAAAA='
    """
    # Of a list, this takes half of NumPy's time.
    return base64.b64encode(struct.pack(f"<{len(token_ids)}i", *token_ids)).decode()


def with_token_ids(row: dict[str, Any]) -> dict[str, Any]:
    """A row, with its token ids as a list.

    >>> with_token_ids({"step": 1, "token_ids": packed_ids([5, 2])})
    {'step': 1, 'token_ids': [5, 2]}
    """
    if isinstance(packed := row.get("token_ids"), str):
        row["token_ids"] = np.frombuffer(base64.b64decode(packed), "<i4").tolist()
    return row


def shortest(value: Any) -> Any:
    """Round numbers to the digits of float32, the dtype of scores. Values that are not finite become None.

    >>> import torch
    >>> shortest({"a": torch.tensor(0.1).item(), "b": float("nan"), "c": "text"})
    {'a': 0.1, 'b': None, 'c': 'text'}
    >>> shortest(1e300) is None
    True
    """
    if isinstance(value, dict):
        return {name: shortest(v) for name, v in value.items()}
    if isinstance(value, float):
        # Whole numbers, such as most scores, are as short as they can be.
        if abs(value) < 2**24 and value.is_integer():
            return value
        return float(str(np.float32(value))) if abs(value) < LARGEST else None
    return value


def finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by None.

    >>> finite({"a": [1.0, float("inf")], "b": (float("nan"), "text")})
    {'a': [1.0, None], 'b': [None, 'text']}
    """
    if isinstance(value, dict):
        return {name: finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def strict_json(value: Any) -> str:
    """A value as JSON that every reader takes: a browser refuses the `NaN` and `Infinity` that Python writes.

    >>> strict_json({"kl": [0.5, float("inf")]})
    '{"kl": [0.5, null]}'
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        # Most values are finite: looking at each is left until it is needed.
        return json.dumps(finite(value), allow_nan=False)


def as_json(row: dict[str, Any]) -> str:
    """A row as JSON. Prompts and extra columns are the user's, and may hold any object. Values that are not finite
    become null. Objects that JSON does not know, or that contain themselves, become text, and so does what is nested
    too deeply for readers.

    >>> deep = json.loads("[" * 500 + "]" * 500)
    >>> row = json.loads(as_json({"step": 1, "extra": {"parsed": deep, "other": [2]}}))
    >>> row["extra"]["other"], is_shallow(row), is_shallow(deep)
    ([2], True, False)
    """
    # Most rows need no conversion, and copying them takes time: conversions are tried only after a failure.
    for plain in (None, finite, _text):
        try:
            made = row if plain is None else {n: plain(v) if n in TEXTS else v for n, v in row.items()}
            line = ENCODER.encode(made)
        except RecursionError:
            # At first, JSON itself has gone too deep. It names what contains itself otherwise.
            if plain is None:
                return as_json(shallow(row))
            continue
        except (TypeError, ValueError):
            continue
        # Brackets in texts count too, but few rows have so many: most are not looked at again.
        if line.count("[") + line.count("{") <= DEEPEST or is_shallow(made):
            return line
        return as_json(shallow(made))
    raise ValueError(f"a row that is no JSON: {_text(row)}")


def is_shallow(value: Any, levels: int = DEEPEST) -> bool:
    """Whether lists and dicts are nested in at most so many levels."""
    if not isinstance(value, (dict, list, tuple)):
        return True
    elements = value.values() if isinstance(value, dict) else value
    return levels > 0 and all(is_shallow(one, levels - 1) for one in elements)


def shallow(value: Any, levels: int = DEEPEST, inside: frozenset[int] = frozenset()) -> Any:
    """A value whose lists and dicts below so many levels, or that are inside themselves, have become text.

    >>> shallow({"a": [1, [2, [3]]]}, 2)
    {'a': [1, '[2, [3]]']}
    """
    if not isinstance(value, (dict, list, tuple)):
        return value
    if not levels or id(value) in inside:
        return _text(value)
    inside |= {id(value)}
    if isinstance(value, dict):
        return {name: shallow(one, levels - 1, inside) for name, one in value.items()}
    return [shallow(one, levels - 1, inside) for one in value]


def _text(value: Any) -> str:
    """The text of any object, also of one whose `str` raises an error."""
    try:
        return str(value)
    except Exception:
        # A user's own object may raise anything.
        return f"a {type(value).__name__}"


ENCODER = json.JSONEncoder(default=_text, allow_nan=False)
