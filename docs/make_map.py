"""Writes the map of files in docs/architecture.md: each file with the first sentence of its docstring.

python docs/make_map.py
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rloom"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- map: python docs/make_map.py -->\n```text\n", "```\n<!-- end of the map -->"
WIDTH, COLUMN = 118, 34
LEAST = 30  # characters of a sentence that say enough


def first_sentence(path: Path) -> str:
    """Of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.?]) ", paragraph)[0].rstrip(".")


def lines_of(folder: Path, depth: int = 1) -> list[str]:
    """A line for each file of a folder, those of its folders after it."""
    lines = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        indent = "  " * depth
        if path.is_dir() and (path / "__init__.py").exists():
            lines += entry(f"{indent}{path.name}/", first_sentence(path / "__init__.py"))
            lines += lines_of(path, depth + 1)
        elif path.suffix == ".py" and not path.name.startswith("__"):
            lines += entry(f"{indent}{path.name}", first_sentence(path))
    return lines


def entry(name: str, what: str) -> list[str]:
    """A name and what it is: in one line where a part of the sentence says enough, else wrapped."""
    room = WIDTH - COLUMN
    if len(what) > room:
        ends = [match.start() for match in re.finditer(r"[:;,] ", what) if LEAST <= match.start() <= room]
        ends = [end for end in ends if what[:end].count("(") == what[:end].count(")")]
        strong = [end for end in ends if what[end] in ":;"]
        what = what[: (strong or ends or [len(what)])[-1]]
    lines = textwrap.wrap(what, room) or [""]
    return [f"{name:<{COLUMN}}{lines[0]}".rstrip(), *(" " * COLUMN + line for line in lines[1:])]


def page() -> str:
    """The page with the map as it should be."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + "\n".join(["src/rloom/", *lines_of(SOURCE)]) + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(page())
