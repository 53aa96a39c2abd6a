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

from transformers import HfArgumentParser

from rloom.cli.parser import Parser
from rloom.errors import ConfigError, UnknownOptionError, did_you_mean


class Flags(Parser, HfArgumentParser):
    """The flags of some dataclasses, without their defaults.

    >>> from rloom.cli.options import DataOptions
    >>> flags = Flags([DataOptions], prog="rloom train")
    >>> flags.given(["--dataset-name", "prompts.jsonl"])
    {'dataset_name': 'prompts.jsonl'}
    """

    def __init__(
        self, classes: Sequence[Any], *, prog: str, description: str = "", shown: Sequence[str] = (), footer: str = ""
    ) -> None:
        self.shown, self.footer = shown, footer
        super().__init__(
            list(classes),
            prog=prog,
            description=description,
            add_help=False,
            formatter_class=argparse.HelpFormatter,
            usage=f"{prog} [--config RECIPE.yaml] [OPTIONS]",
        )
        self.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS, help="the options used most")
        self.add_argument("--help-all", action="store_true", default=argparse.SUPPRESS, help="all options")
        self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="Options as YAML; flags win")
        for action in self._actions:
            self._loosen(action)

    def _loosen(self, action: argparse.Action) -> None:
        """Nothing is required or filled in by the parser; types that a text cannot be turned into get a reader."""
        if action.default not in (None, argparse.SUPPRESS, "") and action.help and action.nargs != 0:
            action.help = f"{action.help.replace('%', '%%')} (default {action.default})"
        elif action.help:
            action.help = action.help.replace("%", "%%")
        action.default, action.required = argparse.SUPPRESS, False
        kind = str(action.type)
        if kind.startswith("tuple[float"):
            action.type, action.nargs = float, 2
        elif kind.startswith("dict["):
            action.type = json.loads
        elif "ParallelismConfig" in kind:
            action.type = _parallelism
        elif "string_to_bool" in kind and action.nargs is None:  # `--bf16` alone is yes
            action.nargs, action.const = "?", True
        if action.choices is not None:
            action.metavar = action.dest.upper()

    def given(self, argv: Sequence[str]) -> dict[str, Any]:
        """What was given, by name; a recipe's values beneath the flags'. Wrong usage leaves with 2."""
        options, unknown = self.parse_known_args(argv)
        values = vars(options)
        if "help" in values or "help_all" in values:
            self.print_help() if "help_all" in values else print(self.short_help())
            self.exit(0)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        recipe = values.pop("config", None)
        if recipe is None:
            return values
        try:
            return {**read_recipe(recipe, self), **values}
        except (OSError, ConfigError, UnknownOptionError) as error:
            self.error(str(error))

    def short_help(self) -> str:
        """Usage and the options in `shown`, one line each."""
        lines = [f"usage: {self.usage}", "", self.description or "", ""]
        by_name = {action.dest: action for action in reversed(self._actions)}
        for name in [*self.shown, "config"]:
            action = by_name[name]
            help, _, default = (action.help or "").replace("%%", "%").partition(" (default ")
            help = help.split(". ")[0].rstrip(".") + (f" (default {default}" if default else "")
            lines.append(f"  {action.option_strings[0]:32}{help}")
        return "\n".join([*lines, "", self.footer])


def _parallelism(text: str) -> Any:
    from accelerate.parallelism_config import ParallelismConfig

    return ParallelismConfig(**json.loads(text))


def read_recipe(path: str, flags: Flags) -> dict[str, Any]:
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
    actions = {action.dest: action for action in flags._actions if action.nargs != 0}
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
    several = action.nargs in ("+", "*", 2)
    if isinstance(value, list) or several:
        return [_converted_one(v, convert) for v in (value if isinstance(value, list) else [value])]
    return _converted_one(value, convert)


def _converted_one(value: Any, convert: Any) -> Any:
    if convert is int and isinstance(value, float) and value != int(value):
        raise ValueError(f"must be a whole number, not {value}")
    if isinstance(value, bool):
        if convert in (int, float):
            raise ValueError(f"must be a number, not {value}")
        return value
    if isinstance(value, str) or (convert in (int, float) and not isinstance(value, convert)):
        return convert(str(value)) if isinstance(value, str) else convert(value)
    return value


def split(values: dict[str, Any], classes: Sequence[Any]) -> list[dict[str, Any]]:
    """The values that each of the classes has a field for; what none has goes to the last, which says so."""
    parts: list[dict[str, Any]] = [{} for _ in classes]
    for name, value in values.items():
        owners = [i for i, cls in enumerate(classes) if name in {f.name for f in dataclasses.fields(cls)}]
        parts[owners[0] if owners else -1][name] = value
    return parts
