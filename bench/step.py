"""Whole steps inside `trainer.train()`: ours and TRL's, generation, rewards, update and logging included.

    python bench/step.py small --steps 20 --trl-steps 4

Weights change, and completions end where they end: enough tokens count as end tokens that lengths are ragged, with
half of the limit as their mean. Both peers have the same weights, prompts and reward. Prints the ratio and both peaks,
and what of a step was generation. `--forced` runs ours a second time with every completion at the limit: that is what
TRL's generation does in either case, since `model.generate` goes on until the last row of its batch has ended (see
`longest`), so that the two compare.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from learner import Clock, clean, options, report
from shapes import SHAPES, Shape, make_model, make_rows, make_tokenizer, reward


def ends_of(shape: Shape) -> list[int]:
    """So many end tokens that a completion is, on average, half as long as the limit."""
    return list(range(1, 1 + 2 * shape.config.vocab_size // shape.completion))


class Watch:
    """Seconds of each generation, the device's work included."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def around(self, generate: Callable[..., Any], collect: Callable[[Any], Any] = lambda x: x) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self._now()
            found = collect(generate(*args, **kwargs))
            self.times.append(self._now() - start)
            return found

        return timed

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self) -> float:
        return statistics.median(self.times[1:])


def measure(trainer: Any, clock: Clock, watch: Watch) -> dict[str, float]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]
    length = sum(entry["completions/mean_length"] for entry in logs) / len(logs)
    found = {"seconds": round(clock.seconds(), 3), "peak_gib": round(peak, 1), "mean_length": round(length, 1)}
    found |= {"generation_s": round(watch.seconds(), 3), "longest": max(e["completions/max_length"] for e in logs)}
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
        watch = Watch()
        trainer._generate_single_turn = watch.around(trainer._generate_single_turn)
        return measure(trainer, clock, watch)


def run_rloom(shape: Shape, steps: int, dtype: torch.dtype, forced: bool = False, **changes: Any) -> dict[str, float]:
    from rloom import RLOOConfig, RLOOTrainer

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(shape, dtype)
        model.generation_config.eos_token_id = ends_of(shape)
        config = RLOOConfig(**options(shape, folder, steps, shape.completions, **changes))
        trainer = RLOOTrainer(
            model, reward, config, make_rows(shape, steps), processing_class=make_tokenizer(), callbacks=[clock]
        )
        watch, engine = Watch(), trainer.collector.engine
        if forced:
            engine.sampling = replace(engine.sampling, eos_token_ids=())
        engine.generate = watch.around(engine.generate, list)  # groups come one by one
        found = measure(trainer, clock, watch)
        found["engine"] = type(engine).__name__  # type: ignore[assignment]
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
    parser.add_argument("--forced", type=int, default=0, help="steps of ours with every completion at the limit")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    for name in arguments.shapes:
        shape = SHAPES[name]
        changes = {"max_tokens_per_micro_batch": arguments.budget, "compile_generation": arguments.compile}
        changes |= {"compile_layers": arguments.compile, "keep_logits": arguments.keep}
        ours = run_rloom(shape, arguments.steps, dtype, **changes)
        report(name, "rloom", shape, ours)
        clean()
        forced = None
        if arguments.forced:
            forced = run_rloom(shape, arguments.forced, dtype, forced=True, **changes)
            report(name, "rloom, all at the limit", shape, forced)
            clean()
        if arguments.trl_steps:
            theirs = run_trl(shape, arguments.trl_steps, arguments.per_device, dtype)
            ratio = {"ratio": round(theirs["seconds"] / ours["seconds"], 2)}
            ratio["memory_ratio"] = round(ours["peak_gib"] / theirs["peak_gib"], 2)
            if forced is not None:
                ratio["generation_ratio"] = round(theirs["generation_s"] / forced["generation_s"], 2)
            report(name, "trl", shape, theirs, **ratio)
            clean()


if __name__ == "__main__":
    main()
