"""What options of sampling may be: one owner for [`Sampling`], for `RLOOConfig` and for verbs.

Outside these ranges nothing fails by itself: a negative temperature draws the least likely tokens, `min_p=2` leaves
none, and a repetition penalty of 0 makes logits that are no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from rloom.errors import ConfigError

Rule = tuple[Callable[[Any], bool], str]


def _number(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Real) and not isinstance(value, bool) and holds(value)


def _whole(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Integral) and not isinstance(value, bool) and holds(value)


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


RULES: dict[str, Rule] = {
    "max_completion_length": (_whole(lambda value: value >= 1), "at least 1, in whole tokens"),
    "temperature": (_number(lambda value: 0 <= value < math.inf), "0 (the likeliest token each time) or above, finite"),
    "top_p": (_number(lambda value: 0 < value <= 1), "in (0, 1], where 1 keeps all tokens"),
    "top_k": (_or_none(_whole(lambda value: value >= 0)), "0 (all tokens) or positive, in whole tokens"),
    "min_p": (_or_none(_number(lambda value: 0 <= value <= 1)), "in [0, 1], where 0 keeps all tokens"),
    "repetition_penalty": (_number(lambda value: 0 < value < math.inf), "above 0 and finite, where 1 is none"),
}
"""Of each option whether a value will do, and what will, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """One value of the option `engine`, which `generation/choose.py` makes an engine of."""

    note: str  # what the option's help says about it
    takes_images: bool
    own_options: bool = False  # whether it knows no further options of `model.generate`


ENGINES = {
    "native": EngineChoice(note="our engine, on the trained weights", takes_images=True, own_options=True),
    "forked": EngineChoice(note="the library's cache, repeated for each group", takes_images=False, own_options=True),
    "transformers": EngineChoice(note="`model.generate`", takes_images=True),
    "vllm": EngineChoice(note="vLLM, in this process or behind a server", takes_images=False),
}

STOPS = ("stop_strings", "stop")
"""Entries of `extra` that are texts which end a completion; `stop` is vLLM's name."""


def check_sampling(values: Mapping[str, Any]) -> None:
    """Refuse what cannot be sampled with; options that are not among `values` are not looked at.

    >>> check_sampling({"temperature": 0.0, "top_k": 0, "min_p": None})
    >>> check_sampling({"min_p": 2})
    Traceback (most recent call last):
        ...
    rloom.errors.ConfigError: min_p must be in [0, 1], where 0 keeps all tokens, not 2
    """
    for name, (holds, what) in RULES.items():
        if name in values and not holds(values[name]):
            raise ConfigError(f"{name} must be {what}, not {values[name]!r}")
    extra = values.get("extra") or {}
    for name in STOPS:
        _check_stops(name, extra.get(name))


def _check_stops(name: str, stops: Any) -> None:
    """Every text has the empty one in it, so that a completion would end with its first token."""
    if stops is None or isinstance(stops, str):
        return
    if not isinstance(stops, list | tuple):
        raise ConfigError(f"{name} must be a text or a list of texts, not {stops!r}")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ConfigError(f"{name} must be texts of at least one character, not {stop!r}: take it out")
