"""Collecting rollouts (prompts → completions → scores) and keeping them while updates still need them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.data.images import without_images
from rloom.data.plan import UpdatePlan
from rloom.data.prompts import PromptEncoder
from rloom.errors import EngineError, NoCompletionError
from rloom.evaluation.measured import Measured
from rloom.generation.base import Engine
from rloom.observe.completions import CompletionLog
from rloom.observe.metrics import Metrics
from rloom.observe.store import RunStore
from rloom.printable import get_logger
from rloom.rewards.base import RewardBatch
from rloom.rewards.collection import RewardSet
from rloom.seeds import derive_seed
from rloom.training.credit import Shaper
from rloom.training.outcome import Outcome
from rloom.training.processes import ALONE, Processes
from rloom.types import EOS, Group, Prompt, Rollout, Share

logger = get_logger(__name__)

ScoreFunction = Callable[[list[dict[str, Any]], list[Any], list[Any], list[list[int]]], Tensor]


class Collector:
    """Runs the engine and the rewards for a batch of rows, and writes down what came out."""

    def __init__(
        self,
        *,
        encoder: PromptEncoder,
        engine: Engine,
        score: ScoreFunction,
        batch: Callable[..., RewardBatch],
        rewards: RewardSet,
        shaper: Shaper,
        decode: Callable[[list[list[int]]], list[str]],
        truncated: str,
        metrics: Metrics,
        log: CompletionLog,
        store: RunStore,
        count_tokens: Callable[[int], int],
        log_images: bool = False,
        meanwhile: Callable[[Rollout], None] | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.processes = processes
        self.encoder, self.engine, self.score, self.shaper = encoder, engine, score, shaper
        self.batch, self.rewards, self.reward_names = batch, rewards, rewards.names
        self.decode, self.truncated = decode, truncated
        self.metrics, self.log, self.count_tokens, self.log_images = metrics, log, count_tokens, log_images
        self.store = store
        self.meanwhile = meanwhile  # what can be computed of a rollout without its scores, while they are awaited
        self.extra: dict[str, list[Any]] = {}  # what reward functions add to each completion of a rollout
        self.logged: list[tuple[str, float]] = []  # what they log beside
        self.measured: Measured | None = None  # while evaluating

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

        In training all processes collect together, each rows of its own, which stand at `places` among those of all. A
        batch of an evaluation is one process' own.
        """
        prompts = self.encoder.encode(rows)
        if mode == "train":
            seed = self._share_noise(prompts, seed, places)
        self.logged = []
        try:
            groups = self._in_order(prompts, self._generate(prompts, num_generations, seed))
            if not any(group.completions for group in groups):
                raise NoCompletionError("the engine returned no completion at all; see its messages above")
            rollout = self._without_scores(groups)
            if self.meanwhile is not None:
                self.meanwhile(rollout)
            if not self._decodes_early:
                self._decode(groups)
            scores, texts = self._scored(groups)
        finally:
            self.rewards.forget()
        self._set_scores(rollout, groups, scores, mode)
        total = self.shaper.total(scores)
        outcome = Outcome.of(groups, scores, total, num_generations, self.rewards.report)
        self._record(outcome, mode, self.processes if mode == "train" else ALONE)
        if self.measured is not None:
            self.measured.add(groups, scores, total, texts)
        stored = self._stored(groups, rollout)
        rollout.records = self.store.add(stored)
        self.log.add(rollout.records, self._shown(groups, texts, stored))
        return rollout

    def sit_out(self) -> None:
        """Take part in what processes find out together about a rollout, with no completions of one's own."""
        nothing, self.logged = Outcome.nothing(len(self.reward_names)), []
        self.shaper.together(self.processes, nothing.scores, nothing.lengths, nothing.ended)
        self._record(nothing, "train", self.processes)

    def _share_noise(self, prompts: list[Prompt], seed: int, places: Sequence[int] | None) -> int:
        """Say which prompts these are among those of all processes, so that each draws what it would in one process.
        An engine that does not look at that gets a seed of this process' own instead."""
        if self.processes.alone:
            return seed
        if not getattr(self.engine, "keyed_by_prompt", False):
            return derive_seed(seed, "process", self.processes.rank) if self.processes.rank else seed
        for prompt, place in zip(prompts, places or range(len(prompts)), strict=True):
            prompt.number = place
        return seed

    def _generate(self, prompts: list[Prompt], num_generations: int, seed: int) -> list[Group]:
        """All groups, as they come; rewards that are marked for it begin with each, while the next is generated."""
        position = {id(prompt): index for index, prompt in enumerate(prompts)}
        names = column_names([prompt.columns for prompt in prompts])
        if any(prompt.inputs for prompt in prompts) and not getattr(self.engine, "takes_images", False):
            raise EngineError(
                f"{type(self.engine).__name__} does not take images, and prompts have some: leave `engine` unset, or "
                "give an engine that hands `prompt.inputs` to the model and says so with `takes_images = True`"
            )
        groups = []
        for group in self.engine.generate(prompts, num_generations, seed=seed):
            groups.append(group)
            if not group.completions:
                continue
            if self._decodes_early:
                self._decode([group])
            if self.rewards.streaming:
                self.rewards.add(position[id(group.prompt)], self.batch(*_flat([group]), names=names))
        return groups

    @property
    def _decodes_early(self) -> bool:
        """Whether texts are made group by group; else while the device is busy with what is done meanwhile."""
        return self.rewards.streaming or self.meanwhile is None

    def _in_order(self, prompts: list[Prompt], groups: list[Group]) -> list[Group]:
        """Groups in the order of the prompts, whatever order they finished in; none may be lost."""
        position = {id(prompt): index for index, prompt in enumerate(prompts)}
        groups.sort(key=lambda group: position[id(group.prompt)])
        if len(groups) != len(prompts):
            raise EngineError(f"the engine returned {len(groups)} groups for {len(prompts)} prompts")
        return groups

    def _decode(self, groups: list[Group]) -> None:
        completions = [c for group in groups for c in group.completions]
        for completion, text in zip(completions, self.decode([c.token_ids for c in completions]), strict=True):
            completion.text = text

    def _scored(self, groups: list[Group]) -> tuple[Tensor, list[Any]]:
        """Scores (N, F), and the completions as the functions saw them."""
        inputs, contents, texts, ids = _flat(groups)
        self.rewards.failed, self.rewards.reasons, self.extra = None, {}, {}
        before = self.log.extra_lengths()
        scores = self.score(inputs, contents, texts, ids).cpu().float()
        self.extra |= self.log.extra_added_since(before, len(ids))
        if self.shaper.composition is not None:
            self.shaper.composition.note_failures(self.rewards.failed)
        return scores, texts

    def _without_scores(self, groups: list[Group]) -> Rollout:
        completions = [c for group in groups for c in group.completions]
        unknown = torch.full((len(completions),), torch.nan)
        logprobs = [c.logprobs for c in completions]
        return Rollout(
            prompt_ids=[group.prompt.token_ids for group in groups for _ in group.completions],
            completion_ids=[c.token_ids for c in completions],
            groups=torch.tensor([index for index, group in enumerate(groups) for _ in group.completions]),
            scores=unknown.unsqueeze(-1),
            score=unknown,
            trained=[bool(c.token_ids) and (self.truncated == "keep" or not c.truncated) for c in completions],
            num_groups=len(groups),
            sampling_logprobs=None if any(p is None for p in logprobs) else logprobs,  # type: ignore[arg-type]
            ended=[c.stop_reason == EOS for c in completions],
            prompt_inputs=[group.prompt.inputs for group in groups for _ in group.completions],
        )

    def _set_scores(self, rollout: Rollout, groups: list[Group], scores: Tensor, mode: str) -> None:
        completions = [c for group in groups for c in group.completions]
        truncated = torch.tensor([c.truncated for c in completions])
        lengths = torch.tensor([len(c.token_ids) for c in completions])
        counted = scores
        if self.truncated == "exclude":  # neither in a baseline nor in a normaliser
            counted = torch.where(truncated.unsqueeze(-1), torch.full_like(scores, torch.nan), scores)
        rollout.scores = scores
        if mode == "train":
            rollout.score = self.shaper.together(self.processes, counted, lengths, ~truncated)
        else:
            rollout.score = self.shaper(counted, lengths, ~truncated, update=False)

    # -- what is written down

    def _record(self, outcome: Outcome, mode: str, processes: Processes) -> None:
        outcome.take_logged(self.logged)
        whole = Outcome.joined(processes.gather(outcome))
        for name, value in whole.logged:
            self.metrics.add(mode, name, value)
        for name, value in whole.totals.items():  # calls come in the order of prompts, not of time: the largest counts
            self.metrics.set(mode, name, max([value, *map(float, self.metrics.values[mode].get(name, []))]))
        self.metrics.set(mode, "num_tokens", self.count_tokens(whole.num_tokens if mode == "train" else 0))
        whole.record(self.reward_names, lambda name, value: self.metrics.add(mode, name, value))

    def _stored(self, groups: list[Group], rollout: Rollout) -> list[dict[str, Any]]:
        """The rollout as the run's store keeps it; the advantages follow when they are known."""
        flat = [(number, g.prompt, c) for number, g in enumerate(groups) for c in g.completions]
        scores, reward = rollout.scores.tolist(), rollout.score.tolist()
        extra = {name: values for name, values in self.extra.items() if len(values) == len(flat)}
        return [
            {
                "group": number,
                "prompt": without_images(prompt.content),
                "completion": completion.text,
                "scores": dict(zip(self.reward_names, scores[row], strict=True)),
                "failures": self.rewards.reasons.get(row, {}),
                "reward": reward[row],
                "advantage": None,
                "stop_reason": completion.stop_reason,
                "num_tokens": len(completion.token_ids),
                "extra": {name: values[row] for name, values in extra.items()},
            }
            for row, (number, prompt, completion) in enumerate(flat)
        ]

    def _shown(self, groups: list[Group], texts: list[Any], stored: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rollout as the table of completions shows it; the advantages follow when they are known."""
        prompts = [group.prompt for group in groups for _ in group.completions]
        return [
            {
                "prompt": prompt.content,
                "completion": text,
                "rewards": row["scores"],
                "extra": row["extra"],
                **({"images": prompt.images} if self.log_images else {}),
            }
            for prompt, text, row in zip(prompts, texts, stored, strict=True)
        ]


def _flat(groups: list[Group]) -> tuple[list[dict[str, Any]], list[Any], list[Any], list[list[int]]]:
    """Columns, prompts, completions and token ids, one of each per completion."""
    flat = [(group.prompt, completion) for group in groups for completion in group.completions]
    return (
        [prompt.columns for prompt, _ in flat],
        [prompt.content for prompt, _ in flat],
        [_as_reply(prompt.conversational, completion.text) for prompt, completion in flat],
        [completion.token_ids for _, completion in flat],
    )


def column_names(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The columns that any of the rows has, beside the prompt.

    >>> column_names([{"prompt": "a", "x": 1}, {"prompt": "b", "y": 2}])
    ['x', 'y']
    """
    return list(dict.fromkeys(name for row in rows for name in row if name != "prompt"))


def _as_reply(conversational: bool, text: str) -> Any:
    return [{"role": "assistant", "content": text}] if conversational else text


def replace_degenerate(
    rollout: Rollout, draw: Callable[[int, int], Rollout], rounds: int, processes: Processes = ALONE
) -> tuple[Rollout, int]:
    """Replace groups without signal by groups with some, drawn in at most `rounds` rounds; says how many were replaced.

    `draw(count, round)` collects `count` groups of other prompts. What still is without signal at the end stays, so
    that the rollout keeps its size. All processes draw in a round, also one that lacks nothing: `draw` is told so.
    """
    replaced = 0
    for number in range(rounds):
        equal = rollout.degenerate()
        missing = [group for group, without in enumerate(equal) if without]
        if not processes.any(bool(missing)):
            break
        try:
            other = draw(len(missing), number)
        except NoCompletionError:  # which is no reason to lose the groups that there are
            continue
        found = [group for group, without in enumerate(other.degenerate()) if not without]
        swaps = dict(zip(missing, found, strict=False))
        replaced += len(swaps)
        rollout = _assembled([(other, swaps[g]) if g in swaps else (rollout, g) for g in range(len(equal))])
    return rollout, replaced


def _assembled(sources: list[tuple[Rollout, int]]) -> Rollout:
    """A rollout of groups taken from others; nothing of it has been used yet."""
    rows = [
        (source, row, new)
        for new, (source, old) in enumerate(sources)
        for row in (source.groups == old).nonzero().flatten().tolist()
    ]
    sampled = [r.sampling_logprobs[row] if r.sampling_logprobs is not None else None for r, row, _ in rows]
    return Rollout(
        prompt_ids=[r.prompt_ids[row] for r, row, _ in rows],
        completion_ids=[r.completion_ids[row] for r, row, _ in rows],
        groups=torch.tensor([new for _, _, new in rows]),
        scores=torch.stack([r.scores[row] for r, row, _ in rows]),
        score=torch.stack([r.score[row] for r, row, _ in rows]),
        trained=[r.trained[row] for r, row, _ in rows],
        num_groups=len(sources),
        sampling_logprobs=None if any(s is None for s in sampled) else sampled,  # type: ignore[arg-type]
        ended=[bool(r.ended and r.ended[row]) for r, row, _ in rows],
        prompt_inputs=[r.prompt_inputs[row] for r, row, _ in rows],
        records=[r.records[row] for r, row, _ in rows],
    )


class RolloutBuffer:
    """The rollouts that the present and later updates train on. A checkpoint holds them."""

    def __init__(self, make: Callable[[UpdatePlan, int], Rollout], num_uses: int) -> None:
        self.make, self.num_uses = make, num_uses
        self.rollouts: dict[tuple[int, int], tuple[Rollout, int]] = {}

    def take(self, plan: UpdatePlan) -> list[Share]:
        """The shares of an update; rollouts that are not there yet are made, those used up are let go."""
        shares: list[Share] = []
        for ref in plan.parts:
            key = plan.key(ref.rollout)
            if key not in self.rollouts:
                self.rollouts[key] = (self.make(plan, ref.rollout), self.num_uses)
            rollout, left = self.rollouts[key]
            shares.append(Share(rollout=rollout, rows=rollout.rows(ref.part, ref.parts)))
            self.rollouts[key] = (rollout, left - 1)
        self.rollouts = {key: entry for key, entry in self.rollouts.items() if entry[1] > 0}
        return shares

    def records(self) -> set[int]:
        """Numbers, in store and table, of rows that wait for their first update."""
        return {number for rollout, _ in self.rollouts.values() for number in rollout.records}

    def state_dict(self) -> list[dict[str, Any]]:
        """The rollouts that later updates need, as plain data."""
        names = [field.name for field in dataclasses.fields(Rollout)]
        return [
            {"key": list(key), "left": left, "rollout": {name: getattr(rollout, name) for name in names}}
            for key, (rollout, left) in self.rollouts.items()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Go on where a checkpoint stopped."""
        self.rollouts = {tuple(e["key"]): (Rollout(**e["rollout"]), e["left"]) for e in state}
