"""What a run shows and leaves behind: metrics, tables of completions, progress, the store of all completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloom.observe.store import read_store

__all__ = ["read_store"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rloom.observe' has no attribute '{name}'")
    from rloom.observe import store  # not before it is used: numpy takes its time

    return getattr(store, name)
