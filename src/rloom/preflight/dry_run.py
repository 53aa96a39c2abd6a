"""A run of a few updates that leaves the weights as they are, and writes nothing that stays.

All updates but the last have a learning rate of 0, so that every completion is the given model's. The last one has the
real rate: how far it moves the policy is measured. Then the process ends, and with it the weights.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from rloom.config import RLOOConfig
from rloom.data.datasets import is_iterable
from rloom.data.plan import UpdatePlan
from rloom.models.verify import evaluating
from rloom.observe.clock import EVALUATION, PHASES
from rloom.observe.view import View
from rloom.preflight.process_memory import most_held
from rloom.preflight.real_size import seconds_at_size
from rloom.training.passes import keep, trained_rows
from rloom.training.trainer import RLOOTrainer
from rloom.types import MicroBatch, Record, Rollout


@dataclass(slots=True, kw_only=True)
class Memory:
    """The most memory that was held, of all that there is, in bytes; and the shape that asked for most. On a CPU it is
    what the process has held since it began: loading the model is part of it, and what else the process did."""

    device: str
    peak: int
    whole: int
    prompt: int  # tokens of the longest prompt
    completion: int  # … of the longest completion
    group: int  # completions of a group
    micro_batch: int | None  # tokens of the largest micro-batch that fits; None: not even the smallest does


@dataclass(slots=True, kw_only=True)
class Measurement:
    """What a dry run has found."""

    groups: list[list[float]] = field(default_factory=list)  # rewards of each group's completions that have one
    records: list[Record] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # per completion, by phase
    movement: float | None = None  # nats per token between the policy before and after an update at the real rate
    memory: Memory | None = None

    @property
    def completion_tokens(self) -> list[int]:
        """The lengths of the completions."""
        return [record.completion.num_drawn for record in self.records]


def dry_config(config: RLOOConfig, groups: int, folder: str, rows: Any) -> RLOOConfig:
    """The options of a dry run: those of the run, but for its size and for what it writes."""
    dry = copy.copy(config)
    assert config.generation_batch_size is not None
    prompts = max(1, min(config.generation_batch_size // config.num_generations, groups // 2))
    if not is_iterable(rows):
        prompts = min(prompts, len(rows))
    # Rollouts are as large as the run's, for their speed. An update has several where they are small: of one group
    # nothing can be learnt as often as not.
    rollouts = max(1, groups // 2 // prompts)
    changes: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": prompts * config.num_generations,
        "generation_batch_size": prompts * config.num_generations, "gradient_accumulation_steps": rollouts,
        "steps_per_generation": 1, "num_iterations": 1, "dynamic_sampling": 0,
        "max_steps": max(2, -(-groups // (prompts * rollouts))),
        "learning_rate": 0.0, "lr_scheduler_type": "constant", "warmup_steps": 0, "kl_target": None,
        "early_stop_on": None, "save_strategy": SaveStrategy.NO, "eval_strategy": IntervalStrategy.NO, "do_eval": False,
        "eval_on_start": False,
        "load_best_model_at_end": False, "push_to_hub": False, "report_to": [], "logging_steps": 1,
        "logging_strategy": IntervalStrategy.STEPS, "log_completions": False, "num_sample_generations": 0,
        "store_completions": False, "advice": False, "diagnosis": False, "resume_from_checkpoint": None,
    }  # fmt: skip
    for name, value in changes.items():
        setattr(dry, name, value)
    return dry


@dataclass(slots=True, kw_only=True)
class Sampled:
    """A rollout, and what the journal takes off it."""

    update: int
    rollout: Rollout
    records: list[Record]
    total: Tensor


class DryRun(RLOOTrainer):
    """A trainer that keeps what it has sampled. `rate` is the learning rate of its last update, `size` the completions
    of a rollout of the whole run."""

    def __init__(self, *args: Any, rate: float, size: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.size = size
        self.sampled: list[Sampled] = []
        self.before: list[Tensor] = []  # log-probabilities before the last step
        for callback in [callback for callback in self.callback_handler.callbacks if isinstance(callback, View)]:
            self.remove_callback(callback)
        self.add_callback(_LastStep(rate, before=self._look_before))

    def _make_rollout(self, plan: UpdatePlan, number: int) -> Rollout:
        rollout = super()._make_rollout(plan, number)
        assert rollout.total is not None
        update, records = self.state.global_step + 1, list(rollout.records)
        self.sampled.append(Sampled(update=update, rollout=rollout, records=records, total=rollout.total.clone()))
        return rollout

    def measure(self) -> Measurement:
        """Train, and say what was found."""
        if self.args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.args.device)
        self.train()
        found = Measurement()
        for one in self.sampled:
            found.records += one.records
            parts = [one.total[one.rollout.groups == group] for group in one.rollout.groups.unique()]
            found.groups += [part[~part.isnan()].tolist() for part in parts]
        found.seconds, found.movement = self._seconds(), self._movement()
        found.memory = self._memory()
        # A GPU is not filled by a few groups. A CPU is, and many would take long.
        if self.args.device.type == "cuda" and found.memory.micro_batch is not None:
            found.seconds |= seconds_at_size(self, self.size)
        return found

    def _seconds(self) -> dict[str, float]:
        """Seconds per completion by phase, without the first update, which compiles and allocates."""
        logs = [entry for entry in self.state.log_history if "time/update" in entry][1:]
        completions = sum(len(one.records) for one in self.sampled if one.update > 1)
        phases = [phase for phase in PHASES if phase != "saving"]
        return {phase: sum(entry[f"time/{phase}"] for entry in logs) / max(1, completions) for phase in phases}

    def last_rollouts(self) -> list[Rollout]:
        """What the last update was made of."""
        return [one.rollout for one in self.sampled if one.update == self.sampled[-1].update]

    def _look_before(self) -> None:
        """Note what the policy is before the last step. The time that it takes is no update's."""
        with self.clock.measuring(EVALUATION):
            self.before = self._logprobs()

    def _movement(self) -> float | None:
        """½ E[(log π_after − log π_before)²] per token: the KL of a small step. None where nothing was trained on."""
        if not self.before:
            return None
        moved = (torch.cat(self._logprobs()) - torch.cat(self.before)).square().mean().item() / 2
        return moved if moved > 0 and math.isfinite(moved) else None

    def _logprobs(self) -> list[Tensor]:
        """The log-probabilities of what the last update is made of, row by row. Without dropout, before the step as
        after it: those of the training forward differ from any others by its noise, which no rate makes smaller."""
        found: list[Tensor] = []
        for rollout in self.last_rollouts():
            # Rows without an advantage were not run forward, unless they have a KL.
            rows = [row for row in trained_rows(rollout) if rollout.policy_logprobs[row] is not None]
            column: list[Tensor | None] = [None] * len(rollout)
            self.learner.passes.without_gradient(rollout, functools.partial(self._keep_logprobs, column), rows)
            found += [values for values in column if values is not None]
        return found

    def _keep_logprobs(self, column: list[Tensor | None], batch: MicroBatch) -> None:
        with evaluating(self.model):
            keep(column, batch, self.learner.passes.run(self.model, batch).logprobs.float())

    def _memory(self) -> Memory:
        """Run the worst shape: the longest prompt with completions at their limit, as many as a micro-batch holds."""
        args, encoder = self.args, self.collector.encoder
        shape = (encoder.longest, args.max_completion_length, args.num_generations)
        fits: int | None
        try:
            fits = self.learner.try_worst_case(self.model, *shape, pictured=encoder.pictured)
        except torch.OutOfMemoryError:
            fits = None
        if args.device.type == "cuda":
            peak, whole = torch.cuda.max_memory_reserved(args.device), torch.cuda.mem_get_info(args.device)[1]
        else:
            peak, whole = most_held(), psutil.virtual_memory().total
        return Memory(
            device=args.device.type, peak=peak, whole=whole, prompt=shape[0], completion=shape[1], group=shape[2],
            micro_batch=fits,
        )  # fmt: skip


class _LastStep(TrainerCallback):
    """Gives the last update its learning rate. Calls `before` just before its step."""

    def __init__(self, rate: float, before: Callable[[], None]) -> None:
        self.rate, self.before = rate, before

    def on_step_begin(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the rate before the last update, and make it the optimizer's first, as that of a run is: the moments of
        the updates before it would make Adam's step smaller."""
        if _is_last(state):
            kwargs["optimizer"].state.clear()
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = self.rate

    def on_pre_optimizer_step(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Here the gradient is known, and the weights are the given ones still."""
        if _is_last(state):
            self.before()


def _is_last(state: Any) -> bool:
    return state.global_step == state.max_steps - 1
