"""How long a rollout of the run's own size takes.

On a GPU a few groups take about as long as many: what they take cannot be multiplied. So a rollout of the run's size is
generated and run forward and backward. Its scores are made up, so that no reward is called.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from rloom.types import Rollout, Share

TURNS = 2
"""The first one compiles and allocates. The last one counts."""


def seconds_at_size(trainer: Any, completions: int) -> dict[str, float]:
    """Seconds per completion of generation, reference and update. The trainer's weights are of no use afterwards."""
    for turn in range(TURNS):
        found = _turn(trainer, completions, turn)
    return {phase: seconds / completions for phase, seconds in found.items()}


def _turn(trainer: Any, completions: int, turn: int) -> dict[str, float]:
    times = {}
    began = _now(trainer)
    rollout = _rollout(trainer, completions, turn)
    times["generation"] = _now(trainer) - began
    if trainer.reference is not None:
        trainer.assigner.begin(rollout)
    times["reference"] = _now(trainer) - began - sum(times.values())
    trainer.learner.accumulate(
        trainer.model_wrapped,
        [Share(rollout=rollout, rows=range(len(rollout)))],
        compute_loss=trainer.compute_loss,
        backward=trainer._backward,
    )
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    times["update"] = _now(trainer) - began - sum(times.values())
    return times


def _rollout(trainer: Any, completions: int, seed: int) -> Rollout:
    """Completions of the first prompts, as often as there are too few, with scores that differ."""
    collector, k = trainer.collector, trainer.args.num_generations
    count = completions // k
    some = itertools.islice(trainer.train_dataset, count)
    rows = list(itertools.islice(itertools.cycle(some), count))
    groups = list(collector.engine.generate(collector.encoder.encode(rows), k, seed=seed))
    collector.decode([completion.token_ids for group in groups for completion in group.completions])
    rollout = Rollout.of(groups, train_truncated=collector.truncation.trained)
    rollout.score = torch.arange(len(rollout)).remainder(k).float()
    rollout.scores = rollout.score.unsqueeze(-1)
    return rollout


def _now(trainer: Any) -> float:
    if trainer.args.device.type == "cuda":
        torch.cuda.synchronize(trainer.args.device)
    return time.perf_counter()
