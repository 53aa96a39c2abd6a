"""rloom: REINFORCE Leave-One-Out for language models.

>>> from rloom import RLOOConfig, RLOOTrainer
"""

from rloom.config import RLOOConfig
from rloom.generation import Engine, FakeEngine, NativeEngine, Sampling
from rloom.observe.progress import LiveProgress
from rloom.training.trainer import RLOOTrainer
from rloom.types import Completion, Group, Prompt
from rloom.version import __version__

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
]
