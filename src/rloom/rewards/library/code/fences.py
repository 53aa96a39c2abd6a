"""The fenced blocks of a text, by CommonMark's rules: in list items and quotes too, with or without an end."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

OPENING = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})(.*)")
LIST_ITEM = re.compile(r" {0,3}([-+*]|\d{1,9}[.)])(?=[ \t]|$)")
QUOTE = re.compile(r" {0,3}> ?")
OTHER_BLOCK = re.compile(r" {0,3}(#{1,6}( |$)|([-*_] *){3,}$)")
# From this column on a line is indented code, and a fence in it a part of that.
INDENTED = 4
MAX_DEPTH = 20


@dataclass(slots=True)
class Block:
    """The lines between two fences, and the name after the first of them."""

    name: str
    indent: int = 0  # of its lines, as far as all of them have it
    lines: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The lines as one text, without the indentation that all of them have."""
        indent = min([self.indent, *(_indent(line) for line in self.lines if line.strip())]) if self.indent else 0
        return "".join(f"{_without(line, indent)}\n" for line in self.lines)


def fenced_blocks(text: str, *, any_indent: bool = False) -> list[Block]:
    """The blocks of a text, in order. With `any_indent` by a looser rule, for what models write and CommonMark shows as
    text: list items and quotes are nothing, a fence may be indented as it likes, and its block's lines less.

    >>> [(b.name, b.text) for b in fenced_blocks("1. First:\\n\\n   ```python\\n   x = 1\\n   ```\\nthat is it")]
    [('python', 'x = 1\\n')]
    >>> fenced_blocks("def f():\\n    '''\\n    ```\\n    f()\\n    ```\\n    '''\\n")
    []
    """
    reader = _Reader(any_indent)
    for line in lines_of(text):
        reader.read(line)
    return reader.blocks


def lines_of(text: str) -> list[str]:
    """Lines as CommonMark and Python end them: by \\n, \\\\r\\n or \\\\r."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


class _Reader:
    """Goes through the lines, and knows what is open: list items and quotes, a paragraph, a fence."""

    def __init__(self, any_indent: bool) -> None:
        self.any_indent = any_indent
        self.blocks: list[Block] = []
        # For each open list item the columns that its lines are indented by; for a quote 0.
        self.open: list[int] = []
        self.fence: tuple[str, int] | None = None
        self.paragraph = False

    def read(self, line: str) -> None:
        rest, depth = self._inside(line)
        if depth < len(self.open):
            if self.fence is None and self.paragraph and not self._begins(rest):
                # A paragraph goes on, however little its next line is indented.
                return
            # A fence that is open in there ends too.
            del self.open[depth:]
            self.fence = None
        if self.fence is not None:
            self._in_fence(rest, *self.fence)
        else:
            self._outside(rest)

    def _inside(self, line: str) -> tuple[str, int]:
        """What is left of a line within the list items and quotes that it belongs to, and how many these are."""
        rest = line
        for depth, columns in enumerate(self.open):
            if columns:
                if not rest.strip():
                    # Empty lines belong to the list item.
                    continue
                if _indent(rest) < columns:
                    return rest, depth
                rest = _without(rest, columns)
            elif quote := QUOTE.match(rest):
                rest = rest[quote.end() :]
            else:
                return rest, depth
        return rest, len(self.open)

    def _begins(self, rest: str) -> bool:
        """Whether a line begins something that is no paragraph."""
        kinds = (LIST_ITEM, QUOTE, OTHER_BLOCK)
        return not rest.strip() or self._opening(rest) is not None or any(kind.match(rest) for kind in kinds)

    def _opening(self, rest: str) -> re.Match[str] | None:
        found = OPENING.match(rest)
        return found if found and (self.any_indent or _indent(rest) < INDENTED) else None

    def _outside(self, rest: str) -> None:
        while not self.any_indent and len(self.open) < MAX_DEPTH and not OTHER_BLOCK.match(rest):
            if quote := QUOTE.match(rest):
                self.open.append(0)
                rest = rest[quote.end() :]
            elif item := LIST_ITEM.match(rest):
                after = rest[item.end() :]
                blanks = _indent(after) if after.strip() and _indent(after) <= INDENTED else 1
                self.open.append(item.end() + blanks)
                rest = _without(after, blanks)
            else:
                break
        if opening := self._opening(rest):
            self.fence = (opening[2], _indent(rest))
            self.blocks.append(Block(opening[3].strip(), _indent(rest) if self.any_indent else 0))
        self.paragraph = bool(rest.strip()) and self.fence is None and not OTHER_BLOCK.match(rest)

    def _in_fence(self, rest: str, mark: str, indent: int) -> None:
        bare = rest.strip(" \t")
        if set(bare) == {mark[0]} and len(bare) >= len(mark) and (self.any_indent or _indent(rest) < INDENTED):
            self.fence = None
            return
        self.blocks[-1].lines.append(rest if self.any_indent else _without(rest, indent))


def _indent(line: str) -> int:
    """The indentation in columns. A tab goes to the next column that is a multiple of four."""
    start = line[: len(line) - len(line.lstrip(" \t"))]
    return len(start.expandtabs(4))


def _without(line: str, columns: int) -> str:
    """A line without its first blanks, up to a column. Tabs stay tabs where nothing is taken away."""
    start = len(line) - len(line.lstrip(" \t"))
    return line[:start].expandtabs(4)[columns:] + line[start:] if columns and start else line
