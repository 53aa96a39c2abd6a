"""Reads what a run has left in its folder: its completions by step, its log, its options. Needs no torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloom.errors import DataError
from rloom.observe.lines import lines_of, parts_of
from rloom.observe.row_json import with_token_ids
from rloom.observe.runs import RunReader
from rloom.observe.store import FOLDER

RUN_FILE = "rloom_run.json"
VERSIONS = ("python", "rloom", "torch", "transformers")
"""What a checkpoint has the versions of."""


def steps_of(run: str | Path, *, first: int = 0, last: int | None = None) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The training completions of each step, in order. One step is in memory at a time.

    >>> import tempfile
    >>> from rloom.observe.store import RunStore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = RunStore(folder)
    ...     store.write([{"group": 0, "reward": 1.0}, {"group": 0, "reward": 0.0}], step=1)
    ...     store.write([{"group": 0, "reward": 0.5}], step=2)
    ...     [(step, [row["reward"] for row in rows]) for step, rows in steps_of(folder)]
    [(1, [1.0, 0.0]), (2, [0.5])]
    """
    found = (row for row in _rows(Path(run)) if row.get("mode") == "train" and row["step"] >= first)
    for step, rows in itertools.groupby(found, key=lambda row: row["step"]):
        if last is not None and step > last:
            return
        yield step, list(rows)


def _rows(run: Path) -> Iterator[dict[str, Any]]:
    parts = parts_of(run / FOLDER)
    if not parts:
        raise DataError(f"there are no completions in {run / FOLDER}: is {run} the output folder of a run?")
    for number, part in enumerate(parts):
        for _, row, _ in lines_of(part, last=number == len(parts) - 1):
            if row is not None:
                yield with_token_ids(row)


def checkpoints_of(run: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints of a run by step, the newest first."""
    found = [(path.name.removeprefix("checkpoint-"), path) for path in Path(run).glob("checkpoint-*")]
    return sorted(((int(step), path) for step, path in found if step.isdigit()), reverse=True)


def log_of(run: str | Path) -> dict[int, dict[str, Any]]:
    """What was logged after each update, also of a run that has no checkpoint yet."""
    return {entry["step"]: entry for entry in RunReader(run).metrics() if "loss" in entry}


def facts_of(run: str | Path) -> dict[str, Any]:
    """Model, data, rewards, options and versions of a run, from its newest checkpoint or else from its store."""
    if (found := _newest(run, RUN_FILE)) is not None:
        return found
    stored = RunReader(run).facts()
    versions = {name: value for name, value in stored.get("environment", {}).items() if name in VERSIONS}
    facts = {"fixed": stored.get("fixed"), "options": stored.get("options"), "versions": versions}
    return {name: value for name, value in facts.items() if value}


def _newest(run: str | Path, name: str) -> dict[str, Any] | None:
    for folder in (Path(run), *(path for _, path in checkpoints_of(run))):
        try:
            return json.loads((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None
