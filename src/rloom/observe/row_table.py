"""The table of a store's rows, as the index and the lines have them: what readers filter, sort and count."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rloom.observe.filter_writer import lacks_filter, make_filter
from rloom.observe.lines import first_step, parts_of
from rloom.observe.row_index import (
    IndexBuilder,
    IndexNames,
    end_of,
    fits,
    joined,
    line_of,
    part_records,
    read_index,
    widened,
    write_index,
)

AT_ONCE = 32 * 2**20
"""Bytes of lines that one refresh reads, at least: a part that was begun is read to its end."""
QUIET_SECONDS = 60.0
"""A store that has not been written to for so long may be given an index by a reader."""


@dataclass(slots=True)
class _Read:
    """Records of one part's lines that the index on disk lacks."""

    start: int
    end: int
    records: np.ndarray


class RowTable:
    """The records of all rows, oldest first, as a NumPy table (`row_index.py` names its fields).

    `refresh` takes in what has been written since. A store without an index, of an older version, is read from its
    lines, the newest first, some at each refresh, until `complete`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = IndexNames()
        self.records: np.ndarray = np.zeros(0, self.names.dtype())
        # These at once, for other threads: records, names, and how many of the records are in the index on disk.
        self.view = (self.records, self.names, 0)
        self.complete = False
        # The share of the lines' bytes that the records cover.
        self.share = 1.0
        self._base: np.ndarray = self.records
        # The names of the index on disk, as they were loaded. Reading further lines adds to the table's own.
        self._loaded: IndexNames | None = None
        self._on_disk = False
        self._read: dict[int, _Read] = {}

    def __len__(self) -> int:
        return len(self.records)

    def refresh(self, at_once: int = AT_ONCE) -> None:
        """Take in what the trainer has written since, and some of the lines that have no index."""
        self._load()
        left, missing, total = at_once, 0, 0
        parts = parts_of(self.folder)
        for part in reversed(parts):
            total += (size := _size(part))
            start = self._missing_from(part)
            if start is None or start >= size:
                continue
            if left <= 0:
                missing += size - start
                continue
            left -= size - start
            self._read_part(part, start, last=part == parts[-1])
        self.complete, self.share = missing == 0, 1.0 - missing / max(total, 1)
        new = [one.records for _, one in sorted(self._read.items()) if len(one.records)]
        self.records = joined([self._base, *new], self.names) if new else widened(self._base, self.names)
        self.view = (self.records, self.names.copy(), len(self._base))

    def read_all(self) -> None:
        """Refresh until the table is complete."""
        self.complete = False
        while not self.complete:
            self.refresh()

    def save(self) -> bool:
        """Write the index of a store that has none, where it is complete and no run writes to it. Returns whether it
        was written."""
        if self._on_disk or not self.complete or not self.is_quiet():
            return False
        try:
            write_index(self.folder, self.names, self.records)
        except OSError:
            # A folder that may only be read: the lines are read again the next time.
            return False
        return True

    def lacks_filter(self) -> bool:
        """Whether searches have to read much of the texts, since no filter of texts has it."""
        records, names, indexed = self.view
        return lacks_filter(self.folder, names.id, records, indexed)

    def save_filter(self) -> bool:
        """Write the filter of texts for a store whose index has none, from its lines, where no run writes to it.
        Returns whether it was written."""
        records, names, indexed = self.view

        def going_on() -> bool:
            found = read_index(self.folder)
            return self.is_quiet() and found is not None and found[0].id == names.id

        if len(records) != indexed or not going_on():
            return False
        return make_filter(self.folder, names.id, records, going_on)

    def is_quiet(self) -> bool:
        """Whether there are lines, and none was written in the last minute."""
        try:
            written = max((part.stat().st_mtime for part in parts_of(self.folder)), default=None)
        except OSError:
            return False
        return written is not None and time.time() - written >= QUIET_SECONDS

    def line_of(self, record: np.void) -> dict[str, Any]:
        """The stored row of a record."""
        return json.loads(line_of(self.folder, record))

    # -- what is on disk

    def _load(self) -> None:
        """Map the index on disk. Where its names are others than before, rows may have been dropped: lines are read
        anew."""
        loaded = read_index(self.folder)
        self._on_disk = loaded is not None and fits(self.folder, loaded[1])
        if loaded is not None and self._on_disk:
            names, base = loaded
            if names != self._loaded or len(base) != len(self._base):
                # What is mapped already stays, and searches that hold it too: each map counts as memory.
                self._base = base
            if names != self._loaded:
                self.names, self._loaded, self._read = names, names.copy(), {}
        else:
            if self._shrunk():
                self.names, self._loaded, self._read = IndexNames(), None, {}
            self._base = np.zeros(0, self.names.dtype())

    def _shrunk(self) -> bool:
        """Whether lines that were read are gone: a run of an older version was resumed."""
        return any(_size(self.folder / f"{number:09d}.jsonl") < one.end for number, one in self._read.items())

    def _missing_from(self, part: Path) -> int | None:
        """Where the lines of a part begin that no record covers. None where the index has all of them."""
        number, (base_part, base_end) = first_step(part), end_of(self._base)
        if number < base_part:
            self._read.pop(number, None)
            return None
        start = base_end if number == base_part else 0
        read = self._read.get(number)
        if read is not None and read.start != start:
            # The index has grown into these lines.
            del self._read[number]
            read = None
        return start if read is None else read.end

    def _read_part(self, part: Path, start: int, *, last: bool) -> None:
        records = part_records(part, IndexBuilder(self.names), start=start, last=last)
        number = first_step(part)
        known = self._read.get(number)
        end = end_of(records)[1] if last else _size(part)
        if known is None:
            self._read[number] = _Read(start, max(end, start), records)
        else:
            known.records, known.end = joined([known.records, records], self.names), max(end, known.end)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
