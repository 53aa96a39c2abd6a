"""`rloom VERB …`

A verb is one module with a one-line `SUMMARY`, `add_arguments(parser)` and `run(options)`, which returns the exit code.
Its module is imported for `rloom --help` too: what takes seconds to import is imported where it is used. A verb whose
flags need such imports sets `FLAGS_TAKE_SECONDS`: they are kept in a file (flag_cache.py).
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rloom.cli.parser import Parser, UsageError
from rloom.errors import RloomError
from rloom.printable import printable
from rloom.version import __version__

VERBS = {
    "train": "rloom.cli.train",
    "sft": "rloom.cli.sft",
    "train-reward": "rloom.cli.train_reward",
    "eval": "rloom.cli.eval",
    "replay": "rloom.cli.replay",
    "diff": "rloom.cli.diff",
    "demo": "rloom.cli.demo",
    "show": "rloom.cli.show",
    "generate": "rloom.cli.generate",
    "check-reward": "rloom.cli.check_reward",
    "preflight": "rloom.cli.preflight",
    "doctor": "rloom.cli.doctor",
    "serve-reward": "rloom.cli.serve_reward",
    "vllm-serve": "rloom.cli.vllm_serve",
    "completion": "rloom.cli.shell_completion",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] not in VERBS:
        # This prints help, the version or what is wrong, and leaves.
        _overview().parse_args(words)
    return _guarded(lambda: _run(*words))


def _run(verb: str, *words: str) -> int:
    # bitsandbytes warns of kernels that nobody asked for.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    parser = parser_of(verb)
    options = parser.parse_args(words)
    try:
        return _module(verb).run(options)
    except UsageError as error:
        parser.error(str(error))


def _guarded(run: Callable[[], int]) -> int:
    """What goes wrong on purpose is one line, not a traceback."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (OSError, RloomError) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 0
        print(printable(f"rloom: {error}"), file=sys.stderr)
        return 1
    # The rows of a stream are read as they come.
    except UnicodeDecodeError as error:
        print(printable(f"rloom: the data has text that is not UTF-8: {error}"), file=sys.stderr)
        return 1
    except Exception as error:
        from rloom.rewards.calling.frames import reward_trace

        # The error of a reward has words that may be a service's, and of its frames only the user's are of use.
        print(printable(reward_trace(error) or traceback.format_exc()), end="", file=sys.stderr)
        return 1


def _nobody_reads() -> bool:
    """Whether who reads the output has enough of it (`| head`). What is left of it goes nowhere then."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _module(verb: str) -> Any:
    return importlib.import_module(VERBS[verb])


def parser_of(verb: str) -> Parser:
    """The parser of a verb's flags."""
    parser, module = Parser(prog=f"rloom {verb}"), _module(verb)
    if getattr(module, "FLAGS_TAKE_SECONDS", False):
        from rloom.cli.flag_cache import with_flags

        return with_flags(parser, verb, module.add_arguments)
    module.add_arguments(parser)
    return parser


class _OneLineEach(argparse.HelpFormatter):
    """Room for the longest verb, which argparse would put on a line of its own."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        self._action_max_length = max(self._action_max_length, 16)


def _overview() -> Parser:
    """The parser of what is no verb: `--help`, `--version` and mistakes."""
    parser = Parser(
        prog="rloom",
        description="REINFORCE Leave-One-Out for language models.",
        formatter_class=_OneLineEach,
    )
    parser.add_argument("--version", action="version", version=f"rloom {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb in VERBS:
        verbs.add_parser(verb, help=_module(verb).SUMMARY)
    return parser


if __name__ == "__main__":
    sys.exit(main())
