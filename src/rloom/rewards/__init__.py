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
    from rloom.rewards.accuracy import (
        accuracy_reward,
        choice_accuracy,
        get_cosine_scaled_reward,
        math_accuracy,
        reasoning_accuracy_reward,
    )
    from rloom.rewards.base import Reward, RewardBatch
    from rloom.rewards.code import code_execution
    from rloom.rewards.collection import RewardSet
    from rloom.rewards.compose import route, term
    from rloom.rewards.embeddings import semantic_similarity
    from rloom.rewards.form import format, json_schema, think_format_reward
    from rloom.rewards.functions import FunctionReward, ObjectReward
    from rloom.rewards.http import http_reward
    from rloom.rewards.judging import judge
    from rloom.rewards.marks import reward
    from rloom.rewards.model import ModelReward
    from rloom.rewards.size import get_repetition_penalty_reward, get_soft_overlong_punishment, length
    from rloom.rewards.text import bleu, language, rouge, sentiment

_HOMES = {
    "accuracy": (
        "accuracy_reward", "choice_accuracy", "get_cosine_scaled_reward", "math_accuracy", "reasoning_accuracy_reward",
    ),
    "base": ("Reward", "RewardBatch"),
    "code": ("code_execution",),
    "collection": ("RewardSet",),
    "compose": ("route", "term"),
    "embeddings": ("semantic_similarity",),
    "form": ("format", "json_schema", "think_format_reward"),
    "http": ("http_reward",),
    "judging": ("judge",),
    "functions": ("FunctionReward", "ObjectReward"),
    "text": ("bleu", "language", "rouge", "sentiment"),
    "size": ("get_repetition_penalty_reward", "get_soft_overlong_punishment", "length"),
    "marks": ("reward",),
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
