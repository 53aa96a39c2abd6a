"""What a run came to, for its model card: its rewards, their first and last values, and the curve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloom.observe.numbers import ends_of, which_ends

BARS = "▁▂▃▄▅▆▇█"
EVALUATED = "reward on evaluation prompts"
WIDTH = 40
"""Characters of a curve at most."""


@dataclass(slots=True, kw_only=True)
class RunResults:
    """The names and weights of a run's rewards, and its logs (`state.log_history`)."""

    rewards: list[tuple[str, float]] = field(default_factory=list)
    logs: Sequence[Mapping[str, Any]] = ()

    def values(self, name: str) -> list[float]:
        """A metric at each log that has it."""
        return [float(entry[name]) for entry in self.logs if name in entry]

    def rows(self) -> list[tuple[str, list[float]]]:
        """What is shown, with its values: the reward, each function's where there are several, and evaluations'."""
        names = {"reward": "reward", **{f"rewards/{name}/mean": name for name, _ in self.rewards}}
        if len(self.rewards) == 1:
            names = {"reward": "reward"}
        names["eval_reward"] = EVALUATED
        return [(shown, values) for name, shown in names.items() if (values := self.values(name))]

    def ends(self, shown: str, values: list[float]) -> tuple[float, float]:
        """What a row begins and ends with: means of some logs, as the run's last lines say them; one evaluation."""
        return (values[0], values[-1]) if shown == EVALUATED else ends_of(values)[:2]

    def which_ends(self) -> str:
        """What the first and the last values of rewards are means of."""
        return which_ends(ends_of(self.values("reward") or [0.0])[2])

    def last_step(self) -> int:
        """The last update that was logged; 0 before the first."""
        return max((int(entry.get("step", 0)) for entry in self.logs), default=0)


def curve(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as a row of bars from the lowest to the highest; many are averaged, so that they fit.

    >>> curve([0.0, 0.5, 1.0]), curve([1.0, 1.0]), curve([])
    ('▁▅█', '▁▁', '')
    >>> len(curve(range(1000))), curve([0.0, float("nan"), float("inf"), 1.0])
    (40, '▁  █')
    """
    count = min(len(values), width)
    bounds = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    # What is no number has no height.
    known = [value for value in means if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] if math.isfinite(value) else " " for value in means)
