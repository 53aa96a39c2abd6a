"""The table of metrics is what the docs show and what rewards may not log."""

from __future__ import annotations

from pathlib import Path

import pytest

from rloom.errors import RewardError
from rloom.observe.metric_table import EVALUATION_METRICS, METRICS, OLDER_METRICS, is_own, is_total, markdown
from rloom.observe.metrics import Metrics, check_loggable

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_docs_show_the_table():
    text = DOCS.read_text()
    for table in (
        markdown(METRICS),
        markdown(EVALUATION_METRICS, prefix="eval_"),
        markdown(OLDER_METRICS, what="formula"),
    ):
        assert table in text, "python -m rloom.observe.metric_table prints the tables"


def test_no_name_stands_twice():
    for table in (METRICS, EVALUATION_METRICS, OLDER_METRICS):
        names = [name for metric in table for name in metric.names]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "name", ["reward", "kl", "win_rate", "objective/kl", "mismatch/mine", "eval_mine", "rewards/x"]
)
def test_rewards_do_not_log_names_of_the_trainer(name):
    assert is_own(name)
    with pytest.raises(RewardError, match="the trainer's own"):
        check_loggable(name, 1.0)


@pytest.mark.parametrize("name", ["accuracy", "objective/mine", "judge/calls"])
def test_rewards_log_other_names(name):
    check_loggable(name, 1.0)


def test_totals_of_processes_are_summed_and_other_values_joined():
    metrics = Metrics()
    metrics.join("eval", [{"judge/calls": [2.0], "mine": [1.0]}, {"judge/calls": [3.0], "mine": [4.0]}])
    assert is_total("judge/calls")
    assert metrics.flush("eval") == {"judge/calls": 5.0, "mine": 2.5}
