"""The tests that model-written code is judged by, read from a row's columns."""

from __future__ import annotations

import ast
import builtins
import functools
import sys
from dataclasses import dataclass
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.sandbox.inside.wire import encode

CHECKS_NOTHING = (
    "these tests check nothing: no assert, no unittest test and no call of the program is reached in them. A function "
    "`check(candidate)` needs the column 'entry_point'"
)
# The name under which tests may import the program.
PROGRAM_NAME = "solution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tests:
    """What a program is judged by: test programs, or texts for its standard input with what it should print."""

    sources: tuple[str, ...] = ()
    setup: str = ""
    entry_point: str | None = None
    cases: tuple[tuple[str, str], ...] = ()
    row: dict[str, Any] | None = None  # for a harness of the user's own


def read_tests(row: dict[str, Any], harness: str | None = None) -> Tests | None:
    """The tests in a row's columns; None where there are none.

    >>> read_tests({"tests": ["assert f(1) == 2"]}).sources
    ('assert f(1) == 2',)
    >>> read_tests({"tests": [{"input": "1", "output": "2"}]}).cases
    (('1', '2'),)
    """
    if harness is not None:
        return Tests(sources=(harness,), entry_point=_entry_point(row), row=_plain(row))
    known = [name for name in ("tests", "test_list", "test") if name in row]
    if not known:
        raise RewardError(
            "code_execution finds no tests: the data set needs a column 'tests' (a list of assert lines, a program, or "
            "inputs and outputs), or 'test_list' (MBPP), or 'test' (HumanEval); its columns are: "
            f"{', '.join(sorted(row)) or 'none'}"
        )
    tests = next((row[name] for name in known if row[name] is not None), None)
    if tests is None or (isinstance(tests, (str, list, tuple, dict)) and not tests):
        return None
    if isinstance(tests, dict):
        tests = _transposed(tests)
    if isinstance(tests, (list, tuple)) and tests and all(isinstance(case, dict) for case in tests):
        return Tests(cases=tuple(_case(case) for case in tests))
    sources = tuple(tests) if isinstance(tests, (list, tuple)) else (tests,)
    if not all(isinstance(source, str) for source in sources):
        raise RewardError(f"tests are a text, a list of texts, or inputs and outputs, not {safe_repr(tests)}")
    setup = _setup(row)
    num_statements(setup, f"the tests' setup {setup!r:.100}")
    if not sum(num_statements(source, f"the tests {source!r:.100}") for source in sources):
        raise RewardError(f"{CHECKS_NOTHING}: {sources!r:.100}")
    entry_point = _entry_point(row)
    if entry_point is None and _only_defines_check("\n".join(sources)):
        raise RewardError(f"{CHECKS_NOTHING}: {sources!r:.100}")
    return Tests(sources=sources, setup=setup, entry_point=entry_point)


# Cached, since the completions of a group have their tests in common.
@functools.lru_cache(maxsize=4096)
def names_called(sources: tuple[str, ...]) -> frozenset[str]:
    """The names that tests call and neither they nor Python define, so that the program must.

    >>> names_called(("assert sorted(f(1)) == g(2)", "check = lambda x: x\\nassert check(f(2))")) == {"f", "g"}
    True
    """
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined = {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    # `from solution import f` names what the program defines, and is not counted.
    imports = [
        n for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)) and getattr(n, "module", "") != PROGRAM_NAME
    ]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return frozenset(called - stored - defined - imported - arguments - vars(builtins).keys())


@functools.lru_cache(maxsize=4096)
def imports_of(sources: tuple[str, ...]) -> tuple[str, ...]:
    """The packages, beyond Python's own, that tests import at their top level, where nothing catches their absence.

    >>> imports_of(("import math, numpy as np", "try:\\n    import torch\\nexcept ImportError: pass"))
    ('numpy',)
    """
    found = set()
    for node in [node for source in sources for node in ast.parse(source).body]:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module).split(".")[0])
    return tuple(sorted(found - sys.stdlib_module_names - {"pytest", "__main__", PROGRAM_NAME}))


def _only_defines_check(source: str) -> bool:
    """Whether tests define HumanEval's function `check(candidate)` and call nothing: no program can fail them."""
    body = ast.parse(source).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body) and all(
        isinstance(node, (ast.FunctionDef, ast.Import, ast.ImportFrom)) or _is_constant(node) for node in body
    )


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement is a text that stands alone, or an assignment without a call."""
    if not isinstance(node, (ast.Assign, ast.Expr)):
        return False
    return not any(isinstance(part, (ast.Call, ast.Attribute)) for part in ast.walk(node))


def _setup(row: dict[str, Any]) -> str:
    imports, setup = row.get("test_imports") or [], row.get("test_setup_code") or ""
    lines = [imports] if isinstance(imports, str) else imports
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in [*lines, setup]):
        raise RewardError(
            "test_imports is a text or a list of texts, and test_setup_code a text, not "
            f"{safe_repr(imports)} and {safe_repr(setup)}"
        )
    return "\n".join([*lines, setup])


def _entry_point(row: dict[str, Any]) -> str | None:
    name = row.get("entry_point")
    if name is not None and not isinstance(name, str):
        raise RewardError(f"entry_point is the name of a function, not {safe_repr(name)}")
    return name or None


def safe_repr(value: Any) -> str:
    """A value as a message shows it, also where its own `repr` fails."""
    try:
        return f"{value!r:.100}"
    except Exception:
        return f"a {type(value).__name__}"


def _transposed(tests: dict[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = (tests.get(name, tests.get(name[:-1])) for name in ("inputs", "outputs"))
    if not isinstance(inputs, (list, tuple)) or not isinstance(outputs, (list, tuple)) or len(inputs) != len(outputs):
        raise RewardError(
            "tests that are a dict should hold 'inputs' and 'outputs', two lists of one length; "
            f"this one holds {', '.join(f'{name!r}: {_sized(value)}' for name, value in tests.items())}"
        )
    return [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]


def _sized(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, (list, tuple)) else type(value).__name__


def _case(case: dict[str, Any]) -> tuple[str, str]:
    if not isinstance(case.get("input"), str) or not isinstance(case.get("output"), str):
        kinds = ", ".join(f"{name!r}: {type(value).__name__}" for name, value in case.items())
        raise RewardError(f"a test needs 'input' and 'output', both text (str); this one holds {kinds}")
    return case["input"], case["output"]


@functools.lru_cache(maxsize=4096)
def num_statements(source: str, what: str) -> int:
    """The number of statements in a test program; an error that begins with `what` where it is no Python."""
    try:
        return len(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"{what} are no Python program: {error or type(error).__name__}") from None


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that can be shown to a harness."""
    plain = {}
    for name, value in row.items():
        try:
            encode(value, keep=refuse)
        except (TypeError, ValueError):
            continue
        plain[name] = value
    return plain


def refuse(value: Any) -> Any:
    """Refuse to send what is no plain data."""
    raise TypeError(type(value).__name__)
