"""Writes docs/options.md from the config itself; a test says when it is out of date.

python docs/make_options.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from transformers import TrainingArguments

from rloom import RLOOConfig
from rloom.config.older_names import OlderNames

PAGE = Path(__file__).with_name("options.md")

INTRO = """# All options of `RLOOConfig`

Beside these, everything that `transformers.TrainingArguments` has. Names and defaults are TRL's where TRL has them. Of
the objective's options, those left unset are decided by [`objective`](algorithms.md); `config.choices` shows what was
decided. Older names are in [older-names.md](older-names.md).

| option | default | meaning |
|---|---|---|
"""


def page() -> str:
    """The page as markdown."""
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)}
    older = {f.name for f in dataclasses.fields(OlderNames)}
    changed = {"learning_rate", "logging_steps", "gradient_checkpointing", "bf16", "remove_unused_columns"}
    rows = []
    for field in dataclasses.fields(RLOOConfig):
        if field.name in older or (field.name in inherited and field.name not in changed):
            continue
        default = "–" if field.default is None else f"`{field.default}`"
        rows.append(f"| `{field.name}` | {default} | {field.metadata.get('help', '').replace('|', chr(92) + '|')} |")
    return INTRO + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
