"""Finds a text in the completions of a large run, the newest first.

What the filter of texts excludes is not read; what it leaves over, and rows that have none, are searched as their lines
are on disk. A search goes on in threads of its own, so that the page has the first rows at once. It is exact, and
distinguishes capitals. Most of its time is in C functions that other threads need not wait for, so that two cores
search twice as fast as one.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rloom.observe.page.needle import LineReader, Needle
from rloom.observe.text_filter import TextFilter, rows_in

BLOCK = 2**22
"""Bytes of lines that are read and searched at once. They stay in the processor's cache between the two."""
THREADS = min(4, os.cpu_count() or 1)
FEW_BLOCKS = 16
"""Blocks of a stretch, of 64, in which a text may be and whose rows alone are searched. With more, all are."""
SEVERAL, GAP = 8, 2**14
"""Rows whose lines are read at once, together with what is between them, and how much that may be for each."""
MANY_ROWS = 4096
"""Rows that have to be read, after which a search does so, before it looks at more of the filter."""
NONE = np.zeros(0, np.intp)
AT_ONCE = 64
"""Rows that are looked at before the clock is."""


class TextSearch:
    """Searches the completions of the rows of a table for a text.

    `matches` is True for rows found so far, `seen` for those that were looked at. `done` is True when these are all,
    `ended` also when it was stopped before, or broke off: by `error`, since lines could not be read.

    Args:
        folder: of the store.
        records: the table.
        text: what to look for.
        known: what an earlier search has found in the first rows, which are not looked at again.
        filtered: the filter of the store's texts, if it has one.
    """

    def __init__(
        self,
        folder: Path,
        records: np.ndarray,
        text: str,
        known: np.ndarray | None = None,
        filtered: TextFilter | None = None,
    ) -> None:
        # A plain array: each look into a map of a file makes an object that knows the file.
        self.folder, self.records, self.text = folder, records.view(np.ndarray), text
        self.matches, self.seen = np.zeros(len(records), bool), np.zeros(len(records), bool)
        before = 0 if known is None else len(known)
        self.matches[:before], self.seen[:before] = False if known is None else known, True
        self._needle, self._filter = Needle(text), filtered
        self._stop = False
        self.error: OSError | ValueError | None = None
        self._newer: TextSearch | None = None
        self._end, self._free = threading.Event(), threading.Event()
        self._free.set()
        self._lock, self._left, self._going = threading.Lock(), self._jobs(before), THREADS
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]

    @property
    def looked(self) -> int:
        """How many rows were looked at."""
        return int(np.count_nonzero(self.seen))

    @property
    def done(self) -> bool:
        """Whether all rows were looked at."""
        return self.looked == len(self.records)

    @property
    def ended(self) -> bool:
        """Whether no more rows will be looked at."""
        return self._end.is_set()

    def is_of(self, records: np.ndarray) -> bool:
        """Whether these records begin with those that are searched. Those of an older store grow at their
        beginning."""
        count = len(self.records)
        if count > len(records):
            return False
        last = slice(max(count - 1, 0), count)
        return all((self.records[last][name] == records[last][name]).all() for name in ("part", "offset"))

    def start(self) -> TextSearch:
        """Begin."""
        for thread in self._threads:
            thread.start()
        return self

    def wait(self, seconds: float | None) -> bool:
        """Wait for the end, or so long (None: as long as it takes). Returns whether it is done."""
        self._end.wait(seconds)
        return self.done

    def give_way(self, newer: TextSearch) -> None:
        """Go on when another search has ended: it is of what was typed since."""
        self._newer = newer

    def stop(self) -> None:
        """Give up."""
        self._stop = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the search from going on: what a page waits for takes several times as long beside it."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    def settle(self, order: np.ndarray, wanted: int, seconds: float) -> bool:
        """Look at rows in an order, until so many of them hold the text, for so long at most. Returns whether there
        are as many: then nothing that is found later stands before them."""
        reader, end, found = LineReader(self.folder), time.monotonic() + seconds, 0
        try:
            for start in range(0, len(order), AT_ONCE):
                rows = order[start : start + AT_ONCE]
                self._look_at(rows[~self.seen[rows]], reader)
                found += int(np.count_nonzero(self.matches[rows]))
                if found >= wanted or time.monotonic() > end:
                    break
        except (OSError, ValueError):
            # The run was resumed or moved meanwhile, as below.
            return False
        finally:
            reader.close()
        return found >= wanted

    def _run(self) -> None:
        reader = LineReader(self.folder)
        try:
            while (job := self._next()) is not None:
                rows, some = job
                if self._newer is not None:
                    self._newer.wait(None)
                if not self._free.is_set():
                    self._free.wait()
                if some is None:
                    self._search_rows(reader.lines(self.records[rows]), rows)
                else:
                    self._search_some(reader, some)
                self.seen[rows] = True
        except (OSError, ValueError) as error:
            # The run was resumed or moved meanwhile, and the page asks again, of the new table; or a file is gone.
            self.error, self._stop = error, True
        finally:
            reader.close()
            with self._lock:
                self._going -= 1
                if not self._going:
                    self._end.set()

    # -- which rows to look at

    def _next(self) -> tuple[slice, np.ndarray | None] | None:
        with self._lock:
            return None if self._stop else next(self._left, None)

    def _jobs(self, known: int) -> Iterator[tuple[slice, np.ndarray | None]]:
        """Neighbouring rows, the newest first, and those of them that have to be looked at; None: all."""
        end = len(self.records)
        for stretch, word in self._filter.candidates(self._needle.encoded) if self._filter is not None else ():
            first, last = int(stretch["first"]), int(stretch["first"] + stretch["rows"])
            if last <= known:
                break
            if word.bit_count() > FEW_BLOCKS:
                # As if it were not there.
                if end - first > MANY_ROWS:
                    yield from self._slices(max(first, known), end)
                    end = max(first, known)
                continue
            yield from self._slices(last, end)
            end = max(first, known)
            some = rows_in(stretch, word, self.records["text_size"][first:last]) if word else NONE
            if len(some) and len(some := some[some >= known - first]):
                yield slice(end, last), first + some
            else:
                self.seen[end:last] = True
        yield from self._slices(known, end)

    def _slices(self, first: int, last: int) -> Iterator[tuple[slice, None]]:
        """Rows of one file, about a block of lines at a time, the newest first."""
        while last > first:
            number = int(self.records[last - 1]["part"])
            # Rows are in the order of parts. Few are looked at: a table may be large, and on disk.
            begin = bisect_left(range(last), number, lo=first, key=lambda place: int(self.records[place]["part"]))
            offsets = self.records["offset"][begin:last].astype(np.int64)
            while last > begin:
                # Up to here a block of lines ends with the last of these rows.
                start = begin + int(np.searchsorted(offsets, offsets[last - 1 - begin] - BLOCK, side="right"))
                yield slice(start, last), None
                last = start

    # -- looking

    def _search_rows(self, data: np.ndarray, rows: slice) -> None:
        self.matches[rows] = self._needle.in_rows(data, *_places(self.records[rows]))

    def _search_some(self, reader: LineReader, some: np.ndarray) -> None:
        """Look at some of neighbouring rows: if they lie close together, by one reading of all between them."""
        records = self.records[some] if len(some) >= SEVERAL else None
        if records is None or not _close(records):
            self._look_at(some, reader)
            return
        begin, end = _places(records)
        self.matches[some] = self._needle.row_by_row(reader.lines(records), begin, end)

    def _look_at(self, rows: np.ndarray, reader: LineReader) -> None:
        """Look at rows one by one, wherever they are."""
        records = self.records[rows]
        columns = (records[name].tolist() for name in ("part", "offset", "text_at", "text_size"))
        self.matches[rows] = [
            self._needle.is_in(reader.bytes_at(part, offset + at, size))
            for part, offset, at, size in zip(*columns, strict=True)
        ]
        self.seen[rows] = True


def _close(records: np.ndarray) -> bool:
    """Whether the lines of rows, and what is between them, are quicker to read at once."""
    spread = int(records["offset"][-1]) - int(records["offset"][0])
    return bool(records["part"][0] == records["part"][-1]) and spread <= len(records) * GAP


def _places(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the texts of rows of one file begin and end, counted from the first one's line."""
    begin = records["offset"].astype(np.int64) - int(records["offset"][0]) + records["text_at"]
    return begin, begin + records["text_size"]
