"""From what a user passes as `reward_funcs` to a [`RewardSet`]."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rloom.errors import RewardError
from rloom.rewards.base import Reward
from rloom.rewards.calling.http_reward import http_reward
from rloom.rewards.functions import FunctionReward, ObjectReward
from rloom.rewards.model import ModelReward


def as_list(value: Any) -> list[Any]:
    """One value or several, as a list; None gives an empty list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_rewards(functions: list[Any], processing_classes: Any) -> list[Any]:
    """Check reward functions before anything is loaded. Returns one processing class (or None) per function."""
    if not functions:
        raise RewardError("no reward function: pass one or several as `reward_funcs`")
    for function in functions:
        if not (isinstance(function, (str, nn.Module)) or callable(function) or hasattr(function, "get_rewards")):
            raise RewardError(
                f"a reward is a function, a model, a model's name or path, the address of a service, or an object with "
                f"get_rewards(prompts, completions); got {type(function).__name__}"
            )
        if isinstance(function, nn.Module) and type(function).__name__.endswith("ForCausalLM"):
            raise RewardError(
                f"{type(function).__name__} as reward: a reward model is a …ForSequenceClassification with one label"
            )
        if isinstance(function, nn.Module) and not hasattr(function, "config"):
            raise RewardError(
                f"a model as reward must be a transformers sequence-classification model; {type(function).__name__} "
                "has no config. Wrap it in a function that returns one number per completion"
            )
    classes = as_list(processing_classes) or [None] * len(functions)
    if len(classes) != len(functions):
        raise RewardError(
            f"The number of reward processing classes ({len(classes)}) must match the number of reward functions "
            f"({len(functions)})."
        )
    return classes


def is_url(value: Any) -> bool:
    """Whether a reward is given by address.

    >>> is_url("http://127.0.0.1:8000/score"), is_url("org/reward-model")
    (True, False)
    """
    return isinstance(value, str) and value.startswith(("http://", "https://"))


def load_reward_model(name: str, *, trust_remote_code: bool, init_kwargs: dict[str, Any] | None) -> nn.Module:
    """A reward model by name or path, with one output."""
    if name.startswith(("/", "./", "../")) and not os.path.isdir(name):
        raise RewardError(f"reward_funcs: {name!r} is not a folder")
    if ":" in name:
        raise RewardError(
            f"reward_funcs: {name!r} is no model's name. An address begins with http:// or https://; module:function "
            "is for the command line: here, import the function and pass it"
        )
    kwargs = {"trust_remote_code": trust_remote_code, **(init_kwargs or {})}
    return AutoModelForSequenceClassification.from_pretrained(name, num_labels=1, **kwargs)


def build_reward(
    function: Any,
    tokenizer: Any,
    *,
    place: Callable[[nn.Module], nn.Module],
    template_kwargs: dict[str, Any],
) -> Reward:
    """Wrap what a user passed as a [`Reward`] of the right kind. `place` moves a model to its device."""
    if is_url(function):
        return FunctionReward(http_reward(function))
    if isinstance(function, nn.Module):
        name = str(getattr(function.config, "_name_or_path", "") or type(function).__name__)
        model = place(function)
        return ModelReward(model, tokenizer, name=name.rstrip("/").split("/")[-1], template_kwargs=template_kwargs)
    if hasattr(function, "get_rewards"):
        return ObjectReward(function)
    return FunctionReward(function)


def reward_tokenizer(model: Any, tokenizer: Any, *, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer of a reward model, loaded by the model's name if none is given, with a padding token.

    The model reads its score at the last token that is not padding, so both must agree on which token that is.
    """
    if getattr(model.config, "num_labels", 1) != 1:
        raise RewardError(
            f"{type(model).__name__} has {model.config.num_labels} labels; a reward model has one. Load it with "
            "num_labels=1, or wrap it in a function that turns its logits into one number"
        )
    if tokenizer is None:
        name = model.config._name_or_path
        if not name:
            raise RewardError("the reward model has no name to load a tokenizer by; pass `reward_processing_classes`")
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer
