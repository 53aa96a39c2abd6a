"""The argument parser of a verb: it names the nearest flag to one that does not exist, and keeps help short."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rloom.errors import ConfigError, RloomError, UnknownOptionError, did_you_mean


class UsageError(RloomError):
    """Flags that are wrong together: the command ends as if one alone were wrong, with its usage and 2."""


@contextmanager
def as_usage() -> Iterator[None]:
    """An option that is refused inside is wrong usage."""
    try:
        yield
    except (ConfigError, UnknownOptionError) as error:
        raise UsageError(str(error)) from error


def count(text: str) -> int:
    """A number of at least 1, as a flag's type.

    >>> count("3")
    3
    """
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


class Parser(argparse.ArgumentParser):
    """argparse, whose complaint about an unknown flag or verb names the nearest one that exists.

    `shown` are the options that `--help` lists, where there are too many for all of them; `footer` stands below.

    >>> parser = Parser(prog="rloom", exit_on_error=False)
    >>> _ = parser.add_argument("--steps")
    >>> parser.hint("unrecognized arguments: --step 3")
    "; did you mean '--steps'?"
    >>> _ = parser.add_argument("--max-length", type=int)
    >>> parser.parse_args(["--max_length=3"]).max_length
    3
    """

    shown: Sequence[str] = ()
    footer = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A near miss is told, not guessed.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """With either spelling of a flag, `--max-steps` and `--max_steps`: those that stand for options have both."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelt(word) for word in given], namespace)

    def _spelt(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        known = self._option_string_actions
        dashed = flag.replace("_", "-")
        return dashed + equals + value if flag.startswith("--") and flag not in known and dashed in known else word

    def flags(self) -> list[str]:
        """All flags in their long form."""
        return sorted(flag for flag in self._option_string_actions if flag.startswith("--"))

    def hint(self, message: str) -> str:
        """What to append to argparse's message."""
        if match := re.search(r"unrecognized arguments: (\S+)", message):
            return did_you_mean(match[1].split("=")[0], self._option_string_actions)
        if match := re.search(r"invalid choice: '([^']+)'", message):
            choices = message.split("choose from", 1)[-1]
            return did_you_mean(match[1], re.findall(r"'([^']+)'", choices) or re.findall(r"[\w-]+", choices))
        return ""

    def error(self, message: str) -> NoReturn:
        """Print usage and the message, with the hint, and leave with 2."""
        super().error(message + self.hint(message))

    def format_help(self) -> str:
        """What `--help` prints: all options, or those that are `shown`."""
        return self._short_help() if self.shown else self.full_help()

    def full_help(self) -> str:
        """All options."""
        return super().format_help()

    def _short_help(self) -> str:
        lines = [f"usage: {self.usage}", "", self.description or "", ""]
        by_name = {action.dest: action for action in reversed(self._actions)}
        for name in self.shown:
            action = by_name[name]
            help, _, default = (action.help or "").replace("%%", "%").partition(" (default ")
            help = help.split(". ")[0].rstrip(".") + (f" (default {default}" if default else "")
            lines.append(f"  {', '.join(_names(action)):32}{help}")
        return "\n".join([*lines, "", self.footer, ""])


def _names(action: argparse.Action) -> list[str]:
    """A flag's names without the spelling with dashes: the further ones first, which are short and what documents use.

    >>> _names(argparse.Action(["--model_name", "--model-name", "--model"], "model_name"))
    ['--model', '--model_name']
    """
    first, *others = action.option_strings
    return [*(name for name in others if name[2:].replace("-", "_") != first[2:]), first]
