"""`rloom train-reward`: a reward model from pairs of a chosen and a rejected answer. TRL's RewardTrainer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rloom.cli import supervised
from rloom.cli.flags import Flags

DESCRIPTION = "Train a reward model on pairs (chosen, rejected, and prompt where they do not begin with it)."


def flags() -> Flags:
    """All flags of the verb."""
    return supervised.flags("train-reward", supervised.trl_class("RewardConfig", "train-reward"), DESCRIPTION)


def _mark(trainer: Any) -> None:
    """Note on the model that it has seen texts with an end token, which TRL appends: rewards are then read there."""
    end = trainer.processing_class.eos_token_id
    if all(row["chosen_ids"][-1] == end for row in itertools.islice(trainer.train_dataset, 8)):
        trainer.model.config.ends_with_eos = True


def main(argv: Sequence[str]) -> int:
    """The verb: 0 when trained and saved; prints the accuracy on pairs that were kept back."""
    config, trainer = (supervised.trl_class(name, "train-reward") for name in ("RewardConfig", "RewardTrainer"))
    return supervised.run(
        flags(),
        argv,
        config,
        trainer,
        [["chosen", "rejected"], ["chosen_ids", "rejected_ids"]],
        _mark,
        task_type="SEQ_CLS",
    )
