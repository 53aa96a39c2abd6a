"""The table of mutants fits the code as it is. That none survives is for `make mutants` to say."""

from __future__ import annotations

import ast
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
    for mutant in MUTANTS:
        file, _, name = mutant.test.partition("::")
        function = name.partition("[")[0]
        assert f"def {function}(" in (ROOT / file).read_text(), mutant


def test_there_are_enough_of_each_part():
    parts = [mutant.file.partition("/")[0] for mutant in MUTANTS]
    assert set(parts) >= {"algo", "training", "data", "generation", "models"}
    assert len(set(MUTANTS)) == len(MUTANTS) >= 60


@pytest.mark.parametrize("text", ["nowhere", "twice"])
def test_a_text_that_does_not_occur_once_is_an_error(text):
    with pytest.raises(ValueError, match="not once"):
        Mutant("a.py", text, "other", "tests/a.py::test_a").applied("twice twice")
