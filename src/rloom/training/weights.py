"""Loads checkpoint weights whose names or layout differ from the model's own.

`save_pretrained` writes many vision-language models and mixtures of experts in their publishers' layout, and
`from_pretrained` converts it back. The Trainer does not when it resumes: it warns about missing keys and keeps the
weights that it began with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def are_renamed(folder: str | Path, model: Any) -> bool:
    """Whether the checkpoint in `folder` has weights with names that `model` does not have."""
    names = _names(Path(folder))
    return not names <= set(model.state_dict())


def load_renamed(folder: str | Path, model: Any) -> None:
    """Load the checkpoint's weights into the model by means of `from_pretrained`."""
    saved = type(model).from_pretrained(folder, dtype=model.dtype)
    model.load_state_dict(saved.state_dict())


def _names(folder: Path) -> set[str]:
    """Names of the weights in a checkpoint of a whole model. A checkpoint of an adapter has none."""
    index, single = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.exists():
        return set(json.loads(index.read_text())["weight_map"])
    if not single.exists():
        return set()
    with safe_open(single, framework="pt") as file:
        return set(file.keys())
