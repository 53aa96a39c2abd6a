"""Stores a run on disk: all completions, one line of JSON each, its logs and its diagnoses.

Lines are only appended, in the order of the steps. A kill can cost only the line that is being written. A resumed run
drops the lines of steps after its checkpoint, and writes them again. Problems with the files are logged, and never stop
a run.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rloom.observe.filter_writer import set_filter_aside
from rloom.observe.lines import append_whole, cut, drop_torn_line, first_step, lines_of, parts_of, warn_of_damage
from rloom.observe.row_index import IndexWriter, remove_index
from rloom.observe.row_json import TEXTS, as_json, finite, shortest, with_token_ids
from rloom.printable import get_logger

logger = get_logger(__name__)

FOLDER = "_rollouts"
"""The underscore keeps transformers from uploading the folder to the hub."""
PART_BYTES = 64 * 2**20
UNCHANGED = (*TEXTS, "tokens")
"""Fields whose numbers, if they have any, stay as they are."""
METRICS, DIAGNOSES, RUN = "metrics.jsonl", "diagnoses.jsonl", "run.json"
"""What is logged, what was diagnosed, both with their steps, and what the run is: options, versions, device."""


class RunStore:
    """Writes a run's completions, logs and diagnoses.

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
        # Files whose ends are known to be complete lines.
        self._checked: set[Path] = set()
        # None after a problem: readers then read the lines.
        self._index: IndexWriter | None = IndexWriter(self.folder)

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
        self._own, self._trained, self._checked = not self._off, False, set()

    def resume(self, step: int) -> None:
        """Resume a run after `step`. Rows of later steps are dropped, since they will be written again."""
        self._own, self._trained, self._checked, self._off = True, True, set(), False
        try:
            set_filter_aside(self.folder)
            dropped = self._drop_after(step)
            self._step, self._groups = step, _groups_of(self.folder, step)
        except (OSError, ValueError) as error:
            # Rows that could not be dropped would be there twice.
            logger.warning("the store in %s cannot be continued, and begins anew: %s", self.folder, error)
            self._set_aside()
            return
        if dropped:
            logger.info("%d completions of steps after %d are dropped from %s", dropped, step, self.folder)
        self._resume_index(step)

    def _set_aside(self) -> None:
        """Rename the folder of an earlier run. If that fails, nothing is written, since two runs would be mixed."""
        self._index = IndexWriter(self.folder)
        try:
            if not parts_of(self.folder):
                self._clear()
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

    def _clear(self) -> None:
        """Remove what a run without completions has left."""
        remove_index(self.folder)
        for name in (METRICS, DIAGNOSES, RUN):
            (self.folder / name).unlink(missing_ok=True)

    def _drop_after(self, step: int) -> int:
        """Drop the rows of later steps, file by file from the end. Returns how many there were."""
        for name in (METRICS, DIAGNOSES):
            if (self.folder / name).exists():
                cut(self.folder / name, step)
        dropped = 0
        for part in reversed(parts_of(self.folder)):
            if first_step(part) <= step:
                return dropped + cut(part, step)
            dropped += sum(row is not None for _, row, _ in lines_of(part, last=True))
            part.unlink()
        return dropped

    def _resume_index(self, step: int) -> None:
        self._index = IndexWriter(self.folder)
        try:
            if self.folder.exists():
                self._index.resume(step)
        except (OSError, ValueError) as error:
            self._give_up_index(error)

    def _give_up_index(self, error: Exception) -> None:
        """Without an index readers are slower, and nothing is lost. What it has so far stays right."""
        logger.warning("the index in %s is not continued: %s", self.folder, error)
        self._index = None

    # -- rows

    def plain(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows as plain JSON values, which can be sent to another process."""
        return [json.loads(as_json(self._kept(row))) for row in rows]

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
            made = [{"step": step, "mode": mode, **self._kept(_renumbered(row, before))} for row in rows]
            lines = [as_json(row) for row in made]
            part = self._part(step)
            offset = self._append(part, lines)
        except (OSError, ValueError) as error:
            logger.warning("%d completions of step %d could not be written down: %s", len(rows), step, error)
            return
        self._add_to_index(made, lines, part, offset)

    def _add_to_index(self, rows: list[dict[str, Any]], lines: list[str], part: Path, offset: int) -> None:
        if self._index is None:
            return
        try:
            self._index.add(rows, lines, part=first_step(part), offset=offset)
        except (OSError, ValueError) as error:
            self._give_up_index(error)

    def _count_on(self, rows: Sequence[dict[str, Any]], step: int, mode: str) -> int:
        """How many groups the step has before these rows: an evaluation is written batch by batch."""
        if step != self._step:
            self._step, self._groups = step, {}
        before = self._groups.get(mode, 0)
        self._groups[mode] = before + _count_groups(rows)
        return before

    def _may_write(self) -> bool:
        """Whether rows may be written. An evaluation without training must not add rows to another run's store."""
        if not self._own and parts_of(self.folder):
            logger.warning("%s belongs to another run: these completions are not written down", self.folder)
            return False
        if not self._own:
            self._clear()
        self._own = True
        return True

    def _kept(self, row: dict[str, Any]) -> dict[str, Any]:
        hidden = () if self.texts else (*TEXTS, "tokens")
        return {
            name: shortest(value) if isinstance(value, (float, dict)) and name not in UNCHANGED else value
            for name, value in row.items()
            if name not in hidden
        }

    def _append(self, file: Path, lines: Sequence[str]) -> int:
        """Append lines to a file: all of them, or none. Returns where they begin."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if file not in self._checked and file.exists():
            drop_torn_line(file)
        self._checked.add(file)
        return append_whole(file, "".join(f"{line}\n" for line in lines).encode())

    def _part(self, step: int) -> Path:
        """The newest file, or a new one that begins with this step if the newest is full."""
        new = self.folder / f"{step:09d}.jsonl"
        newest = parts_of(self.folder)[-1:]
        return newest[0] if newest and newest[0].stat().st_size < self.part_bytes else max([new, *newest])

    # -- logs

    def log(self, entry: dict[str, Any], step: int) -> None:
        """Append what was logged at a step."""
        self._note(METRICS, {**entry, "step": step})

    def diagnose(self, rule: str, line: str, step: int) -> None:
        """Append what was diagnosed at a step, and the rule's name."""
        self._note(DIAGNOSES, {"step": step, "rule": rule, "diagnosis": line})

    def diagnosed(self) -> dict[str, int]:
        """The step at which each rule was last noted."""
        path = self.folder / DIAGNOSES
        entries = [row for _, row, _ in lines_of(path, last=True) if row is not None] if path.exists() else []
        return {str(entry.get("rule")): int(entry.get("step") or 0) for entry in entries}

    def describe(self, facts: dict[str, Any]) -> None:
        """Write what the run is, over what was written before."""
        if not self._off and self._own:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / RUN).write_text(json.dumps(finite(facts), indent=1, default=str))
            except (OSError, ValueError) as error:
                logger.warning("%s could not be written: %s", self.folder / RUN, error)

    def _note(self, name: str, entry: dict[str, Any]) -> None:
        # Logs of an evaluation without training do not belong to the run whose rows are here.
        if self._off or (not self._own and parts_of(self.folder)):
            return
        try:
            self._append(self.folder / name, [json.dumps(finite(entry), default=float)])
        except (OSError, ValueError, TypeError) as error:
            logger.warning("a line of %s could not be written: %s", self.folder / name, error)


def _count_groups(rows: Iterable[dict[str, Any]]) -> int:
    """The number of groups, by the largest group number. Rows need not have one."""
    return max((row["group"] + 1 for row in rows if isinstance(row.get("group"), int)), default=0)


def _renumbered(row: dict[str, Any], before: int) -> dict[str, Any]:
    return {**row, "group": row["group"] + before} if "group" in row else dict(row)


def _groups_of(folder: Path, step: int) -> dict[str, int]:
    """How many groups of the newest step are on disk, by mode. The step may begin in an earlier file."""
    counts: dict[str, int] = {}
    for part in reversed(parts_of(folder)):
        for _, row, _ in lines_of(part, last=False):
            if row is not None and row["step"] == step:
                mode = str(row.get("mode"))
                counts[mode] = max(counts.get(mode, 0), _count_groups([row]))
        if first_step(part) < step:
            break
    return counts


def read_store(output_dir: str | Path, *, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
    """The completions that a run has stored, in order: one dict each, as docs/rewards.md describes them.

    `pandas.json_normalize(read_store("out"))` makes a table of them. Damaged lines are skipped, with a warning that
    counts them. `rloom.observe.RunReader` reads only what is asked for, which a large run needs.

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
    parts = parts_of(folder)
    if not parts:
        raise FileNotFoundError(f"there are no completions in {folder}: is {output_dir} the output folder of a run?")
    rows = []
    for number, part in enumerate(parts):
        if last is not None and first_step(part) > last:
            break
        damaged = 0
        for _, row, _ in lines_of(part, last=number == len(parts) - 1):
            if row is None:
                damaged += 1
            elif row["step"] >= first and (last is None or row["step"] <= last):
                rows.append(with_token_ids(row))
        warn_of_damage(damaged, part)
    return rows
