"""Adapts transformers' training loop: one batch of the loader is one update. What the loop logs and writes down."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from rloom.config import RLOOConfig
from rloom.data.plan import UpdatePlan
from rloom.errors import ConfigError
from rloom.models.optimizers import SplitAdamW, optimizer_with_low_bits
from rloom.observe.journal import Journal, Page, in_turns
from rloom.observe.trackers import tensorboard_writer
from rloom.training.assigner import CreditAssigner
from rloom.training.callbacks import close_view, connect_view
from rloom.training.saving import CheckpointedTrainer
from rloom.training.sharding_options import hidden_from_accelerate, shards
from rloom.types import Rollout


class UpdateLoop(CheckpointedTrainer):
    """Overrides those methods of transformers' Trainer that assume a batch is a part of an update, and its log.

    The parts below are set by the constructor of [`RLOOTrainer`].
    """

    assigner: CreditAssigner
    journal: Journal
    _keeps_table: bool  # whether the main process shows completions, those of other processes among them
    _eval_prefix: str | None = None  # of metric names while evaluating; None while training

    # -- one batch of the loader is one update

    @contextmanager
    def _one_batch_per_update(self) -> Iterator[None]:
        """Hide gradient accumulation from the Trainer's loop. It would wait for several batches, and ours are whole
        updates."""
        steps, handler = self.schedule.parts_per_update, self.callback_handler
        call_event = handler.call_event

        def with_the_users_value(event: str, args: Any, *rest: Any, **kwargs: Any) -> Any:
            # Callbacks and trackers see the value that the user set.
            args.gradient_accumulation_steps = steps
            try:
                return call_event(event, args, *rest, **kwargs)
            finally:
                args.gradient_accumulation_steps = 1

        handler.call_event = with_the_users_value
        self.args.gradient_accumulation_steps = 1
        try:
            yield
        finally:
            del handler.call_event
            self.args.gradient_accumulation_steps = steps

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.buffer.rollouts.clear()
        self._episodes, self._elapsed, self._train_began = 0, 0.0, time.time()
        self.clock.reset()
        connect_view(self)
        try:
            with self._one_batch_per_update():
                result = super()._inner_training_loop(*args, **kwargs)
        finally:
            close_view(self)
        self.processes.check_same_weights(self.model)
        return result

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator without FSDP: rloom shards the model itself."""
        with hidden_from_accelerate(self.args):
            super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: Any) -> None:
        """Leave a model that is sharded on the host: its layers are brought to the device one by one."""
        if not shards(self.args):
            super()._move_model_to_device(model, device)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        with self.processes.preparing(self.accelerator):
            return super()._prepare_for_training(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """All processes do what a callback asks for in one of them. Otherwise they would wait for each other."""
        self._note_times()
        self._agree()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        # Callbacks also ran after the log, the evaluation and the checkpoint.
        self._agree()

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Whether a checkpoint is due after an evaluation. With save_strategy="best", transformers saves if this is
        True, and drops what a callback has asked for: an early stop, or a signal."""
        best = super()._determine_best_metric(metrics, trial)
        return best or self.control.should_save

    def _note_times(self) -> None:
        """Log where an update's time went. The loop comes here at the end of an epoch too, without an update."""
        if self.clock.leave("update"):
            for phase, seconds in self.clock.take().items():
                self.metrics.add("train", f"time/{phase}", seconds)

    def _agree(self) -> None:
        """Make the flags of the Trainer's control equal in all processes."""
        names = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")
        several = self.processes.gather([getattr(self.control, name) for name in names])
        for name, asked in zip(names, zip(*several, strict=True), strict=True):
            setattr(self.control, name, any(asked))

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> None:
        """Nothing to count: the learner divides by the update's own denominator."""

    def _track_num_input_tokens(self, inputs: UpdatePlan) -> None:
        """Nothing to do: tokens are counted when a rollout is collected."""

    def floating_point_ops(self, inputs: UpdatePlan) -> int:
        """6 operations per parameter and token of an update. Sampling and the reference are not counted."""
        return 6 * self.model.num_parameters(exclude_embeddings=True) * self.learner.tokens_forward

    def get_total_train_batch_size(self, args: RLOOConfig) -> int:
        """Completions per update, over all processes."""
        return self._train_batch_size * self.schedule.parts_per_update * args.world_size

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        """The optimizer that the options name. For bfloat16 weights it keeps the 16 bits that they drop."""
        cls, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if model is None or self.processes.external_optimizer:
            return cls, options
        split = self.precision.split
        low_bits = split.low_bits if split is not None else None
        chosen, options = optimizer_with_low_bits(cls, options, model, low_bits, dither=args.dither_weights)
        if args.dither_weights and chosen is not SplitAdamW:
            raise ConfigError("dither_weights=True: AdamW updates no bfloat16 weights in this run; leave it unset")
        return chosen, options

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm of the gradient. If it is not finite, the update is skipped. A loss scaler (fp16) decides that
        itself, and so has DeepSpeed done."""
        norm = self.processes.as_number(super()._get_grad_norm(model, grad_norm=grad_norm))
        step = self.state.global_step + 1
        if self.processes.external_optimizer:
            if (made := self.processes.update_was_made()) is not None:
                self.finite.note(made, step)
        elif getattr(self.accelerator, "scaler", None) is None:
            self.finite.decide(norm, self.optimizer, model, step)
        return norm

    def _older_counts(self, logs: dict[str, Any]) -> dict[str, Any]:
        """The older names `episode`, `eps` (episodes per second) and `lr`."""
        seconds = self._elapsed + time.time() - self._train_began
        rate = self._episodes / max(seconds, 1e-9)
        return {"episode": self._episodes, "eps": rate, "lr": logs.get("learning_rate")}

    # -- logs

    @property
    def _mode(self) -> str:
        return "train" if self._eval_prefix is None else "eval"

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add the metrics since the last log, under TRL's names, and print or send the table of completions."""
        if self.args.log_older_metrics and self._mode == "train" and "loss" in logs:
            logs.update(self._older_counts(logs))
        prefix = "" if self._eval_prefix is None else f"{self._eval_prefix}_"
        logs.update({f"{prefix}{name}": value for name, value in self.metrics.flush(self._mode).items()})
        super().log(logs, start_time)
        if self.processes.is_main:
            self.store.log(self.state.log_history[-1], self.state.global_step)
        if self.args.log_completions and self.accelerator.is_main_process:
            writer = tensorboard_writer(self.callback_handler.callbacks)
            self.completion_log.show(self.state.global_step, self.args, writer)

    def _first_used(self, rollouts: list[Rollout]) -> Page:
        """Log rollouts at their first use, when KL and advantages are known. Returns what is to be written."""
        new = [rollout for rollout in {id(r): r for r in rollouts}.values() if rollout.records]
        for rollout in new:
            known = [torch.zeros(()) if a is None or not a.numel() else a.mean().float() for a in rollout.advantages]
            device = max((a.device for a in known), key=lambda device: device.type != "cpu")
            advantages = torch.stack([a.to(device) for a in known]).tolist()
            for record, advantage in zip(rollout.records, advantages, strict=True):
                record.advantage = advantage
            self.assigner.record(rollout, self._mode)
        return self.journal.page(new, self.state.global_step + 1 if self._mode == "train" else None)

    def _write_down(self, pages: list[Page]) -> list[Page]:
        """Write the pages of all processes at the main one, and return them there. Other processes return nothing."""
        if not self.processes.is_main:
            pages = [self.journal.sendable(page, table=self._keeps_table) for page in pages]
        # The current update is not counted in `global_step` yet.
        done = self.state.global_step
        step = done + 1 if self._mode == "train" else done
        all_pages = list(in_turns(self.processes.to_main(pages)))
        for page in all_pages:
            self.journal.write(page, step, self._eval_prefix or "train")
        return all_pages
