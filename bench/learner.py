"""The update of a fixed rollout, ours and TRL's in the same process: same weights, same completions.

    PYTHONHASHSEED=0 python bench/learner.py tldr small reason      # on a GPU
    PYTHONHASHSEED=0 python bench/learner.py cpu                    # anywhere
    PYTHONHASHSEED=0 python bench/learner.py --growth               # how time and memory grow; ours alone

Both run inside a real `trainer.train()`, whose generation is replaced by a look-up of prepared completions, so that a
step is: reference pass, (old log-probabilities,) forward, backward, optimizer. Each row is one JSON object: seconds per
update (median after warm-up), peak memory in GiB, trained tokens per second, and the share of the arithmetic floor:
6·N FLOP per token trained (prompts once per group) and 2·N per reference token, at 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
from shapes import SHAPES, Shape, completion, make_model, make_rows, make_tokenizer, reward
from transformers import TrainerCallback

PEAK_FLOPS = 790e12


class Clock(TrainerCallback):
    """The time of each update, from the end of one to the end of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(self.ends) == 1:
                torch.cuda.reset_peak_memory_stats()
        self.ends.append(time.perf_counter())

    def seconds(self) -> float:
        gaps = [b - a for a, b in zip(self.ends, self.ends[1:], strict=False)]
        return statistics.median(gaps[1:])


def options(shape: Shape, folder: str, steps: int, per_device: int, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": f"{folder}/out",
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": shape.completions // per_device,
        "num_generations": shape.k,
        "max_completion_length": shape.completion,
        "max_steps": steps,
        "learning_rate": 1e-6,
        "beta": 0.05,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "shuffle_dataset": False,
        **changes,
    }


def run_trl(shape: Shape, steps: int, per_device: int, dtype: torch.dtype) -> dict[str, float]:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    tokenizer = make_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        make_model(shape, dtype).save_pretrained(folder)  # TRL loads its reference by name
        tokenizer.save_pretrained(folder)
        clock = Clock()
        config = RLOOConfig(
            **options(shape, folder, steps, per_device, bf16=dtype == torch.bfloat16),
            model_init_kwargs={"dtype": str(dtype).split(".")[-1]},
        )
        rows = Dataset.from_list(make_rows(shape, steps))
        trainer = RLOOTrainer(folder, reward, config, rows, processing_class=tokenizer, callbacks=[clock])

        def look_up(prompt_ids: Any, images: Any, fields: Any) -> list[list[int]]:
            texts = tokenizer.batch_decode(prompt_ids)
            return [completion(shape, text, i % shape.k) for i, text in enumerate(texts)]

        trainer._generate_single_turn = look_up
        return measure(trainer, clock)


def run_rloom(shape: Shape, steps: int, dtype: torch.dtype, **changes: Any) -> dict[str, float]:
    from rloom import FakeEngine, RLOOConfig, RLOOTrainer

    clock = Clock()
    engine = FakeEngine(lambda prompt, k, seed: completion(shape, prompt.content, k), eos_token_ids=[0])
    with tempfile.TemporaryDirectory() as folder:
        config = RLOOConfig(**options(shape, folder, steps, shape.completions, **changes))
        trainer = RLOOTrainer(
            make_model(shape, dtype),
            reward,
            config,
            make_rows(shape, steps),
            processing_class=make_tokenizer(),
            callbacks=[clock],
            engine=engine,
        )
        result = measure(trainer, clock)
        result["budget"] = trainer.learner.budget.tokens
        return result


def measure(trainer: Any, clock: Clock) -> dict[str, float]:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")
    return {"seconds": round(clock.seconds(), 4), "peak_gib": round(peak, 1)}


def floor_seconds(shape: Shape) -> float:
    """Arithmetic of a packed update with a reference pass."""
    model = make_model(shape, torch.bfloat16, device="meta")
    inner = model.num_parameters(exclude_embeddings=True)
    head = model.get_output_embeddings().weight.numel()
    packed = shape.groups * (shape.prompt + shape.k * shape.completion)
    scored = shape.completions * shape.completion
    return 8 * (inner * packed + head * scored) / PEAK_FLOPS


def report(name: str, peer: str, shape: Shape, result: dict[str, float], **more: Any) -> None:
    tokens = shape.completions * shape.completion
    row = {
        "shape": name, "peer": peer, "P": shape.prompt, "C": shape.completion, "K": shape.k, "N": shape.completions,
        **result, "tokens_per_second": round(tokens / result["seconds"]), **more,
    }  # fmt: skip
    print("RESULT", json.dumps(row), flush=True)


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def draw_completions(shape: Shape, steps: int) -> None:
    """Before the clock runs: both peers look them up."""
    for row in make_rows(shape, steps):
        for sample in range(shape.k):
            completion(shape, row["prompt"], sample)


def compare(
    name: str, steps: int, per_device: int, budgets: list[int], ours_alone: bool, compiled: bool, keep: list[bool]
) -> None:
    shape, cuda = SHAPES[name], torch.cuda.is_available()
    draw_completions(shape, steps)
    dtype = torch.bfloat16 if cuda else torch.float32
    theirs = None
    if not ours_alone:
        theirs = run_trl(shape, steps, per_device, dtype)
        report(name, "trl", shape, theirs)
        clean()
    for budget, kept in itertools.product(budgets or [None], keep):
        options = {"max_tokens_per_micro_batch": budget or None, "compile_layers": compiled, "keep_logits": kept}
        ours = run_rloom(shape, steps, dtype, **options)
        ours |= {"compiled": compiled, "keep_logits": kept}
        more: dict[str, Any] = {"floor_share": round(floor_seconds(shape) / ours["seconds"], 3)} if cuda else {}
        if theirs is not None:
            more["ratio"] = round(theirs["seconds"] / ours["seconds"], 2)
            more["memory_ratio"] = round(ours["peak_gib"] / theirs["peak_gib"], 2)
        report(name, "rloom", shape, ours, **more)
        clean()


def growth(steps: int) -> None:
    """Each thing doubled twice. On a CPU each case has a process of its own, whose peak is its own."""
    cuda = torch.cuda.is_available()
    base = replace(SHAPES["small"], completions=32) if cuda else replace(SHAPES["cpu"], completions=16)
    words = 37984 if cuda else base.config.vocab_size
    context = multiprocessing.get_context("spawn")
    for factor in (1, 2, 4):
        for what, shape in {
            "K": replace(base, k=base.k * factor, completions=base.completions * factor),
            "prompt": replace(base, prompt=base.prompt * factor),
            "completion": replace(base, completion=base.completion * factor),
            "vocabulary": replace(base, config=with_words(base.config, words * factor)),
        }.items():
            if cuda:
                grown(f"{what} x{factor}", shape, steps)
                clean()
                continue
            case = context.Process(target=grown, args=(f"{what} x{factor}", shape, steps))
            case.start()
            case.join()


def with_words(config: Any, count: int) -> Any:
    return type(config)(**{**config.to_dict(), "vocab_size": count})


def grown(name: str, shape: Shape, steps: int) -> None:
    """One case. On a CPU the peak is what the process has grown by since its model was loaded."""
    draw_completions(shape, steps)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    make_model(shape, dtype)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run_rloom(shape, steps, dtype)
    if not torch.cuda.is_available():
        result["peak_gib"] = round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20, 2)
    report(name, "rloom", shape, result)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--per-device", type=int, default=16, help="TRL's micro-batch, in completions")
    parser.add_argument(
        "--budget", type=int, nargs="*", default=[], help="max_tokens_per_micro_batch, one row each; 0: unset"
    )
    parser.add_argument("--ours", action="store_true", help="leave TRL out")
    parser.add_argument("--compile", action="store_true", help="compile_layers=True for ours")
    parser.add_argument("--keep", type=int, nargs="*", default=[0], help="keep_logits for ours: 0, 1 or both")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--long", action="store_true", help="8 completions of 8k tokens, with checkpointing")
    arguments = parser.parse_args()
    for name in arguments.shapes:
        keep = [bool(kept) for kept in arguments.keep]
        compare(name, arguments.steps, arguments.per_device, arguments.budget, arguments.ours, arguments.compile, keep)
    if arguments.long:
        shape = SHAPES["long"]
        report("long", "rloom", shape, run_rloom(shape, 4, torch.bfloat16, gradient_checkpointing=True))
    if arguments.growth:
        growth(4)


if __name__ == "__main__":
    main()
