"""What is said of a name by which no model can be loaded: which folder may be meant."""

from __future__ import annotations

import difflib
from pathlib import Path

from rloom.errors import in_words

NAMED = 3
"""Folders that a message names, at most."""


def lacks_config(name: str) -> bool:
    """Whether a model's name is that of a folder without a model's config."""
    return Path(name).is_dir() and not (Path(name) / "config.json").exists()


def why_no_model(name: str, error: Exception) -> str:
    """What to tell of a model that cannot be loaded.

    >>> why_no_model("org/typo", OSError("there is none"))
    "the model 'org/typo' cannot be loaded, from a folder of that name or from the hub: there is none"
    """
    start = f"the model {name!r} cannot be loaded"
    if lacks_config(name):
        return f"{start}: that folder has no config.json{_inside(Path(name))}"
    near = _beside(Path(name))
    hint = f"there is no folder {name}; did you mean {in_words(near)}? The hub says: " if near else ""
    return f"{start}, from a folder of that name or from the hub: {hint}{error}"


def _inside(folder: Path) -> str:
    """Which folders in it have a model, the newest first; or what else it is."""
    if (folder / "adapter_config.json").exists():
        return "; it has an adapter: load its base model with peft, and pass the PeftModel"
    found = [path for path in folder.glob("*/") if _has_model(path)]
    newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:NAMED]
    return f"; did you mean {in_words(map(str, newest))}?" if newest else ""


def _beside(path: Path) -> list[str]:
    """Folders with a model, whose names are like that of the one that is not there."""
    if path.exists() or not path.parent.is_dir():
        return []
    there = {one.name: one for one in path.parent.glob("*/") if _has_model(one)}
    return [str(there[name]) for name in difflib.get_close_matches(path.name, there, n=NAMED, cutoff=0.7)]


def _has_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
