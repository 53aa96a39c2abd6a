"""Two processes under DeepSpeed's ZeRO-3, which shards all, end as one does (`make test`).

One launch of torchrun serves all tests here. The other stages, and more of this one, are in `test_zero.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rloom.observe import read_store
from tests.integration import processes_run
from tests.integration.test_processes import assert_close, assert_same_log, results
from tests.integration.test_resume import assert_same
from tests.launches import assert_done, torchrun

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed has an environment of its own: make zero3"
)
AS_ONE = ["sequence", "token", "several", "lora", "checkpointed", "evaluated"]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zero3")
    kinds = [f"zero3 {kind}" for kind in [*AS_ONE, "dropout", "resumed"]]
    assert_done(torchrun(processes_run.__file__, str(folder), *kinds, deepspeed=True, seconds=600))
    return folder


def assert_sharded(found: list[dict], stage: str) -> None:
    """Two processes under DeepSpeed, and with ZeRO-3 each holds half: a launcher may silently do something else."""
    total = sum(weight.numel() for weight in found[0]["weights"].values())
    assert [one["world"] for one in found] == [2, 2]
    assert [one["wrapped"] for one in found] == ["DeepSpeedEngine"] * 2
    assert [f"zero{one['stage']}" for one in found] == [stage] * 2
    if stage == "zero3":
        assert all(abs(one["parts"] - total / 2) < 0.05 * total for one in found)


def assert_as_one(found: list[dict], stage: str, one: dict) -> None:
    """The same weights and the same log."""
    assert_sharded(found, stage)
    assert_close(one, found[0], allowed=1e-5)
    assert_same_log(one, found[0])


def assert_resumed(two: Path, stage: str) -> None:
    """To the bit; and the checkpoint is a model that transformers loads."""
    whole, resumed = results(two, f"{stage} dropout"), results(two, f"{stage} resumed")
    for one, other in zip(whole, resumed, strict=True):
        assert all(torch.equal(one["weights"][name], weight) for name, weight in other["weights"].items())
    assert_same(two / f"{stage} dropout" / "checkpoint-6", two / f"{stage} resumed" / "checkpoint-6")
    assert read_store(two / f"{stage} dropout") == read_store(two / f"{stage} resumed")
    saved = AutoModelForCausalLM.from_pretrained(two / f"{stage} dropout" / "checkpoint-6")
    for name, p in saved.named_parameters():
        torch.testing.assert_close(p.detach(), whole[0]["weights"][name], rtol=0, atol=0)


@pytest.mark.parametrize("kind", AS_ONE)
def test_two_are_as_one(two, kind, tmp_path):
    assert_as_one(results(two, f"zero3 {kind}"), "zero3", processes_run.run(tmp_path / "one", kind))


def test_resumed_is_as_never_stopped(two):
    assert_resumed(two, "zero3")
