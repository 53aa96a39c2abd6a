"""Is the learning rate that preflight recommends a good one? Runs of the demo's task at multiples of it.

python bench/preflight.py --seeds 3 --updates 80          a quarter of an hour on one core

First the advice from several given rates, of which each is one small step; then runs at multiples of the advice of the
second. Numbers go to bench/RESULTS.md by hand.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from learning import BETA, COMPLETIONS, RECENT, K, start

from rloom import RLOOConfig, RLOOTrainer
from rloom.demo import task
from rloom.preflight.dry_run import DryRun, dry_config
from rloom.preflight.recommend import recommend

GIVEN = (1e-6, 1e-5, 1e-4, 1e-3)
GROUPS = 8


def options(folder: str, seed: int, rate: float, updates: int) -> RLOOConfig:
    """A run of the demo's task, with small batches and a constant rate."""
    return RLOOConfig(
        folder, learning_rate=rate, max_steps=updates, seed=seed, num_generations=K, beta=BETA, use_cpu=True,
        per_device_train_batch_size=COMPLETIONS, max_completion_length=task.MAX_COMPLETION_LENGTH, logging_steps=1,
        lr_scheduler_type="constant", save_strategy="no", report_to="none", disable_tqdm=True, log_level="error",
        advice=False, diagnosis=False, gradient_checkpointing=False, log_format="dict", num_sample_generations=0,
    )  # fmt: skip


def advised(seed: int, rate: float, groups: int = GROUPS) -> tuple[float, float]:
    """The rate that preflight recommends from this one, and how far one update at this one moves the policy."""
    model, tokenizer, rows = start(seed)
    with tempfile.TemporaryDirectory() as folder:
        config = options(folder, seed, rate, 1)
        dry = dry_config(config, groups, folder, rows)
        found = DryRun(model, task.exact_match, dry, rows, processing_class=tokenizer, rate=rate, size=64).measure()
    advice = {one.option: one.value for one in recommend(found, config, context=None)}
    return advice.get("learning_rate", float("nan")), found.movement or float("nan")


def train(seed: int, rate: float, updates: int) -> dict[str, float]:
    """Reward and KL per token, the means of the last updates, and the best of such means; accuracy on held-out rows."""
    model, tokenizer, rows = start(seed)
    with tempfile.TemporaryDirectory() as folder:
        trainer = RLOOTrainer(
            model, task.exact_match, options(folder, seed, rate, updates), rows, processing_class=tokenizer
        )
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    means = [statistics.fmean(e["reward"] for e in log[i : i + RECENT]) for i in range(len(log) - RECENT + 1)]
    held_out = task.accuracy(model, tokenizer, task.make_prompts(512, seed, split="held_out"), sampled=True, seed=seed)
    return {
        "first": means[0], "best": max(means), "last": means[-1],
        "kl": statistics.fmean(e["kl"] for e in log[-RECENT:]), "held_out": held_out,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--multiples", type=float, nargs="+", default=[0.1, 1 / 3, 1.0, 3.0])
    args = parser.parse_args()
    for seed in range(args.seeds):
        found = {rate: advised(seed, rate) for rate in GIVEN}
        for rate, (advice, movement) in found.items():
            print(f"seed {seed}: given {rate:g}, one update moves {movement:.2g} nats, advised {advice:g}", flush=True)
        for multiple in args.multiples:
            rate = multiple * found[GIVEN[2]][0]
            numbers = ", ".join(f"{name} {value:.3f}" for name, value in train(seed, rate, args.updates).items())
            print(f"seed {seed}: {multiple:.2g} x, rate {rate:.2g}: {numbers}", flush=True)


if __name__ == "__main__":
    main()
