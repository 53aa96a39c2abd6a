"""rloom: REINFORCE Leave-One-Out for language models.

>>> from rloom import RLOOConfig, RLOOTrainer

Names are imported when they are first used: a worker process that scores completions needs no torch.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from rloom.version import __version__

if TYPE_CHECKING:
    from rloom.config import RLOOConfig
    from rloom.generation import Engine, FakeEngine, NativeEngine, Sampling
    from rloom.models.adapters import is_bf16_supported
    from rloom.models.quick_load import FastLanguageModel, add_lora, load_model
    from rloom.observe.progress import LiveProgress
    from rloom.rewards.calling.call_options import reward
    from rloom.rewards.compose import route, term
    from rloom.training.replay import replay
    from rloom.training.trainer import RLOOTrainer
    from rloom.types import Completion, Group, Prompt

# Importing transformers' Trainer imports peft and bitsandbytes, which warns on some CPUs of a package that nothing here
# needs. Its other messages stay.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

_HOME = {
    "Completion": "types",
    "Engine": "generation",
    "FakeEngine": "generation",
    "FastLanguageModel": "models.quick_load",
    "Group": "types",
    "LiveProgress": "observe.progress",
    "NativeEngine": "generation",
    "Prompt": "types",
    "RLOOConfig": "config",
    "RLOOTrainer": "training.trainer",
    "Sampling": "generation",
    "add_lora": "models.quick_load",
    "is_bf16_supported": "models.adapters",
    "load_model": "models.quick_load",
    "reward": "rewards.calling.call_options",
    "replay": "training.replay",
    "route": "rewards.compose",
    "term": "rewards.compose",
}

__all__ = [
    "Completion",
    "Engine",
    "FakeEngine",
    "FastLanguageModel",
    "Group",
    "LiveProgress",
    "NativeEngine",
    "Prompt",
    "RLOOConfig",
    "RLOOTrainer",
    "Sampling",
    "__version__",
    "add_lora",
    "is_bf16_supported",
    "load_model",
    "replay",
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
