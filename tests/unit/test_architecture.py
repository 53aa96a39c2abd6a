"""The house is as docs/architecture.md says: imports point one way, files have one line each, names are found."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "rloom"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))

FLOORS = [
    {"cli", "demo", "preflight"},
    {"training"},
    {"evaluation"},
    {"generation", "rewards", "data", "models", "observe"},
    {"config"},
    {"algo"},
    {"types", "errors", "printable", "seeds", "version", "sampling_rules", "cpu_bfloat16", "gpu_of_threads"},
]
"""From the top down: a part imports from its own floor and from those below."""


def floor_of(part: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if part in floor)


def imported(path: Path) -> list[str]:
    """The parts that a file imports when it is imported itself: not those under TYPE_CHECKING or in functions."""
    found = []
    tree = ast.parse((SOURCE / path).read_text())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rloom."):
            found.append(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "rloom":
            found += [name.name for name in node.names if (SOURCE / name.name).exists()]
    return found


@pytest.mark.parametrize("path", [path for path in FILES if str(path) not in ("__init__.py", "__main__.py")], ids=str)
def test_imports_point_one_way(path):
    own = path.parts[0].removesuffix(".py")
    up = [part for part in imported(path) if floor_of(part) < floor_of(own)]
    assert not up, f"{path} imports {up}, which stand above it"


def test_no_two_files_are_easily_confused():
    names = Counter(path.stem for path in FILES if not path.stem.startswith("__"))
    assert not [name for name, count in names.items() if count > 2], "a file name three times"
    assert not [name for name in names if name + "s" in names], "two file names that differ by an s"


def test_map_of_files_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_map", ROOT / "docs" / "make_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python docs/make_map.py"


def test_functions_of_the_walk_exist():
    """`file.py`: `name` on the page names a function, a class or a method of that file."""
    found = re.findall(r"`([\w/]+\.py)` `([\w.]+)`", PAGE)
    assert len(found) >= 12
    for file, name in found:
        thing = importlib.import_module("rloom." + file.removesuffix(".py").replace("/", "."))
        for part in name.split("."):
            thing = getattr(thing, part)


@pytest.mark.parametrize("page", ["architecture.md", "decisions.md"])
def test_files_that_pages_name_are_there(page):
    folders = [ROOT, SOURCE, SOURCE / "generation", SOURCE / "training"]
    text = (ROOT / "docs" / page).read_text().split("<!-- map")[0]
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert any((folder / file).exists() for folder in folders), file
