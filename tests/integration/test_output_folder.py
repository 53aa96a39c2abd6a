"""One run, one folder: whose checkpoints are gone on from, who may train there, and what becomes of an earlier run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from rloom import RLOOTrainer
from rloom.errors import ConfigError
from rloom.observe import read_store
from rloom.training import checkpoint
from rloom.training.folder import OutputFolder
from rloom.training.identity import RUN_FILE
from tests.conftest import make_model, make_tokenizer


def lengths(completions, **kwargs):
    return [float(len(text)) for text in completions]


def letters(completions, **kwargs):
    return [float(text.count("a")) for text in completions]


@pytest.fixture
def make(config, rows):
    """A function that makes a trainer, of the same run unless told otherwise."""

    def make(model=None, reward=lengths, data=rows, **changes):
        options = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, "advice": False} | changes
        model = make_model() if model is None else model
        return RLOOTrainer(model, reward, config(**options), data, processing_class=make_tokenizer())

    return make


# -- the run's own checkpoints


def test_a_checkpoint_of_another_run_is_refused_by_what_differs(make, rows, tmp_path, capsys):
    make().train()
    newest = tmp_path / "out" / "checkpoint-1"
    others = {
        "rewards was": {"reward": letters},
        "num_generations was 2 and is 4": {"num_generations": 4},
        "objective's kl_estimator was 'k1' and is 'k3'": {"kl_estimator": "k3"},
        "model's weights was": {"model": make_model(hidden_size=16)},
        "train_dataset's rows was 6 and is 5": {"data": rows[:5]},
        "train_dataset's content was": {"data": [*rows[:5], {**rows[5], "target": -1}]},
    }
    for told, changes in others.items():
        for resume in ("auto", str(newest)):
            with pytest.raises(ConfigError, match=told) as refused:
                make(**changes).train(resume_from_checkpoint=resume)
            assert str(refused.value).startswith(f"{newest} is of another run: ")
    assert newest.exists()  # and nothing was moved
    trainer = make(reward=letters, max_steps=2, resume_changed_run=True)
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 2


def test_options_that_may_change_are_listed(make, tmp_path, capsys):
    make().train()
    capsys.readouterr()
    make(max_steps=2, learning_rate=0.5).train(resume_from_checkpoint="auto")
    said = capsys.readouterr().err
    assert f"going on from {tmp_path / 'out' / 'checkpoint-1'}, after update 1" in said
    assert "learning_rate was 0.001 and is 0.5" in said
    assert "max_steps was 1 and is 2" in said
    assert "seed" not in said


def test_a_record_holds_no_secrets(make, tmp_path):
    make(hub_token="hf_secret", model_init_kwargs={"token": "hf_secret"}).train()
    record = (tmp_path / "out" / "checkpoint-1" / RUN_FILE).read_text()
    assert "learning_rate" in record
    assert "secret" not in record


def test_a_checkpoint_without_a_record_still_loads(make, tmp_path):
    make().train()
    (tmp_path / "out" / "checkpoint-1" / RUN_FILE).unlink()
    trainer = make(reward=letters, max_steps=2)
    trainer.train(resume_from_checkpoint="auto")
    assert trainer.state.global_step == 2


# -- one run at a time


def test_a_second_run_at_the_same_time_is_refused(make, tmp_path):
    out = tmp_path / "out"

    def second(completions, **kwargs):
        with pytest.raises(ConfigError, match=rf"{out} is in use: process {os.getpid()} on .+, since 20") as refused:
            make().train()
        told.append(refused)
        return lengths(completions)

    told: list[object] = []
    make(reward=second).train()
    assert told
    make().train()  # the lock ended with the first


def test_weights_that_a_killed_run_has_left_for_servers_go(tmp_path):
    left = tmp_path / "_vllm_weights" / "rloom-0123" / "model.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(bytes(9))
    with OutputFolder(tmp_path).hold():
        assert not left.parent.parent.exists()


HOLDER = """
import sys, time
from rloom.training import checkpoint
from rloom.training.folder import OutputFolder
with OutputFolder(sys.argv[1]).hold():
    print("held", flush=True)
    time.sleep(600)
"""


def test_the_lock_of_a_dead_process_blocks_nobody(tmp_path):
    line = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ConfigError, match=f"process {other.pid} on"), OutputFolder(tmp_path).hold():
                pass
        finally:
            other.kill()
    with OutputFolder(tmp_path).hold():
        assert json.loads((tmp_path / "_lock").read_text())["pid"] == os.getpid()


FORKS = """
import os, sys, time
from rloom.training.folder import OutputFolder
with OutputFolder(sys.argv[1]).hold():
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(600)
"""


def test_what_a_dead_process_has_forked_blocks_nobody(tmp_path):
    line = [sys.executable, "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as other:
        child = int(other.stdout.readline())
        try:
            other.kill()
            other.wait()
            with OutputFolder(tmp_path).hold():
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_cannot_be_locked_costs_the_lock_and_not_the_run(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    with OutputFolder(tmp_path / "file").hold():
        pass
    assert "cannot be locked against a second run" in caplog.text


# -- what an earlier run left


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def earlier(make, out):
    """A run that saved, with files of the user's own beside it."""
    out.mkdir()
    for name in ("notes.txt", "vocab.txt", "generation_config.yaml"):
        (out / name).write_text("mine")
    trainer = make()
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    (out / "log.txt").write_text("mine too")
    return trainer


def test_what_an_earlier_run_left_is_moved(make, tmp_path, capsys):
    out = tmp_path / "out"
    earlier(make, out)
    weights, rows = (out / "model.safetensors").read_bytes(), read_store(out)
    capsys.readouterr()
    again = make(reward=letters, max_steps=2)
    again.train()
    moved = out / "_previous" / "1"
    assert f"rloom: what an earlier run left in {out} is now in {moved}: " in capsys.readouterr().err
    assert (moved / "model.safetensors").read_bytes() == weights
    assert read_store(moved) == rows
    assert {"checkpoint-1", "_rollouts", "config.json", "tokenizer.json", "trainer_state.json"} <= names(moved)
    mine = {"notes.txt", "vocab.txt", "generation_config.yaml", "log.txt"}
    assert mine <= names(out)
    assert names(out) - mine == {"checkpoint-1", "checkpoint-2", "_rollouts", "_previous", "_lock", "_run.json",
                                 "README.md", "trainer_state.json"}  # fmt: skip
    make(max_steps=2, reward=letters).train(resume_from_checkpoint="auto")  # which moves nothing
    again.train()  # the same run
    assert names(out / "_previous") == {"1"}
    make().train()
    assert names(out / "_previous") == {"1", "2"}


def test_overwriting_deletes_what_an_earlier_run_left(make, tmp_path, capsys):
    out = tmp_path / "out"
    earlier(make, out)
    make(overwrite_output_dir=True, save_strategy="no").train()
    assert f"deleted what an earlier run left in {out}: " in capsys.readouterr().err
    assert names(out) == {"notes.txt", "vocab.txt", "generation_config.yaml", "log.txt", "_rollouts", "_lock",
                          "_run.json", "trainer_state.json"}  # fmt: skip


def test_a_folder_of_an_older_version_or_of_trl_is_known_by_names(tmp_path):
    for name in ("model.safetensors", "config.json", "training_args.bin", "notes.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-of-mine").mkdir()
    OutputFolder(tmp_path).begin()
    assert names(tmp_path) == {"notes.txt", "checkpoint-of-mine", "_previous", "_run.json"}


def test_a_model_that_was_trained_further_is_moved_by_the_next_run(tmp_path):
    for name in ("model.safetensors", "config.json", "training_args.bin"):
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoint-3").mkdir()
    OutputFolder(tmp_path).begin(keep=[tmp_path])
    assert {"model.safetensors", "config.json"} <= names(tmp_path)
    OutputFolder(tmp_path).begin()
    assert names(tmp_path / "_previous" / "2") == {"model.safetensors", "config.json", "training_args.bin"}


def test_what_cannot_be_moved_ends_the_run_each_time(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-3").mkdir()
    folder = OutputFolder(tmp_path)

    def refuse(*args):
        raise PermissionError("no")

    monkeypatch.setattr(Path, "rename", refuse)
    for _ in range(2):
        with pytest.raises(ConfigError, match="cannot be moved to"):
            folder.begin()


def test_a_model_without_a_trainers_file_is_the_users(tmp_path):
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_text("")
    OutputFolder(tmp_path).begin()
    assert names(tmp_path) == {"model.safetensors", "config.json"}


def test_a_run_leaves_what_it_is_made_from(make, tmp_path):
    """A model that is trained further in its own folder, and one that began in a checkpoint there."""
    out = tmp_path / "out"
    earlier(make, out)
    make(model=str(out), save_strategy="no").train()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= names(out)
    assert names(out / "_previous" / "1") == {"checkpoint-1", "_rollouts"}
    from_checkpoint = out / "checkpoint-7"
    (out / "_previous" / "1" / "checkpoint-1").rename(from_checkpoint)
    with pytest.raises(ConfigError, match=r"made from .*checkpoint-7.* another output_dir"):  # which it would replace
        make(model=str(from_checkpoint), save_strategy="no").train()
    assert from_checkpoint.exists()


def test_guesses_are_moved_and_never_deleted(tmp_path):
    for name in ("model.safetensors", "my_config.json", "training_args.bin"):
        (tmp_path / name).write_text("")
    (tmp_path / "checkpoint-3").mkdir()
    OutputFolder(tmp_path).begin(delete=True)
    assert not (tmp_path / "checkpoint-3").exists()
    assert names(tmp_path / "_previous" / "1") == {"model.safetensors", "my_config.json", "training_args.bin"}


def test_nothing_is_deleted_where_a_run_was_to_go_on(make, tmp_path):
    out = tmp_path / "out"
    make().train()
    (out / "checkpoint-1" / "trainer_state.json").write_text("{")
    make(overwrite_output_dir=True).train(resume_from_checkpoint="auto")
    assert (out / "_previous" / "1" / "checkpoint-1" / "model.safetensors").exists()


def test_trainers_that_take_turns_in_a_folder_do_not_mix(make, tmp_path):
    out = tmp_path / "out"
    first, second = make(max_steps=1), make(max_steps=2)
    first.train()
    second.train()
    first.train()
    assert "checkpoint-2" not in names(out)
    assert names(out / "_previous") == {"1", "2"}


def test_a_branch_that_is_left_is_moved(make, tmp_path, capsys):
    out = tmp_path / "out"
    make(max_steps=3).train()
    make(max_steps=2, save_strategy="no").train(resume_from_checkpoint=str(out / "checkpoint-1"))
    assert names(out / "_previous" / "1") == {"checkpoint-2", "checkpoint-3"}
    assert "later checkpoints in" in capsys.readouterr().err


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    folder = OutputFolder(tmp_path)
    with folder.hold():
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with folder.hold():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_errors_of_uploads_are_not_the_disks(make, tmp_path):
    """They are OSErrors too; what was written stays."""

    class Uploads(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            raise ConnectionError("no network")

    trainer = make()
    trainer.add_callback(Uploads())
    with pytest.raises(ConnectionError):
        trainer.train()
    assert (tmp_path / "out" / "checkpoint-1").exists()
    with pytest.raises(ConnectionError), checkpoint.writing(tmp_path, "it"):
        raise ConnectionError("no network")


def test_files_that_cannot_be_looked_at_do_not_hide_the_others(tmp_path):
    (tmp_path / "latest").symlink_to("nowhere")
    folder = OutputFolder(tmp_path)
    (tmp_path / "config.json").write_text("")
    with folder.writing():
        (tmp_path / "model.safetensors").write_text("")
    assert folder.written == {"model.safetensors"}


def test_what_a_trainer_did_before_its_training_is_its_own(make, rows, tmp_path):
    trainer = make(save_strategy="no")
    trainer.evaluate(rows[:2])
    trainer.save_model()
    trainer.train()
    assert not (tmp_path / "out" / "_previous").exists()
    assert {row["mode"] for row in read_store(tmp_path / "out")} == {"train", "eval"}


def test_a_run_that_came_from_another_folder_is_new_in_this_one(make, tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    make(output_dir=str(elsewhere)).train()
    earlier(make, out)
    make(max_steps=2).train(resume_from_checkpoint=str(elsewhere / "checkpoint-1"))
    assert "model.safetensors" in names(out / "_previous" / "1")
    with pytest.raises(ValueError, match=r"elsewhere/checkpoint-9 is no folder: name .*out/checkpoint-2"):
        make(max_steps=2).train(resume_from_checkpoint=str(elsewhere / "checkpoint-9"))
    assert names(out / "_previous") == {"1"}
