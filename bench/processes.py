"""What sharding costs: the same update by processes that hold the whole model, and by those that hold a part.

    python bench/processes.py cpu --processes 2 --ways plain fsdp zero2 zero3     # zero…: where DeepSpeed is installed
    python bench/processes.py cpu --ways plain fsdp freed layered

`freed`: FSDP2, and the whole copy that generates is let go of before each update; `layered`: FSDP2 without such a copy.

A row for each way, in a launch of torchrun of its own: seconds of a step (the best after the first two, since the
machine may be busy), its ratio to processes that hold the whole model, what gathering the copy takes in a step (the
median), and the copy's size in an update.
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

    shape, ends = SHAPES[name], list[float]()
    world = int(os.environ["WORLD_SIZE"])

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.time())

    more = {**SHARDED.get(way, {})}
    if way.startswith("zero"):
        more = {"deepspeed": zero_config(int(way[-1]))}
    on_cpu = not torch.cuda.is_available()
    config = RLOOConfig(
        folder, num_generations=shape.k, per_device_train_batch_size=shape.completions // world, max_steps=steps,
        max_completion_length=shape.completion, learning_rate=1e-6, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=on_cpu, bf16=not on_cpu, **more,
    )  # fmt: skip
    model = make_model(shape, torch.float32, "cpu" if on_cpu else None)
    trainer = RLOOTrainer(
        model, reward, config, make_rows(shape, 64), processing_class=make_tokenizer(), callbacks=[Clock()]
    )
    gathers, copy = watch(trainer)
    trainer.train()
    gaps = [b - a for a, b in itertools.pairwise(ends[1:])]
    if int(os.environ["RANK"]) == 0:
        row = {"shape": name, "way": way, "processes": world, "step_s": round(min(gaps), 3)}
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
    arguments = parser.parse_args()
    plain = None
    for way in arguments.ways:
        zero = way.startswith("zero")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "DS_ACCELERATOR": "cpu"} if zero else {}
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
            continue
        row = json.loads(found[0][4:])
        plain = plain or row["step_s"]
        print("RESULT", json.dumps({**row, "ratio": round(row["step_s"] / plain, 2)}), flush=True)
    return None


if __name__ == "__main__":
    main()
