"""Notes what `rloom train` was given in the run's folder, for `rloom replay`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from rloom.cli.replay import write_command


class CommandNote(TrainerCallback):
    """Writes the note when training begins: the folder is this run's from then on."""

    def __init__(self, trainer: Any, values: dict[str, Any]) -> None:
        self.trainer, self.values = trainer, values

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write it, in the main process."""
        if state.is_world_process_zero:
            with self.trainer.folder.writing():
                write_command(args.output_dir, self.values)
