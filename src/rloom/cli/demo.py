"""`rloom demo`: a small model learns, here and now, from a reward alone."""

from __future__ import annotations

from argparse import Namespace

from rloom.cli.parser import Parser, count

SUMMARY = "train a small model, here and now, and see it learn"


def add_arguments(parser: Parser) -> None:
    """The verb's flags."""
    parser.add_argument("--seed", type=int, default=0, help="everything random follows from it (default 0)")
    parser.add_argument("--steps", type=count, default=200, help="updates (default 200)")
    parser.add_argument(
        "--output",
        default="runs/demo",
        help="where the trained model goes; what is there is replaced (default runs/demo)",
    )


def run(options: Namespace) -> int:
    """Train, and show what was learnt."""
    from rich.console import Console

    from rloom.demo.show import demo

    demo(seed=options.seed, steps=options.steps, output=options.output, console=Console())
    return 0
