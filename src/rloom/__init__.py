"""rloom: REINFORCE Leave-One-Out for language models.

>>> from rloom import RLOOConfig, RLOOTrainer

Names are imported when they are first used: a worker process that scores completions needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rloom.version import __version__

if TYPE_CHECKING:
    from rloom.config import RLOOConfig
    from rloom.generation import Engine, FakeEngine, NativeEngine, Sampling
    from rloom.observe.progress import LiveProgress
    from rloom.rewards.compose import route, term
    from rloom.rewards.marks import reward
    from rloom.training.trainer import RLOOTrainer
    from rloom.types import Completion, Group, Prompt

_HOME = {
    "Completion": "types",
    "Engine": "generation",
    "FakeEngine": "generation",
    "Group": "types",
    "LiveProgress": "observe.progress",
    "NativeEngine": "generation",
    "Prompt": "types",
    "RLOOConfig": "config",
    "RLOOTrainer": "training.trainer",
    "Sampling": "generation",
    "reward": "rewards.marks",
    "route": "rewards.compose",
    "term": "rewards.compose",
}

__all__ = [
    "Completion",
    "Engine",
    "FakeEngine",
    "Group",
    "LiveProgress",
    "NativeEngine",
    "Prompt",
    "RLOOConfig",
    "RLOOTrainer",
    "Sampling",
    "__version__",
    "reward",
    "route",
    "term",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rloom' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(f"rloom.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
