"""The README's script as it stands, and the same script with TRL's import: seconds and memory of what a user types.

    python bench/readme.py                                        # model and prompts from the hub
    python bench/readme.py --model FOLDER --prompts prompts.jsonl # without a network: these under the hub's names

The script is read out of README.md and run in a process of its own for each peer, with empty caches of Triton and of
torch's compiler. Nothing in it is changed but, for TRL, the module it imports from and `resume_from_checkpoint="auto"`,
which TRL does not have. A callback that every `transformers.Trainer` gets notes when updates end and ends the run after
some of them, so the script goes on to its last line. A row's seconds: imports and data until the trainer's constructor
is called; the constructor; from there to the end of the first update; a step (median of those after the third; a real
model ends its completions itself, so steps differ). The ratio is of the sums of the same updates.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
MODEL, PROMPTS = "Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/ultrafeedback-prompt"
REVISION = "0" * 40


def script(peer: str) -> str:
    """The README's first block of Python."""
    (text,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[:1]
    assert MODEL in text, f"the README's script no longer names {MODEL}"
    assert PROMPTS in text, f"the README's script no longer names {PROMPTS}"
    if peer == "trl":
        text = text.replace("from rloom import", "from trl import").replace('resume_from_checkpoint="auto"', "")
    return text


def in_hub_cache(home: Path, folder: Path) -> None:
    """The model of `folder` as `from_pretrained` finds it, under the README's name, without a network."""
    of_model = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "main").write_text(REVISION)
    (of_model / "snapshots").mkdir()
    (of_model / "snapshots" / REVISION).symlink_to(folder.resolve())


def in_datasets_cache(home: Path, prompts: Path) -> None:
    """Rows of a JSONL file as `load_dataset` finds them, under the README's name, without a network."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter
    from datasets.splits import SplitDict, SplitInfo

    name = PROMPTS.split("/")[1]
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    folder = home / "datasets" / PROMPTS.replace("/", "___") / "default" / "0.0.0" / REVISION
    folder.mkdir(parents=True)
    info = Dataset.from_list(rows).info
    writer = ArrowWriter(path=str(folder / f"{name}-train.arrow"), features=info.features)
    for row in rows:
        writer.write(row)
    count, size = writer.finalize()
    info.builder_name, info.dataset_name, info.config_name, info.version = "parquet", name, "default", "0.0.0"
    info.splits = SplitDict({"train": SplitInfo("train", size, count, dataset_name=name)}, dataset_name=name)
    info.write_to_directory(str(folder))


class Times:
    """When things happened, by the clock of the wall."""

    def __init__(self) -> None:
        self.began = float(os.environ["BENCH_BEGAN"])
        self.called, self.built, self.ends = 0.0, 0.0, list[float]()

    def watch(self, trainer_class: Any) -> None:
        """Note when its constructor is called and has ended."""
        init = trainer_class.__init__

        def timed(*args: Any, **kwargs: Any) -> None:
            self.called = time.time()
            init(*args, **kwargs)
            self.built = time.time()

        trainer_class.__init__ = timed

    def row(self) -> dict[str, Any]:
        steps = [b - a for a, b in itertools.pairwise(self.ends)]
        return {
            "until_constructor_s": round(self.called - self.began, 1),
            "constructor_s": round(self.built - self.called, 1),
            "first_update_s": round(self.ends[0] - self.built, 1),
            "step_s": round(statistics.median(steps[3:] or steps), 3),
            "steps": [round(step, 2) for step in steps],
            "all_s": round(time.time() - self.began, 1),
        }


def run_one(peer: str, steps: int) -> None:
    """In a process of its own: the script, with a clock; prints a row."""
    import torch
    from transformers import TrainerCallback, trainer

    times, rewards = Times(), list[float]()

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.ends.append(time.time())
            control.should_training_stop = len(times.ends) == steps
            return control

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            rewards.extend(value for key, value in (logs or {}).items() if key == "reward")

    trainer.DEFAULT_CALLBACKS.append(Clock)
    times.watch(importlib.import_module(peer).RLOOTrainer)
    exec(compile(script(peer), str(README), "exec"), {"__name__": "__main__"})
    row = {"peer": peer, **times.row(), "rewards": [round(value, 3) for value in rewards]}
    if torch.cuda.is_available():
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    print("ROW", json.dumps(row), flush=True)


def spawn(peer: str, steps: int, places: dict[str, str], show: bool) -> dict[str, Any] | None:
    """Run this file again in an empty folder with empty caches; its row."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        environment = {**os.environ, **places, **caches, "RLOOM_CACHE": f"{folder}/rloom"}
        environment["BENCH_BEGAN"] = str(time.time())
        done = subprocess.run(
            [sys.executable, __file__, "--one", peer, str(steps)],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if show or done.returncode:
        print(done.stdout[-6000:], done.stderr[-6000:], flush=True)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    return rows[0] if rows else None


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        run_one(sys.argv[2], int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", nargs="*", default=["rloom", "trl"])
    parser.add_argument("--steps", type=int, default=24, help="updates of ours")
    parser.add_argument("--peer-steps", type=int, default=6, help="updates of TRL's")
    parser.add_argument("--model", type=Path, help="a folder that stands in for the hub's model")
    parser.add_argument("--prompts", type=Path, help="rows with a prompt that stand in for the hub's")
    parser.add_argument("--show", action="store_true", help="print what the scripts print")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        places = {}
        if arguments.model:
            in_hub_cache(Path(home), arguments.model)
            in_datasets_cache(Path(home), arguments.prompts)
            places = {"HF_HOME": home, "HF_HUB_OFFLINE": "1"}
        rows = {}
        for peer in arguments.peers:
            steps = arguments.steps if peer == "rloom" else arguments.peer_steps
            rows[peer] = spawn(peer, steps, places, arguments.show)
            print("RESULT", json.dumps(rows[peer]), flush=True)
    if rows.get("trl") and rows.get("rloom"):
        both = zip(rows["trl"]["steps"], rows["rloom"]["steps"], strict=False)
        theirs, ours = map(sum, zip(*both, strict=True))
        print("RATIO", round(theirs / ours, 2), "of the updates from the second on that both made", flush=True)


if __name__ == "__main__":
    main()
