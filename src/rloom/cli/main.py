"""`rloom VERB …`"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from rloom.cli.parser import Parser
from rloom.errors import MissingExtraError, RloomError
from rloom.printable import printable
from rloom.version import __version__

FORWARDED = {
    "train": "train a model with RLOO, on your prompts and rewards",
    "sft": "supervised training, before RLOO",
    "train-reward": "a reward model from preference pairs",
    "eval": "rewards, pass@k, KL and win rate of a model on a split",
}
"""Verbs that read their own arguments: their flags come from classes that take seconds to import."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in FORWARDED:
        return _guarded(lambda: _module(argv[0]).main(argv[1:]))
    parser, verbs = _parsers()
    # parse_known_args, so that an unknown flag is reported by the verb's own parser, which knows what is near
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        verbs.choices[options.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    _check_ranges(verbs.choices[options.verb], options)
    return _guarded(lambda: _run(options))


def _guarded(run: Callable[[], int]) -> int:
    """What goes wrong on purpose is one line, not a traceback."""
    try:
        return run()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (OSError, RloomError) as error:
        print(printable(f"rloom: {error}"), file=sys.stderr)
        return 1
    except UnicodeDecodeError as error:  # of a stream, whose rows are read as they come
        print(printable(f"rloom: the data has text that is not UTF-8: {error}"), file=sys.stderr)
        return 1
    except Exception:  # of a reward, say, whose words may be a service's
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
        return 1


def _module(verb: str) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which warns of kernels that nobody asked for
    return importlib.import_module(f"rloom.cli.{verb.replace('-', '_')}")


class _OneLineEach(argparse.HelpFormatter):
    """Room for the longest verb, which argparse would put on a line of its own."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        self._action_max_length = max(self._action_max_length, 16)


def _parsers() -> tuple[Parser, Any]:
    parser = Parser(
        prog="rloom",
        description="REINFORCE Leave-One-Out for language models.",
        formatter_class=_OneLineEach,
    )
    parser.add_argument("--version", action="version", version=f"rloom {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    for verb, help in FORWARDED.items():
        verbs.add_parser(verb, help=help, add_help=False)
    _demo(verbs)
    _generate(verbs)
    _check_reward(verbs)
    _serve_reward(verbs)
    _completion(verbs)
    return parser, verbs


def all_flags() -> dict[str, list[str]]:
    """The flags of every verb, for shell completion."""
    _, verbs = _parsers()
    parsers = dict(verbs.choices)
    for verb in FORWARDED:
        with contextlib.suppress(MissingExtraError):  # its verb is completed, its flags are not
            parsers[verb] = _module(verb).flags()
    return {
        verb: sorted({flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")})
        for verb, parser in parsers.items()
    }


def _completion(verbs: Any) -> None:
    completion = verbs.add_parser("completion", help="a script that completes verbs and flags in your shell")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help='eval "$(rloom completion bash)"')


def _demo(verbs: Any) -> None:
    demo = verbs.add_parser("demo", help="train a small model, here and now, and see it learn")
    demo.add_argument("--seed", type=int, default=0, help="everything random follows from it (default 0)")
    demo.add_argument("--steps", type=int, default=None, help="updates (default 200)")
    demo.add_argument(
        "--output",
        default="runs/demo",
        help="where the trained model goes; what is there is replaced (default runs/demo)",
    )


def _generate(verbs: Any) -> None:
    generate = verbs.add_parser("generate", help="write completions of prompts, with their log-probabilities")
    add = generate.add_argument
    add("--model", required=True, help="a name or path")
    file_help = 'JSON lines with a "prompt" each: text or messages'
    add("--prompts", "--data", required=True, metavar="FILE", help=file_help)
    add("--n", "--num-generations", type=int, default=1, metavar="N", help="completions per prompt (default 1)")
    add("--output", metavar="FILE", help="where the JSON lines go (default: standard output)")
    add("--max-completion-length", type=int, default=512, help="tokens (default 512)")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default 1)")
    add("--top-p", type=float, default=1.0, help="keep the smallest set of tokens with this probability")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0: all")
    add("--min-p", type=float, help="keep tokens at least this likely, relative to the likeliest")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: discourage tokens seen before")
    add("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    stop_ids_help = "tokens that end a completion, beside the model's own"
    add("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help=stop_ids_help)
    add("--seed", type=int, default=0, help="of the sampling (default 0)")
    engines = ("native", "forked", "transformers", "vllm")
    add("--engine", choices=engines, help="default: the fastest of our own that fits the model")
    add("--dtype", help="of the weights: float32, bfloat16, … (default: as saved; float32 on a CPU)")
    add("--trust-remote-code", action="store_true", help="allow models that bring their own Python code")
    add("--fetch-images", action="store_true", help="fetch images that prompts name by address")
    folder_help = "where images named by paths are (default: the file's own folder, or the working folder)"
    add("--image-folder", metavar="FOLDER", help=folder_help)


def _check_reward(verbs: Any) -> None:
    check = verbs.add_parser("check-reward", help="see what rewards give, before a run depends on it")
    add = check.add_argument
    add(
        "rewards",
        nargs="*",
        metavar="REWARD",
        help="named as for rloom train: ready-made, file.py:function(option=1), …",
    )
    add("--reward", "--reward-funcs", nargs="+", default=[], dest="more", metavar="REWARD", help="the same, as there")
    add("--data", required=True, help='prompts as JSON lines: "prompt", further columns, and maybe "completions"')
    add("--model", help="what writes the completions, where the file has none: a name or path")
    add("--prompts", type=int, default=16, help="how many prompts to take (default 16)")
    add("--num-generations", type=int, default=8, help="completions per prompt from the model (default 8)")
    add("--max-completion-length", type=int, default=256, help="tokens (default 256)")
    add("--seed", type=int, default=0, help="of the model's sampling (default 0)")
    add("--time-limit", type=float, default=60.0, help="seconds per sample for isolated functions (default 60)")


def _serve_reward(verbs: Any) -> None:
    serve = verbs.add_parser("serve-reward", help="serve a reward over HTTP, for reward_funcs='http://…/score'")
    serve.add_argument(
        "reward", metavar="REWARD", help="a ready-made name, module:function or file.py:function(option=1)"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default 8000)")
    serve.add_argument("--workers", type=int, help="worker processes (default: one per core, at most 8)")
    serve.add_argument("--on-error", choices=("raise", "none"), default="raise", help="answer 422, or null scores")


def _check_ranges(parser: Parser, options: Any) -> None:
    for name in ("steps", "prompts", "n", "num_generations", "max_completion_length", "workers"):
        value = getattr(options, name, None)
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")


def _run(options: Any) -> int:
    """Heavy imports come after the usage is known to be right."""
    if options.verb == "generate":
        from rloom.cli import generate

        return generate.run(options)
    if options.verb == "check-reward":
        from rloom.cli import check_reward

        return check_reward.run(options)
    if options.verb == "serve-reward":
        from rloom.cli import serve_reward

        return serve_reward.run(options)
    if options.verb == "completion":
        from rloom.cli.completion import script

        print(script(options.shell, all_flags()), end="")
        return 0
    from rloom.cli import demo

    return demo.run(seed=options.seed, steps=options.steps, output=options.output)


if __name__ == "__main__":
    sys.exit(main())
