"""The diffs of "How to add" in docs/architecture.md work: a copy of the project has them applied, and trains."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()

RUN = """
import sys, torch
import rloom
from rloom import RLOOConfig, RLOOTrainer
from rloom.observe.diagnose import RULES
from tests.conftest import make_model, make_tokenizer

assert rloom.__file__.startswith(sys.argv[1]), rloom.__file__
ENGINE

def short(completions, **kwargs):
    return [-float(len(text)) + index for index, text in enumerate(completions)]

quick = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "max_steps": 2}
config = RLOOConfig(
    sys.argv[2], per_device_train_batch_size=4, num_generations=4, max_completion_length=4, beta=0.1,
    advantage_estimator="best_of_others", kl_estimator="absolute", save_steps=2, **quick,
)
trainer = RLOOTrainer(
    make_model(), short, config, [{"prompt": "ab"}, {"prompt": "xyz"}], processing_class=make_tokenizer(),
    engine=MyEngine(),
)
trainer.train()
assert trainer.state.log_history[0]["completions/one_token_ratio"] == 0.0
assert trainer.state.log_history[0]["kl"] >= 0.0
assert "completions_are_one_token" in [rule.__name__ for rule in RULES]
state = torch.load(f"{sys.argv[2]}/checkpoint-2/rloom_state.pt", weights_only=True)
assert state["components"]["finite"] == {"in_a_row": 0}
"""


def applied(source: str, hunk: list[str]) -> str:
    """A hunk of context (" …") and new lines ("+…"): these stand before the next line of context, or after the last."""
    new: list[str] = []
    context = None
    for line in hunk:
        if line.startswith("+"):
            new.append(line[1:])
            continue
        context = line[1:]
        assert source.count(f"\n{context}") == 1, context
        if new:
            source = source.replace(f"\n{context}", "\n" + "\n".join(new) + f"\n{context}")
            new = []
    if new:
        start = source.index(f"\n{context}") + 1
        end = source.index("\n", start)
        source = source[:end] + "\n" + "\n".join(new) + source[end:]
    return source


def test_diffs_of_the_page_work(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        parts = re.split(r"^ # (src/\S+)\n", block, flags=re.MULTILINE)
        for file, text in zip(parts[1::2], parts[2::2], strict=True):
            path = tmp_path / file
            path.write_text(applied(path.read_text(), text.splitlines()))
    (engine,) = re.findall(r"```python\n(class MyEngine.*?)```", PAGE, re.DOTALL)
    script = tmp_path / "run.py"
    script.write_text(RUN.replace("ENGINE", f"from rloom import Completion, Group\n\n{engine}"))
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(tmp_path / "out")],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
