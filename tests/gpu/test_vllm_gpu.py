"""Whole runs with vLLM on an NVIDIA GPU, in the trainer's process and behind a server on the same GPU.

One after the other (`-n 10 --dist loadgroup`): vLLM measures the GPU's free memory at its start, which others would
change. Side by side five of these failed on an H200, for a reason that was not seen.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.standins import ROOT, prompts, save_jsonl, save_llama
from tests.vllm.test_server import Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]
COMMAND = ["train", "--model", "model", "--data", "prompts.jsonl", "--reward", "length(maximum=4)", "--output_dir", "o",
           "--max_completion_length", "12", "--per_device_train_batch_size", "16", "--num_generations", "8",
           "--max_steps", "30", "--learning_rate", "0.01", "--logging_steps", "1", "--use_vllm"]  # fmt: skip
LORA = ["--dtype", "bfloat16", "--use_peft", "--lora_r", "8", "--lora_target_modules", "all-linear"]
LORA += ["--lora_dropout", "0"]
EAGER = ["--compile_generation", "False"]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SERVED = ["--dtype", "bfloat16", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
SERVED += ["--logprobs-mode", "processed_logprobs"]


@pytest.fixture
def folder(tmp_path):
    save_llama(tmp_path / "model", **SIZES)  # heads of 64: what FlashAttention knows
    save_jsonl(tmp_path / "prompts.jsonl", prompts(16))
    return tmp_path


def assert_learns(folder, options):
    """In a process of its own: vLLM lets memory that can sleep be taken once in a process."""
    done = subprocess.run(
        [sys.executable, "-m", "rloom", *COMMAND, *options], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "merged in" not in done.stderr
    log = json.loads((folder / "o" / "trainer_state.json").read_text())["log_history"]
    rewards = [entry["reward"] for entry in log if "reward" in entry]
    assert sum(rewards[-5:]) > sum(rewards[:5])
    mismatch = [entry["mismatch/mean"] for entry in log if "mismatch/mean" in entry]
    assert len(mismatch) == 30
    assert max(mismatch) < 0.1


@pytest.mark.parametrize(
    "options",
    [[], [*EAGER, "--vllm_enable_sleep_mode"], [*LORA, *EAGER], [*LORA, *EAGER, "--vllm_enable_sleep_mode"]],
    ids=["compiled", "sleeping", "lora", "sleeping lora"],
)
def test_colocated(folder, options):
    assert_learns(folder, [*options, "--vllm_gpu_memory_utilization", "0.1"])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_server(folder, lora):
    adapters = ["--enable-lora", "--max-lora-rank", "8"] if lora else ["--load-format", "dummy"]
    server = Server(folder / "model", folder / "log", *SERVED, *adapters, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")
    try:
        options = ["--vllm_mode", "server", "--vllm_server_base_url", server.address, "--vllm_server_timeout", "200"]
        assert_learns(folder, [*options, *(LORA if lora else [])])
    finally:
        server.stop()


def test_the_same_seed_draws_the_same():
    """vLLM's newer model runner, which it uses on GPUs, draws by seeds; the older from torch's generators."""
    for runner in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.vllm_seeds"], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
