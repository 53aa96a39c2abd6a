"""Rewards that are a user's function or object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

from rloom.errors import RewardError, did_you_mean
from rloom.rewards.base import RewardBatch
from rloom.rewards.calling.call_options import CallOptions, call_options_of


class FunctionReward:
    """A callable, sync or async, that takes any subset of the documented arguments.

    >>> reward = FunctionReward(lambda completions: [float(len(c)) for c in completions])
    >>> reward.score(RewardBatch(prompts=["a"], completions=["four"], completion_ids=[[1]]))
    [4.0]
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = callable_name(function)
        parameters = _parameters(function)
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.positional = [p.name for p in named if p.kind is p.POSITIONAL_ONLY]
        self.required = [p.name for p in named if p.default is p.empty]
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self.accepted = None if takes_all else [p.name for p in named]
        self.signature = f"{self.name}({', '.join(map(_shown, parameters))})"
        self.call_options = call_options_of(function)

    def score(self, batch: RewardBatch) -> Any:
        """Call the function with the arguments that it takes."""
        chosen = self.arguments(batch)
        first = [chosen.pop(name) for name in self.positional]
        return self.function(*first, **chosen)

    def arguments(self, batch: RewardBatch) -> dict[str, Any]:
        """The arguments that the function takes, by name."""
        arguments = batch.arguments()
        self.check_columns(batch.columns)
        if self.accepted is None:
            return arguments
        return {name: arguments[name] for name in self.accepted if name in arguments}

    def check_columns(self, columns: Collection[str], source: str = "the data set") -> None:
        """Refuse a data set without a column that the function cannot do without."""
        known = [*columns, *GIVEN]
        for name in self.required:
            if name not in known:
                nearest = did_you_mean(name, known) or "."
                raise RewardError(
                    f"The reward function '{self.name}' wants an argument '{name}', which is neither a column of "
                    f"{source} nor one of the documented arguments{nearest} Its signature is {self.signature}. The "
                    f"columns are: {', '.join(sorted(columns)) or 'none'}"
                )


GIVEN = tuple(RewardBatch(prompts=[], completions=[], completion_ids=[]).arguments())
"""What a function may ask for whatever the data set has."""


def check_reward_columns(rewards: Iterable[Any], columns: Iterable[str], source: str = "the data set") -> None:
    """Refuse functions that want a column which is not there. Models, objects and services take what there is.

    >>> check_reward_columns([FunctionReward(lambda completions, answer: [])], ["answers"])
    Traceback (most recent call last):
        ...
    rloom.errors.RewardError: ... did you mean 'answers'? Its signature is <lambda>(completions, answer). ...
    """
    known = {name for name in columns if name != "prompt"}
    for reward in rewards:
        if isinstance(reward, FunctionReward):
            reward.check_columns(known, source)


class ObjectReward:
    """An object with `get_rewards(prompts, completions)`."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        self.name = type(scorer).__name__
        self.call_options: CallOptions = call_options_of(scorer)

    def score(self, batch: RewardBatch) -> Any:
        """Call `get_rewards` of the object."""
        return self.scorer.get_rewards(batch.prompts, batch.completions)


def callable_name(function: Callable[..., Any]) -> str:
    """The name that metrics carry: the function's, the wrapped function's, or the object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _shown(parameter: inspect.Parameter) -> str:
    """Without annotations and values, which may be long."""
    stars = "*" * (parameter.kind is parameter.VAR_POSITIONAL) + "**" * (parameter.kind is parameter.VAR_KEYWORD)
    return f"{stars}{parameter.name}{'' if parameter.default is parameter.empty else '=…'}"


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function. One without a signature, as some builtins, takes any keyword."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("anything", inspect.Parameter.VAR_KEYWORD)]
