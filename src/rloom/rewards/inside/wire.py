"""Plain data over a pipe, and calls in both directions between two processes that do not trust each other.

A message is four bytes of length and JSON. What JSON does not know is tagged: `{"tuple": […]}`, `{"dict": [[k, v],
…]}`. An object that is no plain data stays where it is: its owner sends a number, and the other side gets a
[`Remote`], whose calls, attributes and operators go back to the owner. Two things never do: `==` and `hash`. An
object that says it is equal to everything is therefore equal to nothing but itself.
"""

from __future__ import annotations

import builtins
import importlib
import json
import operator
import os
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any

MAX_DEPTH = 100
MAX_MESSAGE = 4 * 2**20
EXACT = 2**53
REBUILT = {("decimal", "Decimal"): str, ("fractions", "Fraction"): str, ("collections", "deque"): list}
"""Types beyond the built-in ones that travel by value, and what they are rebuilt from."""


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


def send(fd: int, message: Any, write: Callable[[int, Any], int] = os.write) -> None:
    """One message."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(body)} bytes; {MAX_MESSAGE} are allowed")
    data = memoryview(struct.pack(">I", len(body)) + body)
    while data:
        data = data[write(fd, data) :]


def receive(fd: int, read: Callable[[int, int], bytes] = os.read) -> Any:
    """One message."""
    (size,) = struct.unpack(">I", read_exactly(fd, 4, read))
    if size > MAX_MESSAGE:
        raise WireError(f"a message of {size} bytes; {MAX_MESSAGE} are allowed")
    try:
        return json.loads(read_exactly(fd, size, read))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a message: {error}") from None


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
        return bool(value) if kind is bool else number if abs(number) <= EXACT else {"int": hex(number)}
    if isinstance(value, (str, float)):
        return str(value) if isinstance(value, str) else float(value)
    if isinstance(value, list):
        return each(value)
    if isinstance(value, dict):
        return {"dict": [each(pair) for pair in value.items()]}
    for tag, plain in (("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, plain):
            return {tag: each(value)}
    if isinstance(value, (bytes, bytearray)):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if (kind.__module__, kind.__name__) in REBUILT:
        parts = REBUILT[kind.__module__, kind.__name__](value)
        return {"rebuilt": [kind.__module__, kind.__name__, encode(parts, keep, depth + 1)]}
    if isinstance(value, type) and getattr(builtins, type.__getattribute__(value, "__name__"), None) is value:
        return {"type": type.__getattribute__(value, "__name__")}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep, depth + 1)
    return keep(value)


def decode(data: Any, find: Callable[[str, Any], Any], depth: int = 0) -> Any:
    """The value again. `find` turns a name that `keep` gave into an object.

    >>> decode({"dict": [["a", {"set": [3]}], [{"tuple": [1, 2]}, {"int": "0x10"}]]}, find=None)
    {'a': {3}, (1, 2): 16}
    """
    if depth > MAX_DEPTH:
        raise WireError("data nested too deep")
    if isinstance(data, list):
        return [decode(d, find, depth + 1) for d in data]
    if not isinstance(data, dict):
        return data
    try:
        ((tag, body),) = data.items()
        if tag in ("theirs", "mine"):
            return find(tag, body)
        if tag == "int":
            return int(body, 16)
        if tag in ("bytes", "bytearray"):
            return (bytes if tag == "bytes" else bytearray).fromhex(body)
        if tag == "complex":
            return complex(float(body[0]), float(body[1]))
        if tag == "dict":
            return {decode(k, find, depth + 1): decode(v, find, depth + 1) for k, v in body}
        if tag == "type":
            found = getattr(builtins, body)
            assert isinstance(found, type)
            return found
        if tag == "rebuilt":
            module, name, parts = body
            assert (module, name) in REBUILT
            return getattr(importlib.import_module(module), name)(decode(parts, find, depth + 1))
        made: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
        return made(decode(d, find, depth + 1) for d in body)
    except (AssertionError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"not a value: {error!r}") from None


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"__{f.__name__}__": f for f in (len, iter, next, bool, str, repr, int, float, abs, round, reversed)},
    **{f"__{n}__": getattr(operator, n) for n in
       ("getitem", "setitem", "delitem", "contains", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg",
        "lt", "le", "gt", "ge", "and_", "or_", "xor", "matmul", "index")},
    "__radd__": lambda a, b: b + a, "__rmul__": lambda a, b: b * a, "__rsub__": lambda a, b: b - a,
    "call": lambda f, *args, **kwargs: f(*args, **kwargs),
    "getattr": getattr, "setattr": setattr,
}  # fmt: skip
OPERATIONS["__and__"], OPERATIONS["__or__"] = OPERATIONS.pop("__and___"), OPERATIONS.pop("__or___")


class Remote:
    """An object of the other side."""

    __slots__ = ("_rloom_number", "_rloom_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_rloom_peer", peer)
        object.__setattr__(self, "_rloom_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python looks for by itself (copying, pickling, …)
            raise AttributeError(name)
        return self._rloom_peer.ask("getattr", self, (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._rloom_peer.ask("setattr", self, (name, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._rloom_peer.ask("call", self, args, kwargs)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any) -> Any:
        return self._rloom_peer.ask(name, self, args, {})

    return method


for _name in OPERATIONS:
    if _name.startswith("__"):
        setattr(Remote, _name, _forwarded(_name))


class Peer:
    """One end of the pipes. `allow(operation, object, arguments)` says what the other side may do with what is ours."""

    def __init__(self, read_fd: int, write_fd: int, allow: Callable[[str, Any, tuple[Any, ...]], bool]) -> None:
        self.read_fd, self.write_fd, self.allow = read_fd, write_fd, allow
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}
        self.exceptions: dict[str, type[Exception]] = {}

    def keep(self, value: Any) -> Any:
        """The name under which the other side gets an object."""
        if isinstance(value, Remote):
            return {"theirs": object.__getattribute__(value, "_rloom_number")}
        if isinstance(value, ModuleType):
            raise TypeError("a module cannot be passed between tests and program")
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)  # kept alive, so that the id stays its own
        return {"mine": self.numbers[id(value)]}

    def find(self, whose: str, number: Any) -> Any:
        """The object behind a name that the other side sent: "mine" is its own, "theirs" is ours."""
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise WireError("not the number of an object")
        if whose == "mine":
            return self.remotes.setdefault(number, Remote(self, number))
        if number >= len(self.objects):
            raise WireError("no such object")
        return self.objects[number]

    def pack(self, value: Any) -> Any:
        """Encoded, objects named."""
        return encode(value, self.keep)

    def unpack(self, data: Any) -> Any:
        """Decoded, names resolved."""
        return decode(data, self.find)

    def ask(self, operation: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the other side do something with an object of its own, serving what it asks meanwhile."""
        request = {"do": operation, "with": self.pack(target), "args": [self.pack(a) for a in args],
                   "kwargs": {k: self.pack(v) for k, v in kwargs.items()}}  # fmt: skip
        send(self.write_fd, request)
        while True:
            answer = receive(self.read_fd)
            if not isinstance(answer, dict):
                raise WireError("not an answer")
            if "do" in answer:
                self.serve(answer)
                continue
            for index, changed in answer.get("changed", {}).items():
                restore(args[int(index)], self.unpack(changed))
            if "error" in answer:
                raise self.exception(answer["error"])
            return self.unpack(answer.get("value"))

    def serve(self, request: dict[str, Any]) -> None:
        """Do what the other side asks; answer with the value or exception, and the arguments that were changed."""
        answer: dict[str, Any] = {}
        try:
            target = self.unpack(request["with"])
            args = tuple(self.unpack(a) for a in request["args"])
            kwargs = {str(k): self.unpack(v) for k, v in request["kwargs"].items()}
            if not self.allow(request["do"], target, args):
                raise PermissionError(f"{request['do']} is not allowed here")
            value = OPERATIONS[request["do"]](target, *args, **kwargs)
            answer["value"] = self.pack(value)
            after = {str(i): self.pack(a) for i, a in enumerate(args) if isinstance(a, (list, dict, set))}
            answer["changed"] = {i: a for i, a in after.items() if a != request["args"][int(i)]}
        except WireError:
            raise
        except BaseException as error:  # sys.exit in a program is a failed call, not the end of the tests
            answer = {"error": describe(error)}
        try:
            send(self.write_fd, answer)
        except ValueError as error:  # too large
            send(self.write_fd, {"error": describe(error)})

    def exception(self, description: Any) -> Exception:
        """The nearest exception that this side knows; never one that ends a process."""
        names, message = description
        for name in names:
            kind = self.exceptions.get(name) or getattr(builtins, str(name), None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    return kind(str(message))
                except TypeError:  # UnicodeDecodeError and the like want more
                    continue
        return RuntimeError(f"{names[:1]}: {message}")


def describe(error: BaseException) -> list[Any]:
    """An exception as the names of its classes and its message."""
    try:
        message = str(error)[:500]
    except BaseException:  # a program may define its own
        message = ""
    return [[kind.__name__ for kind in type(error).__mro__], message]


def restore(target: Any, value: Any) -> None:
    """Write back what a call did to a list, dict or set that it was given."""
    if isinstance(target, list) and isinstance(value, list):
        target[:] = value
    elif (isinstance(target, dict) and isinstance(value, dict)) or (isinstance(target, set) and isinstance(value, set)):
        target.clear()
        target.update(value)
