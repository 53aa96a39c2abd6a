"""Two processes that hold half of the model each (FSDP2) end as one does that trains on the same batches.

One launch of torchrun serves most tests here: starting Python and torch is what takes the time.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from rloom.observe import read_store
from rloom.training.sharded_checkpoint import read_optimizer, read_weights
from tests.conftest import make_model
from tests.integration import processes_run
from tests.integration.test_processes import assert_close, assert_same_log, launch, results
from tests.integration.test_resume import assert_same
from tests.launches import assert_done
from tests.made_once import made_once

AS_ONE = ["sequence", "token", "several", "lora with biases", "degenerate", "evaluated", "by name", "layered by name",
          "layered evaluated", "saved layered"]  # fmt: skip
MORE_AS_ONE = ["lora on the head", "exact", "checkpointed", "pissa lora by name"]
RESUMED = ["saved lora", "saved bfloat16", "saved layered"]
COPIES = ["freed several", "kept several", "layered", "whole layered"]
PARTS = ["saved", "saved bfloat16", "resumed saved bfloat16"]
MORE = ["freed lora", "kept lora", "layered lora", "whole layered lora", "saved lora", "parts saved lora",
        "parts resumed saved lora", "dropout", "parts dropout", "parts resumed dropout", "layered half",
        "saved layered half", "resumed saved layered half", "layered replaced", "whole layered replaced",
        "layered old lora", "layered with another reference", "layered text of a vision model",
        "saved layered lora", "resumed saved layered lora"]  # fmt: skip
DRAWS = [31, 44, 69, 90]
"""Of the oracle's. All 88 of the first 400 that two processes can share were run once."""


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The folder of a launch of two processes that has run all kinds."""

    def run(folder: Path) -> None:
        # A checkpoint of one process, which two go on from.
        processes_run.run(folder / "one saved", "saved")
        kinds = [*AS_ONE, "replaced", "bfloat16", "half", "dropout", "resumed", "saved", "by its launcher"]
        kinds += [kind for kind in RESUMED if kind not in AS_ONE]
        kinds += [*[f"resumed {kind}" for kind in RESUMED], *COPIES, *[f"parts {kind}" for kind in PARTS]]
        asked = [f"sharded {kind}" for kind in kinds] + [f"draw {DRAWS[0]}"]
        done = launch(str(folder), *asked, f"sharded from {folder / 'one saved'}")
        assert_done(done)

    return made_once(tmp_path_factory, "sharded", run)


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> Path:
    """The same for what the other tests show in a smaller way."""

    def run(folder: Path) -> None:
        asked = [f"sharded {kind}" for kind in [*MORE, *MORE_AS_ONE]] + [f"draw {number}" for number in DRAWS[1:]]
        done = launch(str(folder), *asked)
        assert_done(done)

    return made_once(tmp_path_factory, "sharded-more", run)


SLOW = pytest.mark.slow
LORA = pytest.param("more", "lora", marks=SLOW)


def assert_sharded(found: list[dict]) -> None:
    """Two processes, and each holds half: a launcher, or accelerate, may silently do something else."""
    total = sum(weight.numel() for weight in found[0]["weights"].values())
    assert [one["world"] for one in found] == [2, 2]
    assert all(one["wrapped"].startswith("FSDP") for one in found)
    assert sum(one["parts"] for one in found) == total
    assert all(abs(one["parts"] - total / 2) < 0.05 * total for one in found)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [*[("two", kind) for kind in AS_ONE], *[pytest.param("more", kind, marks=SLOW) for kind in MORE_AS_ONE]],
)
def test_two_halves_are_as_one(request, folder, kind, tmp_path):
    """Weights after three updates, and every number in the log; unequally many tokens and micro-batches in each."""
    one = processes_run.run(tmp_path / "one", kind)
    found = results(request.getfixturevalue(folder), f"sharded {kind}")
    assert_sharded(found)
    assert_close(one, found[0], allowed=1e-5)
    assert_same_log(one, found[0])
    assert len(found[0]["fingerprints"]) == len(set(found[0]["fingerprints"]))  # something was learnt in each update


@pytest.mark.slow
@pytest.mark.parametrize("kind", MORE[-5:-1])
def test_more_in_parts_are_as_one(more, kind, tmp_path):
    """References: a copy of the adapter that was there before, also one that follows it, and another model. A model
    that could have images."""
    one = processes_run.run(tmp_path / "one", kind)
    found = results(more, f"sharded {kind}")
    assert_sharded(found)
    assert_close(one, found[0], allowed=1e-5)
    assert_same_log(one, found[0])


@pytest.mark.parametrize("kind", ["by name", "layered by name"])
def test_the_main_process_alone_reads_a_model_by_name(two, kind):
    """The other one makes it without data, and has all of its weights sent; tied ones once for each of their names.

    Neither has more whole weights at a time than a layer has: a device need not hold the whole model.
    """
    main, other = results(two, f"sharded {kind}")
    assert main["received"] == 0
    assert other["received"] == len(other["weights"]) + 1
    in_a_layer = sum(name.startswith("model.layers.0.") for name in other["weights"])
    assert main["at_once"] == other["at_once"] == in_a_layer


@pytest.mark.parametrize(
    ("folder", "number"), [("two", DRAWS[0]), *[pytest.param("more", number, marks=SLOW) for number in DRAWS[1:]]]
)
def test_draws_of_the_oracle_are_as_one(request, folder, number, tmp_path):
    """The oracle is held against one process (tests/parity/test_oracle.py), and that against two halves."""
    two = request.getfixturevalue(folder)
    assert processes_run.can_be_halved(number)
    one = processes_run.run_draw(tmp_path / "one", number)
    found = results(two, f"draw {number}")
    assert_sharded(found)
    assert_close(one, found[0], allowed=1e-7)  # float64
    assert_same_log(one, found[0])


def test_a_launcher_may_ask_for_it(two):
    found = results(two, "sharded by its launcher")
    assert_sharded(found)
    assert_close(results(two, "sharded sequence")[0], found[0], allowed=0.0)


def test_replaced_groups_are_as_one(two):
    assert_sharded(results(two, "sharded replaced"))


def test_bfloat16_weights_learn_in_float32(two, tmp_path):
    """The parts are float32, and what is saved is bfloat16 again. One process rounds its gradients in other places, and
    Adam makes a whole step of a gradient's sign where it is about 0: so the mean is compared, after one update."""
    one = processes_run.run(tmp_path / "one", "bfloat16", max_steps=1)
    found = results(two, "sharded bfloat16")
    assert_sharded(found)
    assert found[0]["dtypes"] == {torch.float32}
    assert {weight.dtype for weight in found[0]["weights"].values()} == {torch.bfloat16}
    apart, moved = [], []
    for name, begun in make_model(seed=1).bfloat16().named_parameters():
        apart.append((found[0]["weights"][name].float() - one["weights"][name].float()).abs().flatten())
        moved.append((one["weights"][name].float() - begun.detach().float()).abs().flatten())
    assert torch.cat(apart).mean() < 0.1 * torch.cat(moved).mean()


def test_a_process_that_is_killed_in_an_update_ends_the_others(tmp_path):
    """`launch` waits for two minutes at most. The others wait for its part of a layer, and say who has gone.

    Unless torchrun, which sees the kill too, ends them first: on a busy machine it may. One of three must say it.
    """
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        done = launch(str(folder), "sharded killed")
        assert done.returncode != 0
        assert not list(folder.glob("sharded killed/result_*"))
        if "has ended, or did not answer" in done.stderr:
            return
    raise AssertionError(done.stderr[-2000:])


def test_a_process_without_memory_at_the_start_ends_all(tmp_path):
    """Packed rows are tried out on the parts: nobody may go on to the next check while others are in this one."""
    done = launch(str(tmp_path), "layered scarce")
    assert done.returncode != 0
    assert "memory ran out while it was tried out how this model can be run; packing=False does without" in done.stderr


@pytest.mark.parametrize(
    ("folder", "kind"), [("two", "half"), pytest.param("more", "layered half", marks=pytest.mark.slow)]
)
def test_what_runs_without_gradient_is_the_policy(request, folder, kind):
    """Under bf16, before any update: no KL, and the engine's log-probabilities are those of the training forward."""
    found = results(request.getfixturevalue(folder), f"sharded {kind}")
    assert_sharded(found)
    assert found[0]["dtypes"] == {torch.float32}
    (log,) = [entry for entry in found[0]["history"] if "kl" in entry]
    assert abs(log["kl"]) < 1e-6
    assert log["mismatch/mean"] < 0.02


# -- the whole copy


@pytest.mark.parametrize(("folder", "kind"), [("two", "several"), LORA])
def test_a_copy_that_is_let_go_of_changes_nothing(request, folder, kind):
    """Its memory is really free in the update, also what the engine holds of it. Tokens and weights are the same."""
    two = request.getfixturevalue(folder)
    for freed, kept in zip(results(two, f"sharded freed {kind}"), results(two, f"sharded kept {kind}"), strict=True):
        (whole, left, less), (as_before, stays, nothing) = freed["memory"][0], kept["memory"][0]
        assert whole == as_before == stays > 70_000
        assert left < 200
        assert less >= whole - left
        assert nothing == 0
        assert freed["drawn"] == kept["drawn"]
        assert freed["fingerprints"] == kept["fingerprints"]
        assert all(torch.equal(freed["weights"][name], weight) for name, weight in kept["weights"].items())


@pytest.mark.parametrize(("folder", "kind"), [("two", "layered"), pytest.param("more", "layered lora", marks=SLOW)])
def test_layer_by_layer_is_as_the_whole_copy(request, folder, kind):
    """The same engine on the parts draws the same tokens; one process is done earlier and waits in idle steps."""
    two = request.getfixturevalue(folder)
    by_parts, by_copy = results(two, f"sharded {kind}"), results(two, f"sharded whole {kind}")
    assert_sharded(by_parts)
    lengths = [sorted(len(ids) for _, group in one["drawn"] for ids in group) for one in by_parts]
    assert lengths[0] != lengths[1]
    if kind == "layered":
        # Nor has it equally many micro-batches in the passes before an update.
        assert [one["rounds"] for one in by_parts] == [[2, 2], [1, 1]]
    for parts, copy in zip(by_parts, by_copy, strict=True):
        assert parts["drawn"] == copy["drawn"]
        # With LoRA, a rollout's KL is that of a pass before the update in both processes, where one needs it.
        allowed = 1e-5 if "lora" in kind else 0.0
        assert_close(copy, parts, allowed=allowed)
    assert_same_log(by_copy[0], by_parts[0])


@pytest.mark.slow
def test_groups_are_replaced_layer_by_layer(more):
    """Also in a round in which a process has nothing to replace: it idles along, and so it does in evaluations."""
    by_parts, by_copy = results(more, "sharded layered replaced"), results(more, "sharded whole layered replaced")
    replaced = [entry["completions/replaced_groups"] for entry in by_parts[0]["history"] if "loss" in entry]
    assert sum(replaced) > 0
    assert len(by_parts[0]["drawn"]) != len(by_parts[1]["drawn"])
    for parts, copy in zip(by_parts, by_copy, strict=True):
        assert parts["drawn"] == copy["drawn"]
        assert_close(copy, parts, allowed=0.0)
    assert_same_log(by_copy[0], by_parts[0])


# -- checkpoints


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        *[("two", kind) for kind in RESUMED],
        pytest.param("more", "saved layered half", marks=SLOW),
        pytest.param("more", "saved layered lora", marks=SLOW),
    ],
)
def test_what_was_saved_is_loaded(request, folder, kind):
    """Adapters, which peft loads by its own names; bfloat16 weights with the bits that they drop; a reference in parts
    that has followed the policy."""
    two = request.getfixturevalue(folder)
    for whole, resumed in zip(results(two, f"sharded {kind}"), results(two, f"sharded resumed {kind}"), strict=True):
        assert len(whole["fingerprints"]) == 4
        assert whole["fingerprints"][2:] == resumed["fingerprints"]


def test_resumed_is_as_never_stopped(two):
    """To the bit: weights, optimizer, reference, rollouts in use."""
    assert_same(two / "sharded dropout" / "checkpoint-6", two / "sharded resumed" / "checkpoint-6")
    assert read_store(two / "sharded dropout") == read_store(two / "sharded resumed")
    for whole, resumed in zip(results(two, "sharded dropout"), results(two, "sharded resumed"), strict=True):
        assert all(torch.equal(whole["weights"][name], weight) for name, weight in resumed["weights"].items())


def test_a_checkpoint_is_that_of_one_process(two):
    """The same files, names and shapes, so that any number of processes goes on from it."""
    ours, one = two / "sharded saved" / "checkpoint-2", two / "one saved" / "checkpoint-2"
    weights = [load_file(folder / "model.safetensors") for folder in (ours, one)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=1e-5)
    moments = [torch.load(folder / "optimizer.pt", weights_only=True)["state"] for folder in (ours, one)]
    assert moments[0].keys() == moments[1].keys()
    for index, values in moments[0].items():
        for name, value in values.items():
            torch.testing.assert_close(value, moments[1][index][name], rtol=1e-3, atol=1e-6, msg=f"{index} {name}")
    assert type(AutoModelForCausalLM.from_pretrained(ours)).__name__ == "LlamaForCausalLM"


def test_two_go_on_from_a_checkpoint_of_one(two):
    found = results(two, "sharded")
    assert_sharded(found)
    assert_close(results(two, "sharded saved")[0], found[0])


def test_one_goes_on_from_a_checkpoint_of_two(two, tmp_path):
    processes_run.cut_off_after(two / "sharded saved", tmp_path / "one", step=2)
    found = processes_run.run(tmp_path / "one", "saved", resume=True)
    assert_close(results(two, "sharded saved")[0], found)


# -- checkpoints in parts


@pytest.mark.slow
def test_parts_resume_to_the_same_bits(more):
    """And are what whole checkpoints are: the run is the same with either, whichever it goes on from."""
    for whole, parts, resumed in zip(
        results(more, "sharded dropout"),
        results(more, "sharded parts dropout"),
        results(more, "sharded parts resumed dropout"),
        strict=True,
    ):
        assert len(set(parts["fingerprints"])) == 6
        assert whole["fingerprints"] == parts["fingerprints"]
        assert parts["fingerprints"][3:] == resumed["fingerprints"]
    assert read_store(more / "sharded parts dropout") == read_store(more / "sharded parts resumed dropout")


SAVED = [("two", "saved bfloat16"), pytest.param("more", "saved lora", marks=SLOW)]


@pytest.mark.parametrize(("folder", "kind"), SAVED)
def test_parts_of_other_weights_resume_to_the_same_bits(request, folder, kind):
    two = request.getfixturevalue(folder)
    for saved, resumed in zip(
        results(two, f"sharded parts {kind}"), results(two, f"sharded parts resumed {kind}"), strict=True
    ):
        assert len(saved["fingerprints"]) == 4
        assert saved["fingerprints"][2:] == resumed["fingerprints"]


def test_each_process_writes_its_part(two):
    """Half of each tensor lies in the file of each, and no whole weights lie beside them."""
    folder = two / "sharded parts saved" / "checkpoint-2"
    for where in ("pytorch_model_fsdp_0", "optimizer_0"):
        found = FileSystemReader(folder / where).read_metadata()
        for name, tensor in found.state_dict_metadata.items():
            files = {info.relative_path for index, info in found.storage_data.items() if index.fqn == name}
            assert len(tensor.chunks) == len(files) == (1 if name.endswith(".step") else 2), name
    assert not list(folder.glob("*.safetensors"))
    assert not (folder / "optimizer.pt").exists()


@pytest.mark.parametrize(("folder", "kind"), SAVED)
def test_parts_as_a_whole_are_what_a_whole_checkpoint_has(request, folder, kind):
    """To the bit: weights in the dtype of the model, moments, and the bits that bfloat16 drops."""
    two = request.getfixturevalue(folder)
    whole, parts = (two / f"sharded {how}{kind}" / "checkpoint-2" for how in ("", "parts "))
    state, expected = read_optimizer(parts), torch.load(whole / "optimizer.pt", weights_only=True)
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        assert values.keys() == state["state"][number].keys()
        for name, value in values.items():
            assert torch.equal(value, state["state"][number][name]), (number, name)
    if kind == "saved bfloat16":
        assert "rest" in expected["state"][0]
        weights = read_weights(parts)
        for name, weight in load_file(whole / "model.safetensors").items():
            assert weight.dtype == torch.bfloat16
            assert torch.equal(weight, weights[name])


def test_one_goes_on_from_parts_of_two(two, tmp_path):
    processes_run.cut_off_after(two / "sharded parts saved", tmp_path / "one", step=2)
    found = processes_run.run(tmp_path / "one", "saved", resume=True)
    assert_close(results(two, "sharded parts saved")[0], found)


@pytest.mark.slow
def test_four_go_on_from_parts_of_two(two, tmp_path):
    processes_run.cut_off_after(two / "sharded parts saved", tmp_path / "sharded parts again", step=2)
    done = launch(str(tmp_path), "sharded parts again", processes=4)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_close(results(two, "sharded parts saved")[0], results(tmp_path, "sharded parts again", processes=4)[0])


def test_the_last_model_is_whole(two, tmp_path):
    """And `accelerate merge-weights` makes a model of a checkpoint's parts."""
    folder, found = two / "sharded parts saved", results(two, "sharded parts saved")[0]["weights"]
    for name, weight in AutoModelForCausalLM.from_pretrained(folder / "last").named_parameters():
        assert torch.equal(weight, found[name])
    merge_fsdp_weights(str(folder / "checkpoint-4" / "pytorch_model_fsdp_0"), str(tmp_path))
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(weight, found[name])


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/.metadata", "rloom_layout.pt"])
def test_a_part_that_is_missing_or_damaged_is_named(two, part, tmp_path):
    processes_run.cut_off_after(two / "sharded parts saved", tmp_path / "one", step=2)
    file = tmp_path / "one" / "checkpoint-2" / part
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    trainer = processes_run.make_trainer(tmp_path / "one", "saved")
    with pytest.raises(ValueError, match=rf"checkpoint-2 is damaged: {re.escape(part)} is not what was written"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    file.unlink()
    with pytest.raises(ValueError, match=rf"checkpoint-2 is damaged: {re.escape(part)} is missing"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
