"""ZeRO-3 with generation by a real vLLM server: the pair that documents recommend (`make test-scale`).

The server runs in vLLM's own environment, whose Python VLLM_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import make_model, make_tokenizer
from tests.integration import processes_run
from tests.integration.test_processes import results
from tests.integration.test_vllm_processes import assert_served
from tests.launches import assert_done, torchrun
from tests.services import free_port

PYTHON = Path(os.environ.get("VLLM_PYTHON", ""))
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: make test-scale"),
    pytest.mark.skipif(not PYTHON.is_file(), reason="VLLM_PYTHON names no Python that has vLLM: make test-scale"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server that `rloom vllm-serve` has started, with other weights than those that are trained."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    make_model(7, **processes_run._changes("vllm")).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    command = [PYTHON, "-m", "rloom", "vllm-serve", folder, "--port", str(port), "--transfer", "gloo"]
    command += ["--vllm-flags", "--enforce-eager", "--max-num-seqs", "32"]
    # What is on this test's path is DeepSpeed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with (folder / "log").open("w") as log:
        own = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment | own, start_new_session=True, cwd=folder
        )
    yield f"http://127.0.0.1:{port}"
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(60)


@pytest.mark.parametrize("kind", ["zero3 vllm", "zero3 layered vllm"])
def test_zero3_and_a_server(address, kind, tmp_path):
    """With a copy of all weights in each process, and without."""
    script, server = processes_run.__file__, {"RLOOM_TEST_SERVER": address}
    assert_done(torchrun(script, str(tmp_path), kind, deepspeed=True, seconds=400, **server))
    found = results(tmp_path, kind)
    assert [one["wrapped"] for one in found] == ["DeepSpeedEngine"] * 2
    assert_served(found, half=True)


@pytest.mark.parametrize("kind", ["sharded layered vllm", "sharded layered vllm lora"])
def test_fsdp_without_a_copy_and_a_server(address, kind, tmp_path):
    """Weights are gathered and sent in several pieces between the start and the end of one update."""
    script, server = processes_run.__file__, {"RLOOM_TEST_SERVER": address}
    assert_done(torchrun(script, str(tmp_path), kind, seconds=400, **server))
    assert_served(results(tmp_path, kind), half=True)
