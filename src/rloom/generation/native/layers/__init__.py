"""Layers that run otherwise in decode steps than in the model; `patched.py` states which, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

Forwards = list[tuple[nn.Module, Callable[..., Tensor]]]
"""Modules, each with the forward that it runs in place of its own."""


class LayerPatch(Protocol):
    """Replaces the forwards of some layers while the engine runs the model."""

    @property
    def forwards(self) -> Forwards:
        """The layers and their forwards, as far as they still fit the model: weights may have been moved since."""

    def refresh(self) -> None:
        """Copy the weights again, for patches that hold copies. Called at the start of each rollout."""
