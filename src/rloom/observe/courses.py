"""The courses of a run's metrics over its logs, as rules of diagnosis read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

WINDOW = 3
"""Logs that a value is averaged over."""


@dataclass(frozen=True, slots=True)
class Course:
    """The course of a metric: its values over the logs, oldest first."""

    values: list[float]

    def __len__(self) -> int:
        return len(self.values)

    def first(self, count: int = WINDOW) -> float:
        """The mean of the first values."""
        return fmean(self.values[:count])

    def last(self, count: int = WINDOW) -> float:
        """The mean of the latest values."""
        return fmean(self.values[-count:])

    def noise(self) -> float:
        """The standard deviation of a single value, by the median difference of neighbours: a trend does not count, nor
        does a single jump. (Of two normal values it is 0.954 standard deviations.)

        >>> Course([1.0, 2.0, 1.0, 2.0, 9.0]).noise() == 1 / 0.954
        True
        """
        return median(abs(b - a) for a, b in pairwise(self.values)) / 0.954 if len(self) > 1 else 0.0

    def rise(self) -> float:
        """How far the latest values are above the first, in standard errors of that difference; below 0: they fell."""
        error = self.noise() * math.sqrt(2 / WINDOW)
        difference = self.last() - self.first()
        return difference / error if error else math.copysign(math.inf, difference) if difference else 0.0


class Logs:
    """A run's log entries by metric. Entries without a finite value are left out.

    >>> Logs([{"kl": 0.1}, {"kl": None}, {"kl": 0.3}])["kl"].values
    [0.1, 0.3]
    """

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self.entries = entries
        self._known: dict[str, Course] = {}

    def __getitem__(self, name: str) -> Course:
        if name not in self._known:
            found = [entry.get(name) for entry in self.entries]
            values = [float(v) for v in found if isinstance(v, (int, float)) and math.isfinite(v)]
            self._known[name] = Course(values)
        return self._known[name]

    def long(self, *names: str, at_least: int = 2 * WINDOW) -> bool:
        """Whether each metric has at least so many values."""
        return all(len(self[name]) >= at_least for name in names)
