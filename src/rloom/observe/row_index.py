"""An index of a store's rows: one record of fixed size for each, with its numbers and its place among the lines.

The store's lines stay the truth. The trainer appends to the index what it appends to the store, so that a reader finds,
filters and sorts rows without reading the lines. Rows that the index lacks (of an older version, or of a kill between
the two) are read from their lines.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

import numpy as np

from rloom.observe.filter_writer import FilterWriter, remove_filter, texts_of
from rloom.observe.lines import append_whole, first_step, lines_of, parsed, parts_of
from rloom.printable import get_logger

logger = get_logger(__name__)

RECORDS, NAMES = "index.bin", "index.json"
VERSION = 1
BATCH = 4096
"""Lines that are read before their records are made."""
FIELDS = [
    ("part", "<u4"),  # the file that its line is in, by the step in the file's name
    ("offset", "<u8"),  # where its line begins there
    ("size", "<u4"),  # bytes of its line
    ("text_at", "<u4"),  # where in the line the completion's text begins, as JSON writes it; 0: not known
    ("text_size", "<u4"),
    ("step", "<u4"),
    ("mode", "<u2"),  # its place in the names
    ("stop_reason", "<u2"),  # the same
    ("group", "<i4"),
    ("has_tokens", "<u4"),  # 1: its tokens' values are stored
    ("num_tokens", "<i4"),
    ("reward", "<f4"),  # NaN: none
    ("advantage", "<f4"),
    ("prompt", "<u8"),  # a digest; 0: not stored
]


@dataclass(slots=True)
class IndexNames:
    """What the numbers in records stand for. `id` changes whenever records are dropped or made anew."""

    scores: list[str] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    stop_reasons: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def copy(self) -> IndexNames:
        """The names by now."""
        return IndexNames(list(self.scores), list(self.modes), list(self.stop_reasons), self.id)

    def dtype(self) -> np.dtype:
        """The type of a record: the fixed fields, and a score by each function."""
        return np.dtype([*FIELDS, ("scores", "<f4", (len(self.scores),))])


def prompt_digest(prompt: Any) -> int:
    """A number that stands for a prompt. 0 where there is none."""
    if prompt is None:
        return 0
    try:
        text = prompt if isinstance(prompt, str) else json.dumps(prompt, default=str)
    except (TypeError, ValueError, RecursionError):
        # A user's own object may be anything.
        return 0
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") or 1


class IndexBuilder:
    """Makes records of rows and their lines. Names that come for the first time are added.

    >>> builder = IndexBuilder(IndexNames())
    >>> row = {"step": 3, "mode": "train", "completion": "hi", "scores": {"f": 1.0}, "reward": 1.0}
    >>> records = builder.records([row], [json.dumps(row)], part=1, offsets=[0])
    >>> int(records["step"][0]), float(records["scores"][0, 0])
    (3, 1.0)
    """

    def __init__(self, names: IndexNames) -> None:
        self.names = names
        self._digest: tuple[Any, int] = (None, 0)

    def records(
        self, rows: Sequence[dict[str, Any]], lines: Sequence[str], *, part: int, offsets: Iterable[int]
    ) -> np.ndarray:
        """The records of rows of one file, whose lines, given without newlines, begin at these offsets."""
        for row in rows:
            for name in _dict(row.get("scores")):
                if name not in self.names.scores:
                    self.names.scores.append(name)
        fixed, scores, names = [], [], self.names.scores
        for row, line, offset in zip(rows, lines, offsets, strict=True):
            fixed.append((part, offset, len(line) + 1, *_text_place(row, line), *self._numbers(row)))
            known = _dict(row.get("scores"))
            scores.append([_number(known.get(name)) for name in names])
        made = np.zeros(len(fixed), self.names.dtype())
        for (name, _), column in zip(FIELDS, zip(*fixed, strict=True), strict=False):
            made[name] = column
        made["scores"] = np.array(scores, "<f4").reshape(made["scores"].shape)
        return made

    def _numbers(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return (
            _count(row["step"], 0),
            _code(self.names.modes, str(row.get("mode"))),
            _code(self.names.stop_reasons, str(row.get("stop_reason"))),
            _count(row.get("group"), -1),
            int("tokens" in row),
            _count(row.get("num_tokens"), -1),
            _number(row.get("reward")),
            _number(row.get("advantage")),
            self._prompt(row.get("prompt")),
        )

    def _prompt(self, prompt: Any) -> int:
        # Rows of a group share their prompt.
        if prompt is not self._digest[0]:
            self._digest = prompt, prompt_digest(prompt)
        return self._digest[1]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**53) else np.nan


def _count(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else otherwise


def _code(names: list[str], name: str) -> int:
    if name not in names:
        names.append(name)
    return names.index(name)


def _text_place(row: dict[str, Any], line: str) -> tuple[int, int]:
    """Where in a line the completion's text is, without its quotes. (0, 0) where there is no such text."""
    text = row.get("completion")
    if not isinstance(text, str):
        return 0, 0
    key = '"completion": '
    found = line.find(key)
    # Most texts have no other letters to escape, and this takes a fifth of the time. One that has some is not in the
    # line as it is here, since JSON has none of them plainly.
    encoded = '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if found >= 0 and line.startswith(encoded, found + len(key)):
        return found + len(key) + 1, len(encoded) - 2
    encoded = encode_basestring_ascii(text)
    # The same key may stand in a prompt's messages.
    while found >= 0 and not line.startswith(encoded, found + len(key)):
        found = line.find(key, found + 1)
    return (0, 0) if found < 0 else (found + len(key) + 1, len(encoded) - 2)


# -- from lines


def tail_of(folder: Path, builder: IndexBuilder, after: tuple[int, int] = (0, 0)) -> list[np.ndarray]:
    """The records of rows that stand after a place (part, offset), read from their lines."""
    parts = [part for part in parts_of(folder) if first_step(part) >= after[0]]
    return [
        part_records(part, builder, start=after[1] if first_step(part) == after[0] else 0, last=part is parts[-1])
        for part in parts
    ]


def part_records(part: Path, builder: IndexBuilder, *, start: int = 0, last: bool = False) -> np.ndarray:
    """The records of one file's rows, from an offset on. Damaged lines have none."""
    found = []
    lines = ((row, line, offset) for offset, row, line in lines_of(part, last=last, start=start) if row is not None)
    while batch := list(itertools.islice(lines, BATCH)):
        rows, texts, offsets = zip(*batch, strict=True)
        plain = [text.decode("ascii", "replace") for text in texts]
        found.append(builder.records(rows, plain, part=first_step(part), offsets=offsets))
    return joined(found, builder.names)


def joined(several: Iterable[np.ndarray], names: IndexNames) -> np.ndarray:
    """Records in one array. Those made before a score's name was known have no value for it."""
    wide = [widened(records, names) for records in several]
    return np.concatenate(wide) if wide else np.zeros(0, names.dtype())


def widened(records: np.ndarray, names: IndexNames) -> np.ndarray:
    """Records with a score for each name there is by now."""
    if records.dtype == names.dtype():
        return records
    made = np.zeros(len(records), names.dtype())
    for name, _ in FIELDS:
        made[name] = records[name]
    made["scores"] = np.nan
    made["scores"][:, : records["scores"].shape[1]] = records["scores"]
    return made


def end_of(records: np.ndarray) -> tuple[int, int]:
    """The place after the last record's line: part and offset."""
    if not len(records):
        return 0, 0
    last = records[-1]
    return int(last["part"]), int(last["offset"] + last["size"])


def rows_of_step(records: np.ndarray, step: int) -> slice:
    """The places of a step's records. They are in the order of steps, so that few of them are looked at."""
    first, last = (
        find(range(len(records)), step, key=lambda place: int(records[place]["step"]))
        for find in (bisect_left, bisect_right)
    )
    return slice(first, last)


def line_of(folder: Path, record: np.void) -> bytes:
    """The line of a record."""
    with (folder / f"{int(record['part']):09d}.jsonl").open("rb") as file:
        file.seek(int(record["offset"]))
        return file.read(int(record["size"]))


def fits(folder: Path, records: np.ndarray) -> bool:
    """Whether the last record of an index is that of a line of the store."""
    if not len(records):
        return True
    try:
        row = parsed(line_of(folder, records[-1]))
    except OSError:
        return False
    return row is not None and row["step"] == int(records[-1]["step"])


# -- files


def read_index(folder: Path) -> tuple[IndexNames, np.ndarray] | None:
    """The index of a store; None where there is none that can be read. Records stay on disk until they are used."""
    try:
        made = json.loads((folder / NAMES).read_text())
        if made.pop("version") != VERSION:
            return None
        names = IndexNames(**made)
        count = (folder / RECORDS).stat().st_size // names.dtype().itemsize
        if not count:
            return names, np.zeros(0, names.dtype())
        return names, np.memmap(folder / RECORDS, names.dtype(), "r", shape=(count,))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def write_index(folder: Path, names: IndexNames, records: np.ndarray) -> None:
    """Write a whole index. A reader sees the old one, or the new one."""
    # Names come last: they have a new id, and whoever sees it finds the records that go with it.
    _replace(folder / RECORDS, np.ascontiguousarray(records).tobytes())
    _replace(folder / NAMES, json.dumps({"version": VERSION, **asdict(names)}).encode())


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    os.replace(new, path)


def remove_index(folder: Path) -> None:
    """Remove the index of a store, and the filter that goes with it."""
    remove_filter(folder)
    for name in (NAMES, RECORDS):
        (folder / name).unlink(missing_ok=True)


class IndexWriter:
    """Appends to a store's index, and to the filter of its texts, as the store's lines are appended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._builder: IndexBuilder | None = None
        # None after a problem: searches then read the lines.
        self._filter: FilterWriter | None = FilterWriter(folder)

    def resume(self, step: int) -> None:
        """Drop the records of steps after `step`, and add those that are missing. The lines have been cut already, and
        the filter was set aside before that."""
        names, kept = self._believed(step)
        former, names.id = names.id, uuid.uuid4().hex
        builder = IndexBuilder(names)
        new = joined(tail_of(self.folder, builder, end_of(kept)), names)
        write_index(self.folder, names, joined([kept, new], names))
        self._builder = builder
        self._tell_filter(lambda filtered: filtered.resume(names.id, former, len(kept)))
        self._tell_filter(lambda filtered: filtered.add(len(kept), texts_of(self.folder, new)))

    def _believed(self, step: int) -> tuple[IndexNames, np.ndarray]:
        """The records up to `step` whose lines are sure to be there. A crash of the machine can cost lines and leave
        their records: those of the newest file are made anew."""
        newest = max((first_step(part) for part in parts_of(self.folder)), default=0)
        names, records = read_index(self.folder) or (IndexNames(), None)
        if records is not None:
            dropped = np.flatnonzero((records["step"] > step) | (records["part"] >= newest))
            kept = np.array(records[: dropped[0]] if len(dropped) else records)
            if fits(self.folder, kept):
                return names, kept
        names = IndexNames()
        return names, np.zeros(0, names.dtype())

    def add(self, rows: Sequence[dict[str, Any]], lines: Sequence[str], *, part: int, offset: int) -> None:
        """Append the records of rows whose lines have just been appended to a file."""
        if self._builder is None:
            names = IndexNames()
            write_index(self.folder, names, np.zeros(0, names.dtype()))
            self._builder = IndexBuilder(names)
            self._tell_filter(lambda filtered: filtered.begin(names.id))
        names = self._builder.names
        before = (list(names.scores), len(names.modes), len(names.stop_reasons))
        starts = itertools.accumulate((len(line) + 1 for line in lines[:-1]), initial=offset)
        records = self._builder.records(rows, lines, part=part, offsets=starts)
        if before != (names.scores, len(names.modes), len(names.stop_reasons)):
            self._rename(before[0])
        first = append_whole(self.folder / RECORDS, records.tobytes()) // records.itemsize
        places = zip(lines, records["text_at"].tolist(), records["text_size"].tolist(), strict=True)
        texts = [line[at : at + size] for line, at, size in places]
        self._tell_filter(lambda filtered: filtered.add(first, texts))

    def _tell_filter(self, what: Callable[[FilterWriter], None]) -> None:
        """The filter only makes searches quicker: a problem with it, such as a full disk, is not the index' end."""
        if self._filter is None:
            return
        try:
            what(self._filter)
        except (OSError, ValueError) as error:
            self._filter = None
            logger.warning(
                "the filter of texts in %s is not continued, and searches read lines: %s", self.folder, error
            )

    def _rename(self, scores: list[str]) -> None:
        """Write the names anew. With another number of scores, records have another size, and are written anew too."""
        assert self._builder is not None
        names = self._builder.names
        if names.scores == scores:
            _replace(self.folder / NAMES, json.dumps({"version": VERSION, **asdict(names)}).encode())
            return
        old = np.fromfile(self.folder / RECORDS, IndexNames(scores=scores).dtype())
        names.id = uuid.uuid4().hex
        write_index(self.folder, names, widened(old, names))
        self._tell_filter(lambda filtered: filtered.rename(names.id))
