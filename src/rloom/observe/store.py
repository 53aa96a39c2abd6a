"""Stores all completions of a run on disk, one line of JSON each.

Lines are only appended, in the order of the steps. A kill can cost only the line that is being written. A resumed run
drops the lines of steps after its checkpoint, and writes them again. Problems with the files are logged, and never stop
a run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rloom.printable import get_logger

logger = get_logger(__name__)

FOLDER = "_rollouts"
"""The underscore keeps transformers from uploading the folder to the hub."""
PART_BYTES = 64 * 2**20
TEXTS = ("prompt", "completion", "extra")
"""Fields that hold the user's or the model's texts."""


class RunStore:
    """Writes a run's completions.

    Args:
        output_dir: the run's folder.
        texts: keep prompts, completions and the columns that reward functions add; scores are always kept.
        part_bytes: a new file begins when the last one is larger than this.
    """

    def __init__(self, output_dir: str | Path, *, texts: bool = True, part_bytes: int = PART_BYTES) -> None:
        self.folder, self.texts, self.part_bytes = Path(output_dir) / FOLDER, texts, part_bytes
        # The current step, and how many groups of it are written already, by mode.
        self._step = -1
        self._groups: dict[str, int] = {}
        # Whether nothing is written, because the rows of another run could not be moved away.
        self._off = False
        # Whether the rows on disk belong to this run, and whether rows of training are among them.
        self._own = False
        self._trained = False
        # The file whose end is known to be a complete line.
        self._checked: Path | None = None

    # -- which run the rows belong to

    @property
    def is_own(self) -> bool:
        """Whether the rows on disk belong to this run. Those of an evaluation before the training do."""
        return self._own

    def begin(self) -> None:
        """Start a new run. The rows of an earlier run are renamed."""
        self._off = False
        if self._trained or not self._own:
            self._set_aside()
        self._own, self._trained, self._checked = not self._off, False, None

    def resume(self, step: int) -> None:
        """Resume a run after `step`. Rows of later steps are dropped, since they will be written again."""
        self._own, self._trained, self._checked, self._off = True, True, None, False
        try:
            dropped = self._drop_after(step)
            self._step, self._groups = step, _groups_of(self.folder, step)
        except (OSError, ValueError) as error:
            # Rows that could not be dropped would be there twice.
            logger.warning("the store in %s cannot be continued, and begins anew: %s", self.folder, error)
            self._set_aside()
            return
        if dropped:
            logger.info("%d completions of steps after %d are dropped from %s", dropped, step, self.folder)

    def _set_aside(self) -> None:
        """Rename the folder of an earlier run. If that fails, nothing is written, since two runs would be mixed."""
        try:
            if not _parts(self.folder):
                return
            aside = next(p for n in itertools.count(1) if not (p := self.folder.with_name(f"{FOLDER}-{n}")).exists())
            self.folder.rename(aside)
            self._step, self._groups = -1, {}
            logger.info("the completions of an earlier run are now in %s", aside)
        except (OSError, ValueError) as error:
            self._off = True
            logger.warning(
                "the completions of an earlier run in %s cannot be set aside: those of this run are NOT written down. "
                "Training continues. %s",
                self.folder,
                error,
            )

    def _drop_after(self, step: int) -> int:
        """Drop the rows of later steps, file by file from the end. Returns how many there were."""
        dropped = 0
        for part in reversed(_parts(self.folder)):
            if _first_step(part) <= step:
                return dropped + _cut(part, step)
            dropped += sum(row is not None for _, row in _lines(part, last=True))
            part.unlink()
        return dropped

    # -- rows

    def plain(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows as plain JSON values, which can be sent to another process."""
        return [json.loads(_line(self._kept(row))) for row in rows]

    def write(self, rows: Sequence[dict[str, Any]], step: int, mode: str = "train") -> None:
        """Write rows of a step. `mode` is "train", or the name of an evaluation. Group numbers continue those that the
        step has already. A full disk costs these rows, not the run."""
        if not rows or self._off:
            return
        before = self._count_on(rows, step, mode)
        try:
            if not self._may_write():
                return
            self._trained = self._trained or mode == "train"
            data = "".join(self._as_line(row, step, mode, before) + "\n" for row in rows).encode()
            self._append(data, step)
        except (OSError, ValueError) as error:
            logger.warning("%d completions of step %d could not be written down: %s", len(rows), step, error)

    def _as_line(self, row: dict[str, Any], step: int, mode: str, before: int) -> str:
        return _line({"step": step, "mode": mode, **self._kept(_renumbered(row, before))})

    def _count_on(self, rows: Sequence[dict[str, Any]], step: int, mode: str) -> int:
        """How many groups the step has before these rows: an evaluation is written batch by batch."""
        if step != self._step:
            self._step, self._groups = step, {}
        before = self._groups.get(mode, 0)
        self._groups[mode] = before + _count_groups(rows)
        return before

    def _may_write(self) -> bool:
        """Whether rows may be written. An evaluation without training must not add rows to another run's store."""
        if not self._own and _parts(self.folder):
            logger.warning("%s belongs to another run: these completions are not written down", self.folder)
            return False
        self._own = True
        return True

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in row.items() if self.texts or name not in TEXTS}
        return {name: value if name in TEXTS else _shortest(value) for name, value in kept.items()}

    def _append(self, data: bytes, step: int) -> None:
        """Append data to the newest file: all of it, or nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self._part(step)
        with part.open("ab", buffering=0) as file:
            if part != self._checked:
                _drop_torn_line(part)
                self._checked = part
            size = part.stat().st_size
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                # Half a line must not stay in the middle of the file.
                os.truncate(part, size)
                raise

    def _part(self, step: int) -> Path:
        """The newest file, or a new one that begins with this step if the newest is full."""
        new = self.folder / f"{step:09d}.jsonl"
        newest = _parts(self.folder)[-1:]
        return newest[0] if newest and newest[0].stat().st_size < self.part_bytes else max([new, *newest])


def _count_groups(rows: Iterable[dict[str, Any]]) -> int:
    """The number of groups, by the largest group number. Rows need not have one."""
    return max((row["group"] + 1 for row in rows if isinstance(row.get("group"), int)), default=0)


def _renumbered(row: dict[str, Any], before: int) -> dict[str, Any]:
    return {**row, "group": row["group"] + before} if "group" in row else dict(row)


def _shortest(value: Any) -> Any:
    """Round numbers to the digits of float32, the dtype of scores. Values that are not finite become None.

    >>> import torch
    >>> _shortest({"a": torch.tensor(0.1).item(), "b": float("nan"), "c": "text"})
    {'a': 0.1, 'b': None, 'c': 'text'}
    >>> _shortest(1e300) is None
    True
    """
    if isinstance(value, dict):
        return {name: _shortest(v) for name, v in value.items()}
    if isinstance(value, float):
        with np.errstate(over="ignore"):
            short = float(str(np.float32(value)))
        return short if math.isfinite(short) else None
    return value


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by None.

    >>> _finite({"a": [1.0, float("inf")], "b": (float("nan"), "text")})
    {'a': [1.0, None], 'b': [None, 'text']}
    """
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: dict[str, Any]) -> str:
    """A row as JSON. Prompts and extra columns are the user's, and may hold any object. Values that are not finite
    become null. Objects that JSON does not know, or that contain themselves, become text."""
    # Most rows need no conversion, and copying them takes time: conversions are tried only after a failure.
    for plain in (lambda value: value, _finite, _text):
        try:
            made = {name: plain(value) if name in TEXTS else value for name, value in row.items()}
            return json.dumps(made, default=_text, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            continue
    raise ValueError(f"a row that is no JSON: {_text(row)}")


def _text(value: Any) -> str:
    """The text of any object, also of one whose `str` raises an error."""
    try:
        return str(value)
    except Exception:
        # A user's own object may raise anything.
        return f"a {type(value).__name__}"


# -- files


def _parts(folder: Path) -> list[Path]:
    """The store's own files, in order. Other files in the folder are ignored."""
    return sorted(folder.glob("[0-9]" * 9 + ".jsonl"))


def _first_step(part: Path) -> int:
    return int(part.stem)


def _lines(part: Path, *, last: bool) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The start and the row of each line; None for a damaged row. Half a line at the last file's end is skipped."""
    position = 0
    with part.open("rb") as file:
        for line in file:
            if last and not line.endswith(b"\n"):
                return
            yield position, _row(line)
            position += len(line)


def _row(line: bytes) -> dict[str, Any] | None:
    """The row of a line. None for a damaged line, such as the zeros that a crash of the machine leaves."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _warn_of_damage(count: int, where: Path) -> None:
    if count:
        lines = "1 line is" if count == 1 else f"{count} lines are"
        logger.warning("%s damaged in %s, and skipped", lines, where)


def _cut(part: Path, step: int) -> int:
    """Cut a file before the first row of a later step. Returns how many rows were dropped."""
    _drop_torn_line(part)
    later, damaged = [], 0
    for position, row in _lines(part, last=True):
        if row is None:
            damaged += 1
        elif row["step"] > step:
            later.append(position)
    _warn_of_damage(damaged, part)
    if later:
        os.truncate(part, later[0])
    return len(later)


def _groups_of(folder: Path, step: int) -> dict[str, int]:
    """How many groups of the newest step are on disk, by mode. The step may begin in an earlier file."""
    counts: dict[str, int] = {}
    for part in reversed(_parts(folder)):
        for _, row in _lines(part, last=False):
            if row is not None and row["step"] == step:
                mode = str(row.get("mode"))
                counts[mode] = max(counts.get(mode, 0), _count_groups([row]))
        if _first_step(part) < step:
            break
    return counts


def _drop_torn_line(part: Path) -> None:
    """Drop an unfinished last line, which a kill or a full disk has left."""
    size = part.stat().st_size
    end = size
    with part.open("rb") as file:
        while end:
            start = max(0, end - 2**20)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
    if end < size:
        logger.warning("the last line of %s is unfinished (the run was stopped while writing it) and is dropped", part)
        os.truncate(part, end)


def read_store(output_dir: str | Path, *, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
    """The completions that a run has stored, in order: one dict each, as docs/rewards.md describes them.

    `pandas.json_normalize(read_store("out"))` makes a table of them. Damaged lines are skipped, with a warning that
    counts them.

    Args:
        output_dir: the run's folder. It may still be running.
        first, last: the steps wanted, both included.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = RunStore(folder)
    ...     store.write([{"prompt": "1+1=", "completion": "2", "scores": {"right": 1.0}, "advantage": 0.5}], step=1)
    ...     read_store(folder)
    [{'step': 1, 'mode': 'train', 'prompt': '1+1=', 'completion': '2', 'scores': {'right': 1.0}, 'advantage': 0.5}]
    """
    folder = Path(output_dir) / FOLDER
    parts = _parts(folder)
    if not parts:
        raise FileNotFoundError(f"there are no completions in {folder}: is {output_dir} the output folder of a run?")
    rows = []
    for number, part in enumerate(parts):
        if last is not None and _first_step(part) > last:
            break
        damaged = 0
        for _, row in _lines(part, last=number == len(parts) - 1):
            if row is None:
                damaged += 1
            elif row["step"] >= first and (last is None or row["step"] <= last):
                rows.append(row)
        _warn_of_damage(damaged, part)
    return rows
