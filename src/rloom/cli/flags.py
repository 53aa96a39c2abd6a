"""Flags and recipes: every field of a dataclass is a flag, and a key of a YAML file; flags win.

Only what was given is handed on, so that an option left out keeps the default of the class that owns it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloom.cli.parser import Parser
from rloom.errors import ConfigError, UnknownOptionError, did_you_mean


def add_fields(parser: Parser, classes: Sequence[Any], *, shown: Sequence[str], footer: str) -> None:
    """Every field of some dataclasses as a flag without a default, and `--config` for a recipe.

    >>> from rloom.cli.options import DataOptions
    >>> parser = Parser(prog="rloom train")
    >>> add_fields(parser, [DataOptions], shown=["dataset_name"], footer="")
    >>> given(parser.parse_args(["--dataset-name", "prompts.jsonl"]))
    {'dataset_name': 'prompts.jsonl'}
    """
    # It takes seconds to import, and what is in the cache needs it not.
    from transformers import HfArgumentParser

    flags = HfArgumentParser(list(classes), add_help=False)
    for action in flags._actions:
        _loosen(action)
    parser._add_container_actions(flags)
    parser.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help="all options")
    parser.add_argument(
        "--config", metavar="FILE", action=Recipe, default=argparse.SUPPRESS, help="Options as YAML; flags win"
    )
    parser._option_string_actions["--help"].help = "the options used most"
    parser.usage = f"{parser.prog} [--config RECIPE.yaml] [OPTIONS]"
    parser.shown, parser.footer = [*shown, "config"], footer


def given(options: argparse.Namespace) -> dict[str, Any]:
    """What was given, by name; a recipe's values beneath the flags'."""
    values = vars(options)
    return {**values.pop("config", {}), **values}


class HelpAll(argparse.Action):
    """`--help-all`."""

    def __call__(self, parser: Any, *args: Any) -> None:
        print(parser.full_help(), end="")
        parser.exit(0)


class Recipe(argparse.Action):
    """Reads a recipe as soon as it is named. Its values are kept apart: flags may stand before it."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, path: Any, flag: str | None = None) -> None:
        try:
            setattr(namespace, self.dest, read_recipe(path, parser))
        except (OSError, ConfigError, UnknownOptionError) as error:
            parser.error(str(error))


def _loosen(action: argparse.Action) -> None:
    """Nothing is required or filled in by the parser; types that a text cannot be turned into get a reader."""
    default = action.default
    if action.help:
        action.help = action.help.replace("%", "%%")
        if default not in (None, argparse.SUPPRESS, "") and action.nargs != 0:
            action.help += f" (default {default})"
    action.default, action.required = argparse.SUPPRESS, False
    kind = str(action.type)
    if kind.startswith("tuple[float"):
        action.type, action.nargs = float, 2
    elif kind.startswith("dict["):
        action.type = json.loads
    elif "ParallelismConfig" in kind:
        action.type = parallelism
    elif "DebugOption" in kind:
        action.type = debug_option
    elif "string_to_bool" in kind:
        action.type = yes_or_no
        if action.nargs is None:
            # `--bf16` alone is yes.
            action.nargs, action.const = "?", True
    if action.choices is not None:
        action.metavar, action.choices = action.dest.upper(), list(action.choices)
        # transformers' reader turns the text of a choice into the choice.
        if all(isinstance(choice, str) for choice in action.choices):
            action.type = str


def yes_or_no(text: str) -> bool:
    """A flag's text as True or False, by the words that transformers takes.

    >>> yes_or_no("True"), yes_or_no("no")
    (True, False)
    """
    word = str(text).lower()
    if word in ("yes", "true", "t", "y", "1"):
        return True
    if word in ("no", "false", "f", "n", "0"):
        return False
    raise argparse.ArgumentTypeError(f"must be true or false, not {text}")


def debug_option(text: str) -> Any:
    """An entry of `TrainingArguments.debug`."""
    from transformers.debug_utils import DebugOption

    return DebugOption(text)


def parallelism(text: str) -> Any:
    """`TrainingArguments.parallelism_config`, given as JSON."""
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(**json.loads(text))


def read_recipe(path: str, parser: Parser) -> dict[str, Any]:
    """The options in a YAML file. Its numbers are read as a flag's would be: YAML takes `1e-6` for a text."""
    import yaml

    if not Path(path).is_file():
        raise ConfigError(f"there is no file {path}")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a recipe is a list of `option: value`, not {type(content).__name__}")
    actions = {action.dest: action for action in parser._actions if action.nargs != 0}
    result = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in actions or name == "config":
            raise UnknownOptionError(f"{path} has an unknown option '{key}'{did_you_mean(name, actions)}")
        try:
            result[name] = _converted(value, actions[name])
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
    return result


def _converted(value: Any, action: argparse.Action) -> Any:
    convert: Any = action.type if callable(action.type) else str
    if value is None or isinstance(value, dict):
        return value
    if isinstance(value, list):
        return [_converted_one(v, convert) for v in value]
    one = _converted_one(value, convert)
    return [one] if action.nargs in ("+", "*", 2) else one


def _converted_one(value: Any, convert: Any) -> Any:
    """A text as a flag's text would be read; a number as the number that the flag wants."""
    if isinstance(value, str):
        return convert(value)
    if convert not in (int, float):
        return value
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {value}")
    if convert is int and value != int(value):
        raise ValueError(f"must be a whole number, not {value}")
    return convert(value)


def split(values: dict[str, Any], classes: Sequence[Any]) -> list[dict[str, Any]]:
    """The values that each of the classes has a field for; what none has goes to the last, which says so."""
    parts: list[dict[str, Any]] = [{} for _ in classes]
    for name, value in values.items():
        owners = [i for i, cls in enumerate(classes) if name in {f.name for f in dataclasses.fields(cls)}]
        parts[owners[0] if owners else -1][name] = value
    return parts
