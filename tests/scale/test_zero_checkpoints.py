"""Checkpoints under DeepSpeed: any number of processes goes on from them, with it or without (`make test-scale`)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rloom.models.low_bits import with_low_bits
from tests.integration import processes_run, test_processes
from tests.integration.test_processes import assert_close, results
from tests.integration.test_resume import assert_equal, assert_same
from tests.launches import assert_done, torchrun
from tests.made_once import made_once

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not in the development set: make test-scale"
)
STAGES = ["zero1", "zero2", "zero3"]
KINDS = ["saved", "saved lora", "saved bfloat16", "saved half"]
OWN = ["saved", "saved lora", "saved half"]
MORE = [("zero2", "saved offloaded"), ("zero3", "saved offloaded"), ("zero3", "saved odd")]
BEST = ["zero2", "zero3"]


def launch(folder: Path, *kinds: str, processes: int) -> None:
    done = torchrun(processes_run.__file__, str(folder), *kinds, processes=processes, deepspeed=True, seconds=600)
    assert_done(done)
    (folder / "stderr.txt").write_text(done.stderr)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """One process without DeepSpeed."""
    return made_once(
        tmp_path_factory,
        "zero checkpoints of one",
        lambda folder: [processes_run.run(folder / kind, kind) for kind in ("saved", "saved bfloat16")] and None,
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """Two processes under DeepSpeed."""
    kinds = [f"{stage} {how}{kind}" for stage in STAGES for kind in KINDS for how in ("", "resumed ")]
    kinds += [f"{stage} own {kind}" for stage in STAGES for kind in OWN]
    kinds += [f"{stage} {how}{kind}" for stage, kind in MORE for how in ("", "resumed ")]
    kinds += [f"{stage} saved best" for stage in BEST]
    return made_once(tmp_path_factory, "zero checkpoints of two", lambda folder: launch(folder, *kinds, processes=2))


@pytest.fixture(scope="module")
def sharded(two, tmp_path_factory) -> Path:
    """Two processes under FSDP2. One of their runs goes on from a checkpoint of DeepSpeed's."""

    def run(folder: Path) -> None:
        kinds = ["sharded saved", "sharded parts saved", f"sharded from {two / 'zero3 saved'}"]
        done = test_processes.launch(str(folder), *kinds)
        assert done.returncode == 0, done.stderr[-4000:]

    return made_once(tmp_path_factory, "zero checkpoints and sharded ones", run)


FOUR = [("zero1", "saved", "zero1"), ("zero2", "saved", "zero2"), ("zero3", "saved", "zero3")]
AGAIN = [("zero3", "saved bfloat16", "zero2"), ("zero3", "saved lora", "zero1"), ("zero3", "saved half", "zero3"),
         ("zero1", "saved bfloat16", "zero3"), ("zero2", "saved lora", "zero3"),
         ("zero3", "saved odd", "zero3"), ("zero2", "saved odd", "zero3"), ("zero3", "saved offloaded", "zero2"),
         ("zero2", "saved offloaded", "zero3")]  # fmt: skip


@pytest.fixture(scope="module")
def four(two, tmp_path_factory) -> Path:
    """Four processes under DeepSpeed that go on from checkpoints of two."""
    kinds = [f"{stage} {kind} from {two / f'{before} {kind}'}" for stage, kind, before in FOUR]
    kinds += [f"{stage} again {kind} from {two / f'{before} {kind}'}" for stage, kind, before in AGAIN]
    return made_once(tmp_path_factory, "zero checkpoints of four", lambda folder: launch(folder, *kinds, processes=4))


ALONE = [("zero1", "saved", "zero3"), ("zero2", "saved", "zero2")]
ALONE_AGAIN = [("zero1", "saved lora", "zero3"), ("zero2", "saved bfloat16", "zero3"), ("zero2", "saved half", "zero2")]


@pytest.fixture(scope="module")
def alone(two, tmp_path_factory) -> Path:
    """One process under DeepSpeed that goes on from checkpoints of two."""
    kinds = [f"{stage} {kind} from {two / f'{before} {kind}'}" for stage, kind, before in ALONE]
    kinds += [f"{stage} again {kind} from {two / f'{before} {kind}'}" for stage, kind, before in ALONE_AGAIN]
    return made_once(tmp_path_factory, "zero checkpoints alone", lambda folder: launch(folder, *kinds, processes=1))


@pytest.fixture(scope="module")
def from_others(one, sharded, alone, tmp_path_factory) -> Path:
    """Two processes under DeepSpeed that go on from what others have saved."""
    kinds = [f"zero1 saved from {alone / 'zero2 saved'}", f"zero2 saved from {sharded / 'sharded parts saved'}",
             f"zero3 saved from {one / 'saved'}", f"zero3 again saved from {sharded / 'sharded saved'}",
             f"zero2 again saved bfloat16 from {one / 'saved bfloat16'}"]  # fmt: skip
    return made_once(tmp_path_factory, "zero from others", lambda folder: launch(folder, *kinds, processes=2))


def masters(folder: Path) -> dict[str, torch.Tensor]:
    """The float32 weights that a checkpoint stands for, by the names of its weights; tied ones are not there twice."""
    weights = load_file(folder / "model.safetensors")
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    order = [name for decays in (True, False) for name in sorted_as_in_the_model(weights) if decays == is_matrix(name)]
    return {
        name: with_low_bits(weights[name].float(), state["rest"]) if "rest" in state else weights[name]
        for name, (_, state) in zip(order, sorted(optimizer["state"].items()), strict=True)
    }


def sorted_as_in_the_model(weights: dict[str, torch.Tensor]) -> list[str]:
    names = [name for name, _ in processes_run.make_model(seed=1).named_parameters()]
    assert set(names) == set(weights)
    return names


def is_matrix(name: str) -> bool:
    """Whether a weight decays, which orders the optimizer's weights."""
    return "norm" not in name


@pytest.mark.parametrize("kind", ["saved", "saved bfloat16", "saved half"])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_are_deepspeeds_masters(two, stage, kind, monkeypatch):
    """Bit for bit, by DeepSpeed's own converter of its own files."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = get_fp32_state_dict_from_zero_checkpoint(str(two / f"{stage} {kind}" / "own-2"))
    found = masters(two / f"{stage} {kind}" / "checkpoint-2")
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name]), name
    # The test can fail: bfloat16 alone is not it.
    assert any(not torch.equal(weight.bfloat16().float(), weight) for weight in found.values())


@pytest.mark.parametrize(("stage", "kind"), [*((stage, kind) for stage in STAGES for kind in KINDS), *MORE])
def test_as_many_go_on_to_the_same_bits(two, stage, kind):
    for whole, resumed in zip(results(two, f"{stage} {kind}"), results(two, f"{stage} resumed {kind}"), strict=True):
        assert len(whole["fingerprints"]) == 4
        # Of parts that do not divide, the fingerprint has numbers that fill them up and belong to no weight.
        assert kind == "saved odd" or whole["fingerprints"][2:] == resumed["fingerprints"]
        assert_equal(whole["weights"], resumed["weights"], "weights")
    assert_same(two / f"{stage} {kind}" / "checkpoint-4", two / f"{stage} resumed {kind}" / "checkpoint-4")


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_that_deepspeed_wrote_itself_go_on(two, stage, kind):
    """As those of earlier versions of rloom; with as many processes, to the same bits."""
    for whole, resumed in zip(results(two, f"{stage} {kind}"), results(two, f"{stage} own {kind}"), strict=True):
        assert whole["fingerprints"][2:] == resumed["fingerprints"]
    assert_same(two / f"{stage} {kind}" / "checkpoint-4", two / f"{stage} own {kind}" / "checkpoint-4")


@pytest.mark.parametrize("stage", BEST)
def test_the_best_checkpoint_is_loaded_at_the_end(two, stage):
    folder = two / f"{stage} saved best"
    best, last = (load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4))
    for found in results(two, f"{stage} saved best"):
        assert_equal(best, found["weights"], "weights")
        assert not torch.equal(last["lm_head.weight"], found["weights"]["lm_head.weight"])


def assert_restored(before: Path, last: Path) -> None:
    """What was loaded is what was saved: weights, masters and moments, bit for bit, and the schedule."""
    assert not list(before.glob("checkpoint-2/global_step*"))
    [name] = [file.name for file in last.glob("*.safetensors")]
    saved, found = (load_file(folder / name) for folder in (before / "checkpoint-2", last))
    assert_equal(saved, found, name)
    for file in ("optimizer.pt", "scheduler.pt"):
        saved, found = (torch.load(folder / file, weights_only=True) for folder in (before / "checkpoint-2", last))
        assert_equal(saved, found, file)


@pytest.mark.parametrize(("stage", "kind", "before"), AGAIN)
def test_four_load_what_two_have_saved(two, four, stage, kind, before):
    assert [found["stage"] for found in results(four, f"{stage} again {kind}", processes=4)] == [int(stage[-1])] * 4
    assert_restored(two / f"{before} {kind}", four / f"{stage} again {kind}" / "last")


@pytest.mark.parametrize(("stage", "kind", "before"), FOUR)
def test_four_go_on_from_a_checkpoint_of_two(two, four, stage, kind, before):
    found = results(four, f"{stage} {kind}", processes=4)
    assert [len(one["fingerprints"]) for one in found] == [2] * 4
    assert_close(results(two, f"{before} {kind}")[0], found[0], allowed=1e-5)


@pytest.mark.parametrize(("stage", "kind", "before"), ALONE_AGAIN)
def test_one_loads_what_two_have_saved(two, alone, stage, kind, before):
    assert_restored(two / f"{before} {kind}", alone / f"{stage} again {kind}" / "last")


@pytest.mark.parametrize(("stage", "kind", "before"), ALONE)
def test_one_goes_on_from_a_checkpoint_of_two(two, alone, stage, kind, before):
    [found] = results(alone, f"{stage} {kind}", processes=1)
    assert found["wrapped"] == "DeepSpeedEngine"
    assert_close(results(two, f"{before} {kind}")[0], found, allowed=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_one_without_deepspeed_goes_on_from_a_checkpoint_of_two(two, stage, tmp_path):
    processes_run.cut_off_after(two / f"{stage} saved", tmp_path / "one", step=2)
    found = processes_run.run(tmp_path / "one", "saved", resume=True)
    assert_close(results(two, f"{stage} saved")[0], found, allowed=1e-5)


def test_an_adapter_of_two_goes_on_without_deepspeed(two, tmp_path):
    """DeepSpeed has dropped a group of the optimizer that has no weights; here it is there."""
    processes_run.cut_off_after(two / "zero2 saved lora", tmp_path / "one", step=2)
    found = processes_run.run(tmp_path / "one", "saved lora", resume=True)
    assert_close(results(two, "zero2 saved lora")[0], found, allowed=1e-5)


def test_fsdp_goes_on_from_a_checkpoint_of_deepspeed(two, sharded):
    assert_close(results(two, "zero3 saved")[0], results(sharded, "sharded")[0], allowed=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_deepspeed_goes_on_from_checkpoints_of_others(two, from_others, stage):
    """Of one process under DeepSpeed and of one without, and of parts that FSDP2 has written."""
    found = results(from_others, f"{stage} saved")
    assert [one["stage"] for one in found] == [int(stage[-1])] * 2
    assert_close(results(two, f"{stage} saved")[0], found[0], allowed=1e-5)


def test_deepspeed_loads_what_others_have_saved(one, sharded, from_others):
    for before, kind in ((sharded / "sharded saved", "zero3 again saved"),
                         (one / "saved bfloat16", "zero2 again saved bfloat16")):  # fmt: skip
        last = from_others / kind / "last"
        saved, found = (load_file(folder / "model.safetensors") for folder in (before / "checkpoint-2", last))
        assert_equal(saved, found, kind)
        saved, found = (
            torch.load(folder / "optimizer.pt", weights_only=True)["state"]
            for folder in (before / "checkpoint-2", last)
        )
        assert_equal(saved, found, kind)
