"""Processes under DeepSpeed, of which one runs out of memory: all repeat the update, and end as one process does.

Two launches of torchrun serve most tests here. The failures are those of `scarce_run.RUNS` and `scarce_zero_run`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration import processes_run, scarce_run
from tests.integration.test_processes import assert_close, assert_same_log, results
from tests.integration.test_sharded_memory import repeated

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not in the development set: make test-scale", allow_module_level=True)

from rloom.training import zero_attempts
from tests.launches import assert_done, torchrun
from tests.scale import scarce_zero_run

PLACES = {
    "zero1": ["forward", "sum"],
    "zero2": ["backward", "sum", "both"],
    "zero3": ["make", "gather", "wait", "forward", "loss", "backward", "sum", "end", "both"],
    "zero2 overlapping:": ["backward"],
    "zero3 overlapping:": ["backward"],
    "zero3 plain:": ["backward"],
    "zero2 offloaded:": ["backward"],
    "zero3 offloaded:": ["backward"],
}
AT_PLACES = [(stage, name) for stage, names in PLACES.items() for name in names]
WAYS = {
    "zero1": ["later"],
    "zero2": ["later", "lora"],
    "zero3": ["later", "lora", "head", "checkpointed", "several", "freed"],
}
IN_WAYS = [(stage, name) for stage, names in WAYS.items() for name in names]
LAYERED = ["layered", "layered update"]


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The folder of a launch of two processes that fail at all places."""
    folder = tmp_path_factory.mktemp("scarce-zero")
    launch(folder, 2, *[f"{stage} {name}" for stage, names in PLACES.items() for name in ["never", *names]])
    return folder


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> Path:
    """The same for kinds of models and ways to run them."""
    folder = tmp_path_factory.mktemp("scarce-zero-more")
    names = ["dropout never", "dropout", "layered never", *LAYERED, "hopeless"]
    launch(folder, 2, *[f"{stage} {name}" for stage, name in IN_WAYS], *[f"zero3 {name}" for name in names])
    return folder


def launch(folder: Path, processes: int, *names: str) -> None:
    script = scarce_zero_run.__file__
    assert_done(torchrun(script, str(folder), *names, processes=processes, deepspeed=True, seconds=600))


@pytest.mark.parametrize(("stage", "name"), AT_PLACES)
def test_wherever_it_fails_it_is_as_smaller_micro_batches(two, stage, name):
    """To the bit, and so is every number in the log."""
    expected = results(two, f"{stage} never")
    for one, other in zip(expected, repeated(two, name, f"{stage} {name}"), strict=True):
        assert f"zero{other['stage']}" == stage.split()[0]
        assert one["budget"] == other["budget"] == (30, 8)
        assert other["attempts"] == {"update": 3}
        assert_close(one, other, allowed=0.0)
        assert_same_log(one, other)
        assert one["fingerprints"] == other["fingerprints"]


@pytest.mark.parametrize(("stage", "name"), IN_WAYS)
def test_it_is_as_one_process(more, stage, name, tmp_path):
    found = repeated(more, name, f"{stage} {name}")
    kind, options, _ = scarce_run.RUNS[name]
    one = processes_run.run(tmp_path / "one", kind, **options)
    assert_close(one, found[0], allowed=1e-5)
    assert_same_log(one, found[0])


def test_what_is_drawn_is_drawn_again(more):
    for one, other in zip(
        results(more, "zero3 dropout never"), repeated(more, "dropout", "zero3 dropout"), strict=True
    ):
        assert_close(one, other, allowed=0.0)


@pytest.mark.parametrize("name", LAYERED)
def test_layer_by_layer(more, name):
    """The passes without gradient are repeated too: completions, weights and logs are as if none had failed."""
    found, expected = repeated(more, name, f"zero3 {name}"), results(more, "zero3 layered never")
    assert [one["drawn"] for one in found] == [one["drawn"] for one in expected]
    assert_close(expected[0], found[0], allowed=1e-5)
    assert_same_log(expected[0], found[0])


def test_what_never_fits_ends_all_processes(more):
    for one in results(more, "zero3 hopeless"):
        assert one["error"] == (
            "out of memory in process 1 (injected: backward): micro-batches of 16 tokens, the smallest, do not fit"
        )


def test_one_process_repeats_by_itself(tmp_path):
    stages = ["zero1", "zero2", "zero2 offloaded:"]
    launch(tmp_path, 1, *[f"{stage} {name}" for stage in stages for name in ("alone never", "alone")])
    for stage in stages:
        (one,), (other,) = (results(tmp_path, f"{stage} {name}", processes=1) for name in ("alone never", "alone"))
        assert f"zero{other['stage']}" == stage.split()[0]
        assert other["due"] == []
        assert other["attempts"] == {"update": 3}
        assert one["budget"] == other["budget"] == (30, 8)
        assert_close(one, other, allowed=0.0)


@pytest.mark.parametrize("kind", ["DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"])
def test_where_something_else_would_have_to_be_undone_it_is_not_repeated(kind, monkeypatch):
    """An optimizer that is not known, one that lacks something, options; collectives that are not counted."""
    yes, no = lambda: True, lambda: False
    backend = SimpleNamespace(**dict.fromkeys(zero_attempts.COLLECTIVES), has_all_gather_into_tensor=yes,
                              has_reduce_scatter_tensor=yes)  # fmt: skip
    monkeypatch.setattr(zero_attempts, "_backend", lambda: backend)
    needed = zero_attempts.OF_OPTIMIZER[kind]

    def left(name: str = kind, *, without: str = "", optimizer: str = "AdamW", **options) -> bool:
        found = dict.fromkeys({*zero_attempts.OF_ALL, *needed} - {without}) | {"optimizer": type(optimizer, (), {})()}
        if "parameter_offload" in found:
            found["parameter_offload"] = SimpleNamespace(get_param_coordinator=None)
        engine = SimpleNamespace(optimizer=type(name, (), found)(), wall_clock_breakdown=no, is_deepcompile_enabled=no,
                                 module=SimpleNamespace(**dict.fromkeys(zero_attempts.OF_MODEL)))  # fmt: skip
        for option, value in options.items():
            setattr(engine.optimizer if option in zero_attempts.ELSEWHERE else engine, option, value)
        return zero_attempts.can_be_left(engine)

    assert left()
    assert not left("BF16_Optimizer")
    assert not left(optimizer="MuonWithAuxAdam")
    assert not left(wall_clock_breakdown=yes)
    assert not left(is_deepcompile_enabled=yes)
    for name in (*zero_attempts.OF_ALL, *needed):
        assert not left(without=name)
    for name in zero_attempts.ELSEWHERE:
        assert not left(**{name: True})
    if "Stage3" in kind:
        assert not left(module=SimpleNamespace())
    del backend.broadcast
    assert not left()
