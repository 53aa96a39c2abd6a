"""FSDP2 and DeepSpeed on an NVIDIA GPU: two processes that share it end as one does (`host_collectives.py` says how
they talk)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from tests.gpu import sharded_run
from tests.services import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of a launch of two processes, and of one process, which have made all runs."""
    return launch(tmp_path_factory, *sharded_run.KINDS)


@pytest.fixture(scope="module")
def deepspeed_runs(tmp_path_factory):
    """The same under DeepSpeed."""
    return launch(tmp_path_factory, *sharded_run.DEEPSPEED)


def launch(tmp_path_factory, *names: str):
    two, one = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("one")
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    launches = [(two, place | {"RANK": str(rank)}) for rank in range(2)] + [(one, {})]
    started = [
        subprocess.Popen(
            [sys.executable, sharded_run.__file__, str(folder), *names],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for folder, environment in launches
    ]
    for process in started:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said[-4000:]
    return two, one


def assert_close(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    apart = (found.cpu() - expected.cpu()).abs().max()
    assert apart < 2e-5, (name, float(apart))


@pytest.mark.parametrize("name", sharded_run.KINDS)
def test_two_processes_on_a_gpu_are_as_one(runs, name):
    """In float32 to rounding. In bfloat16 weights differ by a step of Adam where a gradient is about 0, which makes a
    whole step of its sign: there the first completions, their KL and the engine's mismatch are held against each other.
    """
    two, one = (torch.load(folder / name / "result_0.pt", weights_only=False) for folder in runs)
    assert two["reference_on"] == ({"cpu"} if "offloaded" in name else {"cuda"} if "layered" in name else set())
    total = sum(weight.numel() for weight in one["weights"].values())
    assert two["parts"] == pytest.approx(total / 2, rel=0.05)
    if "half" not in name:
        for key, weight in one["weights"].items():
            assert_close(key, two["weights"][key], weight)
        return
    (log,) = [entry for entry in two["history"] if "kl" in entry]
    assert abs(log["kl"]) < 1e-6
    assert log["mismatch/mean"] < 0.02


@needs_deepspeed
@pytest.mark.parametrize("name", sharded_run.DEEPSPEED)
def test_two_processes_under_deepspeed_are_as_one(deepspeed_runs, name):
    """In float32, to rounding."""
    two, one = (torch.load(folder / name / "result_0.pt", weights_only=False) for folder in deepspeed_runs)
    total = sum(weight.numel() for weight in one["weights"].values())
    assert two["wrapped"] == "DeepSpeedEngine"
    assert two["parts"] == pytest.approx(total / 2 if "zero3" in name else total, rel=0.05)
    assert two["reference_on"] == ({"cpu"} if "offloaded" in name else {"cuda"} if "layered" in name else set())
    for key, weight in one["weights"].items():
        assert_close(key, two["weights"][key], weight)
