"""The files in examples/accelerate_configs, by the environment that `accelerate launch` makes of them.

On a CPU that launcher would start one process, and say nothing. So torchrun starts two, in that environment.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
from accelerate.commands import launch
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from tests.integration import processes_run
from tests.integration.test_processes import assert_close, assert_same_log, results
from tests.launches import assert_done, cause, torchrun
from tests.standins import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not in the development set: make test-scale"
)
KIND = "launched sequence"
SHARDED = {"fsdp2", "deepspeed_zero3"}


def environment_of(name: str, monkeypatch) -> dict[str, str]:
    """What `accelerate launch` adds to the environment of the processes that it starts."""
    launches = []
    for launcher in ("deepspeed_launcher", "multi_gpu_launcher"):
        monkeypatch.setattr(launch, launcher, launches.append)
    path = str(ROOT / f"examples/accelerate_configs/{name}.yaml")
    launch.launch_command(
        launch.launch_command_parser().parse_args(["--config_file", path, "--main_process_port", "0", "train.py"])
    )
    (asked,) = launches
    whole = prepare_deepspeed_cmd_env(asked)[1] if asked.use_deepspeed else prepare_multi_gpu_env(asked)
    return {key: value for key, value in whole.items() if os.environ.get(key) != value and key != "PYTHONPATH"}


@pytest.mark.parametrize(
    ("name", "wrapped", "stage"),
    [
        ("multi_gpu", "LlamaForCausalLM", 0),
        ("fsdp2", "FSDPLlamaForCausalLM", 0),
        ("deepspeed_zero1", "DeepSpeedEngine", 1),
        ("deepspeed_zero2", "DeepSpeedEngine", 2),
        ("deepspeed_zero3", "DeepSpeedEngine", 3),
    ],
)
def test_two_processes_are_as_one(name, wrapped, stage, tmp_path, monkeypatch):
    environment = environment_of(name, monkeypatch)
    done = torchrun(processes_run.__file__, str(tmp_path), KIND, deepspeed=stage > 0, **environment)
    assert_done(done)
    one, found = processes_run.run(tmp_path / "one", "sequence"), results(tmp_path, KIND)
    assert [(each["wrapped"], each["stage"]) for each in found] == [(wrapped, stage)] * 2
    total = sum(weight.numel() for weight in one["weights"].values())
    expected = total / 2 if name in SHARDED else total
    assert all(abs(each["parts"] - expected) < 0.05 * total for each in found)
    assert_close(one, found[0], allowed=1e-5)
    assert_same_log(one, found[0])


def test_an_environment_for_a_cpu_does_not_leave_deepspeed_out(tmp_path, monkeypatch):
    """accelerate would train without DeepSpeed."""
    environment = environment_of("deepspeed_zero3", monkeypatch) | {"ACCELERATE_USE_CPU": "true"}
    done = torchrun(processes_run.__file__, str(tmp_path), KIND, deepspeed=True, **environment)
    assert done.returncode != 0
    assert "accelerate leaves it out" in cause(done.stderr)
