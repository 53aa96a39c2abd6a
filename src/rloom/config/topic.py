"""What the topics of the config share: how an option is declared, and what is said about one that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rloom.errors import ConfigError

if TYPE_CHECKING:
    # Topics are mixed into one class with TrainingArguments, whose options they may read.
    from transformers import TrainingArguments as Whole
else:
    Whole = object


def option(default: Any, help: str) -> Any:
    """A field with a help text, which is also a flag's."""
    return field(default=default, metadata={"help": help})


class Topic(Whole):
    """Some options that belong together, and what is checked about them. Mixed into [`RLOOConfig`]."""

    _given: frozenset[str] = frozenset()  # the options that were given, whatever their values
    _init_only: Mapping[str, Any] = MappingProxyType({})  # arguments of the constructor that are no fields

    if TYPE_CHECKING:
        auto_find_batch_size: bool
        fp16: bool
        fsdp: Any
        use_cpu: bool

    def require(self, name: str, holds: bool, what: str) -> None:
        """Refuse a value: it must be as `what` says."""
        if not holds:
            raise ConfigError(f"{name} must be {what}, not {getattr(self, name)}")


def idle(name: str, without: str) -> ConfigError:
    """The error for an option that nothing reads: it is refused rather than ignored."""
    return ConfigError(f"`{name}` has no effect without {without}: leave it out, or set that too")


def parsed(option: dict[str, Any] | str | None) -> dict[str, Any]:
    """An option that may be given as JSON, which the config has read by now; nothing where it is unset."""
    if isinstance(option, str):
        raise ConfigError(f"{option!r} is no JSON object: give a dictionary, or its JSON")
    return option or {}
