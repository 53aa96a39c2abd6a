"""`rloom diff`: the first step at which two runs part, and what is the cause there."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest

from rloom.cli.main import main
from rloom.observe.compare import compare_runs
from rloom.observe.store import RunStore

STEPS = 4


def rows(step: int) -> list[dict]:
    return [
        {"group": number // 2, "prompt": f"p{number // 2}", "completion": f"{step}{number}",
         "token_ids": [step, number], "scores": {"a": number / 3}, "failures": {}, "reward": number / 3,
         "advantage": number / 7,
         "stop_reason": "eos", "num_tokens": 2, "extra": {}}
        for number in range(4)
    ]  # fmt: skip


def write(folder, *, steps=STEPS, change=None, log=None, options=None, part_bytes=2**20):
    store = RunStore(folder, part_bytes=part_bytes)
    for step in range(1, steps + 1):
        made = copy.deepcopy(rows(step))
        if change is not None:
            change(step, made)
        store.write(made, step)
        store.write([{"group": 0, "prompt": f"evaluated in {folder.name}", "reward": 0.0}], step, "eval")
    entries = [{"step": step, "loss": 0.5, "grad_norm": 1.0 + step} for step in range(1, steps + 1)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log(entries) if log else entries}))
    (folder / "checkpoint-3").mkdir()
    facts = {"fixed": {"model": {"name": "m"}}, "options": {"seed": 1, **(options or {})}, "versions": {"torch": "2"}}
    (folder / "checkpoint-3" / "rloom_run.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def one(tmp_path):
    (tmp_path / "one").mkdir()
    return write(tmp_path / "one")


@pytest.fixture
def other(tmp_path):
    (tmp_path / "other").mkdir()
    return tmp_path / "other"


def test_the_same_runs_do_not_part(one, other):
    """However their stores are cut into files."""
    found = compare_runs(one, write(other, part_bytes=100))
    assert (found.step, found.compared, found.ends, found.options) == (None, 4, (4, 4), [])
    assert len(list((other / "_rollouts").glob("*.jsonl"))) > 1


def at(step, number, **fields):
    def change(now, made):
        # What comes after it differs as well.
        if now >= step:
            made[number] |= fields

    return change


@pytest.mark.parametrize(
    ("change", "what", "where", "values"),
    [
        (at(2, 3, prompt="q", token_ids=[9], advantage=0.0), "prompts", "prompt of sample 3", ("p1", "q")),
        (at(2, 1, token_ids=[9], completion="x", reward=9.0), "completions", "token_ids of sample 1", ([2, 1], [9])),
        (at(2, 1, scores={"a": 9.0}, reward=9.0), "scores", "scores of sample 1", ({"a": 0.33333334}, {"a": 9.0})),
        (at(2, 0, reward=9.0, advantage=1.0), "rewards", "reward of sample 0", (0.0, 9.0)),
        (at(2, 2, advantage=0.25), "advantages", "advantage of sample 2", (0.2857143, 0.25)),
    ],
)  # fmt: skip
def test_the_cause_is_named_before_what_follows_from_it(one, other, change, what, where, values):
    found = compare_runs(one, write(other, change=change))
    assert found.step == 2
    assert (found.first.what, found.first.where, found.first.values) == (what, where, values)
    assert what not in found.others


def test_a_log_that_differs_where_completions_do_not(one, other):
    """Another gradient, by a kernel say: completions part later."""

    def log(entries):
        return [{**entry, "grad_norm": 9.0} if entry["step"] == 3 else entry for entry in entries]

    found = compare_runs(one, write(other, log=log, change=at(4, 0, completion="x")))
    assert (found.step, found.first.what, found.first.where, found.first.values) == (3, "log", "grad_norm", (4.0, 9.0))


@pytest.mark.parametrize("where", ["trainer_state.json", "the store"])
@pytest.mark.parametrize(("step", "compared"), [(2, 2), (4, 3)])
def test_logs_of_updates_without_completions_are_compared(tmp_path, where, step, compared):
    """Completions of updates 1 and 3 serve two updates each, and update 3's differ too where update 2's log does."""
    for name, added in (("one", 0.0), ("other", 1.0)):
        store = RunStore(tmp_path / name)
        for number in (1, 3):
            store.write(rows(number + (9 if added and step < number else 0)), number)
        entries = [{"step": at, "loss": 0.5 + added * (at == step)} for at in range(1, 5)]
        if where == "the store":
            for entry in entries:
                store.log({"loss": entry["loss"]}, entry["step"])
        else:
            (tmp_path / name / where).write_text(json.dumps({"log_history": entries}))
    found = compare_runs(tmp_path / "one", tmp_path / "other")
    assert (found.step, found.first.where, found.first.values) == (step, "loss", (0.5, 1.5))
    assert found.compared == compared


def test_options_of_runs_without_checkpoints(tmp_path):
    for name, seed in (("one", 1), ("other", 2)):
        store = RunStore(tmp_path / name)
        store.write(rows(1), 1)
        store.describe({"options": {"seed": seed}, "environment": {"torch": "2", "system": name}, "about": {"a": name}})
    found = compare_runs(tmp_path / "one", tmp_path / "other")
    assert [(d.where, d.values) for d in found.options] == [("options seed", (1, 2))]


def test_other_numbers_of_completions_are_the_schedule(one, other):
    found = compare_runs(one, write(other, change=lambda step, made: made.pop() if step == 2 else None))
    assert (found.step, found.first.what, found.first.values) == (2, "schedule", (4, 3))


def test_a_longer_run_is_the_same_as_far_as_both_go(one, other, capsys):
    write(other, steps=6, options={"seed": 2})
    found = compare_runs(one, other)
    assert (found.step, found.ends) == (None, (4, 6))
    assert [(d.where, d.values) for d in found.options] == [("options seed", (1, 2))]
    assert main(["diff", str(one), str(other)]) == 0
    assert "the same: 4 updates" in (shown := capsys.readouterr().out)
    assert "options seed" in shown


def test_the_verb_says_where_and_needs_no_torch(one, other):
    write(other, change=at(3, 2, token_ids=[1], completion="\x1b[31m", reward=3.0))
    script = (
        "import sys; from rloom.cli.main import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "diff", str(one), str(other)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "they part at update 3, in completions; the 2 updates before it are the same" in done.stdout
    assert "token_ids of sample 2" in done.stdout
    assert "also different at that update: rewards" in done.stdout
    assert "\x1b" not in done.stdout
    done = subprocess.run(
        [sys.executable, "-c", script, "diff", str(one), str(other), "--json"], capture_output=True, text=True
    )
    assert json.loads(done.stdout)["first"]["what"] == "completions"


def test_a_folder_that_is_no_run_is_named(one, tmp_path, capsys):
    assert main(["diff", str(one), str(tmp_path / "nothing")]) == 1
    assert "nothing is no folder: name the output folder of a run" in capsys.readouterr().err
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "trainer_state.json").write_text('{"log_history": [{"loss": 0.1, "step": 1}]}')
    assert main(["diff", str(one), str(tmp_path / "trl")]) == 1
    assert "stored completions are needed, and" in (said := capsys.readouterr().err)
    assert "trl has curves alone, as a run by TRL has" in said
