"""What a run logs and stores: metrics, completions, progress, diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloom.observe.store import read_store

__all__ = ["read_store"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rloom.observe' has no attribute '{name}'")
    # Importing numpy takes time, so the store is imported when it is first used.
    from rloom.observe import store

    return getattr(store, name)
