"""An argument parser that knows near misses."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from rloom.errors import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse, whose complaint about an unknown flag or verb names the nearest one that exists.

    >>> parser = Parser(prog="rloom", exit_on_error=False)
    >>> _ = parser.add_argument("--steps")
    >>> parser.hint("unrecognized arguments: --step 3")
    "; did you mean '--steps'?"
    >>> _ = parser.add_argument("--max-length", type=int)
    >>> parser.parse_args(["--max_length=3"]).max_length
    3
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})  # a near miss is told, not guessed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """With either spelling of a flag, `--max-steps` and `--max_steps`: those that stand for options have both."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelt(word) for word in given], namespace)

    def _spelt(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        known = self._option_string_actions
        dashed = flag.replace("_", "-")
        return dashed + equals + value if flag.startswith("--") and flag not in known and dashed in known else word

    def hint(self, message: str) -> str:
        """What to append to argparse's message."""
        if match := re.search(r"unrecognized arguments: (\S+)", message):
            known = [flag for action in self._actions for flag in action.option_strings]
            return did_you_mean(match[1].split("=")[0], known)
        if match := re.search(r"invalid choice: '([^']+)'", message):
            return did_you_mean(match[1], re.findall(r"'([^']+)'", message.split("choose from", 1)[-1]) or
                                re.findall(r"[\w-]+", message.split("choose from", 1)[-1]))  # fmt: skip
        return ""

    def error(self, message: str) -> NoReturn:
        """Print usage and the message, with the hint, and leave with 2."""
        super().error(message + self.hint(message))
