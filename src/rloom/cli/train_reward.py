"""`rloom train-reward`: a reward model from pairs of a chosen and a rejected answer. TRL's RewardTrainer."""

from __future__ import annotations

import itertools
from argparse import Namespace
from typing import Any

from rloom.cli.parser import Parser

SUMMARY = "a reward model from preference pairs"
FLAGS_TAKE_SECONDS = True

COLUMNS = [["chosen", "rejected"], ["chosen_ids", "rejected_ids"]]
"""The columns that rows may have."""


def add_arguments(parser: Parser) -> None:
    """All flags of the verb."""
    from rloom.cli import supervised

    parser.description = "Train a reward model on pairs (chosen, rejected, and prompt where they do not begin with it)."
    supervised.add_arguments(parser, "RewardConfig")


def run(options: Namespace) -> int:
    """0 when trained and saved; prints the accuracy on pairs that were kept back."""
    from rloom.cli import supervised

    return supervised.run(options, "RewardConfig", "RewardTrainer", COLUMNS, _mark, task_type="SEQ_CLS")


def _mark(trainer: Any) -> None:
    """Note on the model that it has seen texts with an end token, which TRL appends: rewards are then read there."""
    end = trainer.processing_class.eos_token_id
    if all(row["chosen_ids"][-1] == end for row in itertools.islice(trainer.train_dataset, 8)):
        trainer.model.config.ends_with_eos = True
