"""Keeps the rollouts that later updates still train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from rloom.data.plan import UpdatePlan
from rloom.types import Rollout, Share

FIELDS = {field.name for field in fields(Rollout)}


class RolloutBuffer:
    """The rollouts that this and later updates train on. Checkpoints include them.

    `make(plan, number)` collects a rollout. `num_uses` is how many parts of updates use each rollout.
    """

    def __init__(self, make: Callable[[UpdatePlan, int], Rollout], num_uses: int) -> None:
        self.make, self.num_uses = make, num_uses
        self.rollouts: dict[tuple[int, int], tuple[Rollout, int]] = {}

    def take(self, plan: UpdatePlan) -> list[Share]:
        """The shares of an update. Missing rollouts are made; rollouts that no later update needs are dropped."""
        shares: list[Share] = []
        for ref in plan.parts:
            key = plan.key(ref.rollout)
            if key not in self.rollouts:
                self.rollouts[key] = (self.make(plan, ref.rollout), self.num_uses)
            rollout, left = self.rollouts[key]
            shares.append(Share(rollout=rollout, rows=rollout.rows(ref.part, ref.parts)))
            self.rollouts[key] = (rollout, left - 1)
        self.rollouts = {key: entry for key, entry in self.rollouts.items() if entry[1] > 0}
        return shares

    def state_dict(self) -> list[dict[str, Any]]:
        """The rollouts that later updates need, as plain data. Their records were written at the first use."""
        names = FIELDS - {"records", "drawn", "total"}
        return [
            {"key": list(key), "left": left, "rollout": {name: getattr(rollout, name) for name in names}}
            for key, (rollout, left) in self.rollouts.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restore the rollouts of a checkpoint. Fields of older versions that no longer exist are ignored."""
        self.rollouts = {}
        for entry in state:
            known = {name: value for name, value in entry["rollout"].items() if name in FIELDS - {"records"}}
            self.rollouts[tuple(entry["key"])] = (Rollout(**known), entry["left"])
