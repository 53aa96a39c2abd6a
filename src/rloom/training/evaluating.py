"""Evaluates by generating: rewards, pass@k, lengths, KL and win rate of the evaluation prompts, with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from rloom.data.images import without_images
from rloom.data.loader import RoundRobinStream, as_is
from rloom.evaluation.measured import Measured
from rloom.evaluation.opponents import WinRate
from rloom.evaluation.statistics import Estimate
from rloom.observe.clock import EVALUATION
from rloom.observe.journal import Page, in_turns
from rloom.printable import get_logger
from rloom.seeds import derive_seed
from rloom.training.collector import Collector
from rloom.training.loop import UpdateLoop

logger = get_logger(__name__)


class EvaluatingTrainer(UpdateLoop):
    """Overrides how transformers' Trainer evaluates. The parts below are set by the constructor of [`RLOOTrainer`]."""

    collector: Collector
    win_rate: WinRate | None
    _batches: list[tuple[Page, Measured]]  # of the current evaluation: what is to be written, and what was measured

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Generate for the evaluation prompts and report rewards, pass@k, lengths, KL and win rate as `eval_*`."""
        with self._evaluating(metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Generate for test prompts and report the same as `evaluate`, as `test_*`."""
        with self._evaluating(metric_key_prefix):
            output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
            output.metrics.update({f"{metric_key_prefix}_{k}": v for k, v in self.metrics.flush("eval").items()})
            return output

    @contextmanager
    def _evaluating(self, prefix: str) -> Iterator[None]:
        """Set the prefix of an evaluation inside the block. Blocks may be nested: an evaluation of several sets
        evaluates each inside its own."""
        before = self._eval_prefix, self._batches
        self._eval_prefix, self._batches = prefix, []
        self.processes.gather_weights()
        try:
            with self._rewards_open(), self.clock.measuring(EVALUATION):
                yield
        finally:
            self._eval_prefix, self._batches = before

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Run all batches, then report means over prompts with their intervals."""
        self._batches = []
        # Processes may have different numbers of batches, so transformers must not gather their losses.
        if not self.processes.alone:
            self.gather_function = as_is
        with self._without_deepspeed() if self._has_whole_model() else nullcontext():
            output = super().evaluation_loop(*args, **kwargs)
        batches, self._batches = self._batches, []
        if not self.processes.alone:
            output, batches = self._join_evaluation(output, batches)
        found = self.processes.from_main(self._estimates(batches) if self.processes.is_main else None)
        for name, value in found.items():
            for end, number in (("", value.value), ("_low", value.low), ("_high", value.high)):
                self.metrics.set("eval", f"{name}{end}", number)
        return output

    def _has_whole_model(self) -> bool:
        """Whether DeepSpeed has not taken the model yet, and would leave it whole: there is no training, and
        transformers hands models over to evaluate them by ZeRO-3 alone."""
        stage = getattr(getattr(self.accelerator.state, "deepspeed_plugin", None), "zero_stage", 3)
        return self.deepspeed is None and stage < 3

    def _estimates(self, batches: list[tuple[Page, Measured]]) -> dict[str, Estimate]:
        """The metrics of an evaluation, with the win rate."""
        measured = self._nothing_measured()
        measured.join([one for _, one in batches])
        found = measured.estimates()
        if (rate := self._win_rate(measured)) is not None:
            found["win_rate"] = rate
        return found

    def _nothing_measured(self) -> Measured:
        return Measured(reward_names=self.rewards.names, win_rate_of=self.win_rate)

    def _join_evaluation(
        self, output: EvalLoopOutput, batches: list[tuple[Page, Measured]]
    ) -> tuple[EvalLoopOutput, list[tuple[Page, Measured]]]:
        """Join the evaluations of several processes, as if one process had run all batches."""
        self.metrics.join("eval", self.processes.gather(self.metrics.state_dict()["eval"]))
        pages = self._write_down([page for page, _ in batches])
        own = [one if self.processes.is_main else one.sendable() for _, one in batches]
        measured = self.processes.to_main(own)
        name = f"{self._eval_prefix}_loss"
        loss = float(output.metrics.get(name, 0.0)) * len(batches)
        total, count, seen = self.processes.total(loss, len(batches), output.num_samples)
        if count:
            output.metrics[name] = total / count
        streamed = isinstance(self.callback_handler.eval_dataloader.dataset, RoundRobinStream)
        joined = list(zip(pages, in_turns(measured), strict=True))
        # A stream does not know its length.
        return output._replace(num_samples=seen) if streamed else output, joined

    def _win_rate(self, measured: Measured) -> Estimate | None:
        """The win rate; None if the judge fails. The failure ends the run only with `on_reward_error="raise"`."""
        try:
            return measured.win_rate()
        except Exception as error:
            # A user's own judge may raise anything.
            if self.args.on_reward_error == "raise":
                raise
            logger.warning("no win rate this time: %s: %s", type(error).__name__, error)
            return None

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, None, None]:
        """Generate and score a batch of prompts; the same prompts get the same noise in every evaluation."""
        if not inputs:
            # Other processes have a batch, and gather weights from this one as well.
            nothing = self.learner.passes.nothing()
            self.collector.idle_along(nothing)
            self.learner.idle_along(model, nothing)
            return None, None, None
        count = self.args.num_generations_eval or self.args.num_generations
        texts = [str(without_images(row["prompt"])) for row in inputs]
        seed = derive_seed(self.args.seed, "eval", 0, texts)
        rollout = self.collector.collect(inputs, count, seed=seed, mode="eval")
        loss = self.learner.evaluate(model, rollout)
        measured = self._nothing_measured()
        measured.add(rollout)
        page = self._first_used([rollout])
        if self._eval_prefix is None or self.processes.alone:
            self._write_down([page])
            page = Page()
        # With several processes, pages are written when all batches are done.
        self._batches.append((page, measured))
        return loss.detach(), None, None
