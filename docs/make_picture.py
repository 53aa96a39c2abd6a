"""Draws docs/panel.svg, the picture of a run's panel in the README, from a real run of the demo.

python docs/make_picture.py            about a minute on a CPU
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

import torch
from rich.console import Console

from rloom.demo import show, task
from rloom.observe.progress import LiveProgress


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = task.make_tokenizer()
    model = task.make_model(tokenizer, 0)
    rows = task.make_prompts(4096, 0)
    task.warm_up(model, tokenizer, rows, seed=0)
    quiet = Console(file=io.StringIO(), width=108)
    with tempfile.TemporaryDirectory() as folder:
        trainer = show.make_trainer(model, tokenizer, rows, seed=0, steps=200, output=folder, console=quiet)
        [panel] = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, LiveProgress)]
        trainer.train()
    picture = Console(file=io.StringIO(), width=108, record=True)
    picture.print(panel.view())
    # Without the fonts that rich would have a browser fetch: any monospaced one does.
    svg = re.sub(r"@font-face \{.*?\}", "", picture.export_svg(title="rloom demo"), flags=re.DOTALL)
    Path(__file__).with_name("panel.svg").write_text(svg)


if __name__ == "__main__":
    main()
