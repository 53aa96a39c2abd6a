"""Options with a few possible values: each value is one entry of a table, beside the code that it stands for.

The entry says what its name is, what it computes and what it needs. The config's checks, its help texts and the
dispatch all read the tables, so that a new value is one new entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from rloom.errors import in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One value that an option may have."""

    name: str
    note: str = ""  # what help texts say about it
    options: tuple[str, ...] = ()  # further options, which only such choices read


C = TypeVar("C", bound=Choice)


def by_name(*choices: C) -> dict[str, C]:
    """A table of choices."""
    return {choice.name: choice for choice in choices}


def described(table: Mapping[str, Choice]) -> str:
    """The names of a table with their notes, for a help text.

    >>> described(by_name(Choice(name="keep"), Choice(name="mask", note="no loss")))
    'keep or mask (no loss)'
    """
    return in_words(f"{name} ({choice.note})" if choice.note else name for name, choice in table.items())


def readers(option: str, table: Mapping[str, Choice]) -> list[str]:
    """The names of those choices that read a further option."""
    return [name for name, choice in table.items() if option in choice.options]
