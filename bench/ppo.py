"""PPO with a value model beside RLOO, in one plain loop: what a critic costs, and what it brings.

An ordinary PPO for language models (Schulman et al. 2017): a value model of the policy's size, generalised advantage
estimation over tokens, clipped ratios, a clipped value loss, and the KL to the starting policy charged token by token.
RLOO runs in the same loop, with the same sampler, optimizer and reward: they differ in advantages and loss alone. In
both, the first pass over a rollout is its own old policy, so that no network is run twice for one gradient.

`bench/claims.py` runs it on the demo's task and prints the tables of docs/claims.md.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from learning import RECENT, change, largest_fall, shown, start
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rloom.algo import leave_one_out
from rloom.demo import task


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is run. Both methods have the same number of completions per rollout."""

    method: Literal["rloo", "ppo"]
    completions: int = 64
    k: int = 4  # RLOO's completions per prompt; PPO has one, and more prompts
    passes: int = 1
    learning_rate: float = 1e-4
    value_learning_rate: float = 1e-3
    beta: float = 0.02
    clip: float = 0.2
    value_clip: float = 0.2
    trace: float = 0.95  # λ of the advantages; rewards are not discounted
    max_grad_norm: float = 1.0


# -- the formulas


def generalised_advantages(rewards: Tensor, values: Tensor, mask: Tensor, trace: float) -> Tensor:
    """A_t = Σ_l λ^l · δ_{t+l} with δ_t = r_t + V_{t+1} − V_t. After a completion's last token V is 0. (N, T)

    >>> one = torch.ones(1, 2)
    >>> generalised_advantages(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]]), one, trace=1.0).tolist()
    [[0.5, 0.75]]
    """
    values = values * mask
    delta = (rewards + F.pad(values[:, 1:], (0, 1)) - values) * mask
    result, carried = torch.zeros_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        carried = delta[:, t] + trace * carried
        result[:, t] = carried
    return result * mask


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """−min(ρ·A, clip(ρ, 1−ε, 1+ε)·A), elementwise."""
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def clipped_value_loss(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> Tensor:
    """½ · max((V − R)², (clip(V, V_old ± ε) − R)²), elementwise."""
    held = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (held - returns).square())


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens of completions."""
    return (values * mask).sum() / mask.sum()


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over the tokens of completions."""
    centred = values - masked_mean(values, mask)
    return centred / (masked_mean(centred.square(), mask).sqrt() + 1e-8) * mask


# -- one run


class ValueModel(nn.Module):
    """A copy of the policy's trunk with a number per position: the expected reward from there on."""

    def __init__(self, policy: LlamaForCausalLM) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(policy.model)
        self.head = nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Values (N, L)."""
        return self.head(self.trunk(input_ids=ids, attention_mask=mask).last_hidden_state).squeeze(-1)


@dataclass(slots=True, kw_only=True)
class Batch:
    """Prompts of one length with their completions, padded on the right."""

    ids: Tensor  # (N, P + T)
    attention: Tensor  # (N, P + T)
    mask: Tensor  # (N, T): the completions' own tokens
    score: Tensor  # (N,)
    groups: Tensor  # (N,)

    @property
    def predicting(self) -> slice:
        """The positions whose output is about a completion's token."""
        width = self.mask.shape[1]
        return slice(self.ids.shape[1] - width - 1, -1)


@dataclass(slots=True)
class Run:
    """A policy in training."""

    settings: Settings
    policy: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    seed: int
    value: ValueModel | None = field(init=False, default=None)
    reference: LlamaForCausalLM = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.policy.eval()
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)
        groups: list[dict[str, Any]] = [{"params": self.policy.parameters(), "lr": self.settings.learning_rate}]
        if self.settings.method == "ppo":
            self.value = ValueModel(self.policy)
            groups.append({"params": self.value.parameters(), "lr": self.settings.value_learning_rate})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)

    @property
    def networks(self) -> list[nn.Module]:
        """The networks that are trained."""
        return [self.policy] if self.value is None else [self.policy, self.value]

    @torch.no_grad()
    def sample(self, rows: list[task.Row], number: int) -> Batch:
        """Completions of some prompts by the policy as it is, scored by exact match."""
        count = self.settings.k if self.settings.method == "rloo" else 1
        rows = [row for row in rows[: self.settings.completions // count] for _ in range(count)]
        prompts = self.tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
        with torch.random.fork_rng():
            torch.manual_seed(self.seed * 1_000_003 + number)
            how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
            ids = self.policy.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=task.MAX_COMPLETION_LENGTH, **how
            )
        drawn = ids[:, prompts.shape[1] :]
        ended = (drawn == self.tokenizer.eos_token_id).long()
        # A completion's last token is its first EOS.
        mask = (ended.cumsum(1) - ended == 0).float()
        texts = self.tokenizer.batch_decode(drawn, skip_special_tokens=True)
        return Batch(
            ids=ids,
            attention=torch.cat([torch.ones_like(prompts), mask.long()], 1),
            mask=mask,
            score=torch.tensor(task.exact_match(texts, answer=[row["answer"] for row in rows])),
            groups=torch.arange(len(rows)) // count,
        )

    def update(self, batch: Batch) -> None:
        """`passes` steps of the optimizer on one rollout."""
        with torch.no_grad():
            reference = self.logprobs(self.reference, batch)
        loss = self._ppo_loss(batch, reference) if self.value is not None else self._rloo_loss(batch, reference)
        for _ in range(self.settings.passes):
            self.optimizer.zero_grad()
            loss().backward()
            for network in self.networks:
                nn.utils.clip_grad_norm_(network.parameters(), self.settings.max_grad_norm)
            self.optimizer.step()

    def logprobs(self, model: LlamaForCausalLM, batch: Batch) -> Tensor:
        """log π of each token of the completions, (N, T)."""
        logits = model(input_ids=batch.ids, attention_mask=batch.attention).logits[:, batch.predicting]
        drawn = batch.ids[:, -batch.mask.shape[1] :, None]
        return logits.log_softmax(-1).gather(-1, drawn).squeeze(-1) * batch.mask

    def _rloo_loss(self, batch: Batch, reference: Tensor) -> Callable[[], Tensor]:
        """One ratio and one leave-one-out advantage for each completion; the KL is in the reward."""
        settings = self.settings
        first: dict[str, Tensor] = {}

        def loss() -> Tensor:
            own = self.logprobs(self.policy, batch).sum(1)
            if not first:
                first["old"] = own.detach()
                reward = batch.score - settings.beta * (first["old"] - reference.sum(1))
                first["advantages"] = leave_one_out(reward, batch.groups)
            return clipped_surrogate(own - first["old"], first["advantages"], settings.clip).mean()

        return loss

    def token_rewards(self, batch: Batch, old: Tensor, reference: Tensor) -> Tensor:
        """The KL is charged at each token, and the score is given at the last. (N, T)"""
        left = batch.mask.flip(1).cumsum(1).flip(1)
        last = batch.mask * (left == 1)
        return last * batch.score[:, None] - self.settings.beta * (old - reference)

    def _ppo_loss(self, batch: Batch, reference: Tensor) -> Callable[[], Tensor]:
        """A ratio, an advantage and a value for each token."""
        settings, value = self.settings, self.value
        assert value is not None
        first: dict[str, Tensor] = {}

        def loss() -> Tensor:
            own = self.logprobs(self.policy, batch)
            values = value(batch.ids, batch.attention)[:, batch.predicting] * batch.mask
            if not first:
                first["old"], first["values"] = own.detach(), values.detach()
                rewards = self.token_rewards(batch, first["old"], reference)
                advantages = generalised_advantages(rewards, first["values"], batch.mask, settings.trace)
                first["returns"] = advantages + first["values"]
                first["advantages"] = whitened(advantages, batch.mask)
            policy = clipped_surrogate(own - first["old"], first["advantages"], settings.clip)
            critic = clipped_value_loss(values, first["values"], first["returns"], settings.value_clip)
            return masked_mean(policy + critic, batch.mask)

        return loss


# -- learning


@dataclass(slots=True, kw_only=True)
class Learning:
    """A run's curve, and its cost by the processor's clock."""

    scores: list[float] = field(default_factory=list)  # the mean score of each rollout
    held_out: float = 0.0
    sampling: list[float] = field(default_factory=list)  # seconds of each rollout
    updating: list[float] = field(default_factory=list)  # seconds of each update

    @property
    def mean(self) -> float:
        """The score over the whole run: high if it learns early."""
        return statistics.fmean(self.scores)


def learn(settings: Settings, seed: int, rollouts: int, test: list[task.Row]) -> Learning:
    """Train from a warm start. Both methods go through the prompts in the same order."""
    policy, tokenizer, rows = start(seed)
    run, result = Run(settings, policy, tokenizer, seed), Learning()
    for number in range(rollouts):
        first = number * settings.completions % len(rows)
        began = time.process_time()
        batch = run.sample(rows[first : first + settings.completions], number)
        sampled = time.process_time()
        run.update(batch)
        result.scores.append(batch.score.mean().item())
        result.sampling.append(sampled - began)
        result.updating.append(time.process_time() - sampled)
    result.held_out = task.accuracy(policy, tokenizer, test, sampled=True, seed=seed)
    return result


Found = dict[tuple[str, int], list[Learning]]
"""Outcomes by method and passes, one per seed."""


def compare(seeds: Sequence[int], rollouts: int, test: list[task.Row], passes: Sequence[int]) -> Found:
    """RLOO and PPO with the same number of completions. They take turns, so that a busy machine is busy for both."""
    found: Found = {(method, count): [] for count in passes for method in ("rloo", "ppo")}
    for seed in seeds:
        for (method, count), outcomes in found.items():
            settings = Settings(method=method, passes=count)  # type: ignore[arg-type]
            outcomes.append(learn(settings, seed, rollouts, test))
    return found


def _rows(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _name(method: str, passes: int) -> str:
    return f"{method.upper()}, {passes} pass{'es' if passes > 1 else ''}"


def learning_table(found: Found) -> str:
    """Curves, and what is left at the end; changes are PPO's against RLOO's with as many passes."""
    length = len(next(iter(found.values()))[0].scores)
    parts = [range(first, min(first + RECENT, length)) for first in range(0, length, RECENT)]
    titles = [
        "", *(f"{part.start + 1}–{part.stop}" for part in parts), "over the run", "change", "held-out, at the end",
        "change", "spread over seeds", "largest fall",
    ]  # fmt: skip
    rows = []
    for (method, passes), outcomes in found.items():
        base = found["rloo", passes]
        means, last = [o.mean for o in outcomes], [o.held_out for o in outcomes]
        rows.append([
            _name(method, passes),
            *(f"{statistics.fmean(o.scores[i] for o in outcomes for i in part):.2f}" for part in parts),
            shown(means),
            "" if outcomes is base else change(means, [o.mean for o in base]),
            shown(last),
            "" if outcomes is base else change(last, [o.held_out for o in base]),
            f"{statistics.stdev(last):.2f}",
            shown([largest_fall(o.scores) for o in outcomes]),
        ])  # fmt: skip
    return _rows(titles, rows)


def seconds_table(found: Found) -> str:
    """Milliseconds of the processor: a seed's median, then mean and interval over seeds."""
    rows = []
    for (method, passes), outcomes in found.items():
        sampling, updating = ([1e3 * statistics.median(times) for times in several] for several in (
            [o.sampling for o in outcomes], [o.updating for o in outcomes]
        ))  # fmt: skip
        base = [1e3 * statistics.median(o.updating) for o in found["rloo", passes]]
        ratio = [a / b for a, b in zip(updating, base, strict=True)]
        rows.append([
            _name(method, passes), shown(sampling, 1), shown(updating, 1), shown(ratio) if method == "ppo" else "1"
        ])  # fmt: skip
    return _rows(["", "a rollout, ms", "its updates, ms", "updates, times RLOO's"], rows)


# -- memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """What is allocated, in bytes."""

    parameters: int
    gradients: int
    optimizer: int
    peak: int  # of all tensors at once, while an update runs

    @property
    def held(self) -> int:
        """What is there between updates."""
        return self.parameters + self.gradients + self.optimizer


def size_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of some tensors, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def memory_of(run: Run, batch: Batch) -> Bytes:
    """Run an update, so that gradients and optimizer state are there; count them; and watch another update."""
    run.update(batch)
    parameters = [p for model in (*run.networks, run.reference) for p in model.parameters()]
    gradients = [p.grad for p in parameters if p.grad is not None]
    states = [value for state in run.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    sizes = {"parameters": size_of(parameters), "gradients": size_of(gradients), "optimizer": size_of(states)}
    # The watched update allocates gradients again.
    del gradients
    run.optimizer.zero_grad()
    above = peak_above(lambda: run.update(batch))
    return Bytes(**sizes, peak=sizes["parameters"] + sizes["optimizer"] + above)


def peak_above(work: Callable[[], None]) -> int:
    """By how many bytes the tensors at their peak exceed those at the start, by torch's own record of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    held = peak = 0
    found = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(found, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def larger_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A llama of 11M random weights: weights outweigh activations, as in a language model."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
        max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def measured_memory(*, large: bool = True) -> dict[str, dict[str, Bytes]]:
    """Bytes by model and method."""
    small, tokenizer, rows = start(0)
    models = {"0.33M weights, 64 completions": (small, 64)}
    if large:
        models["11M weights, 16 completions"] = (larger_model(tokenizer), 16)
    result: dict[str, dict[str, Bytes]] = {}
    for name, (model, completions) in models.items():
        result[name] = {}
        for method in ("rloo", "ppo"):
            settings = Settings(method=method, completions=completions)
            run = Run(settings, copy.deepcopy(model), tokenizer, seed=0)
            result[name][method] = memory_of(run, run.sample(rows, 0))
    return result


def measured_memory_table(found: dict[str, dict[str, Bytes]]) -> str:
    """MiB, and how much less RLOO takes."""
    rows = []
    for name, methods in found.items():
        for method, size in methods.items():
            mib = [f"{part / 2**20:.1f}" for part in (size.parameters, size.gradients, size.optimizer)]
            less = [1 - getattr(size, part) / getattr(methods["ppo"], part) for part in ("held", "peak")]
            cells = [f"{value / 2**20:.1f}" for value in (size.held, size.peak)]
            if method == "rloo":
                cells = [f"{cell} ({share:.0%} less)" for cell, share in zip(cells, less, strict=True)]
            rows.append([name, method.upper(), *mib, *cells])
    titles = ["", "", "parameters", "gradients", "optimizer", "between updates", "at the peak of an update"]
    return _rows(titles, rows)
