"""The table of mutants fits the code as it is. That none survives is for `make mutants` to say."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, SOURCE, Mutant

ROOT = Path(__file__).parents[2]


def test_every_mutant_changes_its_file_once_and_leaves_it_python():
    for mutant in MUTANTS:
        source = (ROOT / SOURCE / mutant.file).read_text()
        changed = mutant.applied(source)  # refuses a text that is not there, or there twice
        assert changed != source, mutant
        ast.parse(changed)


def test_every_mutant_has_a_test_that_is_there():
    """With its parameters: one that is not found would end the whole run of mutants."""
    tests = sorted({mutant.test for mutant in MUTANTS})
    line = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, [line for line in done.stderr.splitlines() if line.startswith("ERROR")]


def test_there_are_enough_of_each_part():
    parts = [mutant.file.partition("/")[0] for mutant in MUTANTS]
    assert set(parts) >= {"algo", "training", "data", "generation", "models"}
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60


@pytest.mark.parametrize("text", ["nowhere", "twice"])
def test_a_text_that_does_not_occur_once_is_an_error(text):
    with pytest.raises(ValueError, match="not once"):
        Mutant("a.py", text, "other", "tests/a.py::test_a").applied("twice twice")
