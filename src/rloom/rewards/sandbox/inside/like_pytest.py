"""What tests use of pytest most: `raises`, `approx`, `fixture`, `mark.parametrize`. The package is not in the sandbox.

Tests that ask for more of it fail with an `AttributeError` that names what is missing.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Raised:
    """What `raises` caught."""

    value: Any = None
    type: Any = None


@contextmanager
def raises(expected: Any, match: str | None = None) -> Iterator[Raised]:
    """Fails unless an exception of that kind is raised within."""
    raised = Raised()
    try:
        yield raised
    except expected as error:
        raised.value, raised.type = error, type(error)
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{error!r} does not match {match!r}") from None
        return
    raise AssertionError(f"did not raise {expected}")


class approx:
    """Equal to numbers within a part in a million, and to lists and dicts of such numbers."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected: Any, rel: float | None = None, abs: float | None = None) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, actual: object) -> bool:
        return self._close(actual, self.expected)

    def _close(self, actual: Any, expected: Any) -> bool:
        if isinstance(expected, dict):
            same = isinstance(actual, dict) and actual.keys() == expected.keys()
            return same and all(self._close(actual[key], expected[key]) for key in expected)
        if isinstance(expected, (list, tuple)):
            same = isinstance(actual, type(expected)) and len(actual) == len(expected)
            return same and all(map(self._close, actual, expected))
        if type(actual) not in (int, float, bool, complex) or not isinstance(expected, (int, float, complex)):
            # An object of the program does not decide this.
            return type(actual) is type(expected) and bool(actual == expected)
        relative = 0.0 if self.rel is None and self.abs is not None else self.rel or 1e-6
        tolerance = max(relative * abs_(expected), 1e-12 if self.abs is None else self.abs)
        return bool(actual == expected) or abs_(actual - expected) <= tolerance

    def __repr__(self) -> str:
        return f"approx({self.expected!r})"


# `approx` has an argument of the name `abs`.
abs_ = abs


def fixture(function: Any = None, **options: Any) -> Any:
    """Marks a function whose value, or what it yields, tests get by its name. It is made anew for each test."""
    if function is None:
        return functools.partial(fixture, **options)
    function.__fixture__ = options
    return function


def parametrize(names: Any, values: Any, **options: Any) -> Callable[[Any], Any]:
    """Marks a test that is run once for each of some values."""
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = [dict(zip(listed, value if len(listed) > 1 else [value], strict=True)) for value in values]

    def marked(function: Any) -> Any:
        before = getattr(function, "__rows__", [{}])
        function.__rows__ = [{**one, **other} for one in rows for other in before]
        return function

    return marked


def fixtures_of(space: dict[str, Any]) -> dict[str, Any]:
    """The fixtures among some names."""
    found = [f for f in space.values() if isinstance(f, types.FunctionType) and hasattr(f, "__fixture__")]
    return {f.__fixture__.get("name") or f.__name__: f for f in found}


def run_test(test: Any, space: dict[str, Any]) -> None:
    """Call a test: once for each of its values, with the fixtures that it asks for."""
    fixtures = fixtures_of(space)
    for row in getattr(test, "__rows__", [{}]):
        with ExitStack() as ends:
            made: dict[str, Any] = {}
            for name, function in fixtures.items():
                if function.__fixture__.get("autouse"):
                    _made(name, fixtures, made, ends)
            asked = [name for name in inspect.signature(test).parameters if name not in row]
            test(**row, **{name: _made(name, fixtures, made, ends) for name in asked})


def _made(name: str, fixtures: dict[str, Any], made: dict[str, Any], ends: ExitStack) -> Any:
    if name not in made:
        if name not in fixtures:
            raise LookupError(f"there is no fixture {name!r}; those of pytest itself are not here")
        needs = {n: _made(n, fixtures, made, ends) for n in inspect.signature(fixtures[name]).parameters}
        value = fixtures[name](**needs)
        if inspect.isgenerator(value):
            ends.callback(next, value, None)
            value = next(value)
        made[name] = value
    return made[name]


def install() -> None:
    """Let tests import it as pytest, also where `site_packages` has that: `run_test` knows these marks alone."""
    module = sys.modules["pytest"] = types.ModuleType("pytest")
    module.raises, module.approx, module.fixture = raises, approx, fixture  # type: ignore[attr-defined]
    module.mark = types.SimpleNamespace(parametrize=parametrize)  # type: ignore[attr-defined]
