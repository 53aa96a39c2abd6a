"""Finds a text in the completions of a large run: the lines are searched as they are on disk, the newest first.

A search goes on in threads of its own, so that the page has the first rows at once. It is exact, and distinguishes
capitals. Most of its time is in C functions that other threads need not wait for, so that two cores search twice as
fast as one.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import numpy as np

BLOCK = 2**19
"""Bytes of lines that are read and searched at once. They stay in a core's cache between the two."""
THREADS = min(4, os.cpu_count() or 1)


class TextSearch:
    """Searches the completions of the rows of a table for a text.

    `matches` is True for rows found so far, `done` when all were looked at, `ended` also when it was stopped before.
    `known` is what an earlier search has found in the first rows, which are not looked at again.
    """

    def __init__(self, folder: Path, records: np.ndarray, text: str, known: np.ndarray | None = None) -> None:
        self.folder, self.records, self.text = folder, records, text
        self.matches = np.zeros(len(records), bool)
        self.looked = 0 if known is None else len(known)
        self.matches[: self.looked] = False if known is None else known
        self._stop = False
        self._end = threading.Event()
        # As the lines have it: JSON, in ASCII.
        self._encoded = json.dumps(text)[1:-1].encode()
        self._lock, self._blocks, self._going = threading.Lock(), self._slices(self.looked), THREADS
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]

    @property
    def done(self) -> bool:
        """Whether all rows were looked at."""
        return self.looked == len(self.records)

    @property
    def ended(self) -> bool:
        """Whether no more rows will be looked at."""
        return self._end.is_set()

    def is_of(self, records: np.ndarray) -> bool:
        """Whether these records begin with those that are searched. Those of an older store grow at their beginning;
        a search that broke off, as its lines changed, is of none."""
        count = len(self.records)
        if count > len(records) or (self.ended and not self.done):
            return False
        last = slice(max(count - 1, 0), count)
        return all((self.records[last][name] == records[last][name]).all() for name in ("part", "offset"))

    def start(self) -> TextSearch:
        """Begin."""
        for thread in self._threads:
            thread.start()
        return self

    def wait(self, seconds: float) -> bool:
        """Wait for the end, or so long. Returns whether it is done."""
        self._end.wait(seconds)
        return self.done

    def stop(self) -> None:
        """Give up."""
        self._stop = True

    def _run(self) -> None:
        reader = _Reader(self.folder)
        try:
            while (rows := self._next()) is not None:
                self._search_rows(reader.read(self.records[rows]), rows)
        except (OSError, ValueError):
            # The run was resumed or moved meanwhile: the page asks again, of the new table.
            self._stop = True
        finally:
            reader.close()
            with self._lock:
                self._going -= 1
                if not self._going:
                    self._end.set()

    def _next(self) -> slice | None:
        with self._lock:
            return None if self._stop else next(self._blocks, None)

    def _slices(self, known: int) -> Iterator[slice]:
        """Neighbouring rows of one file, about a block of them at a time, the newest first."""
        parts = self.records["part"]
        # Rows are in the order of parts.
        for number in np.unique(parts[known:])[::-1]:
            first, last = (int(np.searchsorted(parts, number, side=side)) for side in ("left", "right"))
            first = max(first, known)
            offsets = self.records["offset"][first:last].astype(np.int64)
            end = last
            while end > first:
                begin = first + int(np.searchsorted(offsets, offsets[end - 1 - first] - BLOCK, side="right"))
                yield slice(begin, end)
                end = begin

    def _search_rows(self, data: np.ndarray, rows: slice) -> None:
        records = self.records[rows]
        if _may_hold(data, self._encoded):
            begin = records["offset"].astype(np.int64) - int(records["offset"][0]) + records["text_at"]
            end = begin + records["text_size"]
            # The first hit in each text, by one call for all of them.
            whole = np.ndarray((1,), f"S{len(data)}", data)
            hits = np.strings.find(whole, self._encoded, begin, end)
            found = hits >= 0
            for row in np.flatnonzero(found)[_in_escape(data, hits[found])]:
                found[row] = self.text in json.loads(b'"' + data[begin[row] : end[row]].tobytes() + b'"')
            self.matches[rows] = found
        with self._lock:
            self.looked += len(records)


class _Reader:
    """Reads the lines of neighbouring rows. They are copied: touching a map of a file that a resumed run cuts meanwhile
    would kill the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._part = -1
        self._file: FileIO | None = None
        self._buffer = np.empty(0, np.uint8)

    def read(self, records: np.ndarray) -> np.ndarray:
        """The bytes of these rows' lines, until the next call."""
        start = int(records["offset"][0])
        size = int(records["offset"][-1]) + int(records["size"][-1]) - start
        if len(self._buffer) < size:
            self._buffer = np.empty(size + BLOCK, np.uint8)
        data = self._buffer[:size]
        file = self._open(int(records["part"][0]))
        file.seek(start)
        if file.readinto(data.data) != size:
            raise ValueError(f"{file.name} was cut")
        return data

    def _open(self, part: int) -> FileIO:
        if self._file is None or part != self._part:
            self.close()
            self._part, self._file = part, FileIO(self.folder / f"{part:09d}.jsonl")
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _memmem() -> Callable[..., int | None] | None:
    """The C library's search, where it has one: twice as fast as NumPy's, if there is nothing to find."""
    function = getattr(ctypes.CDLL(None), "memmem", None) if os.name == "posix" else None
    if function is not None:
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return function


_search = _memmem()


def _may_hold(data: np.ndarray, text: bytes) -> bool:
    """Whether a text may be somewhere in a block: False only where it is not."""
    return _search is None or _search(data.ctypes.data, len(data), text, len(text)) is not None


def _in_escape(data: np.ndarray, hits: np.ndarray) -> np.ndarray:
    """Whether hits may begin inside an escape, such as the n of \\n: then the row has to be decoded to know."""
    before = np.maximum(hits[:, None] - np.arange(1, 6), 0)
    return (data[before] == ord("\\")).any(1)
