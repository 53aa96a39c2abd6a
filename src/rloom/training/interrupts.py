"""Saves a checkpoint and stops when Ctrl-C or SIGTERM arrives.

After the first signal the running update is finished, a checkpoint is saved, and the run ends. A second signal stops at
once, as Python does by default. Clusters send SIGTERM before they take a node back.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from rloom.config import RLOOConfig
from rloom.printable import get_logger
from rloom.training.processes import ALONE, Processes

logger = get_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts(TrainerCallback):
    """Handles signals while a run trains: it is saved and stopped at the end of the current update.

    A signal that one of several processes gets, as where one machine is taken back, ends the run in all.
    """

    def __init__(self, processes: Processes = ALONE) -> None:
        self._processes = processes
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the first signal inside the block. Only the main thread can; in other threads nothing changes."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            yield
            return
        self.received = None
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            yield
        finally:
            self._stop_listening()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        # The next signal gets Python's own handling.
        self._stop_listening()
        self._say(
            f"\nrloom: {self.received.name}: the running update is finished, then a checkpoint is saved; "
            "once more stops at once"
        )

    def _say(self, line: str) -> None:
        if self._processes.is_main:
            # "reentrant call": the signal came while this thread was writing.
            with suppress(RuntimeError):
                print(line, file=sys.stderr, flush=True)

    def _stop_listening(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def on_step_end(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save and stop, if a signal has come."""
        if self.received is not None:
            control.should_save = control.should_training_stop = True
        return control

    def leave(self, output_dir: str, step: int) -> None:
        """After a run that a signal has ended, in any process: print how to resume it, and end the script in all."""
        several = self._processes.gather(self.received)
        self.received = None
        having = [rank for rank, signal_of_rank in enumerate(several) if signal_of_rank is not None]
        if not having:
            return
        received = several[having[0]]
        folder = Path(output_dir) / f"checkpoint-{step}"
        # Launchers send theirs to all processes, and the main one has said so.
        why = "" if 0 in having else f" by {received.name} in process {having[0]}"
        # A signal may come after the last update.
        saved = f"saved in {folder}" if folder.is_dir() else "which was the last"
        self._say(
            f"rloom: stopped after update {step}{why}, {saved}. To go on: "
            'trainer.train(resume_from_checkpoint="auto"), or `rloom train … --resume_from_checkpoint auto`'
        )
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + received)
