"""What ready-made rewards need from outside: a column of the data set, a package that is not required."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from rloom.errors import RewardError, needs_extra


def column_of(columns: Mapping[str, Any], *names: str, needed: str) -> Any:
    """The first column of some names that the data set has; an error that says what was `needed` if there is none.

    >>> column_of({"answer": [1], "solution": None}, "solution", "answer", needed="math_accuracy needs an answer")
    [1]
    """
    for name in names:
        if columns.get(name) is not None:
            return columns[name]
    raise RewardError(needed)


def optional_package(module: str, *, what: str, package: str, extra: str) -> ModuleType:
    """A module of a package that only some rewards need; an error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise needs_extra(what, package, extra) from None
