"""`rloom preflight` on a model whose probabilities are known: uniform over its 46 tokens."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml

from rloom.cli.main import main
from tests.conftest import LETTERS, make_model, make_tokenizer
from tests.integration.test_sick_runs import WITHOUT_ITS_TURN
from tests.standins import save_jsonl

REWARDS = """
def early(completions, **kwargs):
    return [float(text[:1] != "" and text[0] < "x" and text[0] >= "a") for text in completions]

def rare(completions, **kwargs):
    return [float(text[:1] in ("a", "b", "c", "d")) for text in completions]

def zero(completions, **kwargs):
    return [0.0] * len(completions)

def second_time(completions, seen=[], **kwargs):
    seen.append(0)
    return [float((len(text) + len(seen)) % 2) for text in completions]
"""
LENGTH, SIZE = 6, len(LETTERS) + 4


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    save_jsonl(tmp_path / "prompts.jsonl", [{"prompt": text} for text in LETTERS])
    (tmp_path / "my.py").write_text(REWARDS)
    return tmp_path


def preflight(capsys, reward="my.py:early", *more, length=("--max_steps", "3")):
    sizes = ["--num_generations", "8", "--per_device_train_batch_size", "64", "--max_completion_length", str(LENGTH)]
    quick = [*length, "--use_cpu", "--report_to", "none", "--no_gradient_checkpointing"]
    data = ["--model", "model", "--data", "prompts.jsonl", "--reward", reward, "--output_dir", "out"]
    code = main(["preflight", *data, *sizes, *quick, "--learning_rate", "1e-3", *more])
    return code, capsys.readouterr().out


def test_known_probabilities_are_measured_and_the_recipe_trains(here, capsys):
    code, out = preflight(capsys, "my.py:early", "--groups", "32", "--json", "--price_per_hour", "3600")
    found = json.loads(out)
    assert (code, found["problems"]) == (0, [])
    base, n = found["base"], 256
    assert (base["prompts"], base["completions"]) == (32, n)
    # 23 of 46 tokens begin a text as wanted. A special token at the start is dropped from the text, so that the next
    # one begins it: three of 46 (the fourth is the end).
    success = sum((3 / SIZE) ** place * 23 / SIZE for place in range(LENGTH))
    assert base["success"] == pytest.approx(success, abs=4 * math.sqrt(0.25 / n))
    truncated = (1 - 1 / SIZE) ** LENGTH
    assert base["truncated"] == pytest.approx(truncated, abs=4 * math.sqrt(truncated * (1 - truncated) / n))
    signal = 1 - success**8 - (1 - success) ** 8
    assert base["groups_with_signal"] == pytest.approx(signal, abs=0.1)
    (reward,) = found["rewards"]
    assert (reward["name"], reward["noise"]) == ("early", 0.0)
    assert found["run"]["updates"] == 3
    assert found["run"]["completions"] == 192
    size = next(one["value"] for one in found["recommended"] if one["option"] == "per_device_train_batch_size")
    assert found["run_as_recommended"]["completions"] == 3 * size
    assert found["run"]["cost"] == pytest.approx(found["run"]["seconds"])
    assert found["run"]["seconds"] == pytest.approx(sum(found["seconds_per_completion"].values()) * 192)
    assert all(seconds > 0 for seconds in found["seconds_per_completion"].values())
    assert found["memory"]["micro_batch"] > 0
    assert (found["memory"]["prompt"], found["memory"]["completion"]) == (1, LENGTH)
    assert found["movement_of_one_update"] > 0
    # Nothing of the run is there, but for the recipe, which trains.
    assert not (here / "out").exists()
    recommended = {one["option"]: one["value"] for one in found["recommended"]}
    assert recommended["num_generations"] == 8
    assert recommended["max_completion_length"] == 2 * LENGTH
    recipe = yaml.safe_load((here / "preflight.yaml").read_text())
    assert recommended.items() <= recipe.items()
    assert main(["train", "--config", "preflight.yaml", "--save_strategy", "no"]) == 0
    assert (here / "out" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_recipe_with_larger_groups_evaluates_too(here, capsys):
    """Four of 46 tokens begin a text as wanted: groups of more than the 8 completions of an evaluation's batch."""
    evaluated = ["--eval_data", "prompts.jsonl", "--eval_strategy", "steps", "--eval_steps", "2"]
    _, out = preflight(capsys, "my.py:rare", "--groups", "16", *evaluated, "--json")
    recommended = {one["option"]: one["value"] for one in json.loads(out)["recommended"]}
    assert recommended["num_generations"] >= 16
    assert recommended["per_device_eval_batch_size"] == recommended["num_generations"]
    assert main(["train", "--config", "preflight.yaml", "--save_strategy", "no"]) == 0


def test_a_recipe_for_few_prompts_trains(here, capsys):
    save_jsonl(here / "prompts.jsonl", [{"prompt": text} for text in LETTERS[:5]])
    epochs = ["--num_train_epochs", "2"]
    few = ["--per_device_train_batch_size", "8", "--groups", "16"]
    _, out = preflight(capsys, "my.py:rare", *few, "--json", length=epochs)
    found = json.loads(out)
    recommended = {one["option"]: one["value"] for one in found["recommended"]}
    assert recommended["per_device_train_batch_size"] == 5 * recommended["num_generations"]
    # Two epochs of one update each.
    assert found["run_as_recommended"]["updates"] == 2
    assert main(["train", "--config", "preflight.yaml", "--save_strategy", "no"]) == 0


@pytest.mark.parametrize(
    ("length", "as_given", "as_recommended"),
    [
        # Updates of twice 8 completions, or of `size`.
        (["--max_steps", "10"], 10, lambda size: 10),
        # 42 prompts with 8 completions each.
        (["--num_train_epochs", "1"], 21, lambda size: 42 * 8 // size),
        # The older name counts completions, however they are cut.
        (["--total_episodes", "320"], 20, lambda size: -(-320 // size)),
    ],
    ids=["updates", "epochs", "episodes"],
)
def test_the_run_of_the_recipe_is_estimated(here, capsys, length, as_given, as_recommended):
    """It is the one that comes next, and may be many times as large. It is told from the recipe, as `rloom train` will
    read it: a length that the old batch has made is no option of it."""
    sizes = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2"]
    _, out = preflight(capsys, "my.py:early", "--groups", "16", *sizes, "--json", length=length)
    found = json.loads(out)
    recommended = {one["option"]: one["value"] for one in found["recommended"]}
    assert recommended["num_generations"] == 8
    size = recommended["per_device_train_batch_size"]
    assert size > 16
    for name, updates, each in (("run", as_given, 16), ("run_as_recommended", as_recommended(size), size)):
        assert (found[name]["updates"], found[name]["completions"]) == (updates, updates * each)


def test_a_recipe_that_would_be_refused_is_not_written(here, capsys, monkeypatch):
    """Whatever the reason: here, as if nothing were recommended for evaluation."""
    from rloom.preflight import recommend

    monkeypatch.setattr(recommend, "_evaluation", lambda size, config: [])
    evaluated = ["--eval_data", "prompts.jsonl", "--eval_strategy", "steps", "--eval_steps", "2"]
    code, out = preflight(capsys, "my.py:rare", "--groups", "16", *evaluated)
    assert code == 1
    assert "what is recommended does not fit what was given, and is left out of the recipe: The global eval" in out
    recipe = (here / "preflight.yaml").read_text()
    assert yaml.safe_load(recipe)["num_generations"] == 8
    assert "# num_generations" not in recipe


def test_nothing_is_evaluated(here, capsys):
    evaluated = ["--eval_data", "prompts.jsonl", "--eval_strategy", "steps", "--eval_steps", "1", "--eval_on_start"]
    _, out = preflight(capsys, "my.py:early", "--groups", "4", *evaluated)
    assert "32 completions of 4 prompts" in out
    assert yaml.safe_load((here / "preflight.yaml").read_text())["eval_on_start"] is True


def test_the_weights_move_in_the_last_update_only(here, capsys, monkeypatch):
    from rloom.preflight import dry_run

    seen = []

    def look(self, args, state, control, **kwargs):
        seen.append(torch.cat([p.detach().flatten() for p in kwargs["model"].parameters()]).clone())

    monkeypatch.setattr(dry_run._LastStep, "on_step_end", look, raising=False)
    preflight(capsys, "my.py:early", "--groups", "8")
    assert len(seen) == 2
    start = torch.cat([p.detach().flatten() for p in _saved().parameters()])
    assert torch.equal(seen[0], start)
    assert not torch.equal(seen[1], start)


def _saved():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("model")


def test_nothing_to_begin_with(here, capsys):
    code, out = preflight(capsys, "my.py:zero", "--groups", "4", "--once")
    assert code == 1
    assert "problem: base success is near zero: 0% of groups" in out
    assert "train it supervised first: rloom sft --model model --data ANSWERS.jsonl" in out
    assert "recommended" not in out
    assert "noise not looked at" in out
    # The recipe has what was given.
    assert yaml.safe_load((here / "preflight.yaml").read_text())["learning_rate"] == 1e-3


def test_a_noisy_reward_and_a_broken_template(here, capsys):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WITHOUT_ITS_TURN
    tokenizer.save_pretrained("model")
    chats = [{"prompt": [{"role": "user", "content": text}]} for text in "abcdefgh"]
    save_jsonl(here / "prompts.jsonl", chats)
    code, out = preflight(capsys, "my.py:second_time", "--groups", "4")
    assert code == 1
    assert "problem: the chat template adds no generation prompt" in out
    assert "more than half of what sets a prompt's completions apart is noise" in out


def test_wrong_usage(here, capsys):
    with pytest.raises(SystemExit) as stop:
        preflight(capsys, "my.py:early", "--groups", "1")
    assert stop.value.code == 2
    assert "--groups must be at least 2" in capsys.readouterr().err
