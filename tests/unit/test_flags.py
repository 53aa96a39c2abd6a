"""Flags and recipes: every field is a flag and a YAML key, flags win, near misses are named."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess

import pytest

from rloom import RLOOConfig
from rloom.cli.flags import given
from rloom.cli.main import main, parser_of
from rloom.cli.shell_completion import all_flags
from rloom.cli.train import make_plan

NEEDED = ["--model", "m", "--data", "d.jsonl", "--reward", "length", "--output_dir", "out"]


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", *arguments])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_every_field_is_a_flag_in_both_spellings():
    known = {flag for action in parser_of("train")._actions for flag in action.option_strings}
    for field in dataclasses.fields(RLOOConfig):
        if field.init:
            assert f"--{field.name}" in known
            assert f"--{field.name.replace('_', '-')}" in known


def test_only_what_is_given_is_handed_on():
    arguments = ["--beta", "0.1", "--bf16", "--no_gradient_checkpointing", "--reward-clip-range", "-1", "1"]
    assert given(parser_of("train").parse_args(arguments)) == {
        "beta": 0.1,
        "bf16": True,
        "gradient_checkpointing": False,
        "reward_clip_range": [-1.0, 1.0],
    }  # fmt: skip


def test_recipe_beneath_flags(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("learning_rate: 3e-6\nbeta: 0.5\nnum-generations: 4\nuse_peft: true\n"
                      "reward_clip_range: [-1, 1]\nmodel_init_kwargs: {dtype: bfloat16}\n")  # fmt: skip
    values = given(parser_of("train").parse_args(["--config", str(recipe), "--beta", "0.1"]))
    assert values["learning_rate"] == 3e-6  # which YAML takes for a text
    assert values["beta"] == 0.1
    assert values["num_generations"] == 4
    assert values["use_peft"] is True
    assert values["reward_clip_range"] == [-1.0, 1.0]
    assert values["model_init_kwargs"] == {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("num_generation: 4", "unknown option 'num_generation'; did you mean 'num_generations'?"),
        ("beta: much", "beta"),
        ("num_generations: 2.5", "must be a whole number"),
        ("num_generations: true", "must be a number"),
        ("- beta", "a recipe is"),
        ("beta: [", "is not YAML"),
    ],
)
def test_wrong_recipes(content, message, tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(content)
    assert message in refused(["--config", str(tmp_path / "r.yaml")], capsys)


def test_a_recipe_that_is_not_text(tmp_path, capsys):
    (tmp_path / "r.yaml").write_bytes(b"output_dir: caf\xe9")
    assert "r.yaml cannot be read: 'utf-8' codec" in refused(["--config", str(tmp_path / "r.yaml")], capsys)


def test_recipe_that_is_not_there(capsys):
    assert "there is no file nowhere.yaml" in refused(["--config", "nowhere.yaml"], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rat", "1"], "did you mean '--learning_rate'?"),
        (NEEDED[2:], "no model"),
        (NEEDED[:2], "no prompts"),
        (NEEDED[:4], "no reward"),
        ([*NEEDED, "--lora_r", "4"], "--lora_r has no effect without --use_peft"),
        ([*NEEDED, "--load_in_4bit"], "add --use_peft"),
        ([*NEEDED, "--use_bnb_nested_quant"], "no effect without --load_in_4bit"),
        ([*NEEDED, "--num_generations", "3"], "must be divisible by num_generations"),
        ([*NEEDED, "--dtype", "bfloat16", "--model_init_kwargs", '{"dtype": "float32"}'], "given twice"),
        ([*NEEDED, "--early_stop_on", "kl_explode"], "did you mean 'kl_explodes'?"),
        ([*NEEDED, "--rloo_k", "4", "--num_generations", "2"], "give one of them, not both"),
    ],
)
def test_wrong_usage(arguments, message, capsys, tmp_path, monkeypatch):
    # Data that is not there would be named first.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.jsonl").write_text('{"prompt": "1 + 1 ="}\n')
    assert message in refused(arguments, capsys)


def test_given_options_are_the_ones_that_were_given():
    arguments = [*NEEDED, "--kl_coef", "0.03", "--train_batch_size", "16"]
    config = make_plan(given(parser_of("train").parse_args(arguments))).config
    assert config.beta == 0.03
    assert config.gradient_accumulation_steps == 2
    assert "learning_rate" not in config._given


def test_help_of_the_verb_is_short_and_all_is_at_hand(capsys):
    for arguments, lines in (["--help"], range(20, 40)), (["--help-all"], range(300, 2000)):
        with pytest.raises(SystemExit) as stop:
            main(["train", *arguments])
        assert stop.value.code == 0
        assert len(capsys.readouterr().out.splitlines()) in lines


def test_missing_data_is_a_failure_of_one_line(capsys, tmp_path):
    assert main(["train", *NEEDED[:2], "--data", str(tmp_path / "no.jsonl"), *NEEDED[4:]]) == 1
    assert "there is no file" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_verbs_and_flags(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "check-reward" in script
    assert "num_generations" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_completes(capsys):
    main(["completion", "bash"])
    script = capsys.readouterr().out
    ask = "\nCOMP_WORDS=(rloom train --num_gen); COMP_CWORD=2; _rloom; echo ${COMPREPLY[@]}"
    found = subprocess.run(["bash", "-c", script + ask], capture_output=True, text=True, check=True).stdout.split()
    assert found == ["--num_generations", "--num_generations_eval"]


def test_all_flags_covers_every_verb():
    assert {"train", "demo", "check-reward", "serve-reward", "completion"} <= set(all_flags())
