"""A whole run in plain PyTorch, row by row, written from docs/algorithms.md, docs/metrics.md and docs/architecture.md.

Nothing here is shared with rloom: no formula, no schedule, no optimizer. It is slow and simple on purpose. A row is one
completion, a forward is the model's own on one unpadded row, everything about rows is a list of Python numbers, and one
backward covers an update. What is random in a run comes from a tape: the calls that rloom made to its engine.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

DEFAULTS: dict[str, Any] = {
    "advantage_estimator": "leave_one_out",
    "kl_estimator": "k1",
    "kl_placement": "reward",
    "ratio_level": "sequence",
    "surrogate": "clip",
    "loss_aggregation": "sequence_mean",
    "dual_clip": 0,
    "advantage_clip": 0,
    "normalize_rewards": "off",
    "normalize_advantages": False,
    "reward_clip_range": None,
    "beta": 0.05,
    "kl_target": None,
    "kl_target_gain": 0.1,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": None,
    "reward_weights": None,
    "baseline_momentum": 0.9,
    "missing_eos_penalty": None,
    "length_regularization": None,
    "length_coefficient": 1.0,
    "length_margin": None,
    "truncated_completions": "keep",
    "temperature": 1.0,
    "sync_ref_model": False,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "router_aux_loss_coef": None,
    "disable_dropout": False,
    "packing": None,
    "num_generations_eval": None,
    "eval_steps": None,
    "log_older_metrics": False,
    "shuffle_dataset": True,
    "max_steps": -1,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": None,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "optim_args": None,
    "adam_epsilon": 1e-8,
}

OBJECTIVES: dict[str, dict[str, Any]] = {
    "trl": {},
    "paper": {"surrogate": "reinforce"},
    "openrlhf": {
        "kl_placement": "reward_tokens_after_baseline",
        "advantage_clip": 10,
        "ratio_level": "token",
        "loss_aggregation": "token_mean",
    },
    "verl": {"ratio_level": "token", "dual_clip": 3, "loss_aggregation": "token_mean"},
    "reinforce++": {
        "normalize_rewards": "batch",
        "reward_clip_range": (-10, 10),
        "advantage_estimator": "none",
        "kl_placement": "reward_tokens_after_baseline",
        "normalize_advantages": True,
        "ratio_level": "token",
        "loss_aggregation": "token_mean",
    },
}


def settled(options: dict[str, Any]) -> SimpleNamespace:
    """All options: those given, else the objective's, else the default."""
    chosen = DEFAULTS | OBJECTIVES[options.get("objective", "trl")] | options
    chosen["steps_per_generation"] = chosen["steps_per_generation"] or chosen["gradient_accumulation_steps"]
    return SimpleNamespace(**chosen)


@dataclass
class Row:
    """One completion, and what becomes known about it."""

    group: int
    prompt: list[int]
    tokens: list[int]
    ended: bool
    trained: bool
    sampled: list[float]  # the engine's log-probabilities
    mask: list[bool]  # which tokens the policy drew
    scores: list[float | None]
    total: float | None = None  # weighted sum, as logged
    score: float | None = None  # after penalties, normaliser and clip
    old: Tensor | None = None
    reference: Tensor | None = None  # (T, V)
    kl: Tensor | None = None
    advantage: float | list[float] = 0.0

    @property
    def length(self) -> int:
        """Tokens that are in the loss."""
        return len(self.drawn) if self.trained else 0

    @property
    def drawn(self) -> list[int]:
        """The tokens that the policy drew."""
        return [token for token, mine in zip(self.tokens, self.mask, strict=True) if mine]


@dataclass
class Rollout:
    """Rows in the order of prompts; how many groups and completions were asked for, the lost ones included."""

    rows: list[Row]
    groups: int
    asked: int
    logged: bool = False

    def part(self, number: int, parts: int) -> range:
        """Contiguous parts, as equal as can be."""
        count = len(self.rows)
        return range(number * count // parts, (number + 1) * count // parts)


@dataclass
class Notes:
    """Metrics since the last log."""

    values: dict[str, list[float | None]] = field(default_factory=dict)

    def add(self, name: str, value: float | Tensor | None) -> None:
        """One more value; None where there was nothing to measure."""
        self.values.setdefault(name, []).append(None if value is None else float(value))

    def set(self, name: str, value: float | None) -> None:
        """A value that stands for all."""
        self.values[name] = [value]

    def take(self) -> dict[str, float | None]:
        """The means; a name with nothing to measure is None."""
        means = {name: mean([v for v in values if v is not None]) for name, values in self.values.items()}
        self.values = {}
        return means


def mean(values: list[float]) -> float | None:
    """None of nothing."""
    return sum(values) / len(values) if values else None


def spread(values: list[float]) -> float | None:
    """The standard deviation (n−1); None with fewer than two."""
    if len(values) < 2:
        return None
    middle = sum(values) / len(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


class Oracle:
    """Simulates the run of `options` on a model and prompts; `logs` and `weights` are what the run should show.

    `tape(prompts, count, mode)` gives each prompt's completions as (tokens, ended, sampled, mask) or None, where
    `prompts` is None for those of the run's own choice (a shuffled data set).
    """

    def __init__(
        self,
        policy: Any,
        reference: Any,
        options: dict[str, Any],
        *,
        prompts: list[str],
        eval_prompts: list[str],
        rewards: list[Callable[..., list[float | None]]],
        tape: Callable[[list[str] | None, int, int, str], list[tuple[str, list[Any]]]],
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        stream: bool = False,
    ) -> None:
        self.set = settled(options)
        self.policy, self.reference = policy, reference.eval()
        self.prompts, self.eval_prompts = prompts, eval_prompts
        self.rewards, self.tape, self.encode, self.decode, self.stream = rewards, tape, encode, decode, stream
        self.weights_of_rewards = self.set.reward_weights or [1.0] * len(rewards)
        self.optimizer = OPTIMIZERS[self.set.optim](self.set, list(self.policy.parameters()))
        self.notes, self.logs, self.weights = Notes(), [], []
        self.average: float | None = None  # of the moving-average baseline
        self.seen: list[float] = []  # all scores of the run, for the running normaliser
        self.num_tokens = self.episodes = 0
        self.finest = 1.0
        self.chance = False  # whether a score was the mean of others by chance: rounding decides if its advantage is 0
        self.beta = self.set.beta  # which may follow the KL
        self.coefficient = self.set.router_aux_loss_coef
        if self.coefficient is None:
            self.coefficient = getattr(policy.config, "router_aux_loss_coef", 0.0)
        if self.set.disable_dropout:
            for module in self.policy.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0

    # -- the schedule

    @property
    def prompts_per_rollout(self) -> int:
        return self.set.per_device_train_batch_size * self.set.steps_per_generation // self.set.num_generations

    def updates_of_an_epoch(self) -> list[list[tuple[int, int]]]:
        """Rollouts are cut into parts and passed over several times; an update takes the next: (rollout, part)."""
        rollouts = len(self.prompts) // self.prompts_per_rollout
        parts = range(self.set.steps_per_generation)
        line = [(r, part) for r in range(rollouts) for _ in range(self.set.num_iterations) for part in parts]
        size = self.set.gradient_accumulation_steps
        return [line[i : i + size] for i in range(0, len(line), size)]

    def num_updates(self) -> int:
        """Of the whole run."""
        if self.set.max_steps > 0:
            return self.set.max_steps
        return int(self.set.num_train_epochs) * len(self.updates_of_an_epoch())

    def learning_rate(self, update: int) -> float:
        """Of an update, counted from 0."""
        rate, warmup, total = self.set.learning_rate, self.set.warmup_steps, self.num_updates()
        if self.set.lr_scheduler_type == "constant":  # which knows no warm-up
            return rate
        if update < warmup:
            return rate * update / warmup
        progress = (update - warmup) / max(1, total - warmup)
        falls = {
            "constant_with_warmup": 1.0,
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        }
        return rate * falls[self.set.lr_scheduler_type]

    # -- the run

    def run(self) -> None:
        """The whole of it."""
        losses: list[float] = []
        since: list[float] = []
        done, total = 0, self.num_updates()
        while done < total:
            rollouts: dict[int, Rollout] = {}
            used: set[int] = set()
            for update in self.updates_of_an_epoch():
                if done == total:
                    break
                loss, norm = self.update(update, rollouts, used, self.learning_rate(done))
                losses.append(loss)
                since.append(loss)
                done += 1
                epoch = done / total if self.stream else done / len(self.updates_of_an_epoch())
                if self.set.sync_ref_model and done % self.set.ref_model_sync_steps == 0:
                    self.sync()
                if done % self.set.logging_steps == 0:
                    log = {"loss": mean(since), "grad_norm": norm, "learning_rate": self.learning_rate(done - 1)}
                    if self.set.log_older_metrics:
                        log |= {"episode": self.episodes, "lr": self.learning_rate(done - 1)}
                    self.logs.append(log | self.notes.take() | {"step": done, "epoch": epoch})
                    since = []
                if self.set.eval_steps and (done % self.set.eval_steps == 0 or done == total):
                    self.logs.append(self.evaluate() | {"step": done, "epoch": epoch})
        self.logs.append({"train_loss": mean(losses)} | self.notes.take() | {"step": done, "epoch": epoch})

    def sync(self) -> None:
        """reference ← α·policy + (1−α)·reference."""
        alpha = self.set.ref_model_mixup_alpha
        with torch.no_grad():
            for mine, other in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                mine.copy_(alpha * other + (1 - alpha) * mine)

    def update(
        self, parts: list[tuple[int, int]], rollouts: dict[int, Rollout], used: set[int], rate: float
    ) -> tuple[float, float]:
        """One optimizer step; the loss, and the gradient's norm before clipping."""
        count = self.set.steps_per_generation
        for number in dict.fromkeys(r for r, _ in parts):
            if number not in used:
                used.add(number)
                covered = {part for r, part in parts if r == number}
                rollouts[number] = self.begin(number, whole=len(covered) == count)
        stretches: list[tuple[Rollout, list[int]]] = []  # neighbouring parts of a rollout are one
        for number, part in parts:
            rows = list(rollouts[number].part(part, count))
            last = stretches[-1] if stretches else None
            if last and last[0] is rollouts[number] and (not rows or not last[1] or last[1][-1] + 1 == rows[0]):
                last[1].extend(rows)
            else:
                stretches.append((rollouts[number], rows))
        loss = self.loss(stretches, train=True)
        self.policy.zero_grad()
        if loss.requires_grad:
            loss.backward()
        for rollout, _ in stretches:
            self.measure(rollout, self.notes)
        norm = self.optimizer.step(rate)
        self.weights.append([p.detach().clone() for p in self.policy.parameters()])
        return float(loss.detach()), norm

    # -- forwards

    def forward(self, model: Any, row: Row) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities of all tokens at each that was drawn, (D, V), and each layer's router logits."""
        ids = torch.tensor([row.prompt + row.tokens])
        if not self.coefficient:
            out = model(input_ids=ids, use_cache=False)
        else:
            out = model(input_ids=ids, use_cache=False, output_router_logits=True)
        logits = out.logits[0, len(row.prompt) - 1 : -1][torch.tensor(row.mask)].double() / self.set.temperature
        return logits.log_softmax(-1), list(out.router_logits) if self.coefficient else []

    def of_reference(self, row: Row) -> Tensor:
        """What the reference says, as it was when the rollout was collected; for the exact KL, as it is now."""
        if row.reference is None or self.set.kl_estimator == "full":
            with torch.no_grad():
                row.reference = self.forward(self.reference, row)[0]
        return row.reference

    def token_kl(self, row: Row, policy: Tensor) -> Tensor:
        """The chosen estimate at each token, (T,)."""
        reference = self.of_reference(row)
        if self.set.kl_estimator == "full":
            return (policy.exp() * (policy - reference)).sum(-1)
        log_ratio = drawn(policy, row) - drawn(reference, row)
        return {
            "k1": log_ratio,
            "k2": log_ratio**2 / 2,
            "k3": (-log_ratio).exp() - 1 + log_ratio,
        }[self.set.kl_estimator]

    @property
    def charged(self) -> bool:
        """Whether the KL is part of the reward."""
        return bool(self.set.beta) and self.set.kl_placement != "loss"

    # -- a rollout

    def begin(self, number: int, *, whole: bool) -> Rollout:
        """Collect a rollout, and all that is known of it before its first update."""
        first = number * self.prompts_per_rollout
        prompts = None if self.set.shuffle_dataset and not self.stream else self.prompts
        wanted = prompts and prompts[first : first + self.prompts_per_rollout]
        rollout = self.collect(wanted, self.prompts_per_rollout, self.set.num_generations, "train")
        self.episodes += rollout.asked
        self.prepare(rollout, train=True)
        if not whole:  # else the training forward says what the old policy says
            self.remember(rollout)
        return rollout

    def collect(self, prompts: list[str] | None, number: int, count: int, mode: str) -> Rollout:
        """Completions and their scores, shaped."""
        rows: list[Row] = []
        drawn_groups = self.tape(prompts, number, count, mode)
        for group, (prompt, completions) in enumerate(drawn_groups):
            there = [c for c in completions if c is not None]
            texts = [self.decode(tokens) for tokens, *_ in there]
            values = [f(prompts=[prompt] * len(texts), completions=texts) for f in self.rewards]
            for index, (tokens, ended, sampled, mask) in enumerate(there):
                trained = any(mask) and (ended or self.set.truncated_completions == "keep")
                scores = [column[index] for column in values]
                rows.append(Row(group, self.encode(prompt), tokens, ended, trained, sampled, mask, scores))
        self.shape(rows, train=mode == "train")
        rollout = Rollout(rows, len(drawn_groups), len(drawn_groups) * count)
        self.describe(rollout, self.notes if mode == "train" else self.eval_notes)
        return rollout

    def shape(self, rows: list[Row], *, train: bool) -> None:
        """Weighted sum, penalties, normaliser, clip."""
        for row in rows:
            known = [w * s for w, s in zip(self.weights_of_rewards, row.scores, strict=True) if s is not None]
            row.total = sum(known) if known else None
            excluded = self.set.truncated_completions == "exclude" and not row.ended
            row.score = None if row.total is None or excluded else row.total - self.penalty(row)
        if self.set.normalize_rewards == "batch":
            for row, value in zip(rows, self.normalised([row.score for row in rows]), strict=True):
                row.score = value
        elif self.set.normalize_rewards == "running":
            if train:
                self.seen += [row.score for row in rows if row.score is not None]
            middle, std = mean(self.seen) or 0.0, spread(self.seen)
            for row in rows:
                row.score = None if row.score is None else (row.score - middle) / ((1.0 if std is None else std) + 1e-4)
        if self.set.reward_clip_range:
            low, high = self.set.reward_clip_range
            for row in rows:
                row.score = None if row.score is None else min(max(row.score, low), high)

    def penalty(self, row: Row) -> float:
        """For not ending, and for length."""
        limit, cost = self.set.max_completion_length, 0.0
        if not row.ended:
            cost += self.set.missing_eos_penalty or 0.0
        if self.set.length_regularization == "linear":
            cost += self.set.length_coefficient * len(row.drawn) / limit
        if self.set.length_regularization == "soft_overlong":
            margin = self.set.length_margin or max(1, limit // 5)
            cost += self.set.length_coefficient * min(max((len(row.drawn) - (limit - margin)) / margin, 0.0), 1.0)
        return cost

    @torch.no_grad()
    def prepare(self, rollout: Rollout, *, train: bool) -> None:
        """KL, at the rollout's weights and without dropout, and advantages."""
        self.policy.eval()
        for row in rollout.rows:
            if row.trained and self.set.beta:
                self.of_reference(row)
            if row.trained and self.charged:
                row.kl = self.token_kl(row, self.forward(self.policy, row)[0])
        self.set_advantages(rollout.rows, train=train)

    @torch.no_grad()
    def remember(self, rollout: Rollout) -> None:
        """The old policy, without dropout."""
        self.policy.eval()
        for row in rollout.rows:
            if row.trained:
                row.old = drawn(self.forward(self.policy, row)[0], row)

    # -- advantages

    def set_advantages(self, rows: list[Row], *, train: bool) -> None:
        """Rewards, baseline, clip, the KL per token, normaliser."""
        placement, beta = self.set.kl_placement, self.beta
        rewards = [row.score for row in rows]
        if self.charged and placement in ("reward", "reward_tokens"):
            rewards = [None if row.score is None else row.score - beta * total(row.kl) for row in rows]
        compared = self.compared(rewards, [row.group for row in rows], train=train)
        if limit := self.set.advantage_clip:
            compared = [None if a is None else min(max(a, -limit), limit) for a in compared]
        if not (self.charged and placement.startswith("reward_tokens")):
            compared = self.normalised(compared) if self.set.normalize_advantages else compared
            for row, advantage in zip(rows, compared, strict=True):
                siblings = {other.score for other in rows if other.group == row.group and other.score is not None}
                near = advantage is not None and abs(advantage) < 1e-6
                alone = self.set.advantage_estimator not in ("leave_one_out", "group_mean", "group_mean_std")
                self.chance |= near and (alone or len(siblings) > 1) and self.set.normalize_rewards != "off"
                row.advantage = 0.0 if advantage is None or abs(advantage) < 1e-9 else advantage  # but for rounding
            return
        table = [self.per_token(row, advantage) for row, advantage in zip(rows, compared, strict=True)]
        if self.set.normalize_advantages:
            flat = iter(self.normalised([a for line in table for a in line]))
            table = [[next(flat) for _ in line] for line in table]
        for row, line in zip(rows, table, strict=True):
            row.advantage = [a or 0.0 for a in line]

    def normalised(self, values: list[float | None]) -> list[float | None]:
        """(x − mean) / (std + 1e-4) over those that are numbers; with fewer than two there is nothing to divide by."""
        known = [v for v in values if v is not None]
        middle = mean(known)
        if middle is None or len(known) < 2:
            return values
        divisor = self.divisor(known)
        return [None if v is None else (v - middle) / divisor for v in values]

    def divisor(self, values: list[float]) -> float:
        """What values are divided by. `finest` is the smallest of these: rounding is divided by it too."""
        std = spread(values)
        if self.charged or std > 1e-9:  # scores alone that are equal are so in any precision
            self.finest = min(self.finest, std + 1e-4)
        return std + 1e-4

    def per_token(self, row: Row, advantage: float | None) -> list[float | None]:
        """A token answers for the KL from there on."""
        if row.kl is None:
            return []
        kl = row.kl.tolist()
        result: list[float | None] = []
        for t in range(len(kl)):
            if advantage is None:
                result.append(None)
            elif self.set.kl_placement == "reward_tokens":  # all of it was charged: what came before is given back
                result.append(advantage + self.beta * sum(kl[:t]))
            else:
                result.append(advantage - self.beta * sum(kl[t:]))
        return result

    def compared(self, rewards: list[float | None], groups: list[int], *, train: bool) -> list[float | None]:
        """Rewards less their baselines; None where there is nothing to compare."""
        known = [r for r in rewards if r is not None]
        if self.set.advantage_estimator == "moving_average" and known:
            batch = sum(known) / len(known)
            baseline = batch if self.average is None else self.average
            if train:
                momentum = self.set.baseline_momentum
                self.average = momentum * baseline + (1 - momentum) * batch
            return [None if r is None else r - baseline for r in rewards]
        result: list[float | None] = []
        for i, reward in enumerate(rewards):
            mine = [(j, r) for j, r in enumerate(rewards) if r is not None and groups[j] == groups[i]]
            others = [r for j, r in mine if j != i]
            result.append(None if reward is None else self.against(reward, [r for _, r in mine], others, known))
        return result

    def against(self, reward: float, group: list[float], others: list[float], batch: list[float]) -> float | None:
        """One reward and what it is compared with."""
        estimator = self.set.advantage_estimator
        if estimator in ("leave_one_out", "group_mean", "group_mean_std") and not others:
            return None
        if estimator == "leave_one_out":
            return reward - sum(others) / len(others)
        if estimator == "group_mean":
            return reward - sum(group) / len(group)
        if estimator == "group_mean_std":
            return (reward - sum(group) / len(group)) / self.divisor(group)
        return reward - sum(batch) / len(batch) if estimator == "batch_mean" else reward

    # -- the loss

    def loss(self, stretches: list[tuple[Rollout, list[int]]], *, train: bool) -> Tensor:
        """Of an update, or of an evaluation's batch."""
        self.policy.train(train)
        chosen = [[rollout.rows[i] for i in rows] for rollout, rows in stretches]
        every = [row for rows in chosen for row in rows]
        counted = [row for row in every if row.trained or self.set.truncated_completions != "exclude"]
        tokens = max(1, sum(row.length for row in every))
        self.per = {"tokens": tokens, "rows": max(1, len(counted))}
        tally = SimpleNamespace(entropies=[], low=[], high=[], ratios=[], policy=0.0, aux=0.0, skipped=0)
        loss = torch.zeros((), dtype=torch.float64)
        for rows in chosen:
            routed: list[tuple[Row, list[Tensor]]] = []
            for row in rows:
                part, routers = self.of_row(row, tally)
                loss = loss + part
                if row.trained:
                    routed.append((row, routers))
            if self.coefficient and routed:
                share = sum(row.length for row, _ in routed) / tokens
                balance = share * self.balance(routed)
                tally.aux += float(balance.detach())
                loss = loss + self.coefficient * balance
        self.note_loss(tally, self.notes if train else self.eval_notes)
        return loss

    def of_row(self, row: Row, tally: SimpleNamespace) -> tuple[Tensor | float, list[Tensor]]:
        """What a completion adds to the loss, already divided."""
        advantage = row.advantage
        if not row.trained:  # no tokens: a product over none of them is 1
            plain = self.set.ratio_level == "sequence" and self.set.surrogate == "clip"
            value = -advantage / self.per["rows"] if plain and self.set.loss_aggregation != "token_mean" else 0.0
            tally.policy += value
            return value, []
        if self.policy.training and not self.set.beta and not self.coefficient and advantage == 0:
            tally.skipped += 1
            return 0.0, []
        policy, routers = self.forward(self.policy, row)
        logprobs = drawn(policy, row)
        if row.old is None:
            row.old = logprobs.detach()
        value = self.averaged(self.surrogate(row, logprobs, tally), row)
        tally.policy += float(value.detach())
        tally.entropies += (-(policy.exp() * policy).sum(-1)).tolist()
        if self.set.beta and self.set.kl_placement == "loss":
            kl = self.token_kl(row, policy)
            row.kl = kl.detach()
            value = value + self.beta * self.averaged(kl, row)
        return value, routers

    def surrogate(self, row: Row, logprobs: Tensor, tally: SimpleNamespace) -> Tensor:
        """−min(ρA, clip(ρ)A) or −A·log π: of the completion, (), or of its tokens, (T,)."""
        advantage = torch.tensor(row.advantage, dtype=torch.float64)
        old = row.old
        if self.set.ratio_level == "sequence":
            logprobs, old = logprobs.sum(), old.sum()
        ratio = (logprobs - old).exp()
        tally.ratios += ratio.detach().reshape(-1).tolist()
        if self.set.surrogate == "reinforce":
            tally.low.append(0.0)
            tally.high.append(0.0)
            return -advantage * logprobs
        low = 1 - self.set.epsilon
        high = 1 + (self.set.epsilon if self.set.epsilon_high is None else self.set.epsilon_high)
        tally.low.append(float(((ratio < low) & (advantage < 0)).double().mean()))
        tally.high.append(float(((ratio > high) & (advantage > 0)).double().mean()))
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if bound := self.set.dual_clip:
            gain = torch.where(advantage < 0, torch.maximum(gain, bound * advantage), gain)
        return -gain

    def averaged(self, values: Tensor, row: Row) -> Tensor:
        """A completion's part of the update's mean; `values` are (), of the whole of it, or (T,)."""
        how = self.set.loss_aggregation
        if how == "token_mean":
            weighted = values * row.length if values.dim() == 0 else values.sum()
            return weighted / self.per["tokens"]
        if how == "sequence_token_mean":
            return values.mean() / self.per["rows"]
        return values.sum() / self.per["rows"]

    def balance(self, routed: list[tuple[Row, list[Tensor]]]) -> Tensor:
        """E · Σ_e (share of choices that fall on e) · (mean probability of e), over a micro-batch's tokens and layers.

        Packed, a prompt's tokens are there once for neighbours of its group; padded, once for each.
        """
        layers: list[Tensor] = []
        before = None
        for row, routers in routed:
            again = self.set.packing is not False and before == row.group
            start = len(row.prompt) if again else 0
            layers += [router[start:] for router in routers]
            before = row.group
        logits = torch.cat(layers)
        experts, chosen = logits.shape[-1], self.policy.config.num_experts_per_tok
        probabilities = logits.softmax(-1)
        picked = probabilities.topk(chosen, dim=-1).indices
        shares = torch.stack([(picked == e).double().sum(-1).mean() for e in range(experts)])
        return experts * (shares * probabilities.mean(0)).sum()

    # -- metrics

    def note_loss(self, tally: SimpleNamespace, notes: Notes) -> None:
        """Of an update's forwards."""
        if tally.skipped:
            notes.add("completions/skipped", tally.skipped)
        if not tally.low:
            return
        notes.add("entropy", mean(tally.entropies))
        if self.coefficient:
            notes.add("aux_loss", tally.aux)
        region = [a + b for a, b in zip(tally.low, tally.high, strict=True)]
        notes.add("clip_ratio/low_mean", mean(tally.low))
        notes.add("clip_ratio/low_min", min(tally.low))
        notes.add("clip_ratio/high_mean", mean(tally.high))
        notes.add("clip_ratio/high_max", max(tally.high))
        notes.add("clip_ratio/region_mean", mean(region))
        if self.set.log_older_metrics:
            ratios = tally.ratios
            middle = sum(ratios) / len(ratios)
            notes.add("policy/approxkl_avg", mean([math.log(r) ** 2 / 2 for r in ratios]))
            notes.add("policy/clipfrac_avg", mean(region))
            notes.add("policy/entropy_avg", mean(tally.entropies))
            notes.add("loss/policy_avg", tally.policy)
            notes.add("val/ratio", middle)
            notes.add("val/ratio_var", sum((r - middle) ** 2 for r in ratios) / len(ratios))

    def describe(self, rollout: Rollout, notes: Notes) -> None:
        """Of a rollout's completions and scores."""
        rows = rollout.rows
        lengths = [len(row.drawn) for row in rows]
        finished = [len(row.drawn) for row in rows if row.ended] or [0]
        for name, values in (("", lengths), ("terminated_", finished)):
            notes.add(f"completions/mean_{name}length", mean(values))
            notes.add(f"completions/min_{name}length", min(values))
            notes.add(f"completions/max_{name}length", max(values))
        notes.add("completions/clipped_ratio", mean([float(not row.ended) for row in rows]))
        again = []
        for row in rows:
            pairs = [row.drawn[i : i + 2] for i in range(len(row.drawn) - 1)]
            again.append(mean([float(pair in pairs[:i]) for i, pair in enumerate(pairs)]) or 0.0)
        notes.add("completions/repetition", mean(again))
        for index, function in enumerate(self.rewards):
            known = [row.scores[index] for row in rows if row.scores[index] is not None]
            notes.add(f"rewards/{function.__name__}/mean", mean(known))
            notes.add(f"rewards/{function.__name__}/std", spread(known))
            if len(known) < len(rows):
                notes.add(f"rewards/{function.__name__}/none_ratio", 1 - len(known) / len(rows))
        scored = [row.total for row in rows if row.total is not None]
        notes.add("reward", mean(scored))
        notes.add("reward_std", spread(scored))
        groups = [
            [row.total for row in rows if row.group == g and row.total is not None] for g in range(rollout.groups)
        ]
        notes.add("frac_reward_zero_std", mean([float(spread(g) is not None and spread(g) < 1e-8) for g in groups]))
        if len(scored) < rollout.asked:
            notes.add("completions/unscored_ratio", 1 - len(scored) / rollout.asked)
        if notes is self.notes:
            self.num_tokens += sum(len(row.prompt) + len(row.tokens) for row in rows)
        notes.set("num_tokens", self.num_tokens)

    def measure(self, rollout: Rollout, notes: Notes) -> None:
        """What is known of a rollout with its first update."""
        if rollout.logged:
            return
        rollout.logged = True
        kls = [row.kl for row in rollout.rows if row.kl is not None]
        if kls:
            notes.add("kl", torch.cat(kls).mean())
        asked = [row for row in rollout.rows if row.old is not None]
        if asked:
            sampled = [[s for s, mine in zip(row.sampled, row.mask, strict=True) if mine] for row in asked]
            pairs = zip(asked, sampled, strict=True)
            gaps = torch.cat([(row.old - torch.tensor(s, dtype=torch.float64)).abs() for row, s in pairs])
            notes.add("mismatch/mean", gaps.mean())
            notes.add("mismatch/max", gaps.max())
        if self.set.log_older_metrics:
            self.measure_older(rollout, notes)
        if self.set.kl_target is not None and notes is self.notes:
            notes.add("beta", self.beta)
            if kls:
                away = float(torch.cat(kls).mean()) / self.set.kl_target - 1
                moved = self.beta * (1 + self.set.kl_target_gain * max(-0.2, min(2.0, away)))
                self.beta = max(self.set.beta / 100, min(self.set.beta * 100, moved))

    def measure_older(self, rollout: Rollout, notes: Notes) -> None:
        """The names of older documents."""
        rows, beta = rollout.rows, self.beta
        kls = [float(row.kl.sum()) for row in rows if row.kl is not None]
        charge = beta * (mean(kls) or 0.0)
        scores = mean([row.score for row in rows if row.score is not None])
        if kls:
            notes.add("objective/kl", mean(kls))
        surprises = [-float(row.old.sum()) for row in rows if row.old is not None]
        if surprises:
            notes.add("objective/entropy", mean(surprises))
        notes.add("objective/scores", scores)
        notes.add("objective/non_score_reward", charge)
        notes.add("objective/rlhf_reward", None if scores is None else scores - charge)
        variances = []
        for group in range(rollout.groups):
            mine = [r.score - beta * total(r.kl) for r in rows if r.group == group and r.score is not None]
            if len(mine) > 1:
                variances.append(spread(mine) ** 2)
        notes.add("rlhf_reward_var_per_prompt", mean(variances))
        notes.add("val/num_eos_tokens", sum(row.ended for row in rows))

    # -- evaluation

    def evaluate(self) -> dict[str, float | None]:
        """Batches of prompts at ratio 1; nothing of the run moves."""
        self.eval_notes = Notes()
        count = self.set.num_generations_eval or self.set.num_generations
        size = self.set.per_device_eval_batch_size // count
        losses, seen = [], []
        for start in range(0, len(self.eval_prompts), size):
            prompts = self.eval_prompts[start : start + size]
            rollout = self.collect(prompts, len(prompts), count, "eval")
            self.prepare(rollout, train=False)
            with torch.no_grad():
                losses.append(float(self.loss([(rollout, list(range(len(rollout.rows))))], train=False)))
            self.measure(rollout, self.eval_notes)
            seen.append(rollout)
        for name, value in self.over_prompts(seen).items():
            self.eval_notes.set(name, value)
        found = {f"eval_{name}": value for name, value in self.eval_notes.take().items()}
        return found | {"eval_loss": mean(losses)}

    def over_prompts(self, rollouts: list[Rollout]) -> dict[str, float | None]:
        """Means over all prompts of the set, of each prompt's mean."""
        groups = [[row for row in r.rows if row.group == g] for r in rollouts for g in range(r.groups)]

        def of(value: Callable[[Row], float | None]) -> float | None:
            known = [[value(row) for row in group if value(row) is not None] for group in groups]
            return mean([mean(values) for values in known if values])

        found = {
            "reward": of(lambda row: row.total),
            "completions/mean_length": of(lambda row: float(len(row.drawn))),
            "completions/clipped_ratio": of(lambda row: float(not row.ended)),
        }
        for index, function in enumerate(self.rewards):
            found[f"rewards/{function.__name__}/mean"] = of(lambda row, index=index: row.scores[index])
            scores = [[row.scores[index] for row in group if row.scores[index] is not None] for group in groups]
            found |= {f"rewards/{function.__name__}/{name}": value for name, value in pass_rates(scores).items()}
        kls = [row.kl for group in groups for row in group if row.kl is not None]
        if kls:
            found["kl"] = of(lambda row: None if row.kl is None else float(row.kl.sum())) / (
                sum(map(len, kls)) / len(kls)
            )
        return found


def pass_rates(groups: list[list[float]]) -> dict[str, float | None]:
    """1 − C(n−c, k)/C(n, k) for one and for the most completions, where all scores are 0 or 1."""
    largest = max(map(len, groups), default=0)
    if any(score not in (0, 1) for group in groups for score in group):
        return {}

    def at(k: int) -> float | None:
        counts = [(len(group), int(sum(group))) for group in groups if len(group) >= k]
        return mean([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts])

    return {f"pass@{k}": at(k) for k in sorted({1, max(1, largest)})}


def drawn(distributions: Tensor, row: Row) -> Tensor:
    """Of the tokens that were drawn: (D, V) → (D,)."""
    return distributions[torch.arange(len(row.drawn)), torch.tensor(row.drawn)]


def total(kl: Tensor | None) -> float:
    """A completion that is not trained on is not charged."""
    return 0.0 if kl is None else float(kl.sum())


# -- optimizers


class Optimizer(ABC):
    """Clips the gradient's norm, then one rule for every weight. Matrices decay, vectors (norms) do not."""

    def __init__(self, options: SimpleNamespace, parameters: list[Any]) -> None:
        self.set, self.parameters, self.steps = options, parameters, 0
        self.state: list[dict[str, Any]] = [{} for _ in parameters]
        pairs = [pair.split("=") for pair in (options.optim_args or "").split(",") if pair]
        self.extra = {name: float(value) for name, value in pairs}

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """One update of all weights; the norm before clipping."""
        self.steps += 1
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
        limit = self.set.max_grad_norm
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for parameter, grad, state in zip(self.parameters, grads, self.state, strict=True):
            decay = self.set.weight_decay if parameter.dim() > 1 else 0.0
            self.rule(parameter, grad * scale, rate, decay, state)
        return norm

    @abstractmethod
    def rule(self, weight: Tensor, grad: Tensor, rate: float, decay: float, state: dict[str, Any]) -> None:
        """Change one weight in place."""


class SGD(Optimizer):
    """w −= rate · m, m = momentum · m + g."""

    def rule(self, weight, grad, rate, decay, state):
        grad = grad + decay * weight
        state["m"] = self.extra.get("momentum", 0.0) * state["m"] + grad if "m" in state else grad
        weight -= rate * state["m"]


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019, with β = (0.9, 0.999)."""

    def rule(self, weight, grad, rate, decay, state):
        weight *= 1 - rate * decay
        state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * grad
        state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * grad**2
        first, second = state["m"] / (1 - 0.9**self.steps), state["v"] / (1 - 0.999**self.steps)
        weight -= rate * first / (second.sqrt() + self.set.adam_epsilon)


class RMSprop(Optimizer):
    """Hinton 2012, with α = 0.99."""

    def rule(self, weight, grad, rate, decay, state):
        grad = grad + decay * weight
        state["v"] = 0.99 * state.get("v", 0.0) + 0.01 * grad**2
        weight -= rate * grad / (state["v"].sqrt() + self.extra["eps"])


OPTIMIZERS = {"sgd": SGD, "adamw_torch": AdamW, "rmsprop": RMSprop}
