"""Each value of an option is one entry of a table, and everything else follows from the entry."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from rloom import RLOOConfig
from rloom.algo.advantages import ADVANTAGE_ESTIMATORS, AdvantageEstimator, Scope
from rloom.algo.kl import KL_ESTIMATORS
from rloom.algo.normalizers import NORMALIZERS
from rloom.algo.objectives import OBJECTIVES, TABLES
from rloom.algo.shaping import LENGTH_REGULARIZATIONS, TRUNCATIONS
from rloom.errors import ConfigError
from rloom.training.credit import Credit

ROOT = Path(__file__).parents[2]
ALL = TABLES | {
    "objective": OBJECTIVES,
    "normalize_rewards": NORMALIZERS,
    "length_regularization": LENGTH_REGULARIZATIONS,
    "truncated_completions": TRUNCATIONS,
}


def make(**options):
    return RLOOConfig("out", report_to="none", use_cpu=True, **options)


@pytest.mark.parametrize("option", ALL)
def test_the_page_of_algorithms_and_the_help_name_every_entry(option):
    page = (ROOT / "docs" / "algorithms.md").read_text()
    section = page[page.index(f"`{option}`") :]
    for name in ALL[option]:
        assert f"`{name}`" in section or f'`"{name}"`' in section or f"\n    {name}:" in section, name
        assert name in RLOOConfig.__dataclass_fields__[option].metadata["help"], name


def test_the_page_of_algorithms_has_the_rows_of_every_objective():
    page = (ROOT / "docs" / "algorithms.md").read_text()
    section = page[page.index("## Whose RLOO") :]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    rows = {cells[0].strip(" `"): [cell.strip(" `") for cell in cells[1:]] for cells in lines}
    assert rows[""] == list(OBJECTIVES)
    for option in TABLES:
        assert rows[option] == [getattr(objective, option) for objective in OBJECTIVES.values()], option


@pytest.mark.parametrize("option", ALL)
def test_the_config_takes_every_entry_and_names_the_nearest_to_another(option):
    for name in ALL[option]:
        beside = {"ratio_level": "token"} if option == "kl_placement" else {}
        make(**{option: name}, **beside)
    nearest = list(ALL[option])[-1]
    with pytest.raises(ConfigError, match=f"`{option}` must be one of .*did you mean '{nearest[:4]}"):
        make(**{option: f"{nearest}x"})


def middle_of_group(rewards, groups, average, update):
    """Rewards less the median of their group."""
    medians = torch.stack([rewards[groups == group].median() for group in groups])
    return rewards - medians


def test_a_new_estimator_is_one_new_entry(monkeypatch):
    entry = AdvantageEstimator(name="group_median", function=middle_of_group, scope=Scope.GROUP)
    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "group_median", entry)
    with pytest.raises(ConfigError, match="at least 2"):
        make(advantage_estimator="group_median", num_generations=1)
    credit = Credit(make(advantage_estimator="group_median", beta=0.0))
    assert not credit.needs_batch
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    got = credit.advantages(torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 3.0]), groups, None, None)
    assert got.tolist() == [-1, 0, 4, 0, 0, -1]


def test_names_of_estimators_stand_in_their_entries_and_in_objectives_alone():
    """And as names of functions, in what `rloom.algo` offers."""
    names = {*ADVANTAGE_ESTIMATORS, *KL_ESTIMATORS} - {"none"}
    allowed = {"advantages.py", "kl.py", "objectives.py", "__init__.py"}
    for file in (ROOT / "src" / "rloom").rglob("*.py"):
        if file.parent.name == "algo" and file.name in allowed:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.Constant) and node.value in names), f"{file}: {node.value}"
