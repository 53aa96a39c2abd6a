"""Which rows of a run are asked for, and in which order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rloom.errors import DataError, did_you_mean
from rloom.observe.row_index import IndexNames

NUMBERS = ("step", "group", "reward", "advantage", "num_tokens")
"""Columns that have a range, beside the scores, which are asked for as `score:NAME`."""


@dataclass(slots=True)
class Query:
    """A filter and an order of rows. Unset fields filter nothing.

    >>> Query.of({"reward_min": "0.5", "stop_reason": "eos", "sort": "-reward"}).ranges
    {'reward': (0.5, inf)}
    """

    mode: str | None = None
    stop_reason: str | None = None
    prompt: int | None = None
    tokens: bool = False
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    text: str = ""
    sort: str = "-step"
    offset: int = 0
    limit: int = 50

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """A query from the parameters of an address. Unknown ones, and numbers that are none, are errors."""
        query = cls()
        for name, value in given.items():
            if name in ("mode", "stop_reason", "text", "sort"):
                setattr(query, name, value)
            elif name in ("offset", "limit"):
                setattr(query, name, _whole(name, value))
            elif name == "tokens":
                query.tokens = value == "1"
            elif name == "prompt":
                query.prompt = _digest(value)
            else:
                query._limit(name, value)
        query.limit = min(query.limit, 1000)
        return query

    def _limit(self, name: str, value: str) -> None:
        column, _, end = name.rpartition("_")
        if end not in ("min", "max") or not (column in NUMBERS or column.startswith("score:")):
            known = [f"{one}_{end}" for one in NUMBERS for end in ("min", "max")]
            hint = did_you_mean(name, [*known, "mode", "stop_reason", "text", "sort", "prompt", "tokens"])
            raise DataError(f"{name!r} is no filter{hint}")
        low, high = self.ranges.get(column, (-math.inf, math.inf))
        number = _number(name, value)
        self.ranges[column] = (number, high) if end == "min" else (low, number)


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise DataError(f"{name} is a number, not {value!r}")
    return number


def _whole(name: str, value: str) -> int:
    if not value.isdecimal() or len(value) > 12:
        raise DataError(f"{name} is a whole number of 0 or more, not {value!r}")
    return int(value)


def _digest(value: str) -> int:
    try:
        return int(value, 16)
    except ValueError:
        raise DataError(f"prompt is a digest in hexadecimal, not {value!r}") from None


def column(records: np.ndarray, names: IndexNames, name: str) -> np.ndarray:
    """A column of numbers by its name: `reward`, or `score:NAME`."""
    if name.startswith("score:"):
        score = name.removeprefix("score:")
        if score not in names.scores:
            raise DataError(f"no reward is called {score!r}{did_you_mean(score, names.scores)}")
        return records["scores"][:, names.scores.index(score)]
    if name not in NUMBERS:
        raise DataError(f"{name!r} is no column{did_you_mean(name, NUMBERS)}")
    return records[name]


def chosen(records: np.ndarray, names: IndexNames, query: Query) -> np.ndarray:
    """Which rows the numbers of a query allow, as booleans. Its text is not looked at. A row without a number in a
    column is outside every range of it."""
    found = np.ones(len(records), bool)
    for field_name, wanted, known in (
        ("mode", query.mode, names.modes),
        ("stop_reason", query.stop_reason, names.stop_reasons),
    ):
        if wanted:
            found &= records[field_name] == known.index(wanted) if wanted in known else False
    if query.prompt is not None:
        found &= records["prompt"] == np.uint64(query.prompt % 2**64)
    if query.tokens:
        found &= records["has_tokens"] != 0
    for name, (low, high) in query.ranges.items():
        values = column(records, names, name)
        found &= (values >= low) & (values <= high)
    return found


def in_order(
    records: np.ndarray, names: IndexNames, places: np.ndarray, sort: str, offset: int, limit: int
) -> np.ndarray:
    """`limit` places of rows from an offset on, in the order of a column: `reward` rising, `-reward` falling. Equal
    ones stay as they were written, and rows without a number come last."""
    falling, name, end = sort.startswith("-"), sort.removeprefix("-"), min(offset + limit, len(places))
    if name == "step":
        # Rows are written in the order of steps.
        return (places[::-1] if falling else places)[offset:end]
    values = column(records, names, name)[places].astype("f8")
    values = np.where(np.isnan(values), np.inf, -values if falling else values)
    if not offset < end:
        return places[:0]
    # Of millions of rows a page is wanted: those that are not before its end need no order.
    near = np.flatnonzero(values <= np.partition(values, end - 1)[end - 1])
    return places[near[np.argsort(values[near], kind="stable")]][offset:end]
