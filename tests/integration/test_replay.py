"""`rloom.replay` and `rloom replay`: an update of a run comes out as it was stored, to the bit."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

import rloom
from rloom.cli.main import main
from rloom.cli.replay import _show, read_command, write_command
from rloom.errors import ConfigError, DataError
from rloom.observe import RunReader
from tests.conftest import make_model, make_tokenizer
from tests.integration import resume_run
from tests.integration.test_resume import run
from tests.standins import prompts, save_jsonl, save_llama


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> tuple[Path, Path]:
    """A run that was killed in its fifth update and resumed, and one that was not."""
    folder = tmp_path_factory.mktemp("replay")
    run("replayed", str(folder / "whole"), f"{folder / 'killed'}:kill=5")
    run("replayed", f"{folder / 'killed'}:resume")
    return folder / "killed", folder / "whole"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_hundred_samples_of_a_killed_run_come_out_as_they_were_stored(killed, tmp_path):
    """Tokens, scores, rewards and advantages, at the weights of a run that was never stopped. The folder is read."""
    folder, whole = killed
    before = contents(folder)
    weights = json.loads((whole / "weights.json").read_text())
    stored = dict(RunReader(folder).steps())
    everything = [(step, sample) for step, rows in stored.items() for sample in range(len(rows))]
    assert len(everything) == 128
    chosen = random.Random(3).sample(everything, 100)
    for step in sorted({step for step, _ in chosen}):
        samples = [sample for at, sample in chosen if at == step]
        trainer = resume_run.make_trainer(str(tmp_path / "trainer"), "replayed")
        found = rloom.replay(trainer, step, samples, run=folder, call_rewards=step == 2)
        assert found.weights == weights[str(step)], step
        assert found.resumed_from == (step - 1) // 3 * 3
        assert [one.sample for one in found.samples] == samples
        for one in found.samples:
            assert one.stored == stored[step][one.sample]
            assert one.differences == []
            assert found.differences == []
            assert {"token_ids", "completion", "scores", "reward", "advantage"} <= one.replayed.keys()
            assert one.gradient_norm > 0 or one.replayed["advantage"] == 0
            assert one.new_scores == (one.stored["scores"] if step == 2 else None)
    assert contents(folder) == before


def make_trainer(folder: Path, reward, eval_dataset=None, **options):
    config = rloom.RLOOConfig(
        str(folder),
        **{
            "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 5, "max_steps": 3,
            "save_steps": 1, "learning_rate": 1e-2, "beta": 0.0, "report_to": "none", "use_cpu": True, "seed": 3,
            "gradient_checkpointing": False, **options,
        },
    )  # fmt: skip
    rows = [{"prompt": text} for text in ("ab", "hello", "1+1=", "why.")]
    return rloom.RLOOTrainer(make_model(), reward, config, rows, eval_dataset, processing_class=make_tokenizer())


def by_length(completions, **kwargs):
    return [len(text) + text.count("a") / 3 for text in completions]


def test_the_gradient_of_a_sample_is_that_of_its_share_of_the_loss(tmp_path):
    """−A_i·∇ log π(y_i) / N at ratio 1, by a plain forward of the model."""
    make_trainer(tmp_path / "run", by_length).train()
    trainer = make_trainer(tmp_path / "again", by_length)
    model = trainer.model
    found = rloom.replay(trainer, 2, [0, 5], run=tmp_path / "run")
    assert found.resumed_from == 1
    for one in found.samples:
        model.zero_grad()
        prompt = make_tokenizer()(one.stored["prompt"], add_special_tokens=False)["input_ids"]
        tokens = torch.tensor([[*prompt, *one.stored["token_ids"]]])
        logprobs = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        drawn = logprobs.gather(1, tokens[0, len(prompt) :].unsqueeze(1))
        (-one.stored["advantage"] * drawn.sum() / 8).backward()
        norms = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
        assert one.gradient_norm == pytest.approx(sum(n**2 for n in norms.values()) ** 0.5, rel=1e-4)
        for name, norm in one.largest:
            assert norm == pytest.approx(norms[name], rel=1e-4)
        assert [name for name, _ in one.largest] == sorted(norms, key=lambda name: -norms[name])[:5]


def test_a_sample_of_a_later_update_has_no_gradient_in_this_one(tmp_path, capsys):
    """Two updates share a rollout of 16: the first trains on 8 of them."""
    make_trainer(tmp_path / "run", by_length, steps_per_generation=2, max_steps=2).train()
    again = make_trainer(tmp_path / "again", by_length, steps_per_generation=2, max_steps=2)
    with pytest.raises(DataError, match="no completions of update 2: it trains on those of update 1, which can be"):
        rloom.replay(again, 2, run=tmp_path / "run")
    found = rloom.replay(again, 1, list(range(16)), run=tmp_path / "run", call_rewards=False)
    assert [one.in_update for one in found.samples] == [True] * 8 + [False] * 8
    assert any(one.gradient_norm > 0 for one in found.samples[:8])
    assert [(one.gradient_norm, one.largest) for one in found.samples[8:]] == [(0.0, [])] * 8
    _show(found, chosen=True)
    assert capsys.readouterr().out.count("a later update trains on it") == 8


def test_scores_are_the_stored_ones_and_a_new_call_stands_beside_them(tmp_path):
    make_trainer(tmp_path / "run", by_length).train()
    calls = []

    def changed(completions, **kwargs):
        calls.append(len(completions))
        return [-1.0] * len(completions)

    changed.__name__ = "by_length"
    found = rloom.replay(make_trainer(tmp_path / "a", changed), 3, run=tmp_path / "run", call_rewards=False)
    assert calls == []
    assert [one.differences for one in found.samples] == [[]] * 8
    assert {one.new_scores for one in found.samples} == {None}
    found = rloom.replay(make_trainer(tmp_path / "b", changed), 3, 1, run=tmp_path / "run")
    assert calls == [8]
    assert found.samples[0].new_scores == {"by_length": -1.0}
    assert found.samples[0].replayed["scores"] == found.samples[0].stored["scores"] != {"by_length": -1.0}

    def failing(completions, **kwargs):
        raise OSError("the judge has gone")

    failing.__name__ = "by_length"
    found = rloom.replay(make_trainer(tmp_path / "c", failing), 3, 1, run=tmp_path / "run")
    assert "the judge has gone" in found.samples[0].new_scores


def test_other_weights_and_options_are_differences(tmp_path):
    """With beta=0 completions and advantages come from the store, whatever the weights: the gradient shows them."""
    options = {"save_strategy": "no", "logging_steps": 1}
    make_trainer(tmp_path / "run", by_length, **options).train()
    same = rloom.replay(make_trainer(tmp_path / "a", by_length, **options), 3, run=tmp_path / "run")
    assert same.differences == []
    other = make_trainer(tmp_path / "b", by_length, learning_rate=5e-2, **options)
    found = rloom.replay(other, 3, run=tmp_path / "run", call_rewards=False)
    assert [one.differences for one in found.samples] == [[]] * 8
    assert found.differences[0] == "learning_rate was 0.01 and is 0.05"
    logged = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"][2]["grad_norm"]
    assert same.gradient_norm == pytest.approx(logged, rel=1e-5)
    assert found.differences[1].startswith(f"the gradient's norm was logged as {logged:.6g} and is ")
    assert len(found.differences) == 2


def test_a_run_that_began_with_an_evaluation(tmp_path):
    """An evaluation would take what is stored for the first update."""
    options = {"eval_on_start": True, "eval_dataset": [{"prompt": "ab"}], "logging_steps": 1}
    make_trainer(tmp_path / "run", by_length, **options).train()
    for step in (1, 3):
        again = make_trainer(tmp_path / f"again{step}", by_length, **options)
        found = rloom.replay(again, step, run=tmp_path / "run", call_rewards=False)
        assert found.differences == []
        assert [one.differences for one in found.samples] == [[]] * 8


def test_a_run_that_was_begun_from_another_runs_checkpoint(tmp_path):
    """Until it has a checkpoint of its own, that one has to be named."""
    options = {"max_steps": 4, "save_steps": 2, "logging_steps": 1}
    make_trainer(tmp_path / "first", by_length, **{**options, "max_steps": 2}).train()
    first, run = tmp_path / "first" / "checkpoint-2", tmp_path / "run"
    make_trainer(run, by_length, **options).train(resume_from_checkpoint=str(first))
    again = make_trainer(tmp_path / "again", by_length, **options)
    with pytest.raises(DataError, match=r"begin with update 3, and it has no checkpoint before 4: .*--checkpoint"):
        rloom.replay(again, 4, run=run)
    with pytest.raises(DataError, match=r"checkpoint-9 is no folder"):
        rloom.replay(again, 4, run=run, checkpoint=tmp_path / "first" / "checkpoint-9")
    with pytest.raises(ConfigError, match=r"written after update 2, which is not before update 2"):
        rloom.replay(again, 2, run=tmp_path / "first", checkpoint=first)
    found = rloom.replay(again, 4, run=run, checkpoint=first)
    assert found.resumed_from == 2
    assert found.differences == []
    assert [one.differences for one in found.samples] == [[]] * 8


def picky(completions, **kwargs):
    """Has no opinion on some."""
    return [None if "a" in text or len(text) % 2 else float(len(text)) for text in completions]


def test_a_score_that_was_none_is_none_again(tmp_path):
    make_trainer(tmp_path / "run", [by_length, picky]).train()
    found = rloom.replay(make_trainer(tmp_path / "a", [by_length, picky]), 2, run=tmp_path / "run")
    assert None in [one.stored["scores"]["picky"] for one in found.samples]
    assert [one.differences for one in found.samples] == [[]] * 8


def test_what_cannot_be_replayed_is_said(tmp_path):
    make_trainer(tmp_path / "run", by_length, store_completions=False).train()
    trainer = make_trainer(tmp_path / "a", by_length)
    with pytest.raises(DataError, match="stored no tokens for update 2: it was trained with store_completions=False"):
        rloom.replay(trainer, 2, run=tmp_path / "run")
    with pytest.raises(DataError, match="is no folder"):
        rloom.replay(trainer, 2, run=tmp_path / "nothing")
    with pytest.raises(ConfigError, match="counted from 1"):
        rloom.replay(trainer, 0, run=tmp_path / "run")
    make_trainer(tmp_path / "other", by_length).train()
    with pytest.raises(DataError, match="other has no update 4: its last is 3"):
        rloom.replay(trainer, 4, run=tmp_path / "other")
    with pytest.raises(ConfigError, match="samples 0 to 7, and no 8"):
        rloom.replay(trainer, 1, 8, run=tmp_path / "other")
    with pytest.raises(DataError, match=r"has stored .* and the data gives"):
        rloom.replay(make_trainer(tmp_path / "b", by_length, seed=4), 1, run=tmp_path / "other")


def test_a_run_of_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "model")
    save_jsonl(tmp_path / "prompts.jsonl", prompts(8))
    command = ["train", "--model", "model", "--data", "prompts.jsonl", "--reward", "length(maximum=4)", "--output_dir"]
    command += ["out", "--max_completion_length", "6", "--per_device_train_batch_size", "4", "--max_steps", "3"]
    command += ["--use_cpu", "--no_gradient_checkpointing", "--save_steps", "2", "--hub_token", "secret"]
    command += ["--logging_steps", "1"]
    assert main(command) == 0
    assert "secret" not in (tmp_path / "out" / "_rloom_command.json").read_text()
    before = contents(tmp_path / "out")
    capsys.readouterr()
    assert main(["replay", "out", "--step", "3", "--sample", "1", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["step"], found["resumed_from"], found["same"]) == (3, 2, True)
    assert [one["sample"] for one in found["samples"]] == [1, 2]
    assert main(["replay", "out", "--step", "1", "--no-new-scores"]) == 0
    assert "update 1, from the run's start: gradient norm" in (shown := capsys.readouterr().out)
    assert main(["replay", "out", "--step", "1", "--checkpoint", "out/checkpoint-2"]) == 1
    assert "written after update 2" in capsys.readouterr().err
    # An update may have hundreds of samples: those that come out as they were stored are shown where asked for.
    assert shown.rstrip().endswith("4 samples come out as they were stored")
    assert "completion" not in shown
    assert "DIFFERS" not in shown
    # Logged by weights that the options do not give.
    logs = tmp_path / "out" / "_rollouts" / "metrics.jsonl"
    as_logged = logs.read_text()
    entries = [json.loads(line) for line in as_logged.splitlines()]
    logs.write_text("".join(json.dumps({**entry, "grad_norm": 9.0}) + "\n" for entry in entries))
    assert main(["replay", "out", "--step", "1", "--no-new-scores"]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS: the gradient's norm was logged as 9 and is" in shown
    assert "4 samples come out as they were stored" in shown
    logs.write_text(as_logged)
    # A stored advantage that the scores do not give.
    store = next((tmp_path / "out" / "_rollouts").glob("0*.jsonl"))
    lines = [json.loads(line) for line in store.read_text().splitlines()]
    lines[0]["advantage"] += 1
    assert contents(tmp_path / "out") == before
    store.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["replay", "out", "--step", "1", "--no-new-scores"]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERS: advantage was" in shown
    assert "of 4 looked at, 1 DIFFER: 0\n" in shown
    assert re.findall(r"^sample \d", shown, re.MULTILINE) == ["sample 0"]
    assert shown.startswith("update 1, from the run's start")
    # What cannot be is told before a model is loaded.
    monkeypatch.setattr("rloom.cli.train.make_trainer", None)
    for words, message in (
        (["out", "--step", "9"], "out has no update 9: its last is 3"),
        (["out", "--step", "3", "--sample", "0", "4"], "update 3 has samples 0 to 3, and no 4"),
        (["nope", "--step", "1"], "nope is no folder: name the output folder of a run"),
        (["prompts.jsonl", "--step", "1"], "prompts.jsonl is no folder"),
        (["model", "--step", "1"], "model holds no run"),
        (["out/checkpoint-2", "--step", "1"], "out/checkpoint-2 is a checkpoint: name the folder of its run, out"),
    ):
        assert main(["replay", *words]) == 1
        assert f"rloom: {message}" in capsys.readouterr().err
    (tmp_path / "out" / "_rloom_command.json").unlink()
    assert main(["replay", "out", "--step", "1"]) == 1
    assert "call rloom.replay(trainer, step) with its trainer" in capsys.readouterr().err


def test_a_replay_pushes_nothing(tmp_path, monkeypatch, capsys):
    """A trainer with push_to_hub makes its repository when it is made, by the name of a replay's scratch folder."""
    made = []

    def init_hf_repo(trainer, token=None):
        made.append(trainer.args.output_dir)
        trainer.hub_model_id = trainer.args.hub_model_id

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.Trainer.init_hf_repo", init_hf_repo)
    monkeypatch.setattr("transformers.Trainer._push_from_checkpoint", lambda *args: None)
    monkeypatch.setattr("transformers.Trainer._finish_current_push", lambda self: None)
    save_llama(tmp_path / "model")
    save_jsonl(tmp_path / "prompts.jsonl", prompts(8))
    command = "train --model model --data prompts.jsonl --reward length(maximum=4) --output_dir out --max_steps 2"
    command += " --max_completion_length 6 --per_device_train_batch_size 4 --use_cpu --no_gradient_checkpointing"
    command += " --push_to_hub --hub_model_id me/mine --hub_strategy end --hub_private_repo yes"
    monkeypatch.setattr("rloom.cli.train.save_trained", lambda *args, **kwargs: None)
    assert main(command.split()) == 0
    assert made == ["out"]
    capsys.readouterr()
    assert main(["replay", "out", "--step", "2", "--no-new-scores"]) == 0
    assert "DIFFERS" not in capsys.readouterr().out
    assert made == ["out"]


def test_addresses_with_a_password_are_not_noted_and_have_to_be_given_again(tmp_path, capsys):
    """Wherever they stand: replay says which option it is."""
    address, server = "https://me:s3cret@host/score?key=abc", {"where": ["http://u:hidden@h"]}
    write_command(tmp_path, {"reward_funcs": ["length()", address], "generation_kwargs": server, "max_steps": 3})
    written = (tmp_path / "_rloom_command.json").read_text()
    assert not [secret for secret in ("s3cret", "abc", "hidden") if secret in written]
    assert json.loads(written)["train"] == {"max_steps": 3}
    assert main(["replay", str(tmp_path), "--step", "1"]) == 1
    assert "leaves out reward_funcs, since its value may hold a password" in capsys.readouterr().err
    given = ["reward_funcs=length()", f"reward_funcs={address}", "generation_kwargs={}"]
    found = read_command(tmp_path, given)
    assert found == {"max_steps": 3, "reward_funcs": ["length()", address], "generation_kwargs": "{}"}
    with pytest.raises(DataError, match="--given max_steps: the run's own value is known"):
        read_command(tmp_path, [*given, "max_steps=4"])
