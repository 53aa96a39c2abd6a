"""A text that is looked for in lines of JSON, and a reader of such lines."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable
from io import FileIO
from pathlib import Path

import numpy as np

FEW = 16
"""Rows from one hit to the next, on average, with which a search goes from hit to hit. With fewer, it goes row by
row."""
ESCAPE = 5
"""How far from its backslash an escape of JSON may end: \\u00e9."""


class Needle:
    """A text to look for. The lines have it as JSON, in ASCII. What is found there may lie across an escape, such as
    the n of \\n: then the row is decoded to know."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.encoded = json.dumps(text)[1:-1].encode()
        # Half of a pair may be found in a whole one.
        self._halves = any("\ud800" <= letter <= "\udfff" for letter in text)

    def is_in(self, text: bytes) -> bool:
        """Whether a completion, as its line has it, holds the text."""
        hit = text.find(self.encoded)
        return hit >= 0 and self._is_at(text[max(hit - ESCAPE, 0) : hit], text)

    def _is_at(self, before: bytes, text: bytes) -> bool:
        """Whether the text is in a completion, by the bytes before the first place that looks like it."""
        sure = b"\\" not in before and not self._halves
        return sure or self.text in json.loads(b'"' + text + b'"')

    def in_rows(self, data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Which of the completions hold the text, by where they begin and end in a block of lines."""
        found = np.zeros(len(begin), bool)
        left = self._hop(data, begin, end, found)
        if left < len(begin):
            found[left:] = self._row_by_row(data, begin[left:], end[left:])
        return found

    def _hop(self, data: np.ndarray, begin: np.ndarray, end: np.ndarray, found: np.ndarray) -> int:
        """Go from hit to hit, and note whose they are. Returns the first row that is left, where there are many."""
        row = at = hops = 0
        while _search is not None and hops <= 2 + row // FEW:
            hops += 1
            hit = _find(data, self.encoded, at)
            # The first row that ends after it: the hit may be in what stands before its completion.
            row = len(begin) if hit < 0 else int(np.searchsorted(end, hit, side="right"))
            if row == len(begin):
                break
            if hit >= begin[row] and hit + len(self.encoded) <= end[row]:
                found[row] = self._is_there(data, hit, int(begin[row]), int(end[row]))
                at, row = int(end[row]), row + 1
            else:
                at = max(hit + 1, int(begin[row]))
        return row

    def _is_there(self, data: np.ndarray, hit: int, begin: int, end: int) -> bool:
        return self._is_at(data[max(hit - ESCAPE, 0) : hit].tobytes(), data[begin:end].tobytes())

    def _row_by_row(self, data: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        # The first hit in each text, by one call for all of them.
        whole = np.ndarray((1,), f"S{len(data)}", data)
        hits = np.strings.find(whole, self.encoded, begin, end)
        found = hits >= 0
        before = np.maximum(hits[found][:, None] - np.arange(1, ESCAPE + 1), 0)
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


def _find(data: np.ndarray, text: bytes, at: int) -> int:
    """Where a text is in a block, from a place on; -1 where it is not."""
    assert _search is not None
    hit = _search(data.ctypes.data + at, len(data) - at, text, len(text))
    return -1 if hit is None else hit - data.ctypes.data


class LineReader:
    """Reads lines of a store. They are copied: touching a map of a file that a resumed run cuts meanwhile would kill
    the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._part = -1
        self._file: FileIO | None = None
        self._buffer = np.empty(0, np.uint8)

    def lines(self, records: np.ndarray) -> np.ndarray:
        """The bytes of the lines of neighbouring rows of one file, until the next call."""
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
        if self._file is None or part != self._part:
            self.close()
            self._part, self._file = part, FileIO(self.folder / f"{part:09d}.jsonl")
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
