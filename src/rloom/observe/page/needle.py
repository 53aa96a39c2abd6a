"""A text that is looked for in lines of JSON, and a reader of such lines."""

from __future__ import annotations

import ctypes
import json
import os
from bisect import bisect_right
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np

FEW = 8
"""Rows from one hit to the next, on average, with which a search goes from hit to hit. With fewer, it goes row by
row."""
ESCAPE = 5
"""How far from its backslash an escape of JSON may end: \\u00e9."""
HEXADECIMAL, ESCAPED = b"0123456789abcdefABCDEF", b'"\\/bfnrtu'
"""What may stand in an escape: at its end, and after its backslash."""
LOCKED, SHORT = 512, 2**16
"""NumPy keeps Python's lock in a call for fewer elements (some 500), however long they are. In a block of so few bytes
that does not matter."""
OPEN_FILES = 100
"""Files that a reader holds open: rows in the order of their rewards are in any of them. 100 are 6.4 GB."""


class Needle:
    """A text to look for. The lines have it as JSON, in ASCII. What is found there may lie across an escape, such as
    the n of \\n: then the row is decoded to know."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.encoded = json.dumps(text)[1:-1].encode()
        # How far before a hit a backslash makes it unsure, by what the text begins with.
        first = self.encoded[:1]
        self._reach = ESCAPE if first in HEXADECIMAL else int(first in ESCAPED)
        # Half of a pair may be found in a whole one.
        self._halves = any("\ud800" <= letter <= "\udfff" for letter in text)

    def is_in(self, text: bytes) -> bool:
        """Whether a completion, as its line has it, holds the text."""
        hit = text.find(self.encoded)
        return hit >= 0 and self._is_at(text[max(hit - self._reach, 0) : hit], text)

    def _is_at(self, before: bytes, text: bytes) -> bool:
        """Whether the text is in a completion, by the bytes before the first place that looks like it."""
        sure = b"\\" not in before and not self._halves
        return sure or self.text in json.loads(b'"' + text + b'"')

    def in_rows(self, data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Which of the completions hold the text, by where they begin and end in a block of lines. They are most of
        what is in it."""
        found = np.zeros(len(begin), bool)
        left = 0 if _search is None else self._hop(data, begin.tolist(), end.tolist(), found)
        if left < len(begin):
            found[left:] = self.row_by_row(data, begin[left:], end[left:])
        return found

    def _hop(self, data: np.ndarray, begin: list[int], end: list[int], found: np.ndarray) -> int:
        """Go from hit to hit, and note whose they are. Returns the first row that is left, where there are many."""
        assert _search is not None
        start, size, text = data.ctypes.data, len(data), self.encoded
        hops, row, rows, at = 0, 0, len(begin), begin[0]
        while row < rows and hops <= 2 + row // FEW:
            hops += 1
            place = _search(start + at, size - at, text, len(text))
            if place is None:
                return rows
            hit = place - start
            # The first row that ends after it: the hit may be in what stands before its completion.
            row = bisect_right(end, hit, row)
            if row < rows and begin[row] <= hit:
                if hit + len(text) <= end[row]:
                    found[row] = self._is_there(data, hit, begin[row], end[row])
                # There is no later one in this row: the first was sure, or its text was decoded.
                row += 1
            at = begin[row] if row < rows else size
        return row

    def _is_there(self, data: np.ndarray, hit: int, begin: int, end: int) -> bool:
        if not self._reach and not self._halves:
            return True
        return self._is_at(data[max(hit - self._reach, 0) : hit].tobytes(), data[begin:end].tobytes())

    def row_by_row(self, data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """The same, where the completions are few, or most of them hold the text: each is read to its first hit."""
        whole = np.ndarray((1,), f"S{len(data)}", data)
        ends = np.stack([begin, end])
        if len(begin) < LOCKED and len(data) > SHORT:
            # Empty texts beside them, so that other threads need not wait.
            ends = np.concatenate([ends, np.zeros((2, LOCKED - len(begin)), ends.dtype)], axis=1)
        hits = np.strings.find(whole, self.encoded, *ends)[: len(begin)]
        found = hits >= 0
        if not self._reach and not self._halves:
            return found
        before = np.maximum(hits[found][:, None] - np.arange(1, self._reach + 1), 0)
        unsure = (data[before] == ord("\\")).any(1) | self._halves
        for row in np.flatnonzero(found)[unsure]:
            found[row] = self._is_there(data, int(hits[row]), int(begin[row]), int(end[row]))
        return found


def _memmem() -> Callable[..., int | None] | None:
    """The C library's search, where it has one: twice as fast as NumPy's, if there is nothing to find."""
    function = getattr(ctypes.CDLL(None), "memmem", None) if os.name == "posix" else None
    if function is not None:
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return function


_search = _memmem()


class LineReader:
    """Reads lines of a store. They are copied: touching a map of a file that a resumed run cuts meanwhile would kill
    the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[int, FileIO] = {}
        self._buffer = np.empty(0, np.uint8)

    def lines(self, records: np.ndarray) -> np.ndarray:
        """The bytes of the lines from the first to the last of some rows of one file, until the next call."""
        start = int(records["offset"][0])
        size = int(records["offset"][-1]) + int(records["size"][-1]) - start
        if len(self._buffer) < size:
            self._buffer = np.empty(size + size // 4, np.uint8)
        data = self._buffer[:size]
        file = self._open(int(records["part"][0]))
        file.seek(start)
        if file.readinto(data.data) != size:
            raise ValueError(f"{file.name} was cut")
        return data

    def bytes_at(self, part: int, offset: int, size: int) -> bytes:
        """So many bytes of a file."""
        file = self._open(part)
        file.seek(offset)
        data = file.read(size)
        if len(data) != size:
            raise ValueError(f"{file.name} was cut")
        return data

    def _open(self, part: int) -> FileIO:
        file = self._files.get(part)
        if file is None:
            if len(self._files) >= OPEN_FILES:
                self.close()
            file = self._files[part] = FileIO(self.folder / f"{part:09d}.jsonl")
        return file

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}
