"""What scores completions: functions, models, objects, services, called alike and checked alike.

>>> from rloom.rewards import think_format_reward
>>> think_format_reward(["<think>2 and 2</think> 4"])
[1.0]

Names are imported when they are first used, and so are the packages that they stand on.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloom.rewards.base import Reward, RewardBatch
    from rloom.rewards.calling.call_options import reward
    from rloom.rewards.calling.http_reward import http_reward
    from rloom.rewards.calling.reward_set import RewardSet
    from rloom.rewards.compose import route, term
    from rloom.rewards.functions import FunctionReward, ObjectReward
    from rloom.rewards.library.accuracy import (
        accuracy_reward,
        choice_accuracy,
        get_cosine_scaled_reward,
        math_accuracy,
        reasoning_accuracy_reward,
    )
    from rloom.rewards.library.code.execution import code_execution
    from rloom.rewards.library.embeddings import semantic_similarity
    from rloom.rewards.library.form import format, json_schema, think_format_reward
    from rloom.rewards.library.judging.judge import judge
    from rloom.rewards.library.size import get_repetition_penalty_reward, get_soft_overlong_punishment, length
    from rloom.rewards.library.text import bleu, language, rouge, sentiment
    from rloom.rewards.model import ModelReward

_HOMES = {
    "library.accuracy": (
        "accuracy_reward", "choice_accuracy", "get_cosine_scaled_reward", "math_accuracy", "reasoning_accuracy_reward",
    ),
    "base": ("Reward", "RewardBatch"),
    "library.code.execution": ("code_execution",),
    "calling.reward_set": ("RewardSet",),
    "compose": ("route", "term"),
    "library.embeddings": ("semantic_similarity",),
    "library.form": ("format", "json_schema", "think_format_reward"),
    "calling.http_reward": ("http_reward",),
    "library.judging.judge": ("judge",),
    "functions": ("FunctionReward", "ObjectReward"),
    "library.text": ("bleu", "language", "rouge", "sentiment"),
    "library.size": ("get_repetition_penalty_reward", "get_soft_overlong_punishment", "length"),
    "calling.call_options": ("reward",),
    "model": ("ModelReward",),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "FunctionReward",
    "ModelReward",
    "ObjectReward",
    "Reward",
    "RewardBatch",
    "RewardSet",
    "accuracy_reward",
    "bleu",
    "choice_accuracy",
    "code_execution",
    "format",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "http_reward",
    "json_schema",
    "judge",
    "language",
    "length",
    "math_accuracy",
    "reasoning_accuracy_reward",
    "reward",
    "rouge",
    "route",
    "semantic_similarity",
    "sentiment",
    "term",
    "think_format_reward",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rloom.rewards' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(f"rloom.rewards.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
