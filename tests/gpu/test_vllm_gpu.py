"""Whole runs with vLLM on an NVIDIA GPU, in the trainer's process and behind servers on the same GPU.

Run this file alone, and without `-n`: in the trainer's process vLLM measures the GPU's free memory at its start, which
other tests would change. Servers are told how much they may take, and measure nothing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.services import free_port
from tests.standins import ROOT, prompts, save_jsonl, save_llama

pytestmark = [
    pytest.mark.gpu,
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
SERVED = ["--vllm-flags", "--enforce-eager", "--kv-cache-memory-bytes", str(2**30)]


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


class Servers:
    """Started by `rloom vllm-serve`, ended by us."""

    def __init__(self, folder, count, flags):
        self.ports, self.processes = [free_port() for _ in range(count)], []
        self.addresses = ",".join(f"http://127.0.0.1:{port}" for port in self.ports)
        for port in self.ports:
            command = [sys.executable, "-m", "rloom", "vllm-serve", "model", "--port", str(port), *flags, *SERVED]
            with (folder / f"{port}.log").open("w") as log:
                process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
            self.processes.append(process)

    def stop(self):
        """End them, and what they started."""
        for process in self.processes:
            os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            process.wait(60)


@pytest.mark.parametrize(
    ("count", "flags"),
    [(1, ["--transfer", "folder"]), (2, ["--transfer", "ipc"]), (1, ["--max-lora-rank", "8"])],
    ids=["folder", "two by ipc", "adapter alone"],
)
def test_servers(folder, count, flags):
    if "ipc" in flags:
        pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine", reason="that of vLLM 0.24 imports Ray")
    servers = Servers(folder, count, flags)
    try:
        options = ["--vllm_mode", "server", "--vllm_server_base_url", servers.addresses]
        assert_learns(folder, [*options, *(LORA if "--max-lora-rank" in flags else [])])
    finally:
        servers.stop()
        for port in servers.ports:
            print((folder / f"{port}.log").read_text()[-2000:])


def test_the_same_seed_draws_the_same():
    """vLLM's newer model runner, which it uses on GPUs, draws by seeds; the older from torch's generators."""
    for runner in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.vllm_seeds"], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "VLLM_USE_V2_MODEL_RUNNER": runner},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
