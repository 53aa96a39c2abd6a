"""Callbacks that the trainer adds by itself: budget, reference, samples, diagnosis, description, the view."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from rloom.config import RLOOConfig
from rloom.data.prompts import PromptEncoder
from rloom.models.reference import Reference
from rloom.observe.completions import CompletionLog
from rloom.observe.doctor import ALL, NAMES, Doctor, lasting
from rloom.observe.progress import LiveProgress
from rloom.observe.store import RunStore
from rloom.observe.trackers import tensorboard_writer
from rloom.observe.view import LogDict, LogLines, View
from rloom.printable import get_logger
from rloom.training.budget import random_state, restore_random_state
from rloom.training.description import description_of
from rloom.training.learner import Learner
from rloom.training.processes import Processes

logger = get_logger(__name__)

USUAL = (ProgressCallback, PrinterCallback)
"""What transformers shows a run with, outside of notebooks."""


class SyncReference(TrainerCallback):
    """Lets the reference follow the policy (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656)."""

    def __init__(self, reference: Reference, processes: Processes) -> None:
        self.reference, self.processes = reference, processes

    def on_step_end(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Mix the policy into the reference, every `ref_model_sync_steps` updates."""
        if state.global_step % args.ref_model_sync_steps == 0:
            values = self.processes.values_of(kwargs["optimizer"])
            self.reference.sync(kwargs["model"], args.ref_model_mixup_alpha, values)


class FitBudget(TrainerCallback):
    """Runs the worst case once after the first update, when gradients and optimizer state have their memory.

    The budget shrinks until the worst case fits. A run that cannot fit thus fails in its first minute. `most`: the
    completions that a micro-batch can have; a small batch is not given the memory of a large one.
    """

    def __init__(self, learner: Learner, encoder: PromptEncoder, most: int) -> None:
        self.learner, self.encoder, self.most = learner, encoder, most
        self.looked = False

    def on_step_end(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Run the worst case once, on a GPU, where gradients can be undone."""
        on_gpu = torch.cuda.is_available() and next(kwargs["model"].parameters()).device.type == "cuda"
        processes = self.learner.processes
        # DeepSpeed's backward is part of its engine, which the learner does not have.
        if processes.external_optimizer or not processes.can_repeat:
            return
        if self.looked or not on_gpu or not self._is_due():
            return
        budget, model = self.learner.budget, kwargs["model"]
        budget.tried = True
        # The trial draws dropout. A resumed run does not repeat it, so the random state is restored.
        randomness = random_state()
        shape = (self.encoder.longest, args.max_completion_length, args.num_generations)
        model.zero_grad(set_to_none=True)
        tokens = self.learner.try_worst_case(model, *shape, most=self.most, pictured=self.encoder.pictured)
        restore_random_state(randomness)
        logger.info("micro-batches of up to %d tokens; the worst case has been run", min(tokens, budget.tokens))

    def _is_due(self) -> bool:
        """Whether the worst case has not been run. Processes that run in step run it where one of them has not: one
        may have lost its part of a checkpoint."""
        self.looked = True
        processes, tried = self.learner.processes, self.learner.budget.tried
        return processes.any(not tried) if processes.repeats_together else not tried


class SampleTable(TrainerCallback):
    """Prints sample completions a given number of times, evenly over the run, and sends them to the trackers."""

    def __init__(self, log: CompletionLog, times: int, callbacks: list[Any]) -> None:
        self.log, self.times, self.callbacks = log, times, callbacks
        # How many completions there were at the last table.
        self.shown = -1

    def on_step_end(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Print and send the table if it is due after this step."""
        step, total = state.global_step, state.max_steps
        # This is true `times` times in a run, whether or not `total` is a multiple of it.
        due = step * self.times // total > (step - 1) * self.times // total
        # Several updates on one rollout would print the same table again.
        if due and self.log.count == self.shown:
            return
        if due and state.is_world_process_zero:
            self.shown = self.log.count
            self.log.print(state.global_step, args.num_completions_to_print or 5)
            self.log.send(state.global_step, args, tensorboard_writer(self.callbacks))


class Diagnose(TrainerCallback):
    """Logs what is going wrong in a run, and what to change. `prompts` says what is wrong with how they are written."""

    def __init__(
        self,
        callbacks: list[Any] | None = None,
        store: RunStore | None = None,
        prompts: Callable[[], list[str]] = list,
    ) -> None:
        self.doctor, self.store, self.prompts = Doctor(), store, prompts
        # Among them are the views that keep the latest diagnosis.
        self.callbacks = [] if callbacks is None else callbacks

    def on_log(
        self, args: RLOOConfig, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Look for problems after each log of training."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            self._tell(self.doctor.named(state.log_history, args, state.global_step), state.global_step)

    def on_train_begin(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at how prompts are written. A resumed run has stored it at its start, and what was named since."""
        if state.is_world_process_zero:
            self.doctor.spoke = self.store.diagnosed() if self.store is not None and state.global_step else {}
            found = [("prompts", line) for line in self._prompt_lines()]
            self._tell(found, state.global_step, stored=state.global_step == 0)

    def _prompt_lines(self) -> list[str]:
        """What is wrong with prompts. A template may be written in any way: looking at it must not end the run."""
        try:
            return self.prompts()
        except Exception as error:
            logger.warning("how prompts are written could not be looked at (%s: %s)", type(error).__name__, error)
            return []

    def _tell(self, found: list[tuple[str, str]], step: int, *, stored: bool = True) -> None:
        for rule, line in found:
            logger.warning("diagnosis at step %d: %s", step, line)
            if self.store is not None and stored:
                self.store.diagnose(rule, line, step)
            for view in [callback for callback in self.callbacks if isinstance(callback, View)]:
                view.note(f"at update {step}: {line}")


class EarlyStop(TrainerCallback):
    """Ends a run, with a checkpoint, when a diagnosis of `early_stop_on` has been made at several logs in a row."""

    def __init__(self, processes: Processes, report: Any) -> None:
        self.processes, self.report = processes, report

    def on_log(
        self, args: RLOOConfig, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Decide in the main process, for all."""
        if "loss" not in (logs or {}):
            return
        asked = args.early_stop_on or []
        names = NAMES if ALL in asked else asked
        why = self.processes.from_main(lasting(names, state.log_history, args, args.early_stop_patience))
        if why is None:
            return
        control.should_save = control.should_training_stop = True
        self.report.stopped_because = why
        if state.is_world_process_zero:
            logger.warning(
                "early stop after update %d, with a checkpoint: at %d logs in a row %s",
                state.global_step, args.early_stop_patience, why,
            )  # fmt: skip


class Describe(TrainerCallback):
    """Writes down what a run is, when its training begins."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Write it, in the main process."""
        if state.is_world_process_zero:
            self.trainer.store.describe(description_of(self.trainer))


def one_view(trainer: Any) -> None:
    """Leave one view of the run: ours replaces transformers' bar and its printed logs, which show a dictionary, or only
    the loss, which says nothing in RLOO. A view that the user passed is left, and takes the place of ours."""
    handler = trainer.callback_handler
    for callback in [callback for callback in handler.callbacks if _is_usual(callback)]:
        trainer.remove_callback(callback)
    own = [callback for callback in handler.callbacks if isinstance(callback, (*USUAL, View))]
    # Of several processes, only the main one shows progress.
    if not trainer.is_world_process_zero():
        for callback in own:
            trainer.remove_callback(callback)
        return
    if not own:
        own = [_view_for(trainer.args)]
        trainer.add_callback(own[0])


def connect_view(trainer: Any) -> None:
    """When training begins: tell the view what it shows, and lend its console to tables. Of several the last one stays,
    since a user may have added one to the trainer."""
    views = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, View)]
    for view in views[:-1]:
        trainer.remove_callback(view)
    for view in views[-1:]:
        view.report, trainer.completion_log.console = trainer.report, view.console
        if isinstance(view, LiveProgress):
            view.clock = trainer.clock


def _is_usual(callback: Any) -> bool:
    """Whether transformers has added a callback by itself."""
    return type(callback) in USUAL or type(callback).__name__ == "NotebookProgressCallback"


def _view_for(args: RLOOConfig) -> View:
    """The view that the options ask for."""
    if args.log_format == "dict":
        return LogDict()
    wanted = args.log_format == "panel"
    if args.log_format == "auto" and not args.disable_tqdm:
        console = Console()
        # The variables that make rich colour its output in a file must not make it draw there.
        terminal = sys.stdout is not None and sys.stdout.isatty() and not console.is_dumb_terminal
        wanted = console.is_jupyter or terminal
    return LiveProgress() if wanted else LogLines()


def close_view(trainer: Any) -> None:
    """Leave the terminal as it was, also where a run ends with an error."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, View):
            callback.close()
    trainer.completion_log.console = None
