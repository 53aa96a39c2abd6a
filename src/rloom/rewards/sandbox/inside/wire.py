"""Plain data over a pipe, between two processes that do not trust each other.

A message is four bytes of length and JSON. What JSON does not know is tagged: `{"tuple": […]}`, `{"dict": [[k, v],
…]}`. An object that is no plain data stays where it is (see remote.py): its owner sends a number.
"""

from __future__ import annotations

import builtins
import os
import struct

from rloom.rewards.sandbox.inside.light_json import dumps, loads

# Every program waits for these imports: what is rarely needed, or only said about types, is not among them.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 100
MAX_MESSAGE = 4 * 2**20
# The most lists, dicts and items in a message: three bytes of a message can make an object of a hundred.
MAX_ITEMS = 2**19
EXACT = 2**53
# Types beyond the built-in ones that travel by value, and the arguments that they are rebuilt from.
REBUILT: dict[tuple[str, str], Callable[[Any], list[Any]]] = {
    ("decimal", "Decimal"): lambda d: [str(d)],
    ("fractions", "Fraction"): lambda f: [str(f)],
    ("collections", "deque"): lambda d: [list(d)],
    ("builtins", "range"): lambda r: [r.start, r.stop, r.step],
    ("datetime", "date"): lambda d: [d.year, d.month, d.day],
    ("datetime", "timedelta"): lambda t: [t.days, t.seconds, t.microseconds],
    ("datetime", "datetime"): lambda d: [d.isoformat()],
    ("datetime", "time"): lambda t: [t.isoformat()],
}
FROM_TEXT = {("datetime", "datetime"), ("datetime", "time")}
PLAIN_TYPES = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, object, type)
# Kinds of numpy's arrays that travel by value.
NUMBERS = ("bool", "int", "uint", "float", "complex")
# The most hexadecimal digits of a whole number that is accepted.
MAX_NUMBER = 2**18


class WireError(Exception):
    """The other side is gone, or sent something that is no message."""


def read_exactly(fd: int, size: int, read: Callable[[int, int], bytes] = os.read) -> bytes:
    """`size` bytes, or a [`WireError`] where the pipe ends first."""
    parts = []
    while size:
        part = read(fd, min(size, 2**20))
        if not part:
            raise WireError("the other side closed the pipe")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send(fd: int, message: Any, write: Callable[[int, Any], int] = os.write) -> int:
    """One message; returns its size."""
    body = dumps(message).encode()
    if len(body) > MAX_MESSAGE or items(body) > MAX_ITEMS:
        raise ValueError(f"a message of {len(body)} bytes; {MAX_MESSAGE} are allowed, and {MAX_ITEMS} items")
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[write(fd, data) :]
    return len(body)


def receive(fd: int, read: Callable[[int, int], bytes] = os.read) -> Any:
    """One message."""
    (size,) = struct.unpack(">I", read_exactly(fd, 4, read))
    if size > MAX_MESSAGE:
        raise WireError(f"a message of {size} bytes; {MAX_MESSAGE} are allowed")
    body = read_exactly(fd, size, read)
    if items(body) > MAX_ITEMS:
        raise WireError(f"a message of over {MAX_ITEMS} items")
    try:
        return loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None


def items(body: bytes) -> int:
    """An upper bound of the lists, dicts and items in a message: commas and brackets in its texts count too.

    >>> items(b'[1, [], {"a": 2}]')
    5
    """
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def encode(value: Any, keep: Callable[[Any], Any], depth: int = 0) -> Any:
    """As JSON with tags. `keep` says how an object that is no plain data is named.

    >>> encode([1, (2.5, None), {"a": {3}}], keep=repr)
    [1, {'tuple': [2.5, None]}, {'dict': [['a', {'set': [3]}]]}]
    """
    if depth > MAX_DEPTH:
        raise ValueError("data nested too deep")

    def each(values: Any) -> list[Any]:
        return [encode(v, keep, depth + 1) for v in values]

    kind: Any = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) <= EXACT else {"int": hex(number)}
    if isinstance(value, (str, float)):
        return str(value) if isinstance(value, str) else float(value)
    if isinstance(value, list):
        return each(value)
    if isinstance(value, dict):
        return {"dict": [each(pair) for pair in value.items()]}
    fields = getattr(kind, "_fields", None)
    if isinstance(value, tuple) and type(fields) is tuple and len(fields) == len(value):
        return {"named": [kind.__name__, list(fields), each(value)]}
    for tag, plain in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, plain):
            return {tag: each(value)}
    return encode_rarer(value, kind, keep, each)


def encode_rarer(value: Any, kind: Any, keep: Callable[[Any], Any], each: Callable[[Any], list[Any]]) -> Any:
    """`encode` for bytes, complex numbers, built-in types and types of other modules."""
    if isinstance(value, (bytes, bytearray)):
        return {kind.__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if (kind.__module__, kind.__name__) in REBUILT:
        return {"rebuilt": [kind.__module__, kind.__name__, each(REBUILT[kind.__module__, kind.__name__](value))]}
    if isinstance(value, type) and getattr(builtins, type.__getattribute__(value, "__name__"), None) is value:
        return {"type": type.__getattribute__(value, "__name__")}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        is_array = kind.__name__ == "ndarray" and value.ndim > 0 and str(value.dtype).rstrip("0123456789") in NUMBERS
        (plain_value,) = each([as_plain(value)])
        return {"array": [str(value.dtype), plain_value]} if is_array else plain_value
    return keep(value)


def as_plain(value: Any) -> Any:
    """A value of numpy's as one of Python's. `tolist` leaves long floats as they are, since Python has none."""
    plain = value.tolist()
    if type(plain) is type(value):
        return complex(plain) if plain.dtype.kind == "c" else float(plain)
    return plain


def decode(data: Any, find: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """The value again. `find` turns a name that `keep` gave into an object.

    >>> decode({"dict": [["a", {"set": [3]}], [{"tuple": [1, 2]}, {"int": "0x10"}]]}, find=None)
    {'a': {3}, (1, 2): 16}
    """
    if depth > MAX_DEPTH:
        raise WireError("data nested too deep")

    def part(inner: Any) -> Any:
        return decode(inner, find, depth + 1)

    if isinstance(data, list):
        return [part(item) for item in data]
    if not isinstance(data, dict):
        return data
    try:
        ((tag, body),) = data.items()
        return find(tag, body) if tag in ("theirs", "mine") else DECODERS[tag](body, part)
    except (AssertionError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"not a value: {error!r}") from None


def as_int(digits: str) -> int:
    """A whole number from its hexadecimal digits."""
    assert len(digits) <= MAX_NUMBER
    return int(digits, 16)


def as_named_tuple(body: Any, part: Callable[[Any], Any]) -> Any:
    """A named tuple, of a class made for it."""
    from collections import namedtuple

    name, fields, values = body
    # That they are names, `namedtuple` checks.
    assert len(fields) <= 100
    return namedtuple(name, fields)(*map(part, values))


def as_rebuilt(body: Any, part: Callable[[Any], Any]) -> Any:
    """A value of one of the types of `REBUILT`."""
    module, name, parts = body
    assert (module, name) in REBUILT
    kind = getattr(__import__(module), name)
    make = kind.fromisoformat if (module, name) in FROM_TEXT else kind
    return make(*map(part, parts))


def as_array(dtype: Any, values: Any) -> Any:
    """An array of numpy's, of numbers only; where numpy is not there, the list."""
    assert isinstance(dtype, str)
    assert dtype.rstrip("0123456789") in NUMBERS
    try:
        import numpy
    except ImportError:
        return values
    return numpy.array(values, dtype=dtype)


def plain_type(name: Any) -> type:
    """A type by name: of plain data, or an exception that a program may raise. SystemExit and the like are neither.

    >>> plain_type("str"), plain_type("KeyError")
    (<class 'str'>, <class 'KeyError'>)
    """
    found = getattr(builtins, name)
    assert isinstance(found, type)
    assert found in PLAIN_TYPES or issubclass(found, Exception)
    return found


# How the body of a tag is read, with a function that decodes its parts.
DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "int": lambda body, part: as_int(body),
    "bytes": lambda body, part: bytes.fromhex(body),
    "bytearray": lambda body, part: bytearray.fromhex(body),
    "complex": lambda body, part: complex(float(body[0]), float(body[1])),
    "tuple": lambda body, part: tuple(map(part, body)),
    "set": lambda body, part: set(map(part, body)),
    "frozenset": lambda body, part: frozenset(map(part, body)),
    "dict": lambda body, part: {part(key): part(value) for key, value in body},
    "type": lambda body, part: plain_type(body),
    "array": lambda body, part: as_array(body[0], part(body[1])),
    "named": as_named_tuple,
    "rebuilt": as_rebuilt,
}
