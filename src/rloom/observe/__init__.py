"""What a run logs and stores: metrics, completions, progress, diagnosis."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloom.observe.runs import RunReader
    from rloom.observe.store import read_store

_HOME = {"RunReader": "runs", "read_store": "store"}

__all__ = ["RunReader", "read_store"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rloom.observe' has no attribute '{name}'")
    # Importing numpy takes time, so the store is imported when it is first used.
    return getattr(importlib.import_module(f"rloom.observe.{_HOME[name]}"), name)
