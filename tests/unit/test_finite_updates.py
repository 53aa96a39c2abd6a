"""Updates that are not finite, where DeepSpeed decides (`tests/integration/test_finite.py` has the rest)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rloom.errors import ConfigError, DivergedError
from rloom.observe.metrics import Metrics
from rloom.training import zero
from rloom.training.finite import IN_A_ROW, FiniteUpdates
from rloom.training.zero_engine import UnderDeepSpeed


@pytest.mark.parametrize("version", ["0.19.6", "0.14.5"])
def test_a_deepspeed_that_makes_updates_that_are_not_finite_is_refused(version, monkeypatch):
    monkeypatch.setattr(zero, "version", lambda _: version)
    with pytest.raises(ConfigError, match=rf"DeepSpeed {version} .*pip install 'deepspeed>=0.19.8'"):
        zero.check_version()


@pytest.mark.parametrize("version", ["0.19.8", "0.20.0+cpu"])
def test_later_ones_are_taken(version, monkeypatch):
    monkeypatch.setattr(zero, "version", lambda _: version)
    zero.check_version()


@pytest.mark.parametrize(
    ("fp16", "applied", "expected"), [(False, True, True), (False, False, False), (True, False, None)]
)
def test_whether_an_update_was_made(fp16, applied, expected):
    """A loss scaler skips some as a matter of course."""
    processes = UnderDeepSpeed()
    processes._engine = SimpleNamespace(fp16_enabled=lambda: fp16, was_step_applied=lambda: applied)
    assert processes.update_was_made() is expected


def test_several_that_were_skipped_in_a_row_end_the_run():
    finite = FiniteUpdates(Metrics())
    for made in (False,) * (IN_A_ROW - 1) + (True,) + (False,) * (IN_A_ROW - 1):
        finite.note(made, 1)
    with pytest.raises(DivergedError, match=f"{IN_A_ROW} updates in a row"):
        finite.note(False, 1)
    assert sum(finite.metrics.values["train"]["updates/skipped"]) == 2 * IN_A_ROW - 1
