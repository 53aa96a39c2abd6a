"""What is made once for all workers of a test run: each would make a module's fixtures for itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def made_once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first worker to ask for it has filled; the others wait for that."""
    root = tmp_path_factory.getbasetemp()
    # Workers have folders of their own, in one that is the run's.
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder, made = root / name, root / f"{name}.made"
    with FileLock(root / f"{name}.lock"):
        if not made.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            made.touch()
    return folder
