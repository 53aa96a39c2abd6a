"""A small model learns to sort digits, from a reward alone, in front of your eyes.

The trainer is the one that users get; only the task is made up. See rloom/demo/task.py for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback
from transformers.utils import logging as transformers_logging

from rloom import RLOOConfig, RLOOTrainer
from rloom.demo import task
from rloom.observe.progress import LiveProgress, plot


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo shows, for tests."""

    before: dict[str, float]
    after: dict[str, float]
    rewards: list[float]
    seconds: float


class Tables(TrainerCallback):
    """Sample completions at the start, in the middle and at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.log: Any = None

    def on_step_end(self, args: RLOOConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Print at the first, middle and last update."""
        if state.global_step in (1, state.max_steps // 2, state.max_steps):
            self.log.print(state.global_step, 8, console=self.console, neighbours=True)


def demo(*, seed: int, steps: int, output: str, console: Console) -> DemoResult:
    """Make a task and a model, warm it up, train it with RLOO, and measure before and after."""
    with _quiet():
        return _demo(seed, steps, output, console)


def _demo(seed: int, steps: int, output: str, console: Console) -> DemoResult:
    began = time.perf_counter()
    # A folder that cannot be made is better known now than after the training.
    Path(output).mkdir(parents=True, exist_ok=True)
    # The model is so small that a second thread only costs.
    torch.set_num_threads(1)
    console.rule("rloom demo: learning to sort digits from a reward")
    tokenizer = task.make_tokenizer()
    model = task.make_model(tokenizer, seed)
    train, held_out = task.make_prompts(4096, seed), task.make_prompts(512, seed, split="held_out")
    console.print(
        f"The task: [bold]{train[0]['prompt']}[/] → [bold]{train[0]['answer']}[/]. A llama of "
        f"{sum(p.numel() for p in model.parameters()):,} random weights, a second of supervised warm-up, so that "
        "it is right now and then; then RLOO: 8 completions per prompt, reward 1 for the exact answer, else 0, and a "
        "KL of weight 0.02 that holds it near where it began. A completion's advantage is its reward less the mean of "
        "its 7 siblings'."
    )
    task.warm_up(model, tokenizer, train, seed=seed)
    before = _measure(model, tokenizer, held_out, seed)
    trainer = make_trainer(model, tokenizer, train, seed=seed, steps=steps, output=output, console=console)
    trainer.train()
    after = _measure(trainer.model, tokenizer, held_out, seed)
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    console.print(plot(rewards, title="reward (mean of 256 completions) per update"))
    console.print(_summary(before, after, len(held_out)))
    seconds = time.perf_counter() - began
    console.print("sampled: at temperature 1, as in training; greedy: the likeliest token each time.")
    console.print(
        f"{seconds:.0f} seconds in all. The trained model is in {Path(output)}; transformers loads it. Look into the "
        f"run: rloom show {Path(output)}. Next: the "
        "README's script with your own model and reward, or examples/own_reward.py."
    )
    return DemoResult(before=before, after=after, rewards=rewards, seconds=seconds)


def make_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, str]], *, seed: int, steps: int, output: str, console: Console
) -> RLOOTrainer:
    """The trainer with the demo's settings: nothing here that a user's own script could not do."""
    config = RLOOConfig(
        output,
        overwrite_output_dir=True,
        max_steps=steps,
        num_generations=8,
        per_device_train_batch_size=256,
        max_completion_length=task.MAX_COMPLETION_LENGTH,
        learning_rate=3e-4,
        beta=0.02,
        seed=seed,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        use_cpu=True,
        log_level="error",
    )
    tables, progress = Tables(console), LiveProgress(console, narrate=False)
    trainer = RLOOTrainer(
        model, task.exact_match, config, rows, processing_class=tokenizer, callbacks=[tables, progress]
    )
    tables.log = trainer.completion_log
    return trainer


def _measure(model: Any, tokenizer: Any, rows: list[dict[str, str]], seed: int) -> dict[str, float]:
    return {
        "sampled": task.accuracy(model, tokenizer, rows, sampled=True, seed=seed),
        "greedy": task.accuracy(model, tokenizer, rows, sampled=False, seed=seed),
    }


def _summary(before: dict[str, float], after: dict[str, float], count: int) -> Table:
    table = Table(title=f"accuracy, {count} held-out prompts")
    for name in ("", "before", "after", "rise"):
        table.add_column(name, justify="left" if not name else "right")
    for how in before:
        table.add_row(how, f"{before[how]:.2f}", f"{after[how]:.2f}", f"{after[how] - before[how]:+.2f}")
    return table


@contextmanager
def _quiet() -> Iterator[None]:
    """Only what the demo itself has to say, for as long as it runs."""
    ours, verbosity = logging.getLogger("rloom"), transformers_logging.get_verbosity()
    level = ours.level
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    ours.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()
        ours.setLevel(level)
