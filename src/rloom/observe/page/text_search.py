"""Finds a text in the completions of a large run: the lines are searched as they are on disk, the newest first.

A search goes on in a thread of its own, so that the page has the first rows at once. It is exact, and distinguishes
capitals.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np

BLOCK = 8 * 2**20
"""Bytes that are searched before other threads get a turn."""


class TextSearch:
    """Searches the completions of the rows of a table for a text.

    `matches` is True for rows found so far, `done` when all were looked at, `ended` also when it was stopped before.
    """

    def __init__(self, folder: Path, records: np.ndarray, text: str) -> None:
        self.folder, self.records, self.text = folder, records, text
        self.matches = np.zeros(len(records), bool)
        self.looked = 0
        self._stop = False
        self._end = threading.Event()
        # As the lines have it: JSON, in ASCII.
        self._encoded = json.dumps(text)[1:-1].encode()
        self._pattern = re.compile(re.escape(self._encoded))
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def done(self) -> bool:
        """Whether all rows were looked at."""
        return self.looked == len(self.records)

    @property
    def ended(self) -> bool:
        """Whether no more rows will be looked at."""
        return self._end.is_set()

    def start(self) -> TextSearch:
        """Begin."""
        self._thread.start()
        return self

    def wait(self, seconds: float) -> bool:
        """Wait for the end, or so long. Returns whether it is done."""
        self._end.wait(seconds)
        return self.done

    def stop(self) -> None:
        """Give up."""
        self._stop = True

    def _run(self) -> None:
        try:
            parts = self.records["part"]
            # Rows are in the order of parts.
            for number in np.unique(parts)[::-1]:
                first, last = (int(np.searchsorted(parts, number, side=side)) for side in ("left", "right"))
                self._search_part(int(number), first, last)
                if self._stop:
                    return
        except (OSError, ValueError):
            # The run was resumed or moved meanwhile: the page asks again, of the new table.
            return
        finally:
            self._end.set()

    def _search_part(self, number: int, first: int, last: int) -> None:
        path = self.folder / f"{number:09d}.jsonl"
        with path.open("rb") as file:
            offsets = self.records["offset"][first:last].astype(np.int64)
            end = int(offsets[-1]) + int(self.records["size"][last - 1])
            for start in range(int(offsets[0]), end, BLOCK):
                # Blocks begin with a row, and end with one.
                rows = slice(*(first + np.searchsorted(offsets, [start, start + BLOCK])))
                if rows.start < rows.stop and not self._stop:
                    self._search_rows(_bytes_of(file, self.records[rows]), rows)

    def _search_rows(self, data: bytes, rows: slice) -> None:
        records = self.records[rows]
        # Where each line begins in the data.
        begin = records["offset"].astype(np.int64) - int(records["offset"][0])
        hits = np.array([hit.start() for hit in self._pattern.finditer(data)], np.int64)
        if len(hits):
            owner = np.searchsorted(begin, hits, side="right") - 1
            text_at = begin[owner] + records["text_at"][owner]
            length = len(self._encoded)
            inside = (hits >= text_at) & (hits + length <= text_at + records["text_size"][owner])
            hits, owner = hits[inside], owner[inside]
            sure = ~_in_escape(data, hits)
            self.matches[rows.start + owner[sure]] = True
            for row in np.unique(owner[~sure]):
                if not self.matches[rows.start + row]:
                    self.matches[rows.start + row] = self.text in _text_of(data, int(begin[row]), records[row])
        self.looked += len(records)


def _bytes_of(file: BinaryIO, records: np.ndarray) -> bytes:
    """The lines of neighbouring rows. They are copied: touching a map of a file that a resumed run cuts meanwhile would
    kill the process."""
    start = int(records["offset"][0])
    size = int(records["offset"][-1]) + int(records["size"][-1]) - start
    file.seek(start)
    data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{file.name} was cut")
    return data


def _in_escape(data: bytes, hits: np.ndarray) -> np.ndarray:
    """Whether hits may begin inside an escape, such as the n of \\n: then the row has to be decoded to know."""
    before = np.maximum(hits[:, None] - np.arange(1, 6), 0)
    return (np.frombuffer(data, np.uint8)[before] == ord("\\")).any(1)


def _text_of(data: bytes, line: int, record: np.void) -> str:
    begin = line + int(record["text_at"])
    return json.loads(b'"' + data[begin : begin + int(record["text_size"])] + b'"')
