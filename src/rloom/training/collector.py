"""Collects a rollout: prompts → completions → scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rloom.algo.shaping import Truncation
from rloom.data.prompts import PromptEncoder, as_reply
from rloom.errors import EngineError, NoCompletionError
from rloom.generation.base import Engine, abilities_of
from rloom.observe.clock import PhaseClock
from rloom.observe.completions import CompletionLog
from rloom.observe.metrics import Metrics
from rloom.rewards.base import RewardBatch
from rloom.rewards.calling.reward_set import RewardSet
from rloom.rewards.calling.scoring import Scoring
from rloom.rewards.scored import Scored
from rloom.seeds import derive_seed
from rloom.training.credit import Shaper
from rloom.training.processes import ALONE, Processes
from rloom.training.rollout_metrics import RolloutMetrics
from rloom.types import Group, Prompt, Record, Rollout

ScoreFunction = Callable[[list[dict[str, Any]], list[Any], list[Any], list[list[int]]], Tensor]


class Collector:
    """Runs the engine and the rewards for a batch of rows.

    `score` is TRL's override point, the trainer's `_calculate_rewards`; `state` gives the trainer's state, which reward
    functions may ask for. `meanwhile` computes what needs no scores, while rewards are running.
    """

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        engine: Engine,
        score: ScoreFunction,
        state: Callable[[], Any],
        rewards: RewardSet,
        shaper: Shaper,
        decode: Callable[[list[list[int]]], list[str]],
        truncation: Truncation,
        metrics: Metrics,
        table: CompletionLog,
        clock: PhaseClock,
        meanwhile: Callable[[Rollout], None] | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.encoder, self.engine, self.score, self.state = encoder, engine, score, state
        self.rewards, self.shaper, self.decode, self.truncation = rewards, shaper, decode, truncation
        self.metrics, self.table, self.clock = metrics, table, clock
        self.meanwhile, self.processes = meanwhile, processes
        # The scoring of the current rollout. TRL's override point has no argument for it.
        self._scoring: Scoring | None = None

    def collect(
        self,
        rows: Sequence[dict[str, Any]],
        num_generations: int,
        *,
        seed: int,
        mode: str,
        places: Sequence[int] | None = None,
    ) -> Rollout:
        """One rollout: K completions for each row's prompt, scored.

        In training all processes collect one rollout together. Each has its own rows; `places` are their positions
        among the rows of all. In evaluation each process collects batches by itself.
        """
        with self._begun() as scoring:
            with self.clock.measuring("generation"):
                prompts = self.encoder.encode(rows)
                if mode == "train":
                    seed = self._share_noise(prompts, seed, places)
                groups = self._generate(prompts, num_generations, seed, scoring)
                rollout = Rollout.of(groups, train_truncated=self.truncation.trained)
            if self.meanwhile is not None:
                self.meanwhile(rollout)
            if not self._decodes_early:
                self._decode(groups)
            with self.clock.measuring("rewards"):
                scored = self._score(groups, scoring)
        self._set_scores(rollout, groups, scored, mode)
        rollout.total = self.shaper.total(scored.scores, scored.failed)
        rollout.records = rollout.drawn = self._records(groups, rollout, scored)
        outcome = RolloutMetrics.of(groups, scored, rollout.total, num_generations)
        self._log(outcome, mode, self.processes if mode == "train" else ALONE)
        return rollout

    def score_rows(self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], ids: Any) -> Tensor:
        """Scores (N, F) by all rewards, NaN for None. This is what TRL's override point does by default."""
        scoring = self._scoring or self.rewards.begin()
        return scoring.score(self._batch(inputs, prompts, completions, ids)).scores

    def idle_along(self, nothing: Rollout) -> None:
        """Take part in a rollout for which this process has no prompts: where weights are gathered from all processes,
        or where the main one sends them for all.

        `nothing` stands for this process' part of it.
        """
        if self.processes.is_layered or abilities_of(self.engine).main_sends_weights:
            groups = list(self.engine.generate([], 1, seed=0))
            assert not groups, "the engine has answered what nobody asked"
        if self.processes.is_layered and self.meanwhile is not None:
            self.meanwhile(nothing)

    def sit_out(self) -> None:
        """Take part in the exchanges of a rollout in which this process has no completions. The others wait for it."""
        nothing = RolloutMetrics.nothing(len(self.rewards.names))
        self.shaper.together(self.processes, nothing.scores, nothing.lengths, nothing.ended)
        self._log(nothing, "train", self.processes)

    @contextmanager
    def _begun(self) -> Iterator[Scoring]:
        """The scoring of one rollout. Calls that are still running at the end of the block are cancelled."""
        self._scoring = self.rewards.begin()
        try:
            yield self._scoring
        finally:
            self._scoring.cancel()
            self._scoring = None

    def _share_noise(self, prompts: list[Prompt], seed: int, places: Sequence[int] | None) -> int:
        """Number the prompts among those of all processes, so that each gets the noise of a run in one process. An
        engine that does not use these numbers gets a seed of this process' own instead. Returns the seed."""
        if self.processes.alone:
            return seed
        if not abilities_of(self.engine).keyed_by_prompt:
            return derive_seed(seed, "process", self.processes.rank) if self.processes.rank else seed
        for prompt, place in zip(prompts, places or range(len(prompts)), strict=True):
            prompt.number = place
        return seed

    def _generate(self, prompts: list[Prompt], num_generations: int, seed: int, scoring: Scoring) -> list[Group]:
        """All groups, in the order of the prompts. Streaming rewards score each group as it comes, while the next ones
        are generated."""
        position = {id(prompt): index for index, prompt in enumerate(prompts)}
        names = column_names([prompt.columns for prompt in prompts])
        if any(prompt.inputs for prompt in prompts) and not abilities_of(self.engine).takes_images:
            raise EngineError(
                f"{type(self.engine).__name__} does not take images, and prompts have some: leave `engine` unset, or "
                "give an engine that passes `prompt.inputs` to the model and sets `takes_images = True`"
            )
        groups = []
        for group in self.engine.generate(prompts, num_generations, seed=seed):
            groups.append(group)
            if not group.completions:
                continue
            if self._decodes_early:
                self._decode([group])
            if self.rewards.streaming:
                scoring.add(position[id(group.prompt)], self._batch(*_flat([group]), names=names))
        if len(groups) != len(prompts):
            raise EngineError(f"the engine returned {len(groups)} groups for {len(prompts)} prompts")
        if not any(group.completions for group in groups):
            raise NoCompletionError("the engine returned no completion at all; see its messages above")
        return sorted(groups, key=lambda group: position[id(group.prompt)])

    @property
    def _decodes_early(self) -> bool:
        """Whether each group is decoded as it comes. Otherwise all are decoded while the device runs `meanwhile`."""
        return self.rewards.streaming or self.meanwhile is None

    def _decode(self, groups: list[Group]) -> None:
        completions = [c for group in groups for c in group.completions]
        with self.clock.measuring("generation"):
            texts = self.decode([c.token_ids for c in completions])
        for completion, text in zip(completions, texts, strict=True):
            completion.text = text

    def _batch(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids: Any,
        names: list[str] | None = None,
    ) -> RewardBatch:
        """Completions as rewards see them. `names` are all columns, of which these rows may lack some."""
        if names is None:
            names = column_names(inputs)
        return RewardBatch(
            prompts=prompts,
            completions=completions,
            completion_ids=completion_ids,
            columns={name: [row.get(name) for row in inputs] for name in names},
            trainer_state=self.state(),
        )

    def _score(self, groups: list[Group], scoring: Scoring) -> Scored:
        """Scores by the rewards, or by an override of `_calculate_rewards`."""
        inputs, contents, replies, ids = _flat(groups)
        before = self.table.extra_lengths()
        scores = self.score(inputs, contents, replies, ids).cpu().float()
        scored = scoring.scored
        # An override has scored without the rewards, or asked them about some of the completions.
        if scored is None or len(scored.scores) != len(ids):
            logged = scored.logged if scored is not None else []
            scored = replace(Scored.nothing(*scores.shape), logged=logged)
        scored.scores = scores
        scored.extra |= self.table.extra_added_since(before, len(ids))
        return scored

    def _set_scores(self, rollout: Rollout, groups: list[Group], scored: Scored, mode: str) -> None:
        """Shape the scores. Truncated completions count as unscored where the options say so."""
        truncated = torch.tensor([c.truncated for group in groups for c in group.completions])
        lengths = torch.tensor([c.num_drawn for group in groups for c in group.completions])
        counted = scored.scores
        if not self.truncation.counted:
            counted = torch.where(truncated.unsqueeze(-1), torch.full_like(counted, torch.nan), counted)
        rollout.scores = scored.scores
        if mode == "train":
            rollout.score = self.shaper.together(self.processes, counted, lengths, ~truncated, scored.failed)
        else:
            rollout.score = self.shaper(counted, lengths, ~truncated, scored.failed, update=False)

    # -- metrics and records

    def _log(self, outcome: RolloutMetrics, mode: str, processes: Processes) -> None:
        """Log a rollout's metrics. In training they cover all processes."""
        whole = RolloutMetrics.joined(processes.gather(outcome))
        for name, value in whole.logged:
            self.metrics.add(mode, name, value)
        # Reports come in the order of prompts, not of time. The largest total is the latest.
        for name, value in whole.totals.items():
            self.metrics.set(mode, name, max([value, *map(float, self.metrics.values[mode].get(name, []))]))
        state = self.state()
        if mode == "train":
            state.num_input_tokens_seen += whole.num_tokens
        self.metrics.set(mode, "num_tokens", state.num_input_tokens_seen)
        whole.record(self.rewards.names, lambda name, value: self.metrics.add(mode, name, value))

    def _records(self, groups: list[Group], rollout: Rollout, scored: Scored) -> list[Record]:
        """One record per completion, for the table and the store."""
        flat = [(number, g.prompt, c) for number, g in enumerate(groups) for c in g.completions]
        scores, reward = rollout.scores.tolist(), rollout.score.tolist()
        extra = {name: values for name, values in scored.extra.items() if len(values) == len(flat)}
        return [
            Record(
                group=number,
                prompt=prompt,
                completion=completion,
                reply=as_reply(completion.text, conversational=prompt.conversational),
                scores=dict(zip(self.rewards.names, scores[row], strict=True)),
                failures=scored.reasons.get(row, {}),
                reward=reward[row],
                extra={name: values[row] for name, values in extra.items()},
            )
            for row, (number, prompt, completion) in enumerate(flat)
        ]


def _flat(groups: list[Group]) -> tuple[list[dict[str, Any]], list[Any], list[Any], list[list[int]]]:
    """Columns, prompts, completions and token ids, one of each per completion."""
    flat = [(group.prompt, completion) for group in groups for completion in group.completions]
    return (
        [prompt.columns for prompt, _ in flat],
        [prompt.content for prompt, _ in flat],
        [as_reply(completion.text, conversational=prompt.conversational) for prompt, completion in flat],
        [completion.token_ids for _, completion in flat],
    )


def column_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The columns that any of the rows has, except the prompt.

    >>> column_names([{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}])
    ['x', 'y']
    """
    return list(dict.fromkeys(name for row in rows for name in row if name != "prompt"))
