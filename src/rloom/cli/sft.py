"""`rloom sft`: supervised training before RLOO, which cannot find what the policy never writes. TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Sequence

from rloom.cli import supervised
from rloom.cli.flags import Flags

DESCRIPTION = "Train on texts, on prompts with completions, or on conversations (messages)."


def flags() -> Flags:
    """All flags of the verb."""
    return supervised.flags("sft", supervised.trl_class("SFTConfig", "sft"), DESCRIPTION, ["packing"])


def main(argv: Sequence[str]) -> int:
    """The verb: 0 when trained and saved."""
    config, trainer = (supervised.trl_class(name, "sft") for name in ("SFTConfig", "SFTTrainer"))
    columns = [["prompt", "completion"], ["messages"], ["input_ids"]]  # or texts, whose column is an option
    return supervised.run(flags(), argv, config, trainer, columns)
