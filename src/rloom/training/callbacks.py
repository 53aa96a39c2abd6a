"""Callbacks that the trainer adds by itself."""

from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback

from rloom.models.reference import Reference
from rloom.observe.completions import CompletionLog


class SyncReference(TrainerCallback):
    """Lets the reference follow the policy (TR-DPO, Gorbatovski et al. 2024, arXiv 2404.09656)."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mix the policy in, every `ref_model_sync_steps` updates."""
        if state.global_step % args.ref_model_sync_steps == 0:
            self.reference.sync(kwargs["model"], args.ref_model_mixup_alpha)


class SampleTable(TrainerCallback):
    """Prints sample completions a given number of times, evenly over the run."""

    def __init__(self, log: CompletionLog, times: int) -> None:
        self.log, self.times = log, times

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print when the step is due."""
        every = max(1, math.ceil(state.max_steps / self.times))
        if state.global_step % every == 0 and state.is_world_process_zero:
            self.log.print(state.global_step, args.num_completions_to_print or 5)
