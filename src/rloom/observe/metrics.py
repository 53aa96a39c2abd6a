"""Collects metric values between two logs.

Values stay on the device that computed them until they are logged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.errors import RewardError
from rloom.observe.metric_table import is_own, is_total


class Metrics:
    """Values per mode ("train", "eval") and name. A log takes their means and starts anew.

    NaN means that there was nothing to measure, and is ignored. A name with only NaN logs None.

    >>> metrics = Metrics()
    >>> metrics.add("train", "reward", 1.0); metrics.add("train", "reward", torch.tensor(2.0))
    >>> metrics.flush("train")
    {'reward': 1.5}
    """

    def __init__(self) -> None:
        self.values: dict[str, defaultdict[str, list[Any]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }

    def add(self, mode: str, name: str, value: float | Tensor) -> None:
        """Add one value."""
        self.values[mode][name].append(value)

    def set(self, mode: str, name: str, value: float) -> None:
        """Set a value that replaces earlier ones, such as a running total."""
        self.values[mode][name] = [value]

    def flush(self, mode: str) -> dict[str, float | None]:
        """The means since the last flush."""
        result: dict[str, float | None] = {}
        for name, values in self.values[mode].items():
            known = [v for v in map(float, values) if not math.isnan(v)]
            result[name] = sum(known) / len(known) if known else None
        self.values[mode].clear()
        return result

    def join(self, mode: str, several: Sequence[dict[str, list[float]]]) -> None:
        """Replace the values by those of several processes, this one included. Running totals are summed."""
        self.values[mode].clear()
        for name in dict.fromkeys(name for one in several for name in one):
            found = [value for one in several for value in one.get(name, [])]
            self.values[mode][name] = [sum(found)] if is_total(name) else found

    def state_dict(self) -> dict[str, dict[str, list[float]]]:
        """The values that have not been logged yet."""
        return {
            mode: {name: [float(v) for v in values] for name, values in named.items()}
            for mode, named in self.values.items()
        }

    def load_state_dict(self, state: dict[str, dict[str, list[float]]]) -> None:
        """Restore the state of a checkpoint."""
        for mode, named in state.items():
            self.values[mode].clear()
            for name, values in named.items():
                self.values[mode][name] = list(values)


def scalar_mean(total: Tensor, count: Tensor | float) -> Tensor:
    """total / count as a tensor, NaN if the count is 0."""
    count = torch.as_tensor(count, dtype=total.dtype, device=total.device)
    return torch.where(count > 0, total / count.clamp(min=1), torch.full_like(total, math.nan))


def check_loggable(name: str, value: Any) -> None:
    """Refuse a metric that a reward function may not log: a name of the trainer's own, or a value that is no number."""
    if is_own(name):
        raise RewardError(f"log_metric({name!r}, …): that name is the trainer's own; choose another")
    if not isinstance(value, (int, float, Tensor)) and not hasattr(value, "__float__"):
        raise RewardError(f"log_metric({name!r}, …): the value must be a number, not {value!r}")
