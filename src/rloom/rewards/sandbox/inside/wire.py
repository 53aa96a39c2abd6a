"""Plain data over a pipe, and calls in both directions between two processes that do not trust each other.

A message is four bytes of length and JSON. What JSON does not know is tagged: `{"tuple": […]}`, `{"dict": [[k, v],
…]}`. An object that is no plain data stays where it is: its owner sends a number, and the other side gets a
[`Remote`], whose calls, attributes and items go back to the owner. What a test judges by never does: an object of the
program in a comparison, in arithmetic or as a truth value is refused (see [`Judged`]), since it would be the program
that decides what comes out, and it would see what was expected.
"""

from __future__ import annotations

import builtins
import operator
import os
import struct
from types import CoroutineType, ModuleType

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
    """At most so many lists, dicts and items are in a message; what stands in its texts is counted too.

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
        return bool(value) if kind is bool else number if abs(number) <= EXACT else {"int": hex(number)}
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
        is_array = kind.__name__ == "ndarray" and value.ndim > 0 and str(value.dtype).rstrip("0123456789") in NUMBERS
        plain_value = encode(as_plain(value), keep, depth + 1)
        return {"array": [str(value.dtype), plain_value]} if is_array else plain_value
    return keep(value)


def as_plain(value: Any) -> Any:
    """What numpy's value is without numpy. Long floats it gives as themselves, since Python has none."""
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
    if isinstance(data, list):
        return [decode(d, find, depth + 1) for d in data]
    if not isinstance(data, dict):
        return data
    try:
        ((tag, body),) = data.items()
        if tag in ("theirs", "mine"):
            return find(tag, body)
        if tag == "int":
            assert len(body) <= MAX_NUMBER
            return int(body, 16)
        if tag in ("bytes", "bytearray"):
            return (bytes if tag == "bytes" else bytearray).fromhex(body)
        if tag == "complex":
            return complex(float(body[0]), float(body[1]))
        if tag == "dict":
            return {decode(k, find, depth + 1): decode(v, find, depth + 1) for k, v in body}
        if tag == "type":
            return plain_type(body)
        if tag == "array":
            return as_array(body[0], decode(body[1], find, depth + 1))
        if tag == "named":
            from collections import namedtuple

            name, fields, values = body
            assert len(fields) <= 100  # that they are names, namedtuple checks
            return namedtuple(name, fields)(*(decode(v, find, depth + 1) for v in values))
        if tag == "rebuilt":
            module, name, parts = body
            assert (module, name) in REBUILT
            kind = getattr(__import__(module), name)
            make = kind.fromisoformat if (module, name) in FROM_TEXT else kind
            return make(*(decode(part, find, depth + 1) for part in parts))
        made: Any = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
        return made(decode(d, find, depth + 1) for d in body)
    except (AssertionError, ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"not a value: {error!r}") from None


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


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{f"__{f.__name__}__": f for f in (len, iter, next, bool, str, repr, int, float, abs, round, reversed)},
    **{f"__{n}__": getattr(operator, n) for n in
       ("getitem", "setitem", "delitem", "contains", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg",
        "lt", "le", "gt", "ge", "and_", "or_", "xor", "matmul", "index")},
    "__radd__": lambda a, b: b + a, "__rmul__": lambda a, b: b * a, "__rsub__": lambda a, b: b - a,
    "call": lambda f, *args, **kwargs: f(*args, **kwargs),
    "getattr": getattr, "setattr": setattr,
    "instancecheck": lambda kind, value: isinstance(value, kind),
    "subclasscheck": lambda kind, other: issubclass(other, kind),
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

    def __enter__(self) -> Any:
        return self._rloom_peer.ask("__enter__", self, (), {})

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Never swallows the exception, which may be a failed test."""
        self._rloom_peer.ask("__exit__", self, (None if error is None else describe(error),), {})


def _leave(target: Any, description: Any) -> None:
    """`__exit__`, told of an exception of the same name."""
    if description is None:
        target.__exit__(None, None, None)
    else:
        error = nearest_exception(description, {})
        target.__exit__(type(error), error, None)


OPERATIONS |= {"__enter__": lambda target: target.__enter__(), "__exit__": _leave}


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any) -> Any:
        return self._rloom_peer.ask(name, self, args, {})

    return method


for _name in OPERATIONS:
    if _name.startswith("__") and _name not in vars(Remote):
        setattr(Remote, _name, _forwarded(_name))


# What tests may do with an object of the program: what it yields is judged when it is plain data.
USABLE = {"__len__", "__iter__", "__next__", "__reversed__", "__str__", "__repr__", "__getitem__", "__setitem__",
          "__delitem__", "__enter__", "__exit__"}  # fmt: skip


class Judged(Remote):
    """An object of the program, as the tests have it. It may be used (called, looked into, gone through), but whatever
    a test may judge by must be plain data: an object would decide the comparison itself."""

    __slots__ = ()

    def _rloom_refuse(self, name: str) -> Any:
        raise self._rloom_peer.refusal(self, name)

    def __eq__(self, other: object) -> bool:
        return self is other if self._rloom_is_told_from(other) else self._rloom_refuse("==")

    def __ne__(self, other: object) -> bool:
        return self is not other if self._rloom_is_told_from(other) else self._rloom_refuse("!=")

    def _rloom_is_told_from(self, other: object) -> bool:
        """Whether the two may be compared by what they are: not where the program chose one as the sum of others, which
        it may have done with an eye on the other."""
        if other is None or not isinstance(other, Judged):
            return other is None
        made = self._rloom_peer.made
        return self._rloom_number not in made and other._rloom_number not in made

    def __instancecheck__(self, instance: Any) -> bool:
        """`isinstance(x, C)` with a class of the program. Of its own objects it may say what they are; data is data."""
        return isinstance(instance, Judged) and self._rloom_peer.ask("instancecheck", self, (instance,), {}) is True

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, Judged) and self._rloom_peer.ask("subclasscheck", self, (kind,), {}) is True

    def __hash__(self) -> int:
        return self._rloom_refuse("hash()")


def _refused(name: str) -> Callable[..., Any]:
    def method(self: Judged, *args: Any) -> Any:
        return self._rloom_refuse(name)

    return method


def _between_objects(name: str) -> Callable[..., Any]:
    """`+`, `-`, `*` of two objects of the program make another one; of an object and data, nothing that is believed."""

    def method(self: Judged, other: Any) -> Any:
        result = self._rloom_peer.ask(name, self, (other,), {}) if isinstance(other, Judged) else None
        if not isinstance(result, Judged):
            return self._rloom_refuse(name)
        self._rloom_peer.made.add(result._rloom_number)
        return result

    return method


FURTHER = ("rtruediv", "rfloordiv", "rmod", "rpow", "complex", "pos", "invert", "trunc", "floor", "ceil", "divmod",
           "rdivmod", "format")  # fmt: skip
for _name in (*OPERATIONS, *(f"__{name}__" for name in FURTHER)):
    if _name.startswith("__") and _name not in USABLE:
        setattr(Judged, _name, _refused(_name))
for _name in ("__add__", "__sub__", "__mul__"):
    setattr(Judged, _name, _between_objects(_name))


class Peer:
    """One end of the pipes. `allow(operation, object, arguments)` says what the other side may do with what is ours."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        allow: Callable[[str, Any, tuple[Any, ...]], bool],
        stand_in: type[Remote] = Remote,
    ) -> None:
        self.read_fd, self.write_fd, self.allow, self.stand_in = read_fd, write_fd, allow, stand_in
        self.asked = 0
        self.trouble = ""  # why what the other side did cannot count, even where a test caught the exception
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}
        self.made: set[int] = set()  # the other side's objects that came out of arithmetic
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
            return self.remotes.setdefault(number, self.stand_in(self, number))
        if number >= len(self.objects):
            raise WireError("no such object")
        return self.objects[number]

    def pack(self, value: Any) -> Any:
        """Encoded, objects named."""
        return encode(value, self.keep)

    def unpack(self, data: Any) -> Any:
        """Decoded, names resolved."""
        return decode(data, self.find)

    def refusal(self, target: Remote, what: str) -> TypeError:
        """Why an object of the other side is not used for what only data is good for."""
        message = f"the program returned an object of its own, not plain data, and a test used it for {what}"
        self.trouble = self.trouble or message
        return TypeError(message)

    def ask(self, operation: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the other side do something with an object of its own, serving what it asks meanwhile."""
        try:
            return self._ask(operation, target, args, kwargs)
        except (WireError, BrokenPipeError) as error:
            self.trouble = self.trouble or f"the program is gone: {error}"
            raise WireError(str(error)) from None

    def _ask(self, operation: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = {"do": operation, "with": self.pack(target), "args": [self.pack(a) for a in args],
                   "kwargs": {k: self.pack(v) for k, v in kwargs.items()}}  # fmt: skip
        self.asked += 1
        send(self.write_fd, request)
        while True:
            answer = receive(self.read_fd)
            if not isinstance(answer, dict):
                raise WireError("not an answer")
            if "do" in answer:
                self.serve(answer)
                continue
            self._write_back(answer, args, kwargs)
            later = answer.get("later") is True
            return self._awaited(answer) if later else self._outcome(answer, may_end=operation == "__next__")

    def _outcome(self, answer: dict[str, Any], *, may_end: bool = False) -> Any:
        """The value, or the exception; one that says "no more" only where that was asked: `all(map(…))` would hold."""
        if "error" not in answer:
            return self.unpack(answer.get("value"))
        error = nearest_exception(answer["error"], self.exceptions)
        if isinstance(error, StopAsyncIteration) or (isinstance(error, StopIteration) and not may_end):
            raise RuntimeError(f"the call raised {type(error).__name__}: {error}")
        raise error

    async def _awaited(self, answer: dict[str, Any]) -> Any:
        """A coroutine of the other side, which has run there already: what it gave is told when it is awaited."""
        return self._outcome(answer)

    def _write_back(self, answer: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What the call did to lists and dicts that it was given, by position or by name."""
        places = {str(place): value for place, value in [*enumerate(args), *kwargs.items()]}
        changed = answer.get("changed", {})
        if not isinstance(changed, dict) or not places.keys() >= changed.keys():
            raise WireError("not an answer")
        for place, value in changed.items():
            restore(places[place], self.unpack(value))

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
            if isinstance(value, CoroutineType):
                answer["later"] = True
                value = run_to_its_end(value)
            answer["value"] = self.pack(value)
            answer["changed"] = self._changed(request, args, kwargs)
        except WireError:
            raise
        except BaseException as error:  # sys.exit in a program is a failed call, not the end of the tests
            answer = {"error": describe(error), "later": "later" in answer}
        try:
            send(self.write_fd, answer)
        except ValueError as error:  # too large
            send(self.write_fd, {"error": describe(error)})

    def _changed(self, request: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        before = {str(place): data for place, data in [*enumerate(request["args"]), *request["kwargs"].items()]}
        after = {
            str(place): self.pack(value)
            for place, value in [*enumerate(args), *kwargs.items()]
            if isinstance(value, (list, dict, set))
        }
        return {place: data for place, data in after.items() if data != before[place]}


def run_to_its_end(coroutine: Any) -> Any:
    """What an async function gives. It is run when it is called: nobody on this side could await it later."""
    import asyncio

    return asyncio.run(coroutine)


def nearest_exception(description: Any, known: dict[str, type[Exception]]) -> Exception:
    """The nearest exception that this side knows; never one that ends a process."""
    try:
        names, message = description
        names, message = [str(name) for name in names], str(message)
    except (TypeError, ValueError):
        raise WireError("not an exception") from None
    for name in names:
        kind = known.get(name) or getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(message)
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
