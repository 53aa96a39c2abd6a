"""Whole steps inside `trainer.train()`: ours and TRL's, generation, rewards, update and logging included.

    python bench/step.py small --steps 20 --trl-steps 4

Weights change, and completions end where they end: enough tokens count as end tokens that lengths are ragged, with
half of the limit as their mean. Both peers have the same weights, prompts and reward. Prints the ratio and both peaks.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from typing import Any

import torch
from learner import Clock, options, report
from shapes import SHAPES, Shape, make_model, make_rows, make_tokenizer, reward


def ends_of(shape: Shape) -> list[int]:
    """So many end tokens that a completion is, on average, half as long as the limit."""
    return list(range(1, 1 + 2 * shape.config.vocab_size // shape.completion))


def measure(trainer: Any, clock: Clock) -> dict[str, float]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    length = sum(entry["completions/mean_length"] for entry in logs) / len(logs)
    found = {"seconds": round(clock.seconds(), 3), "peak_gib": round(peak, 1), "mean_length": round(length, 1)}
    if logs and "mismatch/mean" in logs[-1]:
        found["mismatch"] = round(float(logs[-1]["mismatch/mean"]), 5)
    return found


def run_trl(shape: Shape, steps: int, per_device: int, dtype: torch.dtype) -> dict[str, float]:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(shape, dtype)
        model.generation_config.eos_token_id = ends_of(shape)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        del model
        clock = Clock()
        config = RLOOConfig(
            **options(shape, folder, steps, per_device, bf16=dtype == torch.bfloat16),
            model_init_kwargs={"dtype": str(dtype).split(".")[-1]},
        )
        rows = Dataset.from_list(make_rows(shape, steps))
        trainer = RLOOTrainer(folder, reward, config, rows, processing_class=tokenizer, callbacks=[clock])
        trainer.generation_config.eos_token_id = trainer.eos_token_ids = ends_of(shape)
        return measure(trainer, clock)


def run_rloom(shape: Shape, steps: int, dtype: torch.dtype, **changes: Any) -> dict[str, float]:
    from rloom import RLOOConfig, RLOOTrainer

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(shape, dtype)
        model.generation_config.eos_token_id = ends_of(shape)
        config = RLOOConfig(**options(shape, folder, steps, shape.completions, **changes))
        trainer = RLOOTrainer(
            model, reward, config, make_rows(shape, steps), processing_class=make_tokenizer(), callbacks=[clock]
        )
        found = measure(trainer, clock)
        found["engine"] = type(trainer.collector.engine).__name__  # type: ignore[assignment]
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trl-steps", type=int, default=4)
    parser.add_argument("--per-device", type=int, default=16, help="TRL's micro-batch, in completions")
    parser.add_argument("--budget", type=int, default=None, help="max_tokens_per_micro_batch")
    parser.add_argument("--compile", action="store_true", help="compile_layers and compile_generation")
    parser.add_argument("--keep", action="store_true", help="keep_logits")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    for name in arguments.shapes:
        shape = SHAPES[name]
        changes = {"max_tokens_per_micro_batch": arguments.budget, "compile_generation": arguments.compile}
        changes |= {"compile_layers": arguments.compile, "keep_logits": arguments.keep}
        ours = run_rloom(shape, arguments.steps, dtype, **changes)
        report(name, "rloom", shape, ours)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if arguments.trl_steps:
            theirs = run_trl(shape, arguments.trl_steps, arguments.per_device, dtype)
            ratio = {"ratio": round(theirs["seconds"] / ours["seconds"], 2)}
            ratio["memory_ratio"] = round(ours["peak_gib"] / theirs["peak_gib"], 2)
            report(name, "trl", shape, theirs, **ratio)
            gc.collect()


if __name__ == "__main__":
    main()
