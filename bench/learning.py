"""What options of RLOO do to learning: runs of the demo's task that differ in one option, over several seeds.

Each question has arms; an arm is compared with its question's first, seed by seed: the same starting weights, prompts
and order. `bench/claims.py` prints the tables of docs/claims.md.
"""

from __future__ import annotations

import copy
import functools
import io
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rloom import RLOOConfig, RLOOTrainer
from rloom.demo import task

COMPLETIONS, K = 64, 4
LEARNING_RATE, BETA = 1e-4, 0.02
RECENT = 10
"""Updates that a smoothed number is the mean of."""

Start = tuple[LlamaForCausalLM, PreTrainedTokenizerFast, list[task.Row]]


@functools.cache
def _warm(seed: int) -> Start:
    tokenizer = task.make_tokenizer()
    model, rows = task.make_model(tokenizer, seed), task.make_prompts(4096, seed)
    task.warm_up(model, tokenizer, rows, seed=seed)
    return model, tokenizer, rows


def start(seed: int) -> Start:
    """A model after its warm-up, its tokenizer, and prompts. Each call gives a model of its own."""
    model, tokenizer, rows = _warm(seed)
    return copy.deepcopy(model), tokenizer, rows


# -- rewards


def digits_in_place(text: str, answer: str) -> float:
    """How many characters of the answer stand where they should."""
    return float(sum(a == b for a, b in zip(text, answer, strict=False)))


def make_reward(kind: str, seed: int) -> Callable[..., list[float]]:
    """A reward by its name; `wild` is exact match, but one score in a hundred is 100 or −100, by chance."""
    draw = random.Random(seed)

    def reward(completions: Sequence[str], answer: Sequence[str], **kwargs: Any) -> list[float]:
        exact = task.exact_match(completions, answer=answer)
        if kind == "digits":
            return [digits_in_place(text, right) for text, right in zip(completions, answer, strict=True)]
        if kind == "wild":
            return [draw.choice((-100.0, 100.0)) if draw.random() < 0.01 else score for score in exact]
        return [SCALES[kind](score) for score in exact]

    return reward


SCALES: dict[str, Callable[[float], float]] = {
    "exact": lambda score: score,
    "hundredth": lambda score: score / 100,
    "hundredfold": lambda score: 50 + 100 * score,
}


# -- arms


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    reward: str = "exact"

    @property
    def key(self) -> str:
        """Arms with equal keys are one run."""
        return f"{sorted(self.options.items())} {self.reward}"


BASE = Arm("as it is")
TOKENS = {"ratio_level": "token"}
HEAVY = {**TOKENS, "beta": 0.1}
QUESTIONS: dict[str, tuple[Arm, ...]] = {
    "Leave-one-out against GRPO's advantage": (
        Arm("leave-one-out"),
        Arm("group mean and standard deviation", {"advantage_estimator": "group_mean_std"}),
    ),
    "The KL token by token": (
        Arm("β = 0.1, one KL per completion", HEAVY),
        Arm("β = 0.1, token by token", {**HEAVY, "kl_placement": "reward_tokens"}),
    ),
    "Normalised rewards": (BASE, Arm("normalised", {"normalize_rewards": "batch"})),
    "– where scores are a hundredth": (
        Arm("as they are", reward="hundredth"),
        Arm("normalised", {"normalize_rewards": "batch"}, "hundredth"),
    ),
    "– where scores are 50 or 150": (
        Arm("as they are", reward="hundredfold"),
        Arm("normalised", {"normalize_rewards": "batch"}, "hundredfold"),
    ),
    "Normalised advantages": (BASE, Arm("normalised", {"normalize_advantages": True})),
    "Clipped rewards, one score in 100 is ±100": (
        Arm("as they are", reward="wild"),
        Arm("clipped to ±1", {"reward_clip_range": (-1.0, 1.0)}, "wild"),
    ),
    "– without a limit on the gradient's norm": (
        Arm("as they are", {"max_grad_norm": 0.0}, "wild"),
        Arm("clipped to ±1", {"max_grad_norm": 0.0, "reward_clip_range": (-1.0, 1.0)}, "wild"),
    ),
    "Truncated completions, room for 6 tokens": (
        Arm("kept", {"max_completion_length": 6}),
        Arm("masked", {"max_completion_length": 6, "mask_truncated_completions": True}),
    ),
    "The EOS trick, a reward that does not see the end": (
        Arm("no penalty", reward="digits"),
        Arm("missing_eos_penalty=1", {"missing_eos_penalty": 1.0}, "digits"),
    ),
}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of one run."""

    scores: list[float]  # exact match of each rollout, whatever the reward was
    held_out: float
    kl: float  # per token, at the end
    norms: list[float]  # of the gradient, before its limit
    ended: float  # the share of completions that end by themselves, at the end
    seconds: float  # per update, by the processor's clock

    @property
    def mean(self) -> float:
        """Exact match over the whole run: high if it learns early."""
        return statistics.fmean(self.scores)

    @property
    def fall(self) -> float:
        """By how much the smoothed curve falls below what it had reached."""
        return largest_fall(self.scores)


def largest_fall(scores: Sequence[float]) -> float:
    """The largest fall of the mean of ten updates.

    >>> largest_fall([0.5] * 10 + [0.0] * 10)
    0.5
    """
    recent = min(RECENT, len(scores))
    smooth = [statistics.fmean(scores[i : i + recent]) for i in range(len(scores) - recent + 1)]
    return max(max(smooth[: i + 1]) - value for i, value in enumerate(smooth))


def train(arm: Arm, seed: int, updates: int, test: list[task.Row]) -> Outcome:
    """One run of an arm."""
    model, tokenizer, rows = start(seed)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        config = RLOOConfig(folder, **_options(arm, seed, updates))
        rewards = [make_reward(arm.reward, seed), task.exact_match]
        trainer = RLOOTrainer(model, rewards, config, rows, processing_class=tokenizer)
        began = time.process_time()
        trainer.train()
        seconds = (time.process_time() - began) / updates
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    recent = log[-RECENT:]
    return Outcome(
        scores=[entry["rewards/exact_match/mean"] for entry in log],
        held_out=task.accuracy(model, tokenizer, test, sampled=True, seed=seed),
        kl=statistics.fmean(entry["kl"] for entry in recent),
        norms=[entry["grad_norm"] for entry in log],
        ended=1 - statistics.fmean(entry["completions/clipped_ratio"] for entry in recent),
        seconds=seconds,
    )


def _options(arm: Arm, seed: int, updates: int) -> dict[str, Any]:
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "log_level": "error", "advice": False}
    return {
        **quiet,
        "diagnosis": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "seed": seed,
        "max_steps": updates,
        "lr_scheduler_type": "constant",
        "learning_rate": LEARNING_RATE,
        "beta": BETA,
        "num_generations": K,
        "per_device_train_batch_size": COMPLETIONS,
        "max_completion_length": task.MAX_COMPLETION_LENGTH,
        # Exact match is logged, and counts for nothing.
        "reward_weights": [1.0, 0.0],
        **arm.options,
    }


def run_questions(
    seeds: Sequence[int], updates: int, test: list[task.Row], questions: dict[str, tuple[Arm, ...]] = QUESTIONS
) -> dict[str, list[tuple[Arm, list[Outcome]]]]:
    """All arms of all questions, an outcome per seed. Equal arms run once."""
    done: dict[str, list[Outcome]] = {}
    result: dict[str, list[tuple[Arm, list[Outcome]]]] = {}
    for question, arms in questions.items():
        for arm in arms:
            if arm.key not in done:
                done[arm.key] = [train(arm, seed, updates, test) for seed in seeds]
        result[question] = [(arm, done[arm.key]) for arm in arms]
    return result


# -- tables

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t, 97.5%, by degrees of freedom from 1."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95% interval, from independent values.

    >>> interval([1.0, 3.0])
    (2.0, 12.706)
    """
    spread = statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), T_975[len(values) - 2] * spread


def shown(values: Sequence[float], digits: int = 2) -> str:
    """A mean with its interval."""
    mean, half = interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def change(values: Sequence[float], others: Sequence[float], digits: int = 2) -> str:
    """The mean difference to others, seed by seed, with its interval. It is bold where the interval has no 0."""
    mean, half = interval([a - b for a, b in zip(values, others, strict=True)])
    text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
    return f"**{text}**" if abs(mean) > half else text


def options_table(found: dict[str, list[tuple[Arm, list[Outcome]]]]) -> str:
    """A row per arm."""
    titles = (
        "", "exact match, over the run", "change", "held-out, at the end", "change", "spread over seeds",
        "largest fall", "KL per token", "gradient norm: median, largest", "end by themselves", "ms per update",
    )  # fmt: skip
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for question, arms in found.items():
        lines.append(f"| **{question}** |" + " |" * (len(titles) - 1))
        first = arms[0][1]
        for arm, outcomes in arms:
            lines.append("| " + " | ".join(_cells(arm, outcomes, None if outcomes is first else first)) + " |")
    return "\n".join(lines)


def _cells(arm: Arm, outcomes: list[Outcome], first: list[Outcome] | None) -> list[str]:
    means, last = [o.mean for o in outcomes], [o.held_out for o in outcomes]
    norms = [norm for outcome in outcomes for norm in outcome.norms]
    return [
        arm.name,
        shown(means),
        "" if first is None else change(means, [o.mean for o in first]),
        shown(last),
        "" if first is None else change(last, [o.held_out for o in first]),
        f"{statistics.stdev(last):.2f}",
        shown([o.fall for o in outcomes]),
        shown([o.kl for o in outcomes]),
        f"{statistics.median(norms):.3g}, {max(norms):.3g}",
        shown([o.ended for o in outcomes]),
        shown([1e3 * o.seconds for o in outcomes], 0),
    ]
