"""How rewards are called."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rloom.config.topic import Topic, option
from rloom.errors import ConfigError, did_you_mean


@dataclass
class RewardTopic(Topic):
    """How rewards are called."""

    on_reward_error: str = option(
        "raise",
        "A reward function that fails: raise, none (its samples have no score, and are counted), or a number instead.",
    )
    reward_time_limit: float = option(60.0, "Seconds per sample for isolated reward functions that do not say.")
    reward_workers: int | None = option(
        None,
        "Worker processes of isolated reward functions, and threads of others. Unset: one per core, at most 8; of "
        "several training processes on a machine each has its share of the cores.",
    )
    reward_concurrency: int = option(64, "Calls of an async reward function at a time, where it does not say.")

    @property
    def instead_of_error(self) -> str | float:
        """`on_reward_error` as a number where it is one (a command line gives text)."""
        if self.on_reward_error in ("raise", "none"):
            return self.on_reward_error
        try:
            value = float(self.on_reward_error)
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            hint = did_you_mean(str(self.on_reward_error), ("raise", "none"), cutoff=0.5)
            raise ConfigError(
                f'on_reward_error must be "raise", "none" or a finite number, not {self.on_reward_error!r}{hint}'
            )
        return value

    def check_rewards(self) -> None:
        """`on_reward_error` means something, and limits are positive."""
        _ = self.instead_of_error
        for name in ("reward_time_limit", "reward_workers", "reward_concurrency"):
            value = getattr(self, name)
            self.require(name, value is None or value > 0, "above 0")
