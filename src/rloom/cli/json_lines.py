"""Rows from a file of JSON lines, for verbs that take prompts."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloom.errors import DataError


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object, and where it stands ("prompts.jsonl, line 3"). Empty lines are passed over.

    Read as bytes, whose lines end with a line feed and nothing else: U+2028 and its like may stand in a text.
    """
    # A pipe is no file, and will do.
    if not Path(path).exists() or Path(path).is_dir():
        raise DataError(f"there is no file {path}")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            # Some editors begin a file with a byte order mark.
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _parsed(line, where)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON in UTF-8: {error}") from None
    if not isinstance(row, dict):
        raise DataError(f'{where} has no "prompt": an object with one is expected')
    _check_text(row, where)
    return row


def _check_text(row: dict[str, Any], where: str) -> None:
    """Half of a surrogate pair, which JSON can spell, is no character: tokenizers and files do not take it."""
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ascii(error.object[error.start])
            raise DataError(
                f"{where}: the column {name!r} has half of a character in it, {half}: take it out"
            ) from None
