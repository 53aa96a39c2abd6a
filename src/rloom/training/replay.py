"""Goes back to an update of a run: its weights, completions, advantages, and the gradient of single samples.

A run resumes to the same bits from its checkpoints. So the trainer resumes from the nearest one before the update, in a
folder of its own, and takes the updates up to there on the stored completions and scores. Nothing is generated, no
reward is called, and the run's folder is only read.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import DefaultFlowCallback

from rloom.errors import ConfigError, DataError
from rloom.models.low_bits import added_as_they_come
from rloom.models.verify import evaluating
from rloom.observe.row_json import with_token_ids
from rloom.observe.runs import RunReader
from rloom.observe.store import RunStore
from rloom.observe.view import View
from rloom.training.callbacks import Diagnose, SampleTable
from rloom.training.checkpoint import damage, step_of
from rloom.training.folder import OutputFolder
from rloom.training.passes import attention_for
from rloom.training.playback import StoredEngine, StoredRewards, stored_groups
from rloom.training.processes import fingerprint
from rloom.training.replay_check import changed_norm, changed_options
from rloom.types import Record, Rollout

LARGEST = 5
"""How many parameters of a gradient are named."""


@dataclass(slots=True, kw_only=True)
class ReplayedSample:
    """One completion of an update, as it was stored and as it comes out again."""

    sample: int  # its number among the completions of the step
    stored: dict[str, Any]  # its row in the run's store
    replayed: dict[str, Any]  # the same row, computed anew from stored tokens and scores
    new_scores: dict[str, float | None] | str | None  # by a new call of the rewards, or why there are none
    in_update: bool = True  # False: of the same rollout, and trained on by a later update
    gradient_norm: float = 0.0  # of its share of the update's loss, without dropout; 0 where it is in no part of it
    largest: list[tuple[str, float]] = field(default_factory=list)  # parameters with the largest gradients

    @property
    def differences(self) -> list[str]:
        """Fields that do not come out as they were stored."""
        return [name for name, value in self.replayed.items() if self.stored.get(name) != value]


@dataclass(slots=True, kw_only=True)
class Replay:
    """An update of a run, replayed up to its optimizer's step."""

    step: int
    resumed_from: int  # the step of the checkpoint; 0: the run's start
    weights: str  # a hash of the weights before the update
    gradient_norm: float  # of the whole update, before clipping
    samples: list[ReplayedSample]
    differences: list[str] = field(default_factory=list)  # of options and of the gradient's norm, in words


def replay(
    trainer: Any,
    step: int,
    sample: int | Sequence[int] | None = None,
    *,
    run: str | Path | None = None,
    call_rewards: bool = True,
    checkpoint: str | Path | None = None,
) -> Replay:
    """Re-create update `step` of a run: its completions, advantages, and the gradient of samples.

    ```python
    found = rloom.replay(make_trainer(), step=120, sample=3)
    print(found.samples[0].gradient_norm, found.samples[0].differences)
    ```

    Args:
        trainer: a new trainer, made as the run's was. It cannot be used for anything else afterwards.
        step: the update, counted from 1, as the store counts.
        sample: one or several completions, by their place among those stored for the step. None: all, without
            gradients of their own.
        run: the run's folder; the trainer's `output_dir` if not given. It is only read.
        call_rewards: score the step's completions anew too, to be shown beside the stored scores.
        checkpoint: where to begin, in place of the run's newest checkpoint before the update. A run that was begun from
            a checkpoint of another folder needs that one, until it has some of its own.
    """
    reader = RunReader(trainer.args.output_dir if run is None else run)
    wanted = None if sample is None else [sample] if isinstance(sample, int) else list(sample)
    _check(trainer)
    check_asked(reader, step, wanted)
    begin = _nearest(reader, step) if checkpoint is None else _given(Path(checkpoint), step)
    # Before the trainer is changed.
    options = changed_options(trainer, reader)
    with tempfile.TemporaryDirectory() as scratch:
        _move(trainer, Path(scratch))
        player = _Player(trainer, reader, step, wanted, call_rewards)
        trainer.training_step = player.training_step
        try:
            trainer.train(resume_from_checkpoint=None if begin is None else str(begin[1]))
        except _ReachedError as reached:
            found = Replay(step=step, resumed_from=0 if begin is None else begin[0], **reached.found)
            found.differences = [*options, *changed_norm(trainer, reader, step, found.gradient_norm)]
            return found
    raise DataError(f"training ends before update {step}: replay needs the run's data and options")


def check_asked(run: RunReader, step: int, samples: Sequence[int] | None) -> None:
    """Refuse an update that the run has not stored, and samples that are none of its."""
    if step < 1:
        raise ConfigError(f"updates are counted from 1: there is no update {step}")
    count = sum(map(len, stored_groups(run, step)))
    if not count:
        raise DataError(_why_not(run, step))
    if outside := [number for number in samples or [] if not 0 <= number < count]:
        raise ConfigError(f"update {step} has samples 0 to {count - 1}, and no {outside[0]}")


def _why_not(run: RunReader, step: int) -> str:
    """Why a run has stored no completions of an update."""
    stored = run.stored_steps()
    last = max([0, *stored, *(entry["step"] for entry in run.metrics())])
    if step > last:
        return f"{run.folder} has no update {step}: its last is {last}"
    earlier = [one for one in stored if one < step]
    others = f"it trains on those of update {earlier[-1]}, which can be replayed" if earlier else "none were stored"
    return f"{run.folder} has no completions of update {step}: {others}"


def _check(trainer: Any) -> None:
    """Refuse what cannot be replayed."""
    if not trainer.processes.alone or trainer.processes.external_optimizer:
        raise ConfigError("replay runs in one process, without DeepSpeed")
    if trainer.args.dynamic_sampling:
        raise ConfigError(
            "replay does not know dynamic_sampling yet: the store does not say which groups were replaced"
        )


def _nearest(run: RunReader, step: int) -> tuple[int, Path] | None:
    """The newest whole checkpoint before update `step`; None: the run's start."""
    for number, folder in run.checkpoints():
        if number < step and damage(folder) is None:
            return number, folder
    first = next(run.steps())[0]
    if first > 1:
        raise DataError(
            f"the completions in {run.folder} begin with update {first}, and it has no checkpoint before {step}: "
            "it was begun from another folder's, which has to be named (--checkpoint FOLDER, or checkpoint=)"
        )
    return None


def _given(folder: Path, step: int) -> tuple[int, Path]:
    """A checkpoint that was named, where update `step` can be replayed from it."""
    wrong, number = damage(folder) if folder.is_dir() else "is no folder", step_of(folder)
    if wrong is not None or number is None:
        raise DataError(f"the checkpoint {folder} {wrong}")
    if number >= step:
        raise ConfigError(f"{folder} was written after update {number}, which is not before update {step}")
    return number, folder


def _move(trainer: Any, scratch: Path) -> None:
    """Let the trainer write to a folder of its own, and neither log, save nor evaluate."""
    trainer.args.output_dir, trainer.args.eval_on_start = str(scratch), False
    trainer.folder = OutputFolder(str(scratch), main=True)
    trainer.store = trainer.journal.store = RunStore(scratch)
    silent = (DefaultFlowCallback, View, Diagnose, SampleTable)
    for callback in list(trainer.callback_handler.callbacks):
        if isinstance(callback, silent) or type(callback).__module__.startswith("transformers.integrations"):
            trainer.remove_callback(callback)


class _ReachedError(Exception):
    """The update has been replayed: training ends."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__("the update has been replayed")
        self.found = found


class _Player:
    """Takes the place of the trainer's step: updates before the wanted one run as ever, on what was stored."""

    def __init__(self, trainer: Any, run: RunReader, step: int, wanted: list[int] | None, call_rewards: bool) -> None:
        self.trainer, self.run, self.step = trainer, run, step
        self.wanted, self.call_rewards = wanted, call_rewards
        self.take_update = trainer.training_step
        collector = trainer.collector
        self.rewards = collector.rewards
        collector.engine = StoredEngine(run, trainer)
        collector.rewards = StoredRewards(collector.engine, self.rewards.names)
        self.score, collector.score = collector.score, collector.rewards.score

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One update, or the end."""
        if self.trainer.state.global_step + 1 < self.step:
            return self.take_update(model, inputs, num_items_in_batch)
        raise _ReachedError(self._look(model, inputs))

    def _look(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
        """The update up to its gradient, then each sample by itself."""
        trainer, weights = self.trainer, fingerprint(model.parameters())
        model.train()
        shares = trainer.buffer.take(inputs)
        new = [one for one in {id(s.rollout): s.rollout for s in shares}.values() if one.records]
        records = [record for rollout in new for record in rollout.records]
        trainer.learner.accumulate(
            model, shares, compute_loss=trainer.compute_loss, backward=trainer._backward, skip=False
        )
        norm = _norm(model)
        rows = [_compared(row) for row in trainer.store.plain(trainer._first_used(new).stored)]
        samples = self._samples(rows, records)
        for one in samples:
            rollout, row = _place(new, one.sample)
            one.in_update = any(share.rollout is rollout and row in share.rows for share in shares)
            if one.in_update and self.wanted is not None:
                one.gradient_norm, one.largest = self._gradient(model, rollout, row)
        return {"weights": weights, "gradient_norm": norm, "samples": samples}

    def _samples(self, rows: list[dict[str, Any]], records: list[Record]) -> list[ReplayedSample]:
        stored = [row for group in stored_groups(self.run, self.step) for row in group]
        wanted = range(len(rows)) if self.wanted is None else self.wanted
        scores = self._scored_anew(records) if self.call_rewards else [None] * len(rows)
        return [
            ReplayedSample(sample=number, stored=stored[number], replayed=rows[number], new_scores=scores[number])
            for number in wanted
        ]

    def _scored_anew(self, records: list[Record]) -> Sequence[dict[str, float | None] | str]:
        """Scores of a new call of the rewards. They may be services that are no longer there."""
        collector = self.trainer.collector
        collector.rewards, collector._scoring = self.rewards, None
        try:
            scores = self.score(
                [record.prompt.columns for record in records],
                [record.prompt.content for record in records],
                [record.reply for record in records],
                [record.completion.token_ids for record in records],
            )
        except Exception as error:
            # A reward may raise anything.
            return [f"{type(error).__name__}: {error}"] * len(records)
        return RunStore(".").plain([dict(zip(self.rewards.names, line, strict=True)) for line in scores.tolist()])

    def _gradient(self, model: nn.Module, rollout: Rollout, row: int) -> tuple[float, list[tuple[str, float]]]:
        """The gradient of one row's share of the update's loss."""
        learner = self.trainer.learner
        model.zero_grad(set_to_none=True)
        if rollout.trained[row]:
            batch = learner.batcher.make(rollout, [row], learner.passes.device)
            # The rollout's first update is at its own weights: the ratio is 1. Kept log-probabilities may have dropout.
            batch.first = True
            with (
                evaluating(model),
                learner.passes.attention(),
                attention_for(batch),
                added_as_they_come(learner.policy) as widen,
            ):
                self.trainer._backward(self.trainer.compute_loss(model, batch), True)
                widen()
        norms = {name: float(p.grad.float().norm()) for name, p in model.named_parameters() if p.grad is not None}
        largest = sorted(norms.items(), key=lambda item: -item[1])[:LARGEST]
        return _norm(model), largest


def _compared(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the values of its tokens, which are stored for some groups, to be looked at."""
    return {name: value for name, value in with_token_ids(row).items() if name != "tokens"}


def _norm(model: nn.Module) -> float:
    """The norm of all gradients together."""
    norms = [p.grad.double().norm() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _place(rollouts: list[Rollout], sample: int) -> tuple[Rollout, int]:
    """The rollout of a sample, and its row there."""
    for rollout in rollouts:
        if sample < len(rollout):
            return rollout, sample
        sample -= len(rollout)
    raise AssertionError("a sample of no rollout")
