"""What rloom adds to a transformers checkpoint, and which checkpoints are whole.

`rloom_state.pt` holds what the next update depends on and transformers does not keep: rollouts in use, running
normalisers, metrics that were not logged yet, the running loss. `reference.pt` holds a reference that has moved.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

STATE_FILE = "rloom_state.pt"
REFERENCE_FILE = "reference.pt"
TRAINER_STATE_FILE = "trainer_state.json"


def save(folder: str | Path, state: dict[str, Any], reference: dict[str, Any] | None) -> None:
    """Write our files. They come first: transformers writes `trainer_state.json` last, so that it marks the end."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    torch.save(state, path / STATE_FILE)
    if reference:
        torch.save(reference, path / REFERENCE_FILE)


def load(folder: str | Path) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Our state and the reference's weights; None for what is not there (a checkpoint of TRL's, say)."""
    path = Path(folder)
    found: list[dict[str, Any] | None] = []
    for name in (STATE_FILE, REFERENCE_FILE):
        file = path / name
        found.append(torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None)
    return found[0], found[1]


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint was written to its end."""
    return step_of(folder) is not None


def step_of(folder: Path) -> int | None:
    """The number of updates that a checkpoint was written after; None for one that is not whole."""
    try:
        return int(json.loads((folder / TRAINER_STATE_FILE).read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_whole(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that is whole; an unfinished one, left by a kill in mid-write, is named and passed over."""
    pattern = re.compile(r"^checkpoint-(\d+)$")
    root = Path(output_dir)
    numbered = [(int(m[1]), p) for p in root.glob("checkpoint-*") if (m := pattern.match(p.name)) and p.is_dir()]
    for _, folder in sorted(numbered, reverse=True):
        if is_whole(folder):
            return folder
        logger.warning("%s is unfinished (the run was stopped while writing it) and is passed over", folder)
    return None
