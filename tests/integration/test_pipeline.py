"""Supervised training, a reward model, RLOO and evaluation, one command each, on the example's data."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rloom.cli.main import main
from rloom.rewards.base import RewardBatch
from rloom.rewards.model import ModelReward
from tests.standins import ROOT, save_jsonl, save_llama

QUICK = ["--no_gradient_checkpointing", "--save_strategy", "no"]


def example():
    spec = importlib.util.spec_from_file_location("make_data", ROOT / "examples" / "tldr" / "make_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_from_end_to_end(here, capsys):
    example().main(["--output", "d", "--posts", "64"])
    few = ["--max_steps", "2", "--per_device_train_batch_size", "8", "--held_out", "0.25", *QUICK]
    assert main(["sft", "--model", "d/base", "--data", "d/sft.jsonl", "--output_dir", "d/sft", *few]) == 0
    assert re.search(r"held out: loss \d", capsys.readouterr().out)
    assert main(["train-reward", "--model", "d/sft", "--data", "d/pairs.jsonl", "--output_dir", "d/reward", *few]) == 0
    assert re.search(r"held out: accuracy \d\.\d{4}", capsys.readouterr().out)
    recipe = ["--config", str(ROOT / "examples" / "tldr" / "rloo.yaml"), "--max_steps", "1"]
    train = ["--model", "d/sft", "--data", "d/prompts.jsonl", "--reward", "d/reward", "--output_dir", "d/rloo"]
    assert main(["train", *train, *recipe, "--per_device_train_batch_size", "16"]) == 0
    evaluation = [
        "--data",
        "d/validation.jsonl",
        "--reference_column",
        "completion",
        "--judge_reward_model",
        "d/reward",
    ]
    assert main(["eval", "--model", "d/rloo", *evaluation, "--num_examples", "8", "--max_completion_length", "8"]) == 0
    assert re.search(r"Model win rate: \d+\.\d\d%", capsys.readouterr().out)


def test_completions_keep_the_space_that_they_begin_with():
    tokenizer = example().make_tokenizer()
    prompt, completion = "this happened last week . tl;dr :", " anna lost a red bike ."
    ids = tokenizer(prompt)["input_ids"]
    both = tokenizer(prompt + completion)["input_ids"]
    assert both[: len(ids)] == ids
    assert tokenizer.decode(both[len(ids) :]) == completion
    assert tokenizer.unk_token_id not in both


def test_a_reward_model_learns_its_pairs_and_is_read_where_it_was_trained(here, capsys):
    save_llama(here / "model")
    save_jsonl(
        here / "p.jsonl",
        [{"prompt": f"post {i}. ", "chosen": f"good {i}.", "rejected": f"bad {i}."} for i in range(32)],
    )
    arguments = ["--model", "model", "--data", "p.jsonl", "--output_dir", "rm", "--held_out", "0.25", *QUICK]
    assert main(["train-reward", *arguments, "--num_train_epochs", "8", "--learning_rate", "1e-3"]) == 0
    accuracy = float(re.search(r"accuracy (\S+),", capsys.readouterr().out)[1])
    assert accuracy > 0.9
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained("rm"), AutoTokenizer.from_pretrained("rm")
    reward = ModelReward(model, tokenizer, name="rm", template_kwargs={})
    found = reward.score(
        RewardBatch(prompts=["post 1. "] * 2, completions=["good 1.", "bad 1."], completion_ids=[[], []])
    )
    assert found[0] > found[1]
    ids = tokenizer("post 1. good 1.", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    with torch.no_grad():
        assert found[0] == pytest.approx(model(torch.tensor([ids])).logits.item(), abs=1e-4)


def test_adapters_and_conversations(here, capsys):
    save_llama(here / "model")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello."}]
    save_jsonl(here / "chat.jsonl", [{"messages": talk}] * 8)
    few = [
        "--max_steps",
        "1",
        "--per_device_train_batch_size",
        "2",
        "--use_peft",
        "--lora_r",
        "2",
        "--merge_adapter",
        *QUICK,
    ]
    assert main(["sft", "--model", "model", "--data", "chat.jsonl", "--output_dir", "s", "--packing", *few]) == 0
    assert json.loads((here / "s" / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    other = [talk[0], {"role": "assistant", "content": "no."}]
    save_jsonl(here / "pairs.jsonl", [{"chosen": talk, "rejected": other}] * 8)
    assert main(["train-reward", "--model", "s/merged", "--data", "pairs.jsonl", "--output_dir", "r", *few]) == 0
    assert json.loads((here / "r" / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    assert AutoModelForSequenceClassification.from_pretrained("r/merged").config.num_labels == 1


@pytest.mark.parametrize("verb", ["sft", "train-reward"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model"),
        (["--model", "m"], "no data"),
        (["--model", "m", "--data", "d", "--held_out", "2", "--output_dir", "o"], "share from 0 to 1"),
        (["--learning_rat", "3"], "did you mean '--learning_rate'?"),
    ],
)
def test_wrong_usage(verb, arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main([verb, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_columns_are_named(here, capsys):
    """TRL would stop at a KeyError."""
    save_llama(here / "model")
    save_jsonl(here / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 4)
    save_jsonl(here / "texts.jsonl", [{"body": "a"}] * 4)
    assert main(["sft", "--model", "model", "--data", "pairs.jsonl", "--output_dir", "o"]) == 1
    said = capsys.readouterr().err
    assert "the rows have 'prompt', 'chosen', 'rejected', and need 'prompt' and 'completion', or 'messages'" in said
    assert main(["train-reward", "--model", "model", "--data", "texts.jsonl", "--output_dir", "o"]) == 1
    assert "need 'chosen' and 'rejected'" in capsys.readouterr().err
    few = ["--max_steps", "1", "--output_dir", "o", *QUICK]
    assert main(["sft", "--model", "model", "--data", "texts.jsonl", "--dataset_text_field", "body", *few]) == 0
    assert main(["sft", "--model", "model", "--data", "texts.jsonl", "--columns", "text=body", *few]) == 0
    split = ["--dataset_test_split", "test", "--columns", "text=body", *few]
    assert main(["sft", "--model", "model", "--data", "texts.jsonl", *split]) == 1
    assert "texts.jsonl is one file without splits, so 'test' would be what is trained on" in capsys.readouterr().err


def test_without_trl(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RLOOM_CACHE", str(tmp_path))  # no help of a time when it was there
    monkeypatch.setitem(sys.modules, "trl", None)
    assert main(["sft", "--help"]) == 1
    assert 'pip install "rloom[sft]"' in capsys.readouterr().err
    assert main(["completion", "bash"]) == 0  # which lists the flags of all verbs that are there
    assert "--num_generations" in capsys.readouterr().out
