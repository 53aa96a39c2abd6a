"""The errors that rloom raises on purpose, and helpers for their messages.

    RloomError
    ├── ConfigError (ValueError)     an option, or a combination of options, that cannot be honoured
    ├── UnknownOptionError (TypeError)  an option that does not exist; names the nearest one that does
    ├── DataError (ValueError)       a data set or a prompt that cannot be trained on
    ├── RewardError (ValueError)     a reward function returned something that is not a score, or could not be called
    ├── SandboxError (RuntimeError)  model-written code cannot be run safely here
    ├── MissingExtraError (ImportError)  an optional package is needed; names the extra to install
    ├── DiskError (OSError)          a file that cannot be written
    ├── DivergedError (RuntimeError)  gradients or weights are no longer finite
    ├── ProcessError (RuntimeError)  processes that train together have failed or diverged
    └── EngineError (RuntimeError)   generation did not give what was asked for
        └── NoCompletionError        … not a single completion

Each is also the built-in exception that callers of TRL's trainer catch, so that their scripts keep working.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rloom.printable import printable


class RloomError(Exception):
    """Base of every error that rloom raises on purpose. Control characters in its text are escaped."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args), **options)


class ConfigError(RloomError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""


class UnknownOptionError(RloomError, TypeError):
    """An option that does not exist."""


class DataError(RloomError, ValueError):
    """A data set or a prompt that cannot be trained on."""


class RewardError(RloomError, ValueError):
    """A reward function returned something that is not a score, or could not be called."""


class SandboxError(RloomError, RuntimeError):
    """Model-written code cannot be run safely here."""


class MissingExtraError(RloomError, ImportError):
    """An optional package is needed that is not installed."""


class DiskError(RloomError, OSError):
    """A file cannot be written."""


class DivergedError(RloomError, RuntimeError):
    """Gradients or weights are no longer finite."""


class ProcessError(RloomError, RuntimeError):
    """Processes that train together have failed, or no longer hold the same weights."""


class EngineError(RloomError, RuntimeError):
    """Generation did not give what was asked for."""


class NoCompletionError(EngineError):
    """Generation gave not a single completion."""


def needs_extra(what: str, package: str, extra: str) -> MissingExtraError:
    """The error for an optional package that is not installed.

    >>> print(needs_extra("math_accuracy", "math-verify", "math"))
    math_accuracy needs the package math-verify: pip install "rloom[math]"
    """
    return MissingExtraError(f'{what} needs the package {package}: pip install "rloom[{extra}]"')


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """A short hint naming the nearest known name, or an empty string.

    >>> did_you_mean("betta", ["beta", "epsilon"])
    "; did you mean 'beta'?"
    >>> did_you_mean("zzz", ["beta", "epsilon"])
    ''
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else ""


def in_words(names: Iterable[str]) -> str:
    """Names joined with commas and "or".

    >>> in_words(["clip", "reinforce"]), in_words(["k1"]), in_words(["k1", "k2", "k3"])
    ('clip or reinforce', 'k1', 'k1, k2 or k3')
    """
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def check_choice(option: str, value: object, choices: Iterable[str]) -> None:
    """Raise a [`ConfigError`] that names the nearest choice unless `value` is one of `choices`."""
    known = list(choices)
    if value not in known:
        hint = did_you_mean(str(value), known, cutoff=0.5)
        raise ConfigError(f"`{option}` must be one of {', '.join(map(repr, known))}, not {value!r}{hint}")


def check_options(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that a function does not have, and name the nearest."""
    for name in given:
        if name not in known:
            raise UnknownOptionError(f"{function}() has no option '{name}'{did_you_mean(name, known)}")


F = TypeVar("F", bound=Callable[..., Any])


def checks_options(function: F) -> F:
    """A decorator: an unknown option of the function raises an error that names the nearest one.

    >>> @checks_options
    ... def length(*, maximum=3): ...
    >>> length(maximim=4)
    Traceback (most recent call last):
        ...
    rloom.errors.UnknownOptionError: length() has no option 'maximim'; did you mean 'maximum'?
    """
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        check_options(function.__name__, options, known)
        return function(*args, **options)

    return call  # type: ignore[return-value]
