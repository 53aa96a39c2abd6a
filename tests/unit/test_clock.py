"""Where the time goes: phases add up, each second counts once, and evaluations are a phase of their own."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from rloom import RLOOTrainer
from rloom.observe.clock import EVALUATION, PHASES, PhaseClock
from rloom.observe.metric_table import find, is_own
from tests.conftest import make_model, make_tokenizer


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand():
    return Time()


@pytest.fixture
def clock(hand):
    return PhaseClock(now=hand)


def test_a_phase_inside_another_interrupts_it(clock, hand):
    with clock.measuring("update"):
        hand.now = 2.0
        with clock.measuring("reference"):
            hand.now = 5.0
        hand.now = 6.0
    hand.now = 100.0  # between phases
    assert clock.take() == {"generation": 0, "rewards": 0, "reference": 3, "update": 3, "saving": 0}
    assert not any(clock.take().values())


def test_in_an_evaluation_nothing_else_is_counted(clock, hand):
    with clock.measuring(EVALUATION), clock.measuring("generation"):
        hand.now = 4.0
    assert clock.totals[EVALUATION] == 4
    assert not any(clock.take().values())


def test_a_phase_may_end_elsewhere_and_an_error_ends_what_it_leaves(clock, hand):
    clock.enter("update")
    with suppress(ValueError), clock.measuring("generation"):
        hand.now = 1.0
        raise ValueError("no completions")
    hand.now = 3.0
    assert clock.current() == ("update", 3.0)
    assert clock.leave("update")
    assert not clock.leave("update")
    assert clock.current() is None
    assert clock.totals["update"] == 2


def test_every_phase_has_an_entry_in_the_table_of_metrics():
    assert all(find(f"time/{phase}") is not None and is_own(f"time/{phase}") for phase in PHASES)


def slow(completions, **kwargs):
    time.sleep(0.05)
    return [float(len(text)) for text in completions]


def test_every_update_logs_where_its_time_went(config, rows):
    """All phases in each log; together no more than the update; a checkpoint's seconds with the next update."""
    args = config(max_steps=4, save_strategy="steps", save_steps=1, beta=0.1, eval_strategy="steps", eval_steps=1)
    trainer = RLOOTrainer(make_model(), slow, args, rows, rows[:2], processing_class=make_tokenizer())
    began = time.perf_counter()
    trainer.train()
    wall = time.perf_counter() - began
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 4
    assert logs[-1]["epoch"] > 1  # the end of an epoch is no update
    for phase in ("generation", "rewards", "reference", "update"):
        assert sum(log[f"time/{phase}"] for log in logs) == pytest.approx(trainer.clock.totals[phase])
    for log in logs:
        seconds = {phase: log[f"time/{phase}"] for phase in PHASES}
        assert seconds["rewards"] >= 0.05
        assert min(seconds[name] for name in ("generation", "reference", "update")) > 0
        # Neither the evaluation's generation nor its rewards are in an update's.
        assert seconds["generation"] + seconds["rewards"] + seconds["reference"] <= log["step_time"]
    assert logs[0]["time/saving"] == 0
    assert min(log["time/saving"] for log in logs[1:]) > 0
    assert sum(trainer.clock.totals.values()) <= wall
    assert trainer.clock.totals[EVALUATION] >= 4 * 0.05
    assert not any(name.startswith("eval_time") for entry in trainer.state.log_history for name in entry)


def test_updates_on_one_rollout_share_its_generation(config, rows):
    """An update that generates nothing counts with 0, so that the phases of a log add up to its updates."""
    args = config(max_steps=2, num_iterations=2, logging_steps=1)
    trainer = RLOOTrainer(make_model(), slow, args, rows, processing_class=make_tokenizer())
    trainer.train()
    first, second = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert first["time/generation"] > 0
    assert (second["time/generation"], second["time/rewards"]) == (0, 0)
    assert second["time/update"] > 0
