"""Two processes that train together, whole or sharded, and generate by vLLM servers; with stand-ins for these."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.conftest import make_model
from tests.integration import processes_run
from tests.integration.test_processes import assert_close, results
from tests.launches import assert_done, torchrun
from tests.vllm_standin import serving


def assert_served(found, half: bool) -> None:
    """Both have learned from what the server drew from their own weights, in every update."""
    main, other = found
    total = sum(weight.numel() for weight in main["weights"].values())
    assert [one["parts"] for one in found] == ([pytest.approx(total / 2, rel=0.05)] * 2 if half else [total] * 2)
    for name, weight in main["weights"].items():
        assert torch.equal(weight, other["weights"][name])
    logs = [entry for entry in main["history"] if "mismatch/max" in entry]
    assert len(logs) == 3
    assert max(entry["mismatch/max"] for entry in logs) < 1e-4
    for rollout in range(3):  # each has asked for its own two prompts
        mine, others = ({prompt for prompt, _ in one["drawn"][2 * rollout : 2 * rollout + 2]} for one in found)
        assert len(mine | others) == 4


def test_two_processes_share_servers(tmp_path):
    """Each with all weights, with a half of them and a copy, and with a half alone; by a folder, and in pieces by
    broadcast."""
    config = make_model(**processes_run._changes("vllm")).config
    kinds = ["vllm", "sharded vllm", "sharded layered vllm", "sharded layered vllm lora", "sharded crowded vllm"]
    with serving(config) as first, serving(config, backend="gloo") as second:
        servers = f"{first.address},{second.address}"
        done = torchrun(processes_run.__file__, str(tmp_path), *kinds, RLOOM_TEST_SERVER=servers)
        assert_done(done)
        sends = [path for path, _ in first.calls].count("/update_weight_version")
        pieces = [path for path, _ in second.calls].count("/update_weights")
    # Each run: two to prove that weights arrive, and two after updates, each named twice. The other process sends none.
    assert sends == 8 * len(kinds)
    assert pieces > 4 * len(kinds)
    assert_served(results(tmp_path, "vllm"), half=False)
    for kind in kinds[1:]:
        assert_served(results(tmp_path, kind), half=True)
    # From the same completions, the same weights.
    copied, in_parts, crowded = (results(tmp_path, f"sharded {kind}vllm")[0] for kind in ("", "layered ", "crowded "))
    assert copied["drawn"] == in_parts["drawn"] == crowded["drawn"]
    assert_close(copied, in_parts, allowed=1e-5)
    assert_close(in_parts, crowded, allowed=0.0)
    assert "a whole copy of the weights takes" in done.stderr


@pytest.mark.slow
def test_servers_that_have_the_weights_from_an_earlier_run_are_proved_before_anybody_asks(tmp_path):
    """While the main process sends a server other numbers, the others wait, though it had named the right weights."""
    with serving(make_model(**processes_run._changes("vllm")).config) as service:
        call, draw, loaded = service.collective_rpc, service.v1_completions, threading.Event()

        def call_in_time(content):
            if content["method"] == "update_config":  # a proof begins: there is time to ask before anything is sent
                loaded.clear()
                time.sleep(2.0)
            answer = call(content)
            if content["method"] == "reload_weights":
                loaded.set()
            return answer

        def draw_late(content):  # what was asked before is drawn from the other numbers
            loaded.wait(10)
            return draw(content)

        service.collective_rpc, service.v1_completions = call_in_time, draw_late
        done = torchrun(processes_run.__file__, str(tmp_path), "vllm twice", RLOOM_TEST_SERVER=service.address)
    assert_done(done)
    for found in results(tmp_path, "vllm twice"):
        assert max(found["mismatch"]) < 1e-4
