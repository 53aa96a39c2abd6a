"""What a run leaves on disk: a line of JSON per completion, with every function's value as it came.

Lines are only ever added, in the order of the steps. A kill can cost the line that is being written and no other; a
resumed run drops the lines of steps that its checkpoint does not know, and writes them again. Whatever is wrong with
what is on disk is said, and never stops a run.
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
"""With an underscore in front: transformers uploads what is in the output folder to the hub, but for such names."""
PART_BYTES = 64 * 2**20
TEXTS = ("prompt", "completion", "extra")


class RunStore:
    """Writes a run's completions. They wait in memory until the update that trains on them says their advantages.

    Args:
        output_dir: the run's folder.
        texts: keep prompts, completions and the columns that reward functions add; scores are always kept.
        part_bytes: a file that has grown beyond this is followed by another.
    """

    def __init__(self, output_dir: str | Path, *, texts: bool = True, part_bytes: int = PART_BYTES) -> None:
        self.folder, self.texts, self.part_bytes = Path(output_dir) / FOLDER, texts, part_bytes
        self._step = -1  # the step whose groups are counted
        self._groups: dict[str, int] = {}  # how many groups of it are written down already, by mode
        self._off = False  # whether it could not be opened, so that nothing is written
        self._own = False  # whether what is on disk is this run's
        self._trained = False  # whether rows of training are among it
        self._checked: Path | None = None  # the part whose end is known to be a whole line

    # -- which run it is

    @property
    def is_own(self) -> bool:
        """Whether what is on disk is this run's: an evaluation before the training is."""
        return self._own

    def begin(self) -> None:
        """A run starts from nothing: an earlier one's rows are set aside, under another name."""
        self._off = False
        if self._trained or not self._own:
            self._set_aside()
        self._own, self._trained, self._checked = not self._off, False, None

    def resume(self, step: int) -> None:
        """A run goes on after `step`: rows of later steps are dropped, since they will come again."""
        self._own, self._trained, self._checked, self._off = True, True, None, False
        try:
            dropped = self._drop_after(step)
            self._step, self._groups = step, _groups_of(self.folder, step)
        except (OSError, ValueError) as error:
            # Beside rows that should be gone, new ones would be there twice.
            logger.warning("the run cannot go on with the completions in %s, and begins anew: %s", self.folder, error)
            self._set_aside()
            return
        if dropped:
            logger.info("%d completions of steps after %d are dropped from %s", dropped, step, self.folder)

    def _set_aside(self) -> None:
        """What is there gets another name. Where that may not be, nothing is written: it would mix two runs."""
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
                "Its training goes on. %s",
                self.folder,
                error,
            )

    def _drop_after(self, step: int) -> int:
        dropped = 0
        for part in reversed(_parts(self.folder)):
            if _first_step(part) <= step:
                return dropped + _cut(part, step)
            dropped += sum(row is not None for _, row in _lines(part, last=True))
            part.unlink()
        return dropped

    # -- rows

    def plain(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows as JSON has them, to be sent to another process."""
        return [json.loads(_line(self._kept(row))) for row in rows]

    def write(self, rows: Sequence[dict[str, Any]], step: int, mode: str = "train") -> None:
        """Write rows, as of a step, of training or of an evaluation's name. Their groups are counted on from those that
        the step has already. A full disk costs these rows and not the run."""
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
        """How many groups the step has before these: an evaluation is written batch by batch."""
        if step != self._step:
            self._step, self._groups = step, {}
        before = self._groups.get(mode, 0)
        self._groups[mode] = before + _count_groups(rows)
        return before

    def _may_write(self) -> bool:
        """Evaluating alone must not mix its rows into the store of a run that somebody else made."""
        if not self._own and _parts(self.folder):
            logger.warning("%s belongs to another run: these completions are not written down", self.folder)
            return False
        self._own = True
        return True

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in row.items() if self.texts or name not in TEXTS}
        return {name: value if name in TEXTS else _shortest(value) for name, value in kept.items()}

    def _append(self, data: bytes, step: int) -> None:
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
                os.truncate(part, size)  # no half a line in the middle of the file
                raise

    def _part(self, step: int) -> Path:
        """The newest file, or one that begins with this step where that is full."""
        new = self.folder / f"{step:09d}.jsonl"
        newest = _parts(self.folder)[-1:]
        return newest[0] if newest and newest[0].stat().st_size < self.part_bytes else max([new, *newest])


def _count_groups(rows: Iterable[dict[str, Any]]) -> int:
    """As many as the largest number says; rows need not have one."""
    return max((row["group"] + 1 for row in rows if isinstance(row.get("group"), int)), default=0)


def _renumbered(row: dict[str, Any], before: int) -> dict[str, Any]:
    return {**row, "group": row["group"] + before} if "group" in row else dict(row)


def _shortest(value: Any) -> Any:
    """Numbers with as many digits as float32, in which scores are kept, has; what is no number there as null.

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
    """Without infinities and NaN, which JSON does not have: null in their place.

    >>> _finite({"a": [1.0, float("inf")], "b": (float("nan"), "text")})
    {'a': [1.0, None], 'b': [None, 'text']}
    """
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: dict[str, Any]) -> str:
    """A row as JSON. Prompts and further columns are the user's, and may hold anything: what is no number becomes null,
    what JSON does not know text, and so does what contains itself."""
    for plain in (lambda value: value, _finite, _text):  # most rows need nothing, and copying them takes time
        try:
            made = {name: plain(value) if name in TEXTS else value for name, value in row.items()}
            return json.dumps(made, default=_text, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            continue
    raise ValueError(f"a row that is no JSON: {_text(row)}")


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception:  # an object of the user's own
        return f"a {type(value).__name__}"


# -- files


def _parts(folder: Path) -> list[Path]:
    """The store's own files, in order; others that somebody put there are none of its business."""
    return sorted(folder.glob("[0-9]" * 9 + ".jsonl"))


def _first_step(part: Path) -> int:
    return int(part.stem)


def _lines(part: Path, *, last: bool) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Where each line begins, and its row: None where it is damaged. At the end of the last file half a line may stand,
    which is passed over."""
    position = 0
    with part.open("rb") as file:
        for line in file:
            if last and not line.endswith(b"\n"):
                return
            yield position, _row(line)
            position += len(line)


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as it was written; None for anything else, such as the zeros that a crash of the machine leaves."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _warn_of_damage(count: int, where: Path) -> None:
    if count:
        lines = "1 line is" if count == 1 else f"{count} lines are"
        logger.warning("%s damaged in %s, and passed over", lines, where)


def _cut(part: Path, step: int) -> int:
    """Cut a file before the first row of a later step; returns how many rows that costs."""
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
    """How many groups of the newest step are there, by mode. It may have begun in an earlier file than the last."""
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
    """Without what stands after the last end of line: a kill, or a full disk, came in between."""
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
    """The completions that a run has written down, in order: one dict each, as docs/rewards.md describes them.

    `pandas.json_normalize(read_store("out"))` makes a table of them. Damaged lines are passed over, with a warning that
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
