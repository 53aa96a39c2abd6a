"""Each rule fires on its symptom, names an option to change, and is silent in a healthy run."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from rloom import RLOOConfig, RLOOTrainer
from rloom.observe import diagnose, doctor
from rloom.observe.courses import Course, Logs
from rloom.observe.diagnose import RULES
from rloom.observe.doctor import Doctor, examine, lasting, logs_of
from rloom.observe.store import RunStore
from rloom.training.callbacks import Diagnose
from tests.conftest import make_model, make_tokenizer


def healthy(count: int = 60) -> dict[str, list[float]]:
    """A run that learns: noise on a slow rise, KL and entropy moving gently."""
    wobble = [0.02 * (-1) ** i for i in range(count)]
    return {
        "reward": [0.3 + 0.005 * i + w for i, w in enumerate(wobble)],
        "reward_std": [0.45 + w for w in wobble],
        "frac_reward_zero_std": [0.2 + 0.004 * i for i in range(count)],
        "kl": [0.002 * i for i in range(count)],
        "entropy": [1.5 - 0.01 * i for i in range(count)],
        "grad_norm": [1.0 + 5 * abs(w) for w in wobble],
        "completions/clipped_ratio": [0.1] * count,
        "completions/mean_length": [80.0 + 0.5 * i for i in range(count)],
        "clip_ratio/region_mean": [0.01] * count,
        "val/ratio": [1.0 + w for w in wobble],
        "mismatch/mean": [0.015] * count,
        "eval_win_rate": [0.4 + 0.002 * i for i in range(count)],
        "eval_win_rate_low": [0.3 + 0.002 * i for i in range(count)],
        "eval_win_rate_high": [0.5 + 0.002 * i for i in range(count)],
        "completions/repetition": [0.1 + 0.001 * i for i in range(count)],
        "learning_rate": [1e-6] * count,
    }


def entries(columns):
    count = max(map(len, columns.values()))
    return [{name: values[i] for name, values in columns.items() if i < len(values)} for i in range(count)]


@pytest.fixture(scope="module")
def args():
    return RLOOConfig("out", report_to="none", use_cpu=True, max_completion_length=200, kl_target=0.01)


TARGET = "kl_target (now 0.01)"
SYMPTOMS = {
    "kl_explodes": ({"kl": [0.01] * 50 + [0.1 * 2**i for i in range(10)]}, TARGET),
    "nothing_is_scored": ({"completions/unscored_ratio": [0.1] * 57 + [1.0] * 3}, "on_reward_error='raise'"),
    "reward_falls": ({"reward": [0.5] * 30 + [0.5 - 0.02 * i for i in range(30)]}, "learning_rate"),
    "reward_jumps": ({"reward": [0.3 + 0.3 * (i % 2) for i in range(60)]}, "num_generations"),
    "gradient_spikes": ({"grad_norm": [1.0] * 59 + [40.0]}, "max_grad_norm"),
    "scores_are_constant": ({"reward_std": [0.0] * 60, "reward": [1.0] * 60}, "rloom check-reward"),
    "cold_start": ({"frac_reward_zero_std": [0.97] * 60}, "rloom sft"),
    "groups_became_alike": ({"frac_reward_zero_std": [0.2] * 50 + [0.95] * 10}, "temperature"),
    "entropy_collapses": ({"entropy": [1.5] * 50 + [0.05] * 10}, "learning_rate"),
    "nothing_ends": ({"completions/clipped_ratio": [1.0] * 60}, "stop_token"),
    "completions_are_cut_off": (
        {"completions/clipped_ratio": [0.1] * 50 + [0.8] * 10},
        "max_completion_length (now 200)",
    ),
    "length_explodes": ({"completions/mean_length": [60.0] * 50 + [180.0] * 10}, "length_regularization"),
    "completions_vanish": ({"completions/mean_length": [60.0] * 50 + [1.0] * 10}, "missing_eos_penalty"),
    "updates_are_drastic": ({"clip_ratio/region_mean": [0.01] * 50 + [0.4] * 10}, "num_iterations"),
    "engine_differs": ({"mismatch/mean": [0.01] * 50 + [0.4] * 10}, "engine='transformers'"),
    "reward_is_gamed": ({"eval_win_rate_high": [0.5] * 59 + [0.2], "eval_win_rate": [0.4] * 59 + [0.1]}, TARGET),
    "repetition_is_paid": ({"completions/repetition": [0.1] * 50 + [0.5] * 10}, "get_repetition_penalty_reward"),
    "kl_outweighs_scores": (
        {"kl": [0.3] * 60, "beta": [1.0] * 60, "reward": [0.3 + 0.02 * (i % 3) for i in range(49)]},
        TARGET,
    ),
    "kl_target_is_out_of_reach": ({"beta": [0.005 * 1.1**i for i in range(60)]}, "kl_target"),
    "policy_stands_still": ({"kl": [1e-9 * (-1) ** i for i in range(60)]}, "learning_rate"),
    "no_progress": ({"reward": [0.3 + 0.02 * (-1) ** i for i in range(60)]}, "learning_rate"),
}


def test_every_rule_has_its_symptom():
    assert {rule.__name__ for rule in RULES} == set(SYMPTOMS)
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert all(f"| {rule.__name__} |" in page for rule in RULES)


@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 10, 30, 60])
def test_a_healthy_run_hears_nothing(args, length):
    assert Doctor().look(entries(healthy())[:length], args, step=length) == []


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_rule_fires_on_its_symptom(args, name):
    changes, option = SYMPTOMS[name]
    rule = getattr(diagnose, name)
    line = rule(Logs(entries(healthy() | changes)), args)
    assert line is not None
    assert option in line
    assert ":" in line
    assert "\n" not in line
    assert rule(Logs(entries(healthy())), args) is None


@pytest.mark.parametrize("name", SYMPTOMS)
def test_one_symptom_is_one_line(args, name):
    """A symptom sets its own rule off, and no other; a reward that only jumps makes no progress either."""
    found = Doctor().look(entries(healthy() | SYMPTOMS[name][0]), args, step=60)
    assert len(found) == (2 if name == "reward_jumps" else 1), found


def test_the_ratio_of_older_documents(args):
    for far in (2.5, 0.1):
        line = diagnose.updates_are_drastic(Logs(entries(healthy() | {"val/ratio": [1.0] * 57 + [far] * 3})), args)
        assert f"val/ratio is {far:.2g}" in line


def test_a_rule_that_spoke_is_quiet_for_a_while(args):
    doctor, logs = Doctor(quiet=100), entries(healthy() | SYMPTOMS["cold_start"][0])
    said = [step for step in range(60, 300) if doctor.look(logs, args, step=step)]
    assert said == [60, 160, 260]


def test_numbers_that_were_not_measured_are_passed_over():
    logs = Logs([{"kl": None}, {"kl": float("nan")}, {"kl": 0.5}, {"other": "text"}])
    assert logs["kl"].values == [0.5]
    assert len(logs["other"]) == 0


NAN = float("nan")


@pytest.mark.parametrize("name", SYMPTOMS)
def test_no_rule_needs_a_metric_that_is_not_there(args, name):
    """A run that scores nothing, one that has just begun, and one of a trainer that logs less."""
    whole, rule = healthy() | SYMPTOMS[name][0], getattr(diagnose, name)
    for column in whole:
        others = {other: values for other, values in whole.items() if other != column}
        for changed in (others, others | {column: [NAN] * 60}, {column: whole[column]}):
            rule(Logs(entries(changed)), args)
            rule(Logs(entries(changed)), SimpleNamespace())
    for few in ([], [{}], [{}] * 60, entries(whole)[:1], entries(dict.fromkeys(whole, [NAN] * 60))):
        assert rule(Logs(few), args) is None


def test_equal_scores_are_told_without_a_reward(args):
    alike = {"reward_std": [0.0] * 6, "frac_reward_zero_std": [1.0] * 6}
    assert "every completion scores alike, so" in diagnose.scores_are_constant(Logs(entries(alike)), args)
    became = {"reward_std": [0.5] * 6 + [0.0] * 6, "frac_reward_zero_std": [0.2] * 6 + [1.0] * 6}
    assert "equal scores by now: solved" in diagnose.groups_became_alike(Logs(entries(became)), args)
    # A quick collapse: the first log still had groups with signal.
    quick = {
        "frac_reward_zero_std": [0.85] + [1.0] * 11,
        "reward": [0.8] + [0.0] * 11,
        "reward_std": [0.4] + [0.0] * 11,
    }
    assert diagnose.cold_start(Logs(entries(quick)), args) is None
    said = diagnose.groups_became_alike(Logs(entries(quick)), args)
    assert "equal scores by now (reward 0, at first 0.8): the policy has collapsed" in said
    assert "harder" not in said
    solved = {**quick, "reward": [0.8] + [1.0] * 11}
    assert "(reward 1): solved, or" in diagnose.groups_became_alike(Logs(entries(solved)), args)


def test_a_rule_that_fails_ends_nothing(args, monkeypatch, caplog):
    """It is named once; what the others say is said."""

    def broken(logs, args):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(doctor, "RULES", (broken, *RULES))
    history = [{"step": n, "loss": 0.0, "kl": 3.0} for n in range(1, 5)]
    with caplog.at_level(logging.WARNING, logger="rloom"):
        assert [name for name, _ in Doctor().named(history, args, step=4)] == ["kl_explodes"]
        assert [found.name for found in examine(history, args)] == ["kl_explodes"]
        assert lasting(["broken", "kl_explodes"], history, args, patience=2).startswith("kl_explodes: ")
    (message,) = caplog.messages
    assert "the diagnosis broken failed" in message
    assert "ZeroDivisionError: by zero" in message


def zero(completions, **kwargs):
    return [0.0] * len(completions)


def test_during_a_run(config, rows, caplog):
    caplog.set_level(logging.WARNING, logger="rloom")
    trainer = RLOOTrainer(make_model(), zero, config(max_steps=5), rows, processing_class=make_tokenizer())
    trainer.train()
    said = [message for message in caplog.messages if "diagnosis" in message]
    assert sum("every completion scores 0" in message for message in said) == 1
    assert said[0].startswith("diagnosis at step 3: ")
    caplog.clear()
    args = config(max_steps=5, diagnosis=False)
    RLOOTrainer(make_model(), zero, args, rows, processing_class=make_tokenizer()).train()
    assert not [message for message in caplog.messages if "diagnosis" in message]


def test_a_kl_far_above_the_limit_is_told_at_once():
    args = SimpleNamespace(learning_rate=1.0, beta=0.05, max_completion_length=8)
    (line,) = Doctor().look([{"kl": 0.0, "loss": 0.0}, {"kl": 3.2, "loss": 0.0}], args, step=2)
    assert "the KL is 3.2 per token" in line
    assert "lower learning_rate (now 1)" in line


def test_noise_is_told_from_a_trend():
    """The noise of alternating values is their standard deviation, whatever line they follow; one jump is none."""
    wobble = [0.0, 1.0] * 10
    assert Course(wobble).noise() == pytest.approx(1 / 0.954)
    assert Course([0.01 * i for i in range(20)]).noise() == pytest.approx(0.01 / 0.954)
    assert Course([0.0] * 10 + [5.0] * 10).noise() == 0.0
    assert Course([0.0] * 10 + [5.0] * 10).rise() == math.inf
    assert abs(Course(wobble).rise()) < 1


def test_a_fall_within_the_noise_is_none(args):
    """Few completions per log: the reward goes up and down by more than it fell."""
    noisy = [0.9, 0.7, 1.0, 0.7, 0.95, 0.7, 0.75, 0.6, 0.8]
    logs = entries({"reward": noisy, "reward_std": [0.3] * 9})
    assert diagnose.reward_falls(Logs(logs), args) is None
    steady = entries({"reward": [0.9] * 6 + [0.7] * 3, "reward_std": [0.3] * 9})
    assert diagnose.reward_falls(Logs(steady), args) is not None


def test_a_beta_at_its_bound_is_said_to_be(args):
    grown = [min(0.005 * 1.2**i, 0.5) for i in range(60)]
    line = diagnose.kl_target_is_out_of_reach(Logs(entries(healthy() | {"beta": grown})), args)
    assert "beta has grown from 0.005 to its bound of 0.5, 100 times as much, and the KL" in line
    assert "lower learning_rate" in line
    below = diagnose.kl_target_is_out_of_reach(Logs(entries(healthy() | {"beta": [b / 2 for b in grown[:24]]})), args)
    assert below is None or "bound" not in below


@pytest.mark.parametrize("name", [name for name, (_, word) in SYMPTOMS.items() if word == TARGET])
def test_a_beta_that_follows_a_target_is_not_to_be_set(args, name):
    """Its target is. (A run with kl_target was told to lower beta, or to set kl_target.)"""
    logs, rule = Logs(entries({**healthy(), **SYMPTOMS[name][0]})), getattr(diagnose, name)
    assert "beta" not in (line := rule(logs, args))
    assert "set kl_target" not in line
    constant = rule(logs, SimpleNamespace(kl_target=None, beta=0.1, learning_rate=1e-6))
    assert "beta (now" in constant
    upward = "raise" if name == "kl_outweighs_scores" else "lower"
    assert f"{upward} kl_target" in line
    assert f"{upward} beta" not in constant


def test_a_run_of_others_has_no_options():
    """Its lines name options without values."""
    for name, (changes, _) in SYMPTOMS.items():
        if name not in ("kl_target_is_out_of_reach",):
            line = getattr(diagnose, name)(Logs(entries(healthy() | changes)), SimpleNamespace())
            assert line is not None, name
            assert "None)" not in line or name == "engine_differs"


def test_a_history_is_read_as_the_run_was(args):
    history = entries(healthy() | SYMPTOMS["entropy_collapses"][0])
    history = [{"step": 10 * n, "loss": 0.0, **entry} for n, entry in enumerate(history, 1)]
    (found,) = examine(history, args)
    # Three logs at a thirtieth of the entropy, in a mean over three.
    assert (found.name, found.first, found.last, found.lasts) == ("entropy_collapses", 530, 600, True)
    # Of a long history some beginnings are looked at, the whole of it among them.
    long = [dict(history[n % 50], step=n) for n in range(5000)] + history
    assert examine(long, args)[-1].lasts
    assert examine(long, args)[-1].last == 600


def test_what_lasts_is_found_at_the_end_of_a_long_history(args, monkeypatch):
    """It is asked at every log: looking at all of them each time made a run slower and slower."""
    looked, known = [], doctor.is_update
    monkeypatch.setattr(doctor, "is_update", lambda entry: looked.append(entry) or known(entry))
    history = [{"loss": 0.0, "kl": 0.0 if n < 3995 else 3.0} for n in range(4000)]
    history.insert(3998, {"eval_reward": 1.0})
    assert lasting(["kl_explodes"], history, args, patience=3).startswith("kl_explodes")
    assert len(looked) == 4
    # Each of the views ends with its own log.
    assert [logs_of(history, end)["kl"].last() for end in (3995, 3997, 4001)] == [0.0, 2.0, 3.0]
    assert len(logs_of(history, 3000)["kl"]) == len(logs_of(history)["kl"]) + 1 == 1000


def test_what_lasts_follows_from_the_history_alone(args):
    history = [{"loss": 0.0, "kl": kl} for kl in (0.0, 3.0, 3.0, 0.0, 3.0, 3.0, 3.0)]
    stops = [n for n in range(1, 8) if lasting(["kl_explodes"], history[:n], args, patience=3)]
    assert stops == [7]
    # The log of an evaluation in between is none of the run's.
    history.insert(5, {"eval_loss": 0.0, "eval_reward": 1.0})
    assert [n for n in range(1, 9) if lasting(["kl_explodes"], history[:n], args, patience=3)] == [8]
    assert lasting(["entropy_collapses"], history, args, patience=1) is None


def test_a_resumed_run_does_not_name_what_it_has_named(tmp_path, caplog):
    store, log = RunStore(tmp_path), {"loss": 0.0, "completions/clipped_ratio": 0.8}
    args = SimpleNamespace(max_completion_length=8)
    store.begin()

    def line_at(step, callback):
        caplog.clear()
        state = SimpleNamespace(log_history=[log] * 3, global_step=step, is_world_process_zero=True)
        callback.on_train_begin(args, state, None)
        callback.on_log(args, state, None, logs=log)
        return [message for message in caplog.messages if "are cut off" in message]

    assert line_at(3, Diagnose(None, store))
    store.resume(3)
    again = Diagnose(None, store)
    assert not line_at(4, again)
    assert line_at(103, again)
    store.resume(2)  # before it was named
    assert line_at(3, Diagnose(None, store))
    assert line_at(0, again)  # another run
