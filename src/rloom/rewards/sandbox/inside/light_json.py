"""JSON by the C functions that the standard module is made of.

That module imports `re`, which takes as long as starting Python does, and every program in a sandbox would wait for it.
"""

from __future__ import annotations

from _json import encode_basestring_ascii, make_encoder, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


class Reading:
    """The options of the scanner, all as the standard module has them."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, NOT_FINITE.__getitem__


def refuse(value: Any) -> Any:
    """Refuse what is no JSON."""
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


scan = make_scanner(Reading)  # type: ignore[arg-type]


def dumps(value: Any) -> str:
    """As `json.dumps`.

    >>> dumps({"a": [1, None, "é", float("nan")]})
    '{"a": [1, null, "\\\\u00e9", NaN]}'
    """
    encoder = make_encoder({}, refuse, encode_basestring_ascii, None, ": ", ", ", False, False, True)
    return "".join(encoder(value, 0))


def loads(text: str) -> Any:
    """As `json.loads`, of text that has no blanks around it.

    >>> loads('{"a": [1, null, 2.5]}')
    {'a': [1, None, 2.5]}
    """
    try:
        value, end = scan(text, 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(text):
        raise ValueError("something follows the JSON")
    return value
