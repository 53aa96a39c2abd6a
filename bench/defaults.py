"""What a user types: the README's script, ours and TRL's, the same arguments, nothing else set.

    python bench/defaults.py small tldr reason smol lora8b      # on a GPU
    python bench/defaults.py cpu --steps 6 --peer-steps 4       # anywhere
    python bench/defaults.py small --warm --dtype bfloat16      # caches of the run before; weights for both by hand

A model by name (random weights of a real model's shape, saved first; those of 8 billion parameters are made in memory,
for both), in the dtype that people load it in: float32 for models of up to 2 billion parameters, which is what both
trainers do unasked, and bfloat16 for 8 billion. Each peer runs in a process of its own, with empty caches of Triton and
of torch's compiler, on a data set of an epoch of many steps, and is stopped after `--steps`.

A row: seconds until the trainer is built, from then to the end of the first update, and to that end from the moment at
which the weights are on the GPU; seconds of a step (median of
the steps after the third, or after `--settled`); the slowest step after the third; the peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SECONDS = float(os.environ.get("BENCH_BEGAN", time.time()))  # when the process was asked for


def options(shape: Any, folder: str, per_device: int) -> dict[str, Any]:
    """What both scripts say: batch, lengths, and that nothing is sent or saved."""
    return {
        "output_dir": f"{folder}/out",
        "num_generations": shape.k,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": shape.completions // per_device,
        "max_completion_length": shape.completion,
        "learning_rate": 1e-6,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def model_and_arguments(shape: Any, folder: str, dtype: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The model as the script names it; more options of the config, and arguments of the trainer."""
    import torch

    config: dict[str, Any] = {}
    arguments: dict[str, Any] = {}
    if dtype != "float32":
        config["model_init_kwargs"] = {"dtype": dtype}
    if shape.lora:
        from peft import LoraConfig

        arguments["peft_config"] = LoraConfig(r=shape.lora, target_modules="all-linear", task_type="CAUSAL_LM")
    if not shape.lora:
        return folder, config, arguments
    from shapes import make_model

    model = make_model(shape, getattr(torch, dtype))
    model.config._name_or_path = folder
    if shape.four_bit:
        from engine import in_four_bits

        model = in_four_bits(model)
        # The peak is the trainer's: nobody loads such a model by way of its bfloat16 weights on the GPU.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return model, {}, arguments


class Steps:
    """When the trainer was built and each update ended; stops the run after some. Mixed into a callback below."""

    def __init__(self, limit: int) -> None:
        self.limit, self.ends = limit, []


def callback(limit: int) -> Any:
    import torch
    from transformers import TrainerCallback

    class Clock(Steps, TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.time())
            if len(self.ends) == self.limit:
                control.should_training_stop = True
            return control

    return Clock(limit)


class WeightsArrive(threading.Thread):
    """Notes when about as much memory of the GPU is taken as the weights need in bfloat16."""

    def __init__(self, shape: Any) -> None:
        super().__init__(daemon=True)
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            count = sum(p.numel() for p in AutoModelForCausalLM.from_config(shape.config).parameters())
        self.needed, self.at = 1.9 * count, float("nan")
        self.start()

    def run(self) -> None:
        import torch

        while torch.cuda.memory_allocated() < self.needed:
            time.sleep(0.01)
        self.at = time.time()


def run_one(peer: str, name: str, folder: str, steps: int, per_device: int, dtype: str, settled: int) -> None:
    """In a process of its own: one peer, one shape; prints a row."""
    import torch
    from shapes import SHAPES, make_rows, make_tokenizer, reward

    shape = SHAPES[name]
    rows: Any = make_rows(shape, 400)
    if peer == "trl":
        from datasets import Dataset
        from trl import RLOOConfig, RLOOTrainer

        rows = Dataset.from_list(rows)
    else:
        from rloom import RLOOConfig, RLOOTrainer
    model, more, arguments = model_and_arguments(shape, folder, dtype)
    clock, began = callback(steps), time.time()
    weights = WeightsArrive(shape) if torch.cuda.is_available() else None
    if not torch.cuda.is_available():
        more |= {"use_cpu": True, "bf16": False}
    if os.environ.get("BENCH_FLOAT32"):
        more["bf16"] = False
    if os.environ.get("BENCH_NO_STORE") and peer == "rloom":
        more["store_completions"] = False
    if os.environ.get("BENCH_VLLM"):
        more |= {"use_vllm": True, "vllm_mode": "colocate"}
    config = RLOOConfig(**options(shape, folder, per_device), **more)
    arguments["processing_class"] = make_tokenizer()  # some versions load a Qwen2's own class instead of what was saved
    trainer = RLOOTrainer(model, reward, config, rows, callbacks=[clock], **arguments)
    built = time.time()
    trainer.train()
    gaps = [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]
    gaps = gaps or [clock.ends[0] - built]  # a single step of a slow peer: its first
    late = gaps[max(settled - 1, 0) :] or gaps[-1:]
    row: dict[str, Any] = {
        "shape": name, "peer": peer, "dtype": dtype, "imports_s": round(began - SECONDS, 1),
        "build_s": round(built - began, 1), "first_update_s": round(clock.ends[0] - built, 1),
        "step_s": round(statistics.median(late), 3), "slowest_s": round(max(gaps[3:] or gaps), 2),
        "steps": [round(gap, 2) for gap in gaps],
    }  # fmt: skip
    if weights is not None:
        row["update_after_weights_s"] = round(clock.ends[0] - weights.at, 1)
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if peer == "rloom":
        row["chosen"] = trainer.chosen()
        logs = [entry for entry in trainer.state.log_history if "mismatch/mean" in entry]
        row["mismatch"] = round(float(logs[-1]["mismatch/mean"]), 5) if logs else None
    print("ROW", json.dumps(row), flush=True)


def save_shape(name: str, folder: Path) -> None:
    """A folder as the hub has them: float32 weights, config, tokenizer; without weights for what is made in memory."""
    import torch
    from shapes import SHAPES, make_model, make_tokenizer

    shape = SHAPES[name]
    if not shape.lora:
        make_model(shape, torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def spawn(arguments: list[str], caches: str) -> dict[str, Any] | None:
    """Run this file again, with caches of its own; its row."""
    places = {"TRITON_CACHE_DIR": f"{caches}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    environment = {**os.environ, **places, "RLOOM_CACHE": f"{caches}/rloom", "BENCH_BEGAN": str(time.time())}
    done = subprocess.run(
        [sys.executable, __file__, "--one", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("ROW "):
            return json.loads(line[4:])
    print(done.stdout[-2000:], done.stderr[-3000:], file=sys.stderr, flush=True)
    return None


def compare(name: str, arguments: argparse.Namespace, caches: str) -> None:
    from shapes import SHAPES

    shape = SHAPES[name]
    dtype = arguments.dtype or shape.dtype
    per_device = min(arguments.per_device, shape.completions) if not shape.lora else 8
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--save", name, folder], check=True)
        rows = {}
        for peer in arguments.peers:
            steps = arguments.steps if peer == "rloom" else arguments.peer_steps
            settled = arguments.settled if peer == "rloom" else 1
            told = [peer, name, folder, str(steps), str(per_device), dtype, str(settled)]
            rows[peer] = spawn(told, caches if arguments.warm else tempfile.mkdtemp(dir=caches))
            print("RESULT", json.dumps(rows[peer]), flush=True)
    if rows.get("trl") and rows.get("rloom"):
        ours, theirs = rows["rloom"], rows["trl"]
        ratio = {"shape": name, "ratio": round(theirs["step_s"] / ours["step_s"], 2)}
        if "peak_gib" in ours:
            ratio["memory_ratio"] = round(ours["peak_gib"] / theirs["peak_gib"], 2)
        print("RATIO", json.dumps(ratio), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        peer, name, folder, steps, per_device, dtype, settled = sys.argv[2:]
        return run_one(peer, name, folder, int(steps), int(per_device), dtype, int(settled))
    if sys.argv[1:2] == ["--save"]:
        return save_shape(sys.argv[2], Path(sys.argv[3]))
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--peers", nargs="*", default=["rloom", "trl"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--peer-steps", type=int, default=3)
    parser.add_argument("--settled", type=int, default=3, help="steps of ours that the median leaves out")
    parser.add_argument("--per-device", type=int, default=16, help="per_device_train_batch_size")
    parser.add_argument("--dtype", default=None, help="of the weights, for both; unset: as people load the shape")
    parser.add_argument("--float32", action="store_true", help="bf16=False for both: true float32")
    parser.add_argument("--vllm", action="store_true", help="use_vllm=True, colocated, for both")
    parser.add_argument("--no-store", action="store_true", help="ours without its store of completions")
    parser.add_argument("--warm", action="store_true", help="all runs share their caches")
    arguments = parser.parse_args()
    if arguments.vllm:
        os.environ["BENCH_VLLM"] = "1"
    if arguments.no_store:
        os.environ["BENCH_NO_STORE"] = "1"
    if arguments.float32:
        os.environ["BENCH_FLOAT32"] = "1"
    with tempfile.TemporaryDirectory() as caches:
        for name in arguments.shapes:
            compare(name, arguments, caches)
    return None


if __name__ == "__main__":
    main()
