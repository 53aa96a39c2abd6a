"""Callbacks that the trainer adds by itself: budget, reference, samples, diagnosis."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from rloom.config import RLOOConfig
from rloom.data.prompts import PromptEncoder
from rloom.models.reference import Reference
from rloom.observe.completions import CompletionLog
from rloom.observe.diagnose import Doctor
from rloom.observe.progress import LiveProgress
from rloom.observe.trackers import tensorboard_writer
from rloom.printable import get_logger
from rloom.training.budget import random_state, restore_random_state
from rloom.training.learner import Learner
from rloom.training.processes import Processes

logger = get_logger(__name__)


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

    The budget shrinks until the worst case fits. A run that cannot fit thus fails in its first minute.
    """

    def __init__(self, learner: Learner, encoder: PromptEncoder) -> None:
        self.learner, self.encoder = learner, encoder

    def on_step_end(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Run the worst case once, on a GPU, where gradients can be undone."""
        if (
            self.learner.budget.tried
            or not self.learner.processes.can_repeat
            or not torch.cuda.is_available()
            or next(kwargs["model"].parameters()).device.type != "cuda"
        ):
            return
        budget, model = self.learner.budget, kwargs["model"]
        budget.tried = True
        # The trial draws dropout. A resumed run does not repeat it, so the random state is restored.
        randomness = random_state()
        shape = (self.encoder.longest, args.max_completion_length, args.num_generations)
        model.zero_grad(set_to_none=True)
        self.learner.try_worst_case(model, *shape, pictured=self.encoder.pictured)
        restore_random_state(randomness)
        logger.info("micro-batches of up to %d tokens; the worst case has been run", budget.tokens)


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
    """Logs what is going wrong in a run, and what to change."""

    def __init__(self) -> None:
        self.doctor = Doctor()

    def on_log(
        self, args: RLOOConfig, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Look for problems after each log of training."""
        if state.is_world_process_zero and "loss" in (logs or {}):
            for line in self.doctor.look(state.log_history, args, state.global_step):
                logger.warning("diagnosis at step %d: %s", state.global_step, line)


def one_progress(trainer: Any) -> None:
    """Leave one view of the run: a [`LiveProgress`] replaces transformers' bar and its printed logs.

    A notebook always gets one. transformers shows only the loss there, which says nothing in RLOO.
    """
    present = trainer.callback_handler.callbacks
    # Of several processes, only the main one shows progress.
    if not trainer.is_world_process_zero():
        for callback in [callback for callback in present if isinstance(callback, LiveProgress)]:
            trainer.remove_callback(callback)
        return
    for_notebooks = [callback for callback in present if type(callback).__name__ == "NotebookProgressCallback"]
    live = any(isinstance(callback, LiveProgress) for callback in present)
    if for_notebooks and not live:
        trainer.add_callback(LiveProgress())
    if for_notebooks or live:
        usual = [callback for callback in present if isinstance(callback, (ProgressCallback, PrinterCallback))]
        for callback in (*for_notebooks, *usual):
            trainer.remove_callback(callback)
