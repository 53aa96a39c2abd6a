"""Two processes under FSDP2, of which one runs out of memory: both repeat the update, and end as one process does.

One launch of torchrun serves most tests here. The failures are those of `scarce_run.RUNS`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from rloom.errors import ProcessError
from rloom.training import sharded_attempts
from rloom.training.attempts import Attempts
from rloom.training.budget import TokenBudget
from rloom.training.callbacks import FitBudget
from rloom.training.processes import Processes
from rloom.training.sharded_attempts import CAN_BE_LEFT
from tests.integration import processes_run, scarce_run
from tests.integration.test_processes import assert_close, assert_same_log, results
from tests.launches import assert_done, torchrun
from tests.made_once import made_once

pytestmark = pytest.mark.skipif(not CAN_BE_LEFT, reason="this version of torch cannot be told to leave a micro-batch")

PLACES = ["make", "gather", "forward", "loss", "backward", "sum", "end", "both"]
WAYS = ["again", "kept", "lora", "head", "checkpointed", "kept checkpointed", "exact", "several", "freed"]
OFTEN = ["backward", "both", "freed"]
"""What `make test` runs of these."""
BY_HAND = ["both", *PLACES[:-1], "kept", "kept checkpointed"]
"""What is forgotten by hand too, as with torch 2.11; the first of them in `make test`."""
LAYERED = {"layered": "layered never", "layered update": "layered never", "layered kept": "layered never",
           "layered unequal": "layered unequal never", "layered evaluated": "layered evaluated never"}  # fmt: skip
"""Each with the run in which nothing fails."""


def launch(folder: Path, *names: str) -> None:
    assert_done(torchrun(scarce_run.__file__, str(folder), *names))


@pytest.fixture(scope="module")
def often(tmp_path_factory) -> Path:
    names = ["never", *OFTEN, "hopeless", scarce_run.BY_HAND + BY_HAND[0]]
    return made_once(tmp_path_factory, "scarce", lambda folder: launch(folder, *names))


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> Path:
    names = [name for name in scarce_run.RUNS if name not in (*OFTEN, "hopeless")]
    names += [scarce_run.BY_HAND + name for name in BY_HAND[1:]]
    return made_once(tmp_path_factory, "scarce-more", lambda folder: launch(folder, *names))


def in_folder(names: list[str]) -> list:
    """Each with the fixture that has run it."""
    return [("often", n) if n in OFTEN else pytest.param("more", n, marks=pytest.mark.slow) for n in names]


def repeated(two: Path, name: str, where: str = "") -> list[dict]:
    """What both processes saw of a run (in the folder `where`). All failures have come, and both have repeated as
    often."""
    found = results(two, where or name)
    failures = scarce_run.RUNS[name][2].values()
    assert [one["due"] for one in found] == [[], []]
    assert found[0]["attempts"] == found[1]["attempts"]
    assert found[0]["budget"] == found[1]["budget"]
    # One line for each, where several failures of one attempt are one. The main process says it.
    assert found[1]["said"] == []
    assert len(found[0]["said"]) == len({(what, attempt) for due in failures for what, attempt, _, _ in due})
    return found


@pytest.mark.parametrize(("folder", "name"), in_folder(PLACES))
def test_wherever_it_fails_it_is_as_smaller_micro_batches(request, folder, name):
    """To the bit, and so is every number in the log."""
    two = request.getfixturevalue(folder)
    expected = results(two, "never")
    for one, other in zip(expected, repeated(two, name), strict=True):
        assert one["budget"] == other["budget"] == (30, 8)
        assert other["attempts"] == {"update": 3}
        assert_close(one, other, allowed=0.0)
        assert_same_log(one, other)
        assert one["fingerprints"] == other["fingerprints"]


@pytest.mark.parametrize(
    ("folder", "name"),
    [("often", BY_HAND[0]), *[pytest.param("more", n, marks=pytest.mark.slow) for n in BY_HAND[1:]]],
)
def test_forgotten_by_hand_it_is_the_same(request, folder, name):
    """Torch 2.11 cannot be asked to forget a micro-batch. Here it is done by hand whatever torch could do."""
    two = request.getfixturevalue(folder)
    expected = results(two, name if name in ("kept", "kept checkpointed") else "never")
    for one, other in zip(expected, repeated(two, name, scarce_run.BY_HAND + name), strict=True):
        assert_close(one, other, allowed=0.0)
        assert one["fingerprints"] == other["fingerprints"]


@pytest.mark.parametrize("older", [True, False])
def test_by_hand_nothing_is_left_of_a_micro_batch(older):
    """In 2.11 a layer has one group of weights, and one sum is noted; in newer versions several."""
    idle, busy = TrainingState.IDLE, TrainingState.FORWARD
    weights = SimpleNamespace(**dict.fromkeys(sharded_attempts.OF_WEIGHTS, "noted"), _training_state=busy, states=[])
    weights._post_forward_indices = [1]
    weights._to_sharded = lambda: weights.states.append(weights._training_state)
    layer = SimpleNamespace(_training_state=busy, _modules_to_run_forward={1})
    bare = SimpleNamespace(_training_state=busy, _modules_to_run_forward=set())
    for state, groups in ((layer, [weights]), (bare, [])):
        if older:
            state._fsdp_param_group = groups[0] if groups else None
        else:
            state._fsdp_param_groups = groups
    sums = {"reduce_scatter_state": "noted"} if older else {"reduce_scatter_states": ["noted"]}
    shared = SimpleNamespace(
        all_states=[layer, bare], iter_forward_root=layer, post_backward_final_callback_queued=True
    )
    sent = SimpleNamespace(all_gather_state="noted", post_forward_order=[weights], **sums)
    layer._state_ctx, layer._comm_ctx = shared, sent
    sharded_attempts.forget_by_hand(SimpleNamespace(_get_fsdp_state=lambda: layer))

    assert weights.states == [idle]
    assert not any(getattr(weights, name) for name in sharded_attempts.OF_WEIGHTS)
    assert not any([sent.all_gather_state, sent.post_forward_order, *[getattr(sent, name) for name in sums]])
    assert (shared.iter_forward_root, shared.post_backward_final_callback_queued) == (None, False)
    assert [one._training_state for one in (layer, bare)] == [idle, idle]
    assert not layer._modules_to_run_forward


@pytest.mark.parametrize(("folder", "name"), in_folder(["backward", *WAYS]))
def test_it_is_as_one_process(request, folder, name, tmp_path):
    found = repeated(request.getfixturevalue(folder), name)
    kind, options, _ = scarce_run.RUNS[name]
    one = processes_run.run(tmp_path / "one", kind, **{k: v for k, v in options.items() if k != "fsdp_config"})
    assert_close(one, found[0], allowed=1e-5)
    assert_same_log(one, found[0])


@pytest.mark.slow
def test_what_is_drawn_is_drawn_again(more):
    """Dropout: the process that failed has drawn for idle micro-batches too."""
    for one, other in zip(results(more, "dropout never"), repeated(more, "dropout"), strict=True):
        assert_close(one, other, allowed=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERED)
def test_layer_by_layer(more, name):
    """The passes without gradient are repeated too: completions, weights and logs are as if none had failed."""
    found, expected = repeated(more, name), results(more, LAYERED[name])
    assert [one["drawn"] for one in found] == [one["drawn"] for one in expected]
    assert_close(expected[0], found[0], allowed=1e-5)
    assert_same_log(expected[0], found[0])


@pytest.mark.slow
def test_the_worst_case_fails_in_either(more):
    """It is run by both, and leaves no trace but a smaller budget."""
    for one, other in zip(results(more, "never"), repeated(more, "worst case"), strict=True):
        assert other["budget"] == (30, 8)
        assert 0 < other["worst"] <= 30
        assert_close(one, other, allowed=0.0)


def test_what_never_fits_ends_all_processes(often):
    for one in results(often, "hopeless"):
        assert one["error"] == (
            "out of memory in process 1 (injected: backward): micro-batches of 16 tokens, the smallest, do not fit"
        )
        assert one["budget"] == (16, 8)


@pytest.mark.parametrize(("folder", "names"), [("often", ["never", "freed"]), pytest.param("more", [
    "never", "kept", "lora", "head", "checkpointed", "kept checkpointed", "exact", "half"
], marks=pytest.mark.slow)])  # fmt: skip
def test_micro_batches_have_the_same_collectives(request, folder, names):
    """Of all sizes, idle ones included, in both processes: what the repetition stands on."""
    for name in names:
        sequences = [
            tuple(one) for found in results(request.getfixturevalue(folder), name) for one in found["sequences"]
        ]
        longest = max(sequences, key=len)
        whole = [one for one in sequences if len(one) == len(longest)]
        assert len(whole) > 4
        assert set(whole) == {longest}, name
        # Those that have failed are the beginning of it.
        assert all(one == longest[: len(one)] for one in sequences), name


class KeepsNothing(Attempts):
    """Attempts that leave nothing behind."""

    def _forget_micro_batch(self) -> None:
        pass

    def _drop_attempt(self) -> None:
        pass


def test_random_draws_and_values_are_those_of_one_clean_attempt(monkeypatch):
    attempts, draws, undone = KeepsNothing(Processes()), [], []
    monkeypatch.setattr(attempts, "_go_along", lambda idle, gradient: torch.rand(5))

    def work() -> str:
        draws.append(torch.rand(3))
        if len(draws) < 3:
            raise torch.OutOfMemoryError("injected")
        return "done"

    budget = TokenBudget(64)
    found = attempts.retrying(budget, work, undo=lambda: undone.append(1), idle=lambda last: None, gradient=True)
    assert found == "done"
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert len(undone) == 2
    assert budget.tokens == 16


def test_an_idle_micro_batch_with_fewer_collectives_is_an_error():
    """As where `compute_loss` runs the model twice: going on would be to wait for ever."""
    attempts = KeepsNothing(Processes())
    output = torch.zeros(1)

    def work() -> None:
        attempts.begin(2)
        for _ in range(3):
            attempts.collectives.run(lambda: None, output)
        raise torch.OutOfMemoryError("injected")

    with pytest.raises(ProcessError, match="an idle micro-batch has 1 collectives, and the one that failed had 3"):
        attempts.retrying(
            TokenBudget(64),
            work,
            undo=None,
            idle=lambda last: attempts.collectives.run(lambda: None, output),
            gradient=True,
        )


def test_the_worst_case_is_due_where_one_process_has_not_run_it():
    """Each has its own part of a checkpoint, which says whether it was run."""
    for repeats_together, due in ((True, True), (False, False)):
        processes = SimpleNamespace(any=lambda flag: True, repeats_together=repeats_together)
        budget = TokenBudget(64)
        budget.tried = True
        fit = FitBudget(SimpleNamespace(budget=budget, processes=processes), None, 8)
        assert fit._is_due() is due
        assert fit.looked


def test_budgets_of_other_sizes_become_equal():
    """The smallest of all, below what has failed; None where that was the smallest there is."""
    for sizes, failed, gradient, expected in [
        ([(64, 8), (512, 8)], [1], True, (64, 8)),
        ([(64, 8), (512, 8)], [0, 1], True, (32, 8)),
        ([(64, 8), (64, 2)], [0], False, (64, 2)),
        ([(64, 8), (64, 2)], [1], False, (64, 1)),
        ([(64, 1), (64, 1)], [1], False, (32, 1)),
        ([(16, 8), (64, 8)], [0], True, None),
        ([(16, 8), (64, 8)], [1], True, (16, 8)),
    ]:
        budgets = [TokenBudget(tokens) for tokens, _ in sizes]
        for budget, (_, factor) in zip(budgets, sizes, strict=True):
            budget.factor = factor
        assert {b.shrink_with(sizes, failed, gradient=gradient) for b in budgets} == {expected is not None}
        if expected is not None:
            assert {b.size() for b in budgets} == {expected}


def test_where_it_cannot_be_repeated_the_error_says_what_to_set():
    from rloom.training.sharded import ShardedProcesses
    from rloom.training.zero import ZeroProcesses

    def scarce() -> None:
        raise torch.OutOfMemoryError("injected")

    older = ShardedProcesses(0, 2, half=None)
    older.can_repeat = False
    for processes, where in ((older, "under FSDP"), (ZeroProcesses(0, 2, stage=3, half=None), "under DeepSpeed")):
        with pytest.raises(torch.OutOfMemoryError, match="injected") as error:
            processes.retrying(TokenBudget(64), scarce, idle=lambda last: None)
        assert f"{where} an update cannot be done again in smaller pieces" in error.value.__notes__[0]
        assert "max_tokens_per_micro_batch below 64" in error.value.__notes__[0]
