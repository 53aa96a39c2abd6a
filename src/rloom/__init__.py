"""rloom: REINFORCE Leave-One-Out for language models.

>>> from rloom import RLOOConfig, RLOOTrainer
"""

from rloom.config import RLOOConfig
from rloom.generation import Engine, FakeEngine
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
    "Prompt",
    "RLOOConfig",
    "RLOOTrainer",
    "__version__",
]
