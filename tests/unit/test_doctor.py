"""`rloom doctor`: runs that have ended, that are running, and of other trainers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rloom import RLOOTrainer
from rloom.cli.main import main
from rloom.errors import DataError
from rloom.observe.history import read_history
from rloom.observe.store import RunStore
from tests.conftest import make_model, make_tokenizer


def found(capsys, path) -> dict:
    assert main(["doctor", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def zero(completions, **kwargs):
    return [0.0] * len(completions)


@pytest.fixture
def ended(config, rows, tmp_path):
    """The folder of a run whose completions all score 0."""
    args = config(max_steps=5, save_strategy="steps", save_steps=4, learning_rate=2e-3)
    RLOOTrainer(make_model(), zero, args, rows, processing_class=make_tokenizer()).train()
    return tmp_path / "out"


def test_a_run_that_has_ended(ended, capsys):
    capsys.readouterr()
    report = found(capsys, ended)
    named = {one["name"]: one for one in report["diagnoses"]}
    assert (named["scores_are_constant"]["first"], named["scores_are_constant"]["lasts"]) == (3, True)
    assert report["logs"] == 5
    assert main(["doctor", str(ended)]) == 0
    out = capsys.readouterr().out
    assert "step 3 (and still so at the end), scores_are_constant:" in out
    assert "rloom sft" in out


def test_a_run_that_goes_on_is_read_from_its_logs(ended):
    """Without the state of the end: what is logged is on the disk at once, also what the checkpoint does not have."""
    whole = [entry for entry in read_history(ended).entries if "train_runtime" not in entry]
    assert [entry["step"] for entry in whole] == [1, 2, 3, 4, 5]
    (ended / "trainer_state.json").unlink()
    found = read_history(ended)
    assert [entry for entry in found.entries if "train_runtime" not in entry] == whole
    assert {"grad_norm", "kl", "entropy"} <= whole[-1].keys()
    assert found.options.learning_rate == 2e-3


@pytest.mark.parametrize("step", ["NaN", "Infinity", '"three"', "[]", "null"])
def test_a_log_whose_steps_are_none_is_counted(tmp_path, capsys, step):
    (tmp_path / "logs.jsonl").write_text(f'{{"step": {step}, "loss": 0.1, "kl": 5.0}}\n' * 6)
    (diagnosis,) = found(capsys, tmp_path / "logs.jsonl")["diagnoses"]
    assert (diagnosis["name"], diagnosis["last"]) == ("kl_explodes", 6)


def test_a_run_that_was_stored_and_never_logged(ended):
    """Its completions tell some of what logs would have said."""
    whole = read_history(ended).entries
    for file in (ended / "trainer_state.json", ended / "checkpoint-4/trainer_state.json",
                 ended / "checkpoint-5/trainer_state.json", ended / "_rollouts/metrics.jsonl"):  # fmt: skip
        file.unlink(missing_ok=True)
    entries = read_history(ended).entries
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5]
    for name in ("reward", "reward_std", "frac_reward_zero_std", "completions/mean_length"):
        assert entries[-1][name] == pytest.approx(whole[4][name]), name
    assert entries[-1]["completions/clipped_ratio"] == pytest.approx(whole[4]["completions/clipped_ratio"])
    # Options come with the checkpoint, or with the store.
    assert read_history(ended).options.learning_rate == 2e-3


def write_state(folder, steps) -> None:
    folder.mkdir(exist_ok=True)
    logs = [{"step": n, "loss": 0.0, "reward": 5.0, "reward_std": 1.0, "frac_reward_zero_std": 0.0} for n in steps]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))


def test_normalized_rewards_of_the_store_are_not_read_beside_logged_ones(tmp_path, capsys):
    """The store has rewards after penalties and normalization: 0 on average, where the log says 5."""
    write_state(tmp_path / "checkpoint-20", range(1, 21))
    store = RunStore(tmp_path)
    store.begin()
    for step in range(1, 31):
        store.write([{"group": 0, "completion": "x", "reward": r, "num_tokens": 3} for r in (-1.0, 1.0)], step)
        store.log({"loss": 0.0, "reward": 5.0, "reward_std": 1.0, "frac_reward_zero_std": 0.0}, step)
    assert found(capsys, tmp_path)["diagnoses"] == []
    assert [entry["reward"] for entry in read_history(tmp_path).entries] == [5.0] * 30
    # A run of an older version has no logs but the checkpoint's.
    (tmp_path / "_rollouts/metrics.jsonl").unlink()
    assert [entry["reward"] for entry in read_history(tmp_path).entries] == [5.0] * 20


def test_a_state_that_cannot_be_read_is_passed_over(tmp_path):
    """The run was killed while it was written; the checkpoint before it is whole."""
    write_state(tmp_path / "checkpoint-20", range(1, 21))
    write_state(tmp_path, range(1, 11))
    (tmp_path / "checkpoint-30").mkdir()
    (tmp_path / "checkpoint-30/trainer_state.json").write_text('{"log_history": [{"st')
    # The folder's own is that of an end at step 10, after which the run was resumed.
    assert len(read_history(tmp_path).entries) == 20


def test_another_trainers_state_and_lines(tmp_path, capsys):
    trl = [{"step": 5 * n, "loss": 0.0, "completion_length": 9.0, "kl": 0.9 * n, "reward": 1.0} for n in (1, 2, 3)]
    end = {"step": 15, "train_runtime": 3.0, "train_loss": 0.0}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [*trl, end], "global_step": 15}))
    (one,) = found(capsys, tmp_path)["diagnoses"]
    assert (one["name"], one["first"]) == ("kl_explodes", 15)
    assert "lower learning_rate, or raise beta" in one["line"]
    lines = tmp_path / "verl.jsonl"
    lines.write_text("\n".join(json.dumps({"training/global_step": n, "response_length/clip_ratio": 0.7})
                               for n in range(1, 5)))  # fmt: skip
    (one,) = found(capsys, lines)["diagnoses"]
    assert (one["name"], one["first"]) == ("completions_are_cut_off", 3)


def test_nothing_wrong_is_said_too(tmp_path, capsys):
    (tmp_path / "m.jsonl").write_text('{"reward": 1.0, "step": 1}\n')
    assert main(["doctor", str(tmp_path / "m.jsonl")]) == 0
    assert "No diagnosis" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "not json", "cannot be read as JSON"),
        ("a.json", "[1, 2]", "has no logs"),
        ("a.json", '{"log_history": []}', "has no logs yet"),
        (
            "prompts.jsonl",
            '{"prompt": "1+1=", "answer": 2, "step": 3}',
            "has no metric in any of its 1 line, such as reward",
        ),
        (None, None, "holds no run"),
    ],
)
def test_what_cannot_be_read_is_said(name, text, words, tmp_path, capsys):
    path = tmp_path if name is None else tmp_path / name
    if name is not None:
        path.write_text(text)
    assert main(["doctor", str(path)]) == 1
    assert words in capsys.readouterr().err
    with pytest.raises(DataError):
        read_history(tmp_path / "nowhere")


def test_it_starts_without_torch(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"reward": 1.0, "step": 1}\n')
    code = "import sys; from rloom.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    line = [sys.executable, "-c", code, "doctor", str(tmp_path / "m.jsonl")]
    assert subprocess.run(line, timeout=60, capture_output=True).returncode == 0
