"""Files of JSON lines that are only appended to, each line with the step that it belongs to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloom.printable import get_logger

logger = get_logger(__name__)


def parts_of(folder: Path) -> list[Path]:
    """The store's own files, in order. Other files in the folder are ignored."""
    return sorted(folder.glob("[0-9]" * 9 + ".jsonl"))


def first_step(part: Path) -> int:
    """The step that a file begins with."""
    return int(part.stem)


def lines_of(part: Path, *, last: bool, start: int = 0) -> Iterator[tuple[int, dict[str, Any] | None, bytes]]:
    """Each line from an offset on: its start, its row (None: damaged) and its bytes, without the newline. Half a line
    at the last file's end is skipped."""
    position = start
    with part.open("rb") as file:
        file.seek(start)
        for line in file:
            if last and not line.endswith(b"\n"):
                return
            yield position, parsed(line), line.removesuffix(b"\n")
            position += len(line)


def parsed(line: bytes) -> dict[str, Any] | None:
    """The row of a line. None for a damaged line, such as the zeros that a crash of the machine leaves."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def warn_of_damage(count: int, where: Path) -> None:
    """Say how many lines of a file are damaged."""
    if count:
        lines = "1 line is" if count == 1 else f"{count} lines are"
        logger.warning("%s damaged in %s, and skipped", lines, where)


def cut(part: Path, step: int) -> int:
    """Cut a file before the first row of a later step. Returns how many rows were dropped."""
    drop_torn_line(part)
    later, damaged = [], 0
    for position, row, _ in lines_of(part, last=True):
        if row is None:
            damaged += 1
        elif row["step"] > step:
            later.append(position)
    warn_of_damage(damaged, part)
    if later:
        os.truncate(part, later[0])
    return len(later)


def drop_torn_line(part: Path) -> None:
    """Drop an unfinished last line, which a kill or a full disk has left."""
    size = part.stat().st_size
    end = size
    with part.open("rb") as file:
        while end:
            start = max(0, end - 2**20)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
    if end < size:
        logger.warning("the last line of %s is unfinished (the run was stopped while writing it) and is dropped", part)
        os.truncate(part, end)


def append_whole(path: Path, data: bytes) -> int:
    """Append data to a file: all of it, or nothing. Returns where it begins."""
    with path.open("ab", buffering=0) as file:
        size = path.stat().st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            # Half a line must not stay in the middle of the file.
            os.truncate(path, size)
            raise
    return size
