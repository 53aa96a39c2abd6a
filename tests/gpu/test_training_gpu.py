"""Whole runs on an NVIDIA GPU, by the command line: the engine, the learner and the optimizer together."""

from __future__ import annotations

import json

import pytest
import torch

from rloom.cli.main import main
from tests.standins import prompts, save_jsonl, save_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
COMMAND = ["train", "--model", "model", "--data", "prompts.jsonl", "--reward", "length(maximum=4)", "--output_dir", "o",
           "--max_completion_length", "12", "--per_device_train_batch_size", "16", "--num_generations", "8",
           "--max_steps", "30", "--learning_rate", "0.01", "--logging_steps", "1", "--engine", "native"]  # fmt: skip
LORA = ["--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear", "--lora_dropout", "0"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--dtype", "bfloat16"],
        ["--dtype", "bfloat16", *LORA],
        ["--dtype", "bfloat16", *LORA, "--merge_generation"],
        ["--dtype", "bfloat16", *LORA, "--load_in_4bit", "--optim", "adamw_8bit"],
    ],
    ids=["float32", "bfloat16", "lora", "merged", "four bits"],
)
def test_learns_what_is_rewarded(options, tmp_path, monkeypatch, capfd):
    if "--load_in_4bit" in options:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    monkeypatch.chdir(tmp_path)
    save_llama(tmp_path / "model", hidden_size=64, intermediate_size=128)  # 4-bit weights come in blocks of 64
    save_jsonl(tmp_path / "prompts.jsonl", prompts(16))
    assert main([*COMMAND, *options]) == 0, capfd.readouterr().err
    log = json.loads((tmp_path / "o" / "trainer_state.json").read_text())["log_history"]
    rewards = [entry["reward"] for entry in log if "reward" in entry]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    assert max(entry.get("mismatch/mean", 0.0) for entry in log) < 0.1
    assert any("mismatch/mean" in entry for entry in log)
