"""Skips updates whose gradient is not finite.

One score of 3e38 overflows a sum. A NaN in one gradient makes all weights NaN, and so the checkpoint that the next run
resumes from. Such an update is skipped, counted and logged. Several in a row end the run with an error.

On a GPU the optimizer itself reads a flag on the device, since waiting for the norm would leave the GPU idle at every
update. The host reads the flag when the next update begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rloom.errors import DivergedError
from rloom.models.optimizers import SplitAdamW
from rloom.observe.metrics import Metrics
from rloom.printable import get_logger
from rloom.types import Share

logger = get_logger(__name__)

IN_A_ROW = 5
"""A run ends after this many skipped updates in a row."""


class FiniteUpdates:
    """Decides whether each update is made."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.in_a_row = 0
        # The largest absolute score of the current update.
        self._largest = 0.0
        # The flag of the last update, where the device decided: 1 means that the update was skipped.
        self._flag: Tensor | None = None

    def begin(self, shares: Sequence[Share], step: int) -> None:
        """Begin update number `step`. By now it is known whether the last one was made."""
        self.settle(step - 1)
        scores = [share.rollout.score for share in shares]
        known = torch.cat([score[~score.isnan()].abs() for score in scores]) if scores else torch.zeros(0)
        self._largest = float(known.max()) if known.numel() else 0.0

    def decide(self, norm: Any, optimizer: Any, model: nn.Module, step: int) -> None:
        """Skip the update number `step` if the norm of its gradient is not finite."""
        # accelerate wraps the optimizer.
        inner = getattr(optimizer, "optimizer", optimizer)
        if isinstance(inner, SplitAdamW) and isinstance(norm, Tensor) and norm.is_cuda:
            self._flag = inner.skip = (~torch.isfinite(norm)).float().reshape(1)
            return
        if not torch.isfinite(torch.as_tensor(norm)):
            # An optimizer skips parameters without a gradient.
            model.zero_grad(set_to_none=True)
            self._skipped(step)
        else:
            self.in_a_row = 0

    def note(self, made: bool, step: int) -> None:
        """Update number `step` was made, or skipped, by a library that decides it itself."""
        if made:
            self.in_a_row = 0
        else:
            self._skipped(step)

    def settle(self, step: int) -> None:
        """Find out whether update number `step` was made, where the device decided."""
        flag, self._flag = self._flag, None
        if flag is not None:
            self.note(not bool(flag), step)

    def _skipped(self, step: int) -> None:
        self.in_a_row += 1
        self.metrics.add("train", "updates/skipped", 1.0)
        logger.warning(
            "update %d is skipped: its gradient is not finite. The largest score in it is %g in size", step,
            self._largest,
        )  # fmt: skip
        if self.in_a_row >= IN_A_ROW:
            raise DivergedError(
                f"{IN_A_ROW} updates in a row had a gradient that is not finite, and were skipped: look at the scores "
                f"(the largest is {self._largest:g} in size; reward_clip_range holds them in), lower learning_rate, "
                "or go on from an earlier checkpoint"
            )


def check_finite(named: Iterable[tuple[str, Tensor]], where: str) -> None:
    """Refuse to save weights that are not finite, since a run would resume from them."""
    floating = [(name, p) for name, p in named if p.is_floating_point()]
    if not floating:
        return
    bad = torch.stack([(~torch.isfinite(p.detach())).any().to(floating[0][1].device) for _, p in floating]).tolist()
    names = [name for (name, _), broken in zip(floating, bad, strict=True) if broken]
    if names:
        raise DivergedError(
            f"{len(names)} of {len(bad)} weights hold numbers that are not finite, such as {names[0]}: {where} is not "
            "written. Go on from an earlier checkpoint, with a lower learning_rate"
        )
