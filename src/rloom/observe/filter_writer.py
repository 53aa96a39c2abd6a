"""Writes the filter of a store's texts: as rows are appended, when a run is resumed, and for a store that has none."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from rloom.observe.lines import append_whole
from rloom.observe.text_filter import (
    BLOCKS,
    FILTER,
    HEADER,
    STRETCH,
    WIDTH,
    TextFilter,
    header_of,
    stretches_in,
    stretches_of,
)

ASIDE, MADE = FILTER + ".old", FILTER + ".made"
COPIED = 8 * 2**20
"""Bytes that are copied at once."""
ROWS = 4096
"""Rows whose texts are read at once."""
FEW = 16
"""Stretches of text that may lack a filter in a store that gets no new one: they are quick to read."""
ABANDONED_SECONDS = 3600.0
"""Nobody works on a file that was not written to for so long."""


class FilterWriter:
    """Appends to the filter of a store, as rows are appended to its index. Rows that do not yet fill a stretch wait for
    the next ones; a kill costs their part of the filter, and nothing else.

    Args:
        folder: of the store.
        name: of the file.
    """

    def __init__(self, folder: Path, name: str = FILTER) -> None:
        self.path = folder / name
        self._first = self._size = 0
        self._texts: list[str] = []

    def begin(self, index_id: str) -> None:
        """Begin the file of a new index."""
        _write(self.path, index_id)

    def rename(self, index_id: str) -> None:
        """The index has another id, and the same rows."""
        if self.path.exists():
            _write(self.path, index_id, self.path, self.path.stat().st_size - HEADER)

    def resume(self, index_id: str, former: str, rows: int) -> None:
        """Begin the file of an index whose first rows are those of a former one, with what was set aside of these."""
        aside = self.path.with_name(ASIDE)
        _write(self.path, index_id, aside, _bytes_of(aside, former, rows))
        aside.unlink(missing_ok=True)

    def add(self, first: int, texts: Sequence[str]) -> None:
        """Take the texts of rows from a place of the index on, as JSON has them."""
        if not self._texts:
            self._first = first
        if first != self._first + len(self._texts):
            raise ValueError(f"the texts of rows from {self._first + len(self._texts)} on are missing")
        self._texts += texts
        self._size += sum(map(len, texts))
        if self._size < WIDTH * BLOCKS:
            return
        for made in stretches_of(self._first, self._texts):
            append_whole(self.path, made.tobytes())
            self._first += int(made["rows"][0])
            self._size -= int(made["size"][0])
        del self._texts[: len(self._texts) - (first + len(texts) - self._first)]


def _bytes_of(path: Path, index_id: str, rows: int) -> int:
    """How many bytes the stretches of an index's first rows take in a file; 0 for the file of another index."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        count = stretches_in(file.read(HEADER), path.stat().st_size, index_id)
    if not count:
        return 0
    # Of the tables nothing is read.
    found = np.memmap(path, STRETCH, "r", HEADER, (count,))
    later = np.flatnonzero(found["first"] + found["rows"] > rows)
    return STRETCH.itemsize * (int(later[0]) if len(later) else count)


def _write(path: Path, index_id: str, source: Path | None = None, size: int = 0) -> None:
    """Write a whole file: a header, and what follows another file's. A reader sees the old one, or the new one."""
    new = path.with_name(path.name + ".new")
    try:
        with new.open("wb") as file:
            file.write(header_of(index_id))
            if source is not None and size > 0:
                with source.open("rb") as old:
                    old.seek(HEADER)
                    while size > 0 and (data := old.read(min(size, COPIED))):
                        file.write(data)
                        size -= len(data)
        os.replace(new, path)
    except OSError:
        # On a full disk, half a copy would take the room that lines need.
        new.unlink(missing_ok=True)
        raise


def set_filter_aside(folder: Path) -> None:
    """Rename the filter before lines are cut: whatever happens then, no reader uses it for other lines."""
    if (folder / FILTER).exists():
        os.replace(folder / FILTER, folder / ASIDE)


def remove_filter(folder: Path) -> None:
    """Remove the filter of a store."""
    for path in folder.glob(f"{FILTER}*"):
        path.unlink(missing_ok=True)


# -- from lines


def texts_of(folder: Path, records: np.ndarray) -> list[str]:
    """The completions of records as JSON has them, read from their lines."""
    found, part, file = [], -1, None
    columns = (records[name].tolist() for name in ("part", "offset", "text_at", "text_size"))
    try:
        for number, offset, at, size in zip(*columns, strict=True):
            if file is None or number != part:
                if file is not None:
                    file.close()
                part, file = number, FileIO(folder / f"{number:09d}.jsonl")
            file.seek(offset + at)
            text = file.read(size)
            if len(text) != size:
                raise ValueError(f"{file.name} was cut")
            found.append(text.decode("ascii"))
    finally:
        if file is not None:
            file.close()
    return found


def lacks_filter(folder: Path, index_id: str, records: np.ndarray, indexed: int) -> bool:
    """Whether much of the texts of these records, of which so many are in the index, has no filter."""
    filtered = TextFilter(folder, index_id, indexed)
    covered = sum(int(found["size"][chosen].sum()) for found, chosen in filtered.stretches())
    return int(records["text_size"].sum(dtype=np.int64)) - covered >= FEW * WIDTH * BLOCKS


def make_filter(folder: Path, index_id: str, records: np.ndarray, going_on: Callable[[], bool] = lambda: True) -> bool:
    """Write the filter of a store that no run writes to, from its lines. Returns whether it was written. `going_on` is
    asked in between."""
    # Another reader may make the same at the same time: each has a file of its own. What a killed one has left is not
    # of use to anybody.
    for left in folder.glob(f"{MADE}*"):
        if time.time() - left.stat().st_mtime > ABANDONED_SECONDS:
            left.unlink(missing_ok=True)
    writer = FilterWriter(folder, f"{MADE}-{uuid.uuid4().hex[:8]}")
    try:
        writer.begin(index_id)
        for first in range(0, len(records), ROWS):
            writer.add(first, texts_of(folder, records[first : first + ROWS]))
            if not going_on():
                return False
        os.replace(writer.path, folder / FILTER)
    finally:
        writer.path.unlink(missing_ok=True)
    return True
