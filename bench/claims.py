"""What documents say about RLOO, measured: its gradient's variance, its options, and PPO beside it.

    python bench/claims.py             # a quarter of an hour on one core; prints the tables of docs/claims.md
    python bench/claims.py --only ppo  # a part: noise, memory, options or ppo
    python bench/claims.py --quick     # a few seconds, for tests

`learning.py` runs RLOO with and without an option, `ppo.py` runs PPO beside it. Here is the variance of the gradient.
The model is the demo's: a small llama that sorts digits, right about one time in four. For each K the same prompts are
sampled again and again; each time the gradient of mean_i A_i · log π(y_i) is taken with four baselines on the same
completions. All but the group mean's are unbiased estimates of one gradient, so their variances compare. There are two
rewards: 1 for the exact answer, else 0; and the number of digits in their places, which is far from 0 on average.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ppo
import torch
from learning import QUESTIONS, digits_in_place, options_table, run_questions
from torch import Tensor

from rloom.algo import group_mean, leave_one_out
from rloom.data.prompts import PromptEncoder
from rloom.demo import task
from rloom.generation import Sampling, TransformersEngine

PROMPTS = 8
KS = (2, 4, 8, 16)
REWARDS = ("exact", "digits")


@dataclass(slots=True)
class Noise:
    """Mean and variance of a gradient over repetitions."""

    count: int = 0
    total: Tensor | float = 0.0
    squares: float = 0.0

    def add(self, gradient: Tensor) -> None:
        """One more repetition."""
        self.count += 1
        self.total = self.total + gradient
        self.squares += float(gradient.square().sum())

    @property
    def mean(self) -> Tensor:
        """The mean gradient."""
        return torch.as_tensor(self.total) / self.count

    @property
    def variance(self) -> float:
        """The trace of the covariance: E‖g‖² − ‖E g‖², unbiased."""
        return (self.squares - self.count * float(self.mean.square().sum())) / (self.count - 1)


def baselines(fixed: float) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Advantages from rewards (N,) and their groups, with each of the baselines."""
    return {
        "leave-one-out": leave_one_out,
        "group mean": group_mean,
        "fixed": lambda reward, groups: reward - fixed,
        "none": lambda reward, groups: reward,
    }


class Bench:
    """A model, its prompts, and gradients of what it samples."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.tokenizer = task.make_tokenizer()
        self.model = task.make_model(self.tokenizer, 0)
        rows = task.make_prompts(4096, 0)
        task.warm_up(self.model, self.tokenizer, rows, seed=0)
        encoder = PromptEncoder(self.tokenizer, template_kwargs={}, context_length=None, max_completion_length=16)
        self.prompts = encoder.encode(rows[:PROMPTS])
        sampling = Sampling(
            max_completion_length=task.MAX_COMPLETION_LENGTH,
            eos_token_ids=(self.tokenizer.eos_token_id,),
            pad_token_id=self.tokenizer.pad_token_id,
        )
        self.engine = TransformersEngine(lambda: self.model, sampling, tokenizer=self.tokenizer)

    def sample(self, k: int, seed: int) -> tuple[list[list[int]], list[list[int]], dict[str, Tensor], Tensor]:
        """Prompts, completions, rewards and groups, a row per completion."""
        found = {id(group.prompt): group for group in self.engine.generate(self.prompts, k, seed=seed)}
        groups = [found[id(prompt)] for prompt in self.prompts]
        completions = [c.token_ids for group in groups for c in group.completions]
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        answers = [group.prompt.columns["answer"] for group in groups for _ in group.completions]
        rewards = {
            "exact": torch.tensor(task.exact_match(completions=texts, answer=answers)),
            "digits": torch.tensor([digits_in_place(t, a) for t, a in zip(texts, answers, strict=True)]),
        }
        ids = [group.prompt.token_ids for group in groups for _ in group.completions]
        return ids, completions, rewards, torch.arange(len(groups)).repeat_interleave(k)

    def logprobs(self, prompts: list[list[int]], completions: list[list[int]]) -> Tensor:
        """log π(y) of each completion, (N,), differentiable."""
        rows = [p + c for p, c in zip(prompts, completions, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        lengths = [(len(p), len(c)) for p, c in zip(prompts, completions, strict=True)]
        own = torch.tensor([[0] * p + [1] * c + [0] * (width - p - c) for p, c in lengths])
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (picked * own[:, 1:]).sum(-1)

    def gradients(self, k: int, seed: int, fixed: dict[str, float]) -> dict[tuple[str, str], Tensor]:
        """The gradient for each reward with each baseline, on the same completions."""
        prompts, completions, rewards, groups = self.sample(k, seed)
        logprobs = self.logprobs(prompts, completions)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        result = {}
        for kind in REWARDS:
            for name, advantage in baselines(fixed[kind]).items():
                loss = (advantage(rewards[kind], groups) * logprobs).mean()
                parts = torch.autograd.grad(loss, parameters, retain_graph=True)
                result[kind, name] = torch.cat([part.flatten() for part in parts])
        return result


def measure(repetitions: int, ks: tuple[int, ...] = KS) -> dict[int, dict[tuple[str, str], Noise]]:
    """Mean and variance of the gradient, by K, and by reward and baseline."""
    bench = Bench()
    bench.model.eval()
    fixed = {kind: float(rewards.mean()) for kind, rewards in bench.sample(64, seed=10_000)[2].items()}
    result: dict[int, dict[tuple[str, str], Noise]] = {}
    for k in ks:
        noise = {(kind, name): Noise() for kind in REWARDS for name in baselines(0.0)}
        for seed in range(repetitions):
            for name, gradient in bench.gradients(k, seed, fixed).items():
                noise[name].add(gradient)
        result[k] = noise
    return result


def noise_table(found: dict[int, dict[tuple[str, str], Noise]]) -> str:
    """N · tr Var(g) / ‖E g‖² by K: noise per completion, in units of the squared signal."""
    names = list(baselines(0.0))
    lines = ["| reward | K | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    for kind in REWARDS:
        means = torch.stack([noise[kind, "leave-one-out"].mean for noise in found.values()])
        signal = means.mean(0).square().sum().item()
        for k, noise in found.items():
            scale = {name: ((k - 1) / k) ** 2 if name == "group mean" else 1.0 for name in names}
            cells = [f"{PROMPTS * k * noise[kind, name].variance / (signal * scale[name]):.0f}" for name in names]
            lines.append(f"| {kind} | {k} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# -- memory, computed

TRAINED = 2 + 4 + 8 + 2  # bytes: bfloat16 weight, float32 gradient, two moments, the bits that bfloat16 drops
FROZEN = 2


def memory(parameters: float, *, value: bool, reward: bool) -> float:
    """GiB of weights, gradients and optimizer state; activations and caches are not in it.

    PPO adds a value model as large as the policy, trained like it. Reference and reward model are frozen.
    """
    trained = 1 + value
    frozen = 1 + reward
    return parameters * (trained * TRAINED + frozen * FROZEN) / 2**30


def memory_table() -> str:
    """RLOO against PPO, with and without a reward model of the policy's size."""
    lines = ["| parameters | reward model | PPO, GiB | RLOO, GiB | less |", "|---|---|---|---|---|"]
    for size in (1e9, 7e9, 70e9):
        for reward in (True, False):
            ppo, rloo = (memory(size, value=value, reward=reward) for value in (True, False))
            kind = "yes" if reward else "no (a function)"
            lines.append(f"| {size / 1e9:.0f}B | {kind} | {ppo:.0f} | {rloo:.0f} | {1 - rloo / ppo:.0%} |")
    return "\n".join(lines)


# -- all of it

SEEDS, UPDATES = range(6), 50


def noise_part(options: argparse.Namespace) -> list[str]:
    """The variance of the gradient."""
    return [noise_table(measure(3, (2, 4)) if options.quick else measure(options.repetitions))]


def memory_part(options: argparse.Namespace) -> list[str]:
    """Memory, computed for large models and measured on small ones."""
    return [memory_table(), ppo.measured_memory_table(ppo.measured_memory(large=not options.quick))]


def options_part(options: argparse.Namespace) -> list[str]:
    """Learning with and without each option."""
    seeds, updates, count = (range(2), 1, 16) if options.quick else (SEEDS, UPDATES, 512)
    questions = dict(list(QUESTIONS.items())[-1:]) if options.quick else QUESTIONS
    return [options_table(run_questions(seeds, updates, task.make_prompts(count, 1, "held_out"), questions))]


def ppo_part(options: argparse.Namespace) -> list[str]:
    """RLOO and PPO with the same number of completions."""
    seeds, rollouts, count, passes = (range(2), 2, 16, (1,)) if options.quick else (SEEDS, UPDATES, 512, (1, 2))
    found = ppo.compare(seeds, rollouts, task.make_prompts(count, 1, "held_out"), passes)
    return [ppo.learning_table(found), ppo.seconds_table(found)]


PARTS = {"noise": noise_part, "memory": memory_part, "options": options_part, "ppo": ppo_part}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=80)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name, part in PARTS.items():
        if options.only in (None, name):
            began = time.process_time()
            print("\n\n".join(part(options)))
            print(f"\n({name}: {time.process_time() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
