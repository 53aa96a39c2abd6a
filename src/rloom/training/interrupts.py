"""Ctrl-C and SIGTERM (a node that is taken back) end a run without losing it.

The first signal lets the running update end, saves a checkpoint and leaves; the second stops at once, as Python would
have it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from rloom.printable import get_logger

logger = get_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts(TrainerCallback):
    """Listens for signals while a run trains, and has it saved and stopped at the end of an update."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile the first signal is taken. Only the main thread can listen; elsewhere nothing changes."""
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
        self._stop_listening()  # the next one is not ours
        print(
            f"\nrloom: {self.received.name}: the running update is finished, then a checkpoint is saved; "
            "once more stops at once",
            file=sys.stderr,
            flush=True,
        )

    def _stop_listening(self) -> None:
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Save and stop, if a signal has come."""
        if self.received is not None:
            control.should_save = control.should_training_stop = True
        return control

    def leave(self, output_dir: str, step: int) -> None:
        """After the run: if a signal has ended it, say how it goes on, and end what comes after it too."""
        if self.received is None:
            return
        received, self.received = self.received, None
        folder = Path(output_dir) / f"checkpoint-{step}"
        print(
            f"rloom: stopped after update {step}, saved in {folder}. To go on: "
            'trainer.train(resume_from_checkpoint="auto"), or `rloom train … --resume_from_checkpoint auto`',
            file=sys.stderr,
            flush=True,
        )
        if received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + received)
