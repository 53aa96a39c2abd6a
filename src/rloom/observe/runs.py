"""Reads a run: its logs, its diagnoses, its options, and those of its completions that are asked for.

A run of rloom has them in its store (`output_dir/_rollouts`). Of a run by TRL, or another `transformers.Trainer`, there
are the logs in `trainer_state.json`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rloom.errors import DataError
from rloom.observe.lines import lines_of, parts_of
from rloom.observe.row_index import rows_of_step
from rloom.observe.row_json import with_token_ids
from rloom.observe.row_table import RowTable
from rloom.observe.store import DIAGNOSES, FOLDER, METRICS, RUN

STATE, IDENTITY = "trainer_state.json", "rloom_run.json"


class RunReader:
    """Reads a run's folder. The run may still be going on: what each method returns is what is there by then.

    Args:
        folder: the run's `output_dir`, one of its checkpoints, or a `trainer_state.json`.

    >>> import tempfile
    >>> from rloom.observe.store import RunStore
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = RunStore(folder)
    ...     store.write([{"group": 0, "completion": "2", "reward": 1.0, "advantage": 0.5}], step=1)
    ...     store.log({"reward": 0.5}, step=1)
    ...     run = RunReader(folder)
    ...     run.metrics(), [row["completion"] for row in run.completions(step=1)]
    ([{'reward': 0.5, 'step': 1}], ['2'])
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if self.folder.name == STATE:
            self.folder = self.folder.parent
        self.store = self.folder / FOLDER
        if not self.folder.is_dir():
            raise DataError(f"{folder} is no folder: name the output folder of a run")
        logged = any((self.store / name).exists() for name in (METRICS, RUN))
        if not logged and not parts_of(self.store) and self._state() is None:
            raise DataError(
                f"{folder} holds no run: neither {FOLDER} nor a {STATE} that can be read, here or in a checkpoint"
            )
        self.name = self.folder.resolve().name
        self.table = RowTable(self.store)

    # -- logs

    def metrics(self) -> list[dict[str, Any]]:
        """What was logged, oldest first: a dict each, with its `step`."""
        own = list(_entries(self.store / METRICS))
        state = self._state()
        before = own[0]["step"] if own else None
        # A run that an older version began has its first logs there alone.
        older = [] if state is None else _logs_of(state)
        return [entry for entry in older if before is None or entry["step"] < before] + own

    def diagnoses(self) -> list[dict[str, Any]]:
        """What was diagnosed: `step`, the `rule` and the `diagnosis` in words."""
        return list(_entries(self.store / DIAGNOSES))

    def facts(self) -> dict[str, Any]:
        """What the run is: `options`, `environment`, `about` (model, data, rewards, device). Empty where unknown."""
        newest = [folder for _, folder in self.checkpoints()]
        for path in (self.store / RUN, *(folder / IDENTITY for folder in (self.folder, *newest))):
            try:
                found = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(found, dict):
                return found
        return {}

    def max_steps(self) -> int | None:
        """How many updates the run is to have; None where unknown."""
        found = self.facts().get("max_steps") or (self._state() or {}).get("max_steps")
        return found if isinstance(found, int) and found > 0 else None

    def _state(self) -> dict[str, Any] | None:
        """The newest `trainer_state.json` that can be read. The folder's own is of the run's end, or of an earlier end
        after which it was resumed."""
        own = _state_of(self.folder)
        newest = next((state for _, folder in self.checkpoints() if (state := _state_of(folder)) is not None), None)
        return max((state for state in (own, newest) if state is not None), key=_last_step, default=None)

    def state_stamp(self) -> tuple[tuple[str, int, int], ...]:
        """Path, size and time (ns) of the states that `_state` chooses from, the folder's own and the newest
        checkpoint's: others when there is something new to read."""
        found = []
        for path in (self.folder / STATE, *(folder / STATE for _, folder in self.checkpoints())):
            try:
                file = path.stat()
            except OSError:
                continue
            found.append((str(path), file.st_size, file.st_mtime_ns))
        return tuple(found[:2])

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Its checkpoints by step, newest first."""
        found = [(int(match[1]), path) for path in self.folder.glob("checkpoint-*")
                 if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))]  # fmt: skip
        return sorted(found, reverse=True)

    # -- completions

    def has_completions(self) -> bool:
        """Whether completions are stored; of a run by TRL, there are curves alone."""
        return bool(parts_of(self.store))

    def completions(
        self, *, step: int | None = None, mode: str | None = None, group: int | None = None
    ) -> list[dict[str, Any]]:
        """The stored rows of a step, a mode ("train", or an evaluation's name) or a group, in order; None: of all.

        Only those lines are read. docs/rewards.md lists the fields of a row."""
        self.table.read_all()
        records = self.table.records
        if step is not None:
            records = records[rows_of_step(records, step)]
        chosen = np.ones(len(records), bool)
        if group is not None:
            chosen &= records["group"] == group
        if mode is not None:
            modes = self.table.names.modes
            chosen &= records["mode"] == (modes.index(mode) if mode in modes else -1)
        return [self.row(records[place]) for place in np.flatnonzero(chosen)]

    def steps(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """The training completions of each step, in order. All lines are read, and one step is in memory at a time.

        >>> import tempfile
        >>> from rloom.observe.store import RunStore
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = RunStore(folder)
        ...     store.write([{"group": 0, "reward": 1.0}, {"group": 0, "reward": 0.0}], step=1)
        ...     store.write([{"group": 0, "reward": 0.5}], step=2)
        ...     [(step, [row["reward"] for row in rows]) for step, rows in RunReader(folder).steps()]
        [(1, [1.0, 0.0]), (2, [0.5])]
        """
        trained = (row for row in self._lines() if row.get("mode") == "train")
        for step, rows in itertools.groupby(trained, key=lambda row: row["step"]):
            yield step, list(rows)

    def stored_steps(self) -> list[int]:
        """The updates whose completions are stored, in order. No lines are read."""
        self.table.read_all()
        records, modes = self.table.records, self.table.names.modes
        trained = records["mode"] == (modes.index("train") if "train" in modes else -1)
        return [int(step) for step in np.unique(records["step"][trained])]

    def _lines(self) -> Iterator[dict[str, Any]]:
        parts = self._parts()
        for part in parts:
            for _, row, _ in lines_of(part, last=part is parts[-1]):
                if row is not None:
                    yield _in_numbers(row)

    def _parts(self) -> list[Path]:
        if found := parts_of(self.store):
            return found
        what = "none yet" if self.store.is_dir() else "curves alone, as a run by TRL has"
        raise DataError(f"stored completions are needed, and {self.folder} has {what}")

    def group(self, step: int, group: int, mode: str = "train") -> list[dict[str, Any]]:
        """The rows of one group, in the order of their sampling."""
        return self.completions(step=step, mode=mode, group=group)

    def row(self, record: np.void) -> dict[str, Any]:
        """The stored row of a record of the table. Its tokens, and their values if stored, are lists of numbers."""
        return _in_numbers(self.table.line_of(record))


def _state_of(folder: Path) -> dict[str, Any] | None:
    """The state in a folder. None where there is none, or a damaged one: a run may be killed while it is written."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("log_history"), list) else None


def _logs_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a state that say their step."""
    return [entry for entry in state["log_history"] if isinstance(entry, dict) and isinstance(entry.get("step"), int)]


def _last_step(state: dict[str, Any]) -> int:
    return max((entry["step"] for entry in _logs_of(state)), default=0)


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a log; none where there is no such file."""
    if path.exists():
        yield from (row for _, row, _ in lines_of(path, last=True) if row is not None)


# -- values of tokens


def _in_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose tokens, and their values if stored, are lists of numbers."""
    row = with_token_ids(row)
    if isinstance(tokens := row.get("tokens"), dict):
        row["tokens"] = unpacked(tokens)
    return row


def packed(values: Any) -> str:
    """Numbers as text, with all bits of a float32: shorter than digits, and quicker to write.

    >>> packed([0.5, -1.0])
    'AAAAPwAAgL8='
    """
    return base64.b64encode(np.asarray(values, "<f4").tobytes()).decode()


def unpacked(tokens: dict[str, Any]) -> dict[str, Any]:
    """The values of a completion's tokens: lists of equal length. NaN and infinities become None.

    >>> unpacked({"ids": [5, 6], "texts": ["a", "b"], "kl": packed([0.5, float("-inf")])})
    {'ids': [5, 6], 'texts': ['a', 'b'], 'kl': [0.5, None]}
    """
    return {name: _numbers(value) if isinstance(value, str) else value for name, value in tokens.items()}


def _numbers(text: str) -> list[float | None]:
    try:
        found = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    except ValueError:
        return []
    return [value if math.isfinite(value) else None for value in found.tolist()]
