"""The program in a completion."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from rloom.rewards.library.code.fences import Block, fenced_blocks

PYTHON = re.compile(r"\W*(python|py)[\d.]*\b", re.IGNORECASE)
# Characters of a completion that are parsed in this process: a hundred times as many took seconds and gigabytes.
MAX_PARSED = 20_000
# Fenced blocks of a completion that are looked at, from the last on.
MAX_BLOCKS = 16


def program_of(text: str, prompt: Any = None, entry_point: str | None = None, names: Iterable[str] = ()) -> str:
    """The program in a completion: its last fenced block, or all of it.

    The last that is called Python, if any is; else the last that is called nothing: after a program many models show
    how to start it, or what it prints. Of several, the last that defines one of the `names` that the tests call.

    Where the tests name a function that it does not define, and prompt and completion together do (HumanEval's
    prompts are the beginning of a program), it is both.

    >>> program_of("Here:\\n```python\\nx = 1\\n```\\nand so on")
    'x = 1\\n'
    """
    names = {entry_point, *names} if entry_point else set(names)
    program = _in_fences(text, names) if "```" in text or "~~~" in text else text
    if (
        entry_point
        and isinstance(prompt, str)
        and not _defines(program, entry_point)
        and _defines(prompt + program, entry_point)
    ):
        return prompt + program
    return program


def _in_fences(text: str, names: set[str]) -> str:
    """The block that is the program. Models do not always keep to CommonMark's rules, and fences may stand in a
    program's own texts: the text as a whole, or a looser reading, counts where only that is a Python program."""
    strict, loose = (_chosen(fenced_blocks(text, any_indent=loosely), names) for loosely in (False, True))
    # `~~~x` is an expression of Python, while "```" is none.
    if "~~~" not in text and _is_program(text):
        return text
    if strict is None or strict == loose:
        return text if loose is None else loose
    return loose if loose is not None and not _is_program(strict) and _is_program(loose) else strict


def _chosen(blocks: list[Block], names: set[str]) -> str | None:
    blocks = [block for block in blocks if block.text.strip()][-MAX_BLOCKS:]
    named = [block for block in blocks if PYTHON.match(block.name)]
    unnamed = [block for block in blocks if not block.name]
    several = named or unnamed or blocks
    if len(blocks) > 1:
        several = [b for b in blocks if any(_defines(b.text, name) for name in names)] or several
    return several[-1].text if several else None


def _is_program(text: str) -> bool:
    return len(text) <= MAX_PARSED and _tree(text) is not None


def _tree(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _defines(program: str, name: str) -> bool:
    if len(program) > MAX_PARSED:
        word = re.escape(name)
        return re.search(rf"^((async[ \t]+)?def|class)[ \t]+{word}\b|^{word}[ \t]*=", program, re.MULTILINE) is not None
    if (tree := _tree(program)) is None:
        return False
    return any(
        (isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name)
        or (isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets))
        for node in tree.body
    )
