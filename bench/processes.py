"""What sharding costs: the same update by processes that hold the whole model, and by those that hold a part.

    python bench/processes.py cpu --ways plain fsdp zero1 zero2 zero3 --repeats 3  # zero…: where DeepSpeed is installed
    python bench/processes.py cpu --ways plain fsdp freed layered

`freed`: FSDP2, and the whole copy that generates is let go of before each update; `layered`: FSDP2 without such a copy.

The ways take turns, each in a launch of torchrun of its own, as often as `--repeats` says. Then a row for each way:
seconds of a step (the median after the first two, over all launches) and its ratio to the first way in the same turn
(median, least and largest); the same of the seconds that the main process was on a core in a step, which say more where
the machine is busy with something else; what gathering the copy takes in a step (the median), and the copy's size in an
update.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any


def zero_config(stage: int) -> dict[str, Any]:
    import deepspeed  # noqa: F401

    # Its operator for the host's memory would be compiled without end at the start.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    return {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": False}, "zero_optimization": {"stage": stage},
    }  # fmt: skip


SHARDED: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp": True, "keep_whole_copy": True},
    "freed": {"fsdp": True, "keep_whole_copy": False},
    "layered": {"fsdp": True, "ds3_gather_for_generation": False},
}


def watch(trainer: Any) -> tuple[list[float], list[int]]:
    """Seconds of each gathering of the whole copy, and its bytes in each update; empty where there is no copy."""
    import torch

    gathers, sizes, processes = list[float](), list[int](), trainer.processes
    if getattr(processes, "_copy", None) is None:
        return gathers, sizes
    gather, enter = processes.gather_weights, processes.in_step

    def gathering() -> None:
        began = time.perf_counter()
        gather()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        gathers.append(time.perf_counter() - began)

    def entering() -> Any:
        entered = enter()
        sizes.append(processes._copy.nbytes)
        return entered

    processes.gather_weights, processes.in_step = gathering, entering
    return gathers, sizes


def run(name: str, way: str, steps: int, folder: str) -> None:
    """In each process: one run; the main one prints its row."""
    import torch
    from shapes import SHAPES, make_model, make_rows, make_tokenizer, reward
    from transformers import TrainerCallback

    from rloom import RLOOConfig, RLOOTrainer

    shape, ends, worked = SHAPES[name], list[float](), list[float]()
    world = int(os.environ["WORLD_SIZE"])

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.time())
            worked.append(time.process_time())

    more = {**SHARDED.get(way, {})}
    if way.startswith("zero"):
        more = {"deepspeed": zero_config(int(way[-1]))}
    on_cpu = not torch.cuda.is_available()
    # Before the options: with those of ZeRO-3, transformers would let DeepSpeed take the model apart while it is made.
    model = make_model(shape, torch.float32, "cpu" if on_cpu else None)
    config = RLOOConfig(
        folder, num_generations=shape.k, per_device_train_batch_size=shape.completions // world, max_steps=steps,
        max_completion_length=shape.completion, learning_rate=1e-6, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=on_cpu, bf16=not on_cpu, **more,
    )  # fmt: skip
    trainer = RLOOTrainer(
        model, reward, config, make_rows(shape, 64), processing_class=make_tokenizer(), callbacks=[Clock()]
    )
    gathers, copy = watch(trainer)
    trainer.train()
    gaps, work = ([b - a for a, b in itertools.pairwise(times[1:])] for times in (ends, worked))
    if int(os.environ["RANK"]) == 0:
        row = {"shape": name, "way": way, "processes": world, "step_s": round(statistics.median(gaps), 3)}
        row["cpu_s"] = round(statistics.median(work), 3)
        if gathers:
            row |= {"gather_s": round(statistics.median(gathers[1:]), 4), "copy_mib": round(max(copy) / 2**20, 1)}
        print("ROW", json.dumps(row), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        return run(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=["plain", "fsdp"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    turns = []
    for _ in range(arguments.repeats):
        turns.append({way: launched(arguments, way) for way in arguments.ways})
        print(
            "TURN",
            json.dumps({way: row and (row["step_s"], row["cpu_s"]) for way, row in turns[-1].items()}),
            flush=True,
        )
    first = arguments.ways[0]
    for way in arguments.ways:
        both = [(turn[way], turn[first]) for turn in turns if turn[way] and turn[first]]
        if both:
            print("RESULT", json.dumps(summary(both)), flush=True)
    return None


def launched(arguments: argparse.Namespace, way: str) -> dict[str, Any] | None:
    """The row of one launch; None where it has failed, with its messages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if way.startswith("zero"):
        environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"}
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", str(arguments.processes)]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0", __file__, "--one", arguments.shape, way]
    launch += [str(arguments.steps)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *launch, folder], env=environment, capture_output=True, text=True, check=False
        )
    found = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not found:
        print(done.stderr[-3000:], file=sys.stderr)
        return None
    return dict(json.loads(found[0][4:]))


def summary(both: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """One row of a way's rows, each with that of the first way in the same turn."""
    row = dict(both[0][0])
    for name in row:
        if name.endswith(("_s", "mib")):
            row[name] = round(statistics.median(one[name] for one, _ in both), 4)
    for name, what in (("step_s", "ratio"), ("cpu_s", "cpu_ratio")):
        ratios = [one[name] / first[name] for one, first in both]
        row[what] = [round(number, 2) for number in (statistics.median(ratios), min(ratios), max(ratios))]
    return {**row, "turns": len(both)}


if __name__ == "__main__":
    main()
