"""Whether what a program sent is what was expected, found out without building anything from what it sent.

A message of a few bytes can stand for a number of a gigabyte, or for a set whose elements all collide. So data is
compared in the form in which it travels, against the expected value, which is ours: nothing here takes longer than
reading the message does.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_HEX = 2**18
SMALL_NUMBER = re.compile(r"-?\d{1,400}(?:/\d{1,400})?|-?\d{1,400}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,3})?")
SMALL_SET = 1000


class Different(Exception):
    """The data cannot be equal to what is expected."""


def equals(data: Any, expected: Any) -> bool:
    """Whether encoded data stands for the expected value, which is made of plain literals.

    >>> equals([1, {"tuple": [2.0]}, {"dict": [["a", {"set": [3]}]]}], [1, (2,), {"a": {3}}])
    True
    >>> equals({"rebuilt": ["fractions", "Fraction", ["1/2"]]}, 0.5), equals({"mine": 0}, 1)
    (True, False)
    """
    try:
        return _equals(data, expected)
    except (Different, TypeError, ValueError, LookupError, ArithmeticError, RecursionError):
        return False


def _equals(data: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        items = _items(data, "list" if isinstance(expected, list) else "tuple")
        return len(items) == len(expected) and all(map(_equals, items, expected))
    if isinstance(expected, (set, frozenset)):
        return _same_elements(_items(data, "set", "frozenset"), expected)
    if isinstance(expected, dict):
        return _same_entries(_items(data, "dict"), expected)
    return bool(_simple(data) == expected)


def _tagged(data: Any) -> tuple[str, Any]:
    """The tag of encoded data and what is in it. An array of numpy's counts as a list, a named tuple as a plain one."""
    if not isinstance(data, dict):
        return "list" if isinstance(data, list) else "", data
    ((tag, body),) = data.items()
    if tag == "array":
        return "list", body[1]
    return ("tuple", body[2]) if tag == "named" else (tag, body)


def _items(data: Any, *tags: str) -> list[Any]:
    """What is in encoded data, if it has one of these tags."""
    tag, items = _tagged(data)
    if tag not in tags or not isinstance(items, list):
        raise Different
    return items


def _same_elements(items: list[Any], expected: Any) -> bool:
    """Whether a set has the expected elements. They are looked up in the expected set, so that elements whose hashes
    were chosen to collide meet no others."""
    left = set(expected)
    if len(items) != len(left):
        return False
    for item in items:
        key = _key(item)
        if key not in left:
            return False
        left.remove(key)
    return not left


def _same_entries(pairs: list[Any], expected: dict[Any, Any]) -> bool:
    left = dict(expected)
    if len(pairs) != len(left):
        return False
    for name, value in pairs:
        key = _key(name)
        if key not in left or not _equals(value, left.pop(key)):
            return False
    return not left


def _key(data: Any) -> Any:
    """Encoded data as a value that can be looked up."""
    tag, body = _tagged(data)
    if tag == "tuple":
        return tuple(_key(part) for part in body)
    if tag == "frozenset":
        if len(body) > SMALL_SET:
            raise Different
        return frozenset(_key(part) for part in body)
    return _simple(data)


def _simple(data: Any) -> Any:
    """A number, a text, bytes or None. Of the kinds that a few characters can make endless, only small ones."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    tag, body = _tagged(data)
    if tag == "int" and len(body) <= MAX_HEX:
        return int(body, 16)
    if tag in ("bytes", "bytearray"):
        return bytes.fromhex(body)
    if tag == "complex":
        return complex(float(body[0]), float(body[1]))
    if tag == "rebuilt" and body[:1] in (["decimal"], ["fractions"]):
        return _exact(body[1], body[2][0])
    raise Different


def _exact(kind: str, text: str) -> Any:
    from decimal import Decimal
    from fractions import Fraction

    if not SMALL_NUMBER.fullmatch(text):
        raise Different
    return {"Decimal": Decimal, "Fraction": Fraction}[kind](text)


def shown(data: Any) -> str:
    """The beginning of encoded data, for a message."""
    try:
        return json.dumps(data)[:200]
    except (TypeError, ValueError, RecursionError):
        return "something that cannot be shown"
