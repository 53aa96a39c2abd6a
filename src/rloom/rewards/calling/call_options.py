"""How a reward function wants to be called, noted on the function itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from rloom.errors import RewardError, check_options

ATTRIBUTE = "__rloom_reward__"
F = TypeVar("F")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What [`reward`] notes. The defaults are TRL's way: one call with the whole batch, in the trainer's process."""

    streaming: bool = False  # called per group, as soon as the group is there
    isolated: bool = False  # called per sample, in worker processes
    per_sample: bool = False  # called once per sample; isolated functions always are
    threads: bool = False  # called in several threads: for functions that wait for something outside Python
    time_limit: float | None = None  # seconds per sample (isolated) or call (async)
    concurrency: int | None = None  # calls of an async function, or of one in threads, that run at a time
    at_start: Callable[[], None] | None = None  # called first in each of its worker processes or threads


def call_options_of(function: Any) -> CallOptions:
    """The call options of a function, also of one that is wrapped in a partial; the defaults if it has none."""
    found = getattr(function, ATTRIBUTE, None)
    while found is None and isinstance(function, functools.partial):
        function = function.func
        found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, CallOptions) else CallOptions()


def set_call_options(function: F, **changes: Any) -> F:
    """Note how a function wants to be called, on top of what is noted already. Returns the function."""
    check_options("reward", changes, [field.name for field in fields(CallOptions)])
    before = call_options_of(function)
    options = replace(before, **changes)
    # What is called at the start was chosen for one way to call the function, and does not suit another.
    if "at_start" not in changes and (options.isolated, options.threads) != (before.isolated, before.threads):
        options = replace(options, at_start=None)
    _check(function, options)
    try:
        setattr(function, ATTRIBUTE, options)
    except AttributeError:
        raise RewardError(
            f"{function!r} takes no call options: wrap it in a function of your own, and give them to that"
        ) from None
    return function


def named_reward(function: F, name: str, **options: Any) -> F:
    """Give a function the name that metrics carry, and call options. Returns the function."""
    function.__name__ = name  # type: ignore[attr-defined]
    return set_call_options(function, **options)


def _check(function: Any, options: CallOptions) -> None:
    is_async = is_coroutine_function(function)
    if options.time_limit is not None and not (isinstance(options.time_limit, (int, float)) and options.time_limit > 0):
        raise RewardError(f"time_limit must be a number of seconds above 0, not {options.time_limit!r}")
    if options.concurrency is not None and options.concurrency < 1:
        raise RewardError(f"concurrency must be at least 1, not {options.concurrency}")
    if options.time_limit is not None and not (options.isolated or is_async):
        raise RewardError(
            "time_limit has no effect on a function that runs in the trainer's own process, where nothing can cut it "
            "off: add isolated=True, or make it async"
        )
    if options.at_start is not None and not (options.isolated or (options.threads and not is_async)):
        raise RewardError(
            "at_start is for functions with isolated=True, or with threads=True and not async; for others call it first"
        )
    if options.concurrency is not None and (options.isolated or not (is_async or options.threads)):
        raise RewardError("concurrency is for async functions, and for those with threads=True; others run one by one")


def is_coroutine_function(function: Any) -> bool:
    """Whether calling it gives a coroutine; also for objects with an async `__call__` and for partials."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def reward(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Say how a reward function wants to be called. As a decorator, or around a function, which stays as it was.

    Args:
        streaming: call it per group, as soon as the group is there, while others are still being generated.
        isolated: call it per sample in worker processes; a sample that hangs or crashes costs its own score alone.
        per_sample: call it once per sample.
        threads: call it in several threads; for functions that wait for something outside Python.
        time_limit: seconds per sample of an isolated function, or per call of an async one.
        concurrency: how many calls of an async function, or of one in threads, run at a time.
        at_start: called without arguments, first, in each of its worker processes or threads. What it loads there is
            not the first sample's time.

    >>> @reward(streaming=True)
    ... def short(completions, **kwargs):
    ...     return [-float(len(text)) for text in completions]
    >>> short(["four"])
    [-4.0]
    >>> reward(short, straeming=True)
    Traceback (most recent call last):
        ...
    rloom.errors.UnknownOptionError: reward() has no option 'straeming'; did you mean 'streaming'?
    """
    if function is None:
        return lambda f: set_call_options(f, **options)
    # A copy: a built-in reward, or one that is used elsewhere too, stays as it is.
    return set_call_options(functools.update_wrapper(functools.partial(function), function), **options)
