"""A filter of a store's texts: it says of most completions that they do not hold a text, so that they need not be read.

The texts of neighbouring rows, as JSON has them, one after the other, are a stretch of 64 blocks of 2 KB. A stretch has
a table with a word of 64 bits for each hash of a 4-gram (four bytes in a row): bit b is set if such a 4-gram begins in
block b. A text can only begin where the words of all its 4-grams agree.

The trainer appends stretches to `texts.bin` as it appends to the index, whose `id` stands at the file's beginning: with
another id, rows were dropped or made anew, and the file is of no use. Rows that no stretch covers are read.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

FILTER = "texts.bin"
MAGIC = b"rloom text filter, version 1\n".ljust(32)
HEADER = len(MAGIC) + 32
BLOCKS = 64
GRAM = 4
HASH_BITS = 11
WIDTH = 2048
"""Bytes of text in a block, a power of two. The blocks of a stretch of one row that is too long are wider."""
STRETCH = np.dtype(
    [
        ("first", "<u8"),  # the place of its first row in the index
        ("rows", "<u8"),
        ("size", "<u8"),  # bytes of text
        ("shift", "<u8"),  # byte number >> shift is the number of its block
        ("check", "<u8"),  # a sum over the rest: a crash can leave zeros
        ("table", "<u8", (2**HASH_BITS,)),
    ]
)
AT_ONCE = 64
"""Stretches that are read at once, 1 MB."""
MOST_GRAMS = 64
"""4-grams of a text that are looked up. More would hardly tell more."""


def gram_hashes(text: bytes) -> np.ndarray:
    """A hash of the four bytes at each place of a text.

    >>> len(gram_hashes(b"needle")), len(gram_hashes(b"abc"))
    (3, 0)
    """
    count = max(len(text) - GRAM + 1, 0)
    # A number at every byte, not at every fourth.
    grams = np.ndarray((count,), "<u4", text, 0, (1,)) if count else np.zeros(0, "<u4")
    return (grams * np.uint32(0x9E3779B1)) >> np.uint32(32 - HASH_BITS)


def stretch_of(first: int, rows: int, text: bytes) -> np.ndarray:
    """The stretch of so many rows from a place of the index on, by their texts in one."""
    made = np.zeros(1, STRETCH)
    shift = max(WIDTH.bit_length() - 1, (max(len(text), 1) - 1).bit_length() - BLOCKS.bit_length() + 1)
    made["first"], made["rows"], made["size"], made["shift"] = first, rows, len(text), shift
    places = gram_hashes(text)
    places *= np.uint32(BLOCKS)
    places |= np.arange(len(places), dtype=np.uint32) >> np.uint32(shift)
    flags = np.zeros(2**HASH_BITS * BLOCKS, bool)
    # NumPy's own type of index is twice as fast here, with the conversion.
    flags[places.astype(np.intp)] = True
    made["table"] = np.packbits(flags, bitorder="little").view("<u8")
    made["check"] = checks_of(made)
    return made


def checks_of(stretches: np.ndarray) -> np.ndarray:
    """For each stretch a number that depends on all that it has."""
    rest = sum(stretches[name] * np.uint64(place) for place, name in enumerate(("first", "rows", "size", "shift"), 3))
    return stretches["table"].sum(1, dtype="<u8") + rest


def stretches_of(first: int, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """The stretches of rows from a place of the index on, by their texts. Those at the end that fill none are left."""
    ends = list(itertools.accumulate(map(len, texts)))
    start = before = 0
    while start < len(texts) and ends[-1] - before >= WIDTH * BLOCKS:
        # A row stays whole, so that a text that it holds is in one stretch.
        end = max(bisect_right(ends, before + WIDTH * BLOCKS), start + 1)
        yield stretch_of(first + start, end - start, "".join(texts[start:end]).encode("ascii"))
        start, before = end, ends[end - 1]


# -- which rows may hold a text


class TextFilter:
    """Reads the filter of an index, by its id, for as many rows as the index has.

    Args:
        folder: of the store.
        index_id: of the index. A file of another one is not used.
        rows: how many rows the index has.
    """

    def __init__(self, folder: Path, index_id: str, rows: int) -> None:
        self.path, self.index_id, self.rows = folder / FILTER, index_id, rows

    def candidates(self, text: bytes) -> Iterator[tuple[np.void, int]]:
        """Stretches, the newest first, and for each a word of bits: the blocks in which a text may begin. There are
        none for a text that is shorter than a 4-gram."""
        grams = looked_up(text)
        for found, chosen in self.stretches() if len(grams) else ():
            words = begins(found["table"], grams).tolist()
            yield from ((found[place], words[place]) for place in chosen)

    def stretches(self) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Some stretches of the file at a time, and the places of those that can be believed, both newest first."""
        before = self.rows
        for found in self._read():
            right = (
                (found["rows"] > 0) & (found["check"] == checks_of(found)) & (found["shift"] >= WIDTH.bit_length() - 1)
            )
            chosen = []
            for place in np.flatnonzero(right)[::-1].tolist():
                # They follow each other: none is of rows that another has, or that the index lacks.
                if int(found["first"][place] + found["rows"][place]) <= before:
                    chosen.append(place)
                    before = int(found["first"][place])
            yield found, chosen

    def _read(self) -> Iterator[np.ndarray]:
        """Copies of what is in the file, which may be replaced meanwhile."""
        try:
            with self.path.open("rb", buffering=0) as file:
                count = stretches_in(file.read(HEADER), self.path.stat().st_size, self.index_id)
                for end in range(count, 0, -AT_ONCE):
                    start = max(end - AT_ONCE, 0)
                    file.seek(HEADER + start * STRETCH.itemsize)
                    data = file.read((end - start) * STRETCH.itemsize)
                    yield np.frombuffer(data, STRETCH, len(data) // STRETCH.itemsize)
        except OSError:
            # There is none, or it has just gone away: the rows are read.
            return


def stretches_in(header: bytes, size: int, index_id: str) -> int:
    """How many stretches a file has, by its header and its size; 0 for the file of another index."""
    return max(size - HEADER, 0) // STRETCH.itemsize if header == header_of(index_id) else 0


def header_of(index_id: str) -> bytes:
    """The beginning of the file that goes with an index."""
    return MAGIC + index_id.encode().ljust(HEADER - len(MAGIC))


def looked_up(text: bytes) -> np.ndarray:
    """The hashes of a text that are looked up, in order. They lie within half a block, so in two blocks at most."""
    hashes = gram_hashes(text[: WIDTH // 2])
    chosen = np.linspace(0, len(hashes) - 1, min(len(hashes), MOST_GRAMS)).astype(int)
    return hashes[chosen].astype(np.intp)


def begins(tables: np.ndarray, grams: np.ndarray) -> np.ndarray:
    """For each table a word: bit b is set if a text with these 4-grams may begin in block b."""
    words = tables[:, grams]
    until = np.bitwise_and.accumulate(words, axis=1)
    since = np.bitwise_and.accumulate(words[:, ::-1], axis=1)[:, ::-1]
    # All in one block; or the first of them there, and the rest in the next one.
    across = np.bitwise_or.reduce(until[:, :-1] & (since[:, 1:] >> np.uint64(1)), axis=1)
    return until[:, -1] | across


def rows_in(stretch: np.void, word: int, sizes: np.ndarray) -> np.ndarray:
    """The rows of a stretch, counted from its first, whose texts have a byte in one of a word's blocks.

    Args:
        stretch: of the filter.
        word: bit b stands for block b.
        sizes: of the texts of the stretch's rows.
    """
    ends = np.cumsum(sizes, dtype=np.uint64)
    first = (ends - sizes) >> stretch["shift"]
    last = (np.maximum(ends, np.uint64(1)) - np.uint64(1)) >> stretch["shift"]
    # Bits `first` to `last`. Of a row without text, they may be none, or one too many.
    span = (np.uint64(2) << (np.maximum(last, first) - first)) - np.uint64(1)
    return np.flatnonzero((np.uint64(word) >> first) & span)
