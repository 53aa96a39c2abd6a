"""`rloom sft`: supervised training before RLOO, which cannot find what the policy never writes. TRL's SFTTrainer."""

from __future__ import annotations

from argparse import Namespace

from rloom.cli.parser import Parser

SUMMARY = "supervised training, before RLOO"
FLAGS_TAKE_SECONDS = True

COLUMNS = [["prompt", "completion"], ["messages"], ["input_ids"]]
"""The columns that rows may have; or texts, whose column is an option."""


def add_arguments(parser: Parser) -> None:
    """All flags of the verb."""
    from rloom.cli import supervised

    parser.description = "Train on texts, on prompts with completions, or on conversations (messages)."
    supervised.add_arguments(parser, "SFTConfig", ["packing"])


def run(options: Namespace) -> int:
    """0 when trained and saved."""
    from rloom.cli import supervised

    return supervised.run(options, "SFTConfig", "SFTTrainer", COLUMNS)
