"""`rloom VERB …`"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rloom.cli.parser import Parser
from rloom.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb; returns the exit code: 0 done, 1 failed, 2 wrong usage."""
    parser = Parser(prog="rloom", description="REINFORCE Leave-One-Out for language models.")
    parser.add_argument("--version", action="version", version=f"rloom {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)

    demo = verbs.add_parser("demo", help="train a small model, here and now, and see it learn")
    demo.add_argument("--seed", type=int, default=0, help="everything random follows from it (default 0)")
    demo.add_argument("--steps", type=int, default=None, help="updates (default 200)")
    demo.add_argument(
        "--output",
        default="runs/demo",
        help="where the trained model goes; what is there is replaced (default runs/demo)",
    )

    # parse_known_args, so that an unknown flag is reported by the verb's own parser, which knows what is near
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        verbs.choices[options.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.steps is not None and options.steps < 1:
        verbs.choices["demo"].error(f"--steps must be at least 1, not {options.steps}")
    from rloom.cli.demo import run  # heavy imports come after the usage is known to be right

    try:
        return run(seed=options.seed, steps=options.steps, output=options.output)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"rloom: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
