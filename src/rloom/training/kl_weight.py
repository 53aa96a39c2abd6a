"""The weight of the KL: `beta`, which follows the KL where it has a target."""

from __future__ import annotations

import math

from rloom.algo.kl import adapted_beta
from rloom.config import RLOOConfig
from rloom.observe.diagnose import BETA_RANGE


class KLWeight:
    """The present β. With `kl_target` it is adapted after each rollout, from `1 / BETA_RANGE` of the option `beta` to
    `BETA_RANGE` times it; all processes see the same KL.

    >>> from types import SimpleNamespace
    >>> weight = KLWeight(SimpleNamespace(beta=0.05, kl_target=0.02, kl_target_gain=0.1))
    >>> weight.follow(0.08)
    >>> round(weight.value, 6)
    0.06
    >>> for _ in range(100):
    ...     weight.follow(0.08)
    >>> weight.value
    5.0
    """

    def __init__(self, config: RLOOConfig) -> None:
        self.value = config.beta
        self.bounds = config.beta / BETA_RANGE, config.beta * BETA_RANGE
        self.target, self.gain = config.kl_target, config.kl_target_gain

    def follow(self, kl: float) -> None:
        """Adapt β to the KL of a rollout, per token. Without a target nothing changes."""
        if self.target is not None and math.isfinite(kl):
            low, high = self.bounds
            self.value = min(max(adapted_beta(self.value, kl, self.target, self.gain), low), high)

    def state_dict(self) -> dict[str, float]:
        """The present β."""
        return {"beta": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on with a checkpoint's β. One without a target is the option's."""
        if self.target is not None:
            self.value = state["beta"]
