"""What rloom adds to a transformers checkpoint, and which checkpoints are whole.

`rloom_state.pt` holds what the next update depends on and transformers does not keep: rollouts in use, running
normalisers, metrics that were not logged yet, the running loss; of several processes, each but the first has a file of
its own, with its number in the name. `reference.pt` holds a reference that has moved.
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


def save(folder: str | Path, state: dict[str, Any], reference: dict[str, Any] | None, *, rank: int = 0) -> None:
    """Write our files. They come first: transformers writes `trainer_state.json` last, so that it marks the end. Each
    process has rollouts of its own; the reference is the same for all."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    torch.save(state, path / _state_file(rank))
    if reference and not rank:
        torch.save(reference, path / REFERENCE_FILE)


def _state_file(rank: int) -> str:
    return STATE_FILE if not rank else f"rloom_state_{rank}.pt"


def load(folder: str | Path, *, rank: int = 0) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Our state and the reference's weights; None for what is not there (a checkpoint of TRL's, say). A process that
    the checkpoint does not know gets the first one's state, whose running statistics are those of all."""
    path = Path(folder)
    found: list[dict[str, Any] | None] = []
    own = path / _state_file(rank)
    for file in (own if own.exists() else path / STATE_FILE, path / REFERENCE_FILE):
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
