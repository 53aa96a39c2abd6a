"""Two processes under DeepSpeed end as one does that trains on the same batches (`make test-scale`).

ZeRO-1 shards the optimizer's state, ZeRO-2 gradients too, ZeRO-3 all. One launch of torchrun serves all tests here.
What `make test` shows of ZeRO-3 is in `test_zero3.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.integration import processes_run
from tests.integration.test_processes import assert_close, assert_same_log, results
from tests.integration.test_sharded import DRAWS
from tests.launches import assert_done, torchrun
from tests.scale.test_zero3 import AS_ONE, assert_as_one, assert_resumed
from tests.scale.test_zero_checkpoints import launch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not in the development set: make test-scale"
)
STAGES = ["zero1", "zero2", "zero3"]
ACCUMULATED = "accumulated half"
ALIKE = [("freed sequence", "kept sequence"), ("layered", "whole layered"),
         ("layered with another reference", "whole layered with another reference"),
         ("layered evaluated", "whole layered evaluated"),
         ("saved layered", "whole saved layered")]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("zero")
    kinds = [f"{stage} {kind}" for stage in ("zero1", "zero2") for kind in [*AS_ONE, "dropout", "resumed"]]
    kinds += [f"{stage} {kind}" for stage in STAGES for kind in ("degenerate", "not finite")]
    kinds += [f"{stage} draw {number}" for stage in STAGES for number in DRAWS]
    kinds += [f"{stage} {ACCUMULATED}" for stage in ("zero1", "zero2")]
    kinds += [f"zero3 {kind}" for pair in ALIKE for kind in pair]
    done = torchrun(processes_run.__file__, str(folder), *kinds, deepspeed=True, seconds=600)
    assert_done(done)
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("kind", AS_ONE)
@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_two_are_as_one(two, stage, kind, tmp_path):
    assert_as_one(results(two, f"{stage} {kind}"), stage, processes_run.run(tmp_path / "one", kind))


@pytest.mark.parametrize("number", DRAWS)
@pytest.mark.parametrize("stage", STAGES)
def test_draws_of_the_oracle_are_as_one(two, stage, number, tmp_path):
    """In float32: DeepSpeed knows no float64."""
    one = processes_run.run_draw(tmp_path / "one", number, torch.float32)
    found = results(two, f"{stage} draw {number}")
    assert [each["wrapped"] for each in found] == ["DeepSpeedEngine"] * 2
    assert_close(one, found[0], allowed=1e-5)
    assert_same_log(one, found[0])


def test_zero_1_runs_as_zero_2_where_it_would_be_wrong(two):
    """Gradients in a dtype of their own: it would count micro-batches twice. One line says so."""
    for asked, found in zip(results(two, f"zero2 {ACCUMULATED}"), results(two, f"zero1 {ACCUMULATED}"), strict=True):
        assert found["stage"] == asked["stage"] == 2
        assert_close(asked, found, allowed=0.0)
    assert (two / "stderr.txt").read_text().count("DeepSpeed runs as ZeRO-2 instead of ZeRO-1") == 1


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_that_is_not_finite_is_skipped_and_counted(two, stage, tmp_path):
    one = processes_run.run(tmp_path / "one", "not finite")
    found = results(two, f"{stage} not finite")
    skipped = [[entry.get("updates/skipped") for entry in each["history"][:3]] for each in (one, found[0])]
    assert skipped == [[None, 1.0, None]] * 2
    assert_close(one, found[0], allowed=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_no_forward_uses_decay(two, stage, tmp_path):
    """DeepSpeed steps all weights; ours leaves those without a gradient as they are."""
    one = processes_run.run(tmp_path / "one", "degenerate")
    found = results(two, f"{stage} degenerate")[0]
    assert torch.equal(one["weights"].pop("spare"), torch.ones(2))
    assert (found["weights"].pop("spare") < 1).all()
    assert_close(one, found, allowed=1e-5)


def test_evaluations_before_training_and_predictions_are_as_one(tmp_path):
    """Before training DeepSpeed has not taken the model, and only ZeRO-3 would for an evaluation."""
    kinds = ["zero1 corners", "zero2 corners", "zero3 corners", "zero3 layered corners"]
    launch(tmp_path, *kinds, processes=2)
    one = processes_run.corners(tmp_path / "one")
    for kind in kinds:
        for found in results(tmp_path, kind):
            assert_close(one, found, allowed=1e-5)
            assert_same_log(one, found)


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_resumed_is_as_never_stopped(two, stage):
    assert_resumed(two, stage)


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_what_becomes_of_the_whole_copy_changes_nothing(two, one, other):
    """It is let go of in updates, or is not there at all: tokens and weights are those of a copy that stays."""
    for ours, kept in zip(results(two, f"zero3 {one}"), results(two, f"zero3 {other}"), strict=True):
        assert ours["drawn"] == kept["drawn"]
        # Where micro-batches of one process do not hold whole groups, layer by layer none gives advantages.
        assert_close(kept, ours, allowed=1e-6 if one == "layered evaluated" else 0.0)
    assert_same_log(results(two, f"zero3 {other}")[0], results(two, f"zero3 {one}")[0])
    if "freed" in one:
        whole, left, less = results(two, f"zero3 {one}")[0]["memory"][0]
        assert left < 200 < 70_000 < whole <= less + left
