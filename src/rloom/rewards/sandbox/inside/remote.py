"""Objects of another process, and calls in both directions between two processes that do not trust each other.

An object that is no plain data stays where it is: its owner sends a number, and the other side gets a [`Remote`], whose
calls, attributes and items go back to the owner. What a test judges by never does: an object of the program in a
comparison, in arithmetic or as a truth value is refused (see [`RestrictedRemote`]), since it would be the program that
decides what comes out, and it would see what was expected.
"""

from __future__ import annotations

import builtins
import operator
from types import CoroutineType, ModuleType

from rloom.rewards.sandbox.inside.wire import WireError, decode, encode, receive, send

# Every program waits for these imports: what is rarely needed, or only said about types, is not among them.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

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
        # Python looks for these by itself (copying, pickling, …).
        if name.startswith("__"):
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
    """Call `__exit__` with the nearest exception that this side knows."""
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


class RestrictedRemote(Remote):
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
        if other is None or not isinstance(other, RestrictedRemote):
            return other is None
        made = self._rloom_peer.made
        return self._rloom_number not in made and other._rloom_number not in made

    def __instancecheck__(self, instance: Any) -> bool:
        """`isinstance(x, C)` with a class of the program. Of its own objects it may say what they are; data is data."""
        return (
            isinstance(instance, RestrictedRemote)
            and self._rloom_peer.ask("instancecheck", self, (instance,), {}) is True
        )

    def __subclasscheck__(self, kind: Any) -> bool:
        return isinstance(kind, RestrictedRemote) and self._rloom_peer.ask("subclasscheck", self, (kind,), {}) is True

    def __hash__(self) -> int:
        return self._rloom_refuse("hash()")


def _refused(name: str) -> Callable[..., Any]:
    def method(self: RestrictedRemote, *args: Any) -> Any:
        return self._rloom_refuse(name)

    return method


def _between_objects(name: str) -> Callable[..., Any]:
    """`+`, `-`, `*` of two objects of the program make another one; of an object and data, nothing that is believed."""

    def method(self: RestrictedRemote, other: Any) -> Any:
        result = self._rloom_peer.ask(name, self, (other,), {}) if isinstance(other, RestrictedRemote) else None
        if not isinstance(result, RestrictedRemote):
            return self._rloom_refuse(name)
        self._rloom_peer.made.add(result._rloom_number)
        return result

    return method


FURTHER = ("rtruediv", "rfloordiv", "rmod", "rpow", "complex", "pos", "invert", "trunc", "floor", "ceil", "divmod",
           "rdivmod", "format")  # fmt: skip
for _name in (*OPERATIONS, *(f"__{name}__" for name in FURTHER)):
    if _name.startswith("__") and _name not in USABLE:
        setattr(RestrictedRemote, _name, _refused(_name))
for _name in ("__add__", "__sub__", "__mul__"):
    setattr(RestrictedRemote, _name, _between_objects(_name))


class Peer:
    """One end of the pipes. `allow(operation, object, arguments)` says what the other side may do with what is ours."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        allow: Callable[[str, Any, tuple[Any, ...]], bool],
        remote_type: type[Remote] = Remote,
    ) -> None:
        self.read_fd, self.write_fd, self.allow, self.remote_type = read_fd, write_fd, allow, remote_type
        self.asked = 0
        # Why what the other side did cannot count, even where a test caught the exception.
        self.trouble = ""
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.remotes: dict[int, Remote] = {}
        # The other side's objects that came out of arithmetic.
        self.made: set[int] = set()
        self.exceptions: dict[str, type[Exception]] = {}

    def keep(self, value: Any) -> Any:
        """The name under which the other side gets an object."""
        if isinstance(value, Remote):
            return {"theirs": object.__getattribute__(value, "_rloom_number")}
        if isinstance(value, ModuleType):
            raise TypeError("a module cannot be passed between tests and program")
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            # The object is kept alive, so that no other gets its id.
            self.objects.append(value)
        return {"mine": self.numbers[id(value)]}

    def find(self, whose: str, number: Any) -> Any:
        """The object behind a name that the other side sent: "mine" is its own, "theirs" is ours."""
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise WireError("not the number of an object")
        if whose == "mine":
            return self.remotes.setdefault(number, self.remote_type(self, number))
        if number >= len(self.objects):
            raise WireError("no such object")
        return self.objects[number]

    def pack(self, value: Any) -> Any:
        """Encode a value, with objects as numbers."""
        return encode(value, self.keep)

    def unpack(self, data: Any) -> Any:
        """Decode a value, with numbers as objects."""
        return decode(data, self.find)

    def refusal(self, target: Remote, what: str) -> TypeError:
        """The error for a test that uses an object of the program where only data counts."""
        message = f"the program returned an object of its own, not plain data, and a test used it for {what}"
        self.trouble = self.trouble or message
        return TypeError(message)

    def ask(self, operation: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Have the other side do something with an object of its own, serving what it asks meanwhile."""
        request = {"do": operation, "with": self.pack(target), "args": [self.pack(a) for a in args],
                   "kwargs": {k: self.pack(v) for k, v in kwargs.items()}}  # fmt: skip
        self.asked += 1
        try:
            send(self.write_fd, request)
            while "do" in (answer := self._message()):
                self.serve(answer)
            self._write_back(answer, args, kwargs)
            later = answer.get("later") is True
            return self._awaited(answer) if later else self._outcome(answer, may_end=operation == "__next__")
        except (WireError, BrokenPipeError) as error:
            self.trouble = self.trouble or f"the program is gone: {error}"
            raise WireError(str(error)) from None

    def _message(self) -> dict[str, Any]:
        """An answer, or a request of the other side."""
        message = receive(self.read_fd)
        if not isinstance(message, dict):
            raise WireError("not an answer")
        return message

    def _outcome(self, answer: dict[str, Any], *, may_end: bool = False) -> Any:
        """The value, or the exception; one that says "no more" only where that was asked: `all(map(…))` would hold."""
        if "error" not in answer:
            return self.unpack(answer.get("value"))
        error = nearest_exception(answer["error"], self.exceptions)
        if isinstance(error, StopAsyncIteration) or (isinstance(error, StopIteration) and not may_end):
            raise RuntimeError(f"the call raised {type(error).__name__}: {error}")
        raise error

    async def _awaited(self, answer: dict[str, Any]) -> Any:
        """A coroutine of the other side, which has run there already. Its outcome is told when it is awaited."""
        return self._outcome(answer)

    def _write_back(self, answer: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Apply what the call did to lists and dicts that it was given, by position or by name."""
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
                import asyncio

                # It runs now: nobody on this side could await it later.
                answer["later"] = True
                value = asyncio.run(value)
            answer["value"] = self.pack(value)
            answer["changed"] = self._changed(request, args, kwargs)
        except WireError:
            raise
        except BaseException as error:
            # sys.exit in a program is a failed call, not the end of the tests.
            answer = {"error": describe(error), "later": "later" in answer}
        try:
            send(self.write_fd, answer)
        except ValueError as error:
            # The answer is too large.
            send(self.write_fd, {"error": describe(error)})

    def _changed(self, request: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        before = {str(place): data for place, data in [*enumerate(request["args"]), *request["kwargs"].items()]}
        after = {
            str(place): self.pack(value)
            for place, value in [*enumerate(args), *kwargs.items()]
            if isinstance(value, (list, dict, set))
        }
        return {place: data for place, data in after.items() if data != before[place]}


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
            except TypeError:
                # UnicodeDecodeError and the like take more arguments.
                continue
    return RuntimeError(f"{names[:1]}: {message}")


def describe(error: BaseException) -> list[Any]:
    """An exception as the names of its classes and its message."""
    try:
        message = str(error)[:500]
    except BaseException:
        # A program may define exceptions that cannot be shown.
        message = ""
    return [[kind.__name__ for kind in type(error).__mro__], message]


def restore(target: Any, value: Any) -> None:
    """Write back what a call did to a list, dict or set that it was given."""
    if isinstance(target, list) and isinstance(value, list):
        target[:] = value
    elif (isinstance(target, dict) and isinstance(value, dict)) or (isinstance(target, set) and isinstance(value, set)):
        target.clear()
        target.update(value)
