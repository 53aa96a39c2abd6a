"""Out of memory under DeepSpeed, with a stand-in for it. The real one is in tests/scale/test_zero_memory.py."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rloom.errors import ConfigError
from rloom.training import zero_attempts
from rloom.training.budget import TokenBudget
from rloom.training.processes import Processes
from rloom.training.zero_attempts import ZeroAttempts, can_be_left, drop_gradients
from rloom.training.zero_engine import DeepSpeedProcess


class Backend:
    """What is behind `deepspeed.comm`: notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def all_reduce(self, tensor, op=None):
        self.sent.append(("all_reduce", tensor.tolist()))
        return "sent"

    def broadcast(self, tensor, src):
        self.sent.append(("broadcast", tensor.tolist()))
        tensor.fill_(7)

    def reduce(self, tensor, dst):
        pass

    def all_gather_into_tensor(self, output_tensor, input_tensor):
        pass

    def reduce_scatter_tensor(self, output_tensor, input_tensor):
        pass

    def has_all_gather_into_tensor(self):
        return True

    def has_reduce_scatter_tensor(self):
        return True


class DeepSpeedZeroOptimizer:
    """DeepSpeed's for ZeRO-1 and ZeRO-2, in the middle of an update."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace()
        self.micro_step_id, self.ready, self.offloaded = 3, True, True
        self.bucket = SimpleNamespace(params=[1], index=1)
        self.bucket.clear = self.bucket.params.clear
        self.ipg_buckets = {torch.float32: self.bucket}
        self.extra_large_param_to_reduce, self.previous_reduced_grads = {0: 1}, {0: [1]}
        self.averaged_gradients, self.all_grad_tensors = {0: [1]}, {0: [1]}
        self.params_already_reduced = [True, False]
        self._backward_hook_state = SimpleNamespace(
            backward_active_depth=1, remaining_grad_acc_hooks=2, seen=True, reset_for_new_step=self._reset
        )
        self.cpu_offload, self._offload_accumulated_param_ids = True, {1}
        self.gradients = 1

    def _reset(self) -> None:
        self._backward_hook_state.seen = False

    def _release_ipg_buffers(self) -> None:
        self.ready = False

    def reset_cpu_buffers(self) -> None:
        self.offloaded = False

    def zero_grad(self, set_to_none: bool) -> None:
        self.gradients = 0


class Engine:
    """DeepSpeed's engine: notes what it is told."""

    def __init__(self) -> None:
        self.optimizer, self.told = DeepSpeedZeroOptimizer(), []

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.told.append(("boundary", is_boundary))

    def backward(self, loss, scale_wrt_gas):
        self.told.append(("backward", float(loss), scale_wrt_gas))

    def step(self):
        self.told.append("step")

    def zero_grad(self):
        self.told.append("zero_grad")


@pytest.fixture
def backend(monkeypatch) -> Backend:
    found = Backend()
    monkeypatch.setattr(zero_attempts, "_backend", lambda: found)
    return found


def test_the_step_waits_for_the_updates_end():
    """accelerate would take it with the last backward, when another process may have failed."""
    processes, engine, accelerator = DeepSpeedProcess(), Engine(), SimpleNamespace()
    processes._engine = engine
    for last in (False, True):
        processes.backward(accelerator, None, torch.tensor(2.0), last=last)
    assert accelerator.sync_gradients
    assert engine.told == [("boundary", False), ("backward", 2.0, False), ("boundary", True), ("backward", 2.0, False)]
    assert processes.add_up([], torch.tensor(2.0)) == 2.0
    assert engine.told[4:] == ["step"]


def test_a_script_without_a_launcher_is_told_of_one():
    """There DeepSpeed looks for MPI. What else is missing is not our guess."""

    processes = DeepSpeedProcess()

    def prepare_without(module: str) -> None:
        processes._whole = SimpleNamespace(preparing=nullcontext)
        with processes.preparing(SimpleNamespace()):
            raise ModuleNotFoundError(name=module)

    with pytest.raises(ConfigError, match=r"DeepSpeed wants a launcher, .*`torchrun --nproc_per_node 1 script\.py`"):
        prepare_without("mpi4py")
    with pytest.raises(ModuleNotFoundError):
        prepare_without("hjson")


def test_nothing_is_left_of_a_failed_update():
    engine = Engine()
    drop_gradients(engine)
    optimizer, state = engine.optimizer, engine.optimizer._backward_hook_state
    assert (optimizer.micro_step_id, optimizer.gradients, engine.told) == (-1, 0, ["zero_grad"])
    assert (optimizer.bucket.params, optimizer.bucket.index, optimizer.ready) == ([], 0, False)
    assert not optimizer.extra_large_param_to_reduce
    assert not optimizer.previous_reduced_grads
    assert optimizer.averaged_gradients == optimizer.all_grad_tensors == {0: None}
    assert optimizer.params_already_reduced == [False, False]
    assert (state.backward_active_depth, state.remaining_grad_acc_hooks, state.seen) == (0, 0, False)
    assert not optimizer.offloaded
    assert optimizer._offload_accumulated_param_ids == set()


def test_one_process_drops_gradients_before_it_repeats():
    processes, engine, budget, attempts = DeepSpeedProcess(), Engine(), TokenBudget(64), []
    processes._engine, processes.can_repeat = engine, True

    def work() -> int:
        attempts.append(engine.optimizer.gradients)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("injected")
        return len(attempts)

    undone: list[int] = []
    undo = lambda: undone.append(engine.optimizer.gradients)  # noqa: E731
    assert processes.retrying(budget, work, undo=undo, idle=lambda last: None) == 2
    assert (attempts, undone, budget.tokens) == ([1, 0], [0], 32)


def test_a_process_that_failed_runs_the_attempt_again_and_leaves_out_what_it_has_had(backend):
    """Others have had three micro-batches. It has sent what they have, once and in their order; numbers that were told
    are told again."""
    attempts, told, lasts = ZeroAttempts(Engine(), Processes()), [], []
    budget, failed = TokenBudget(64), []

    def micro_batch(number: int, *, fails: bool = False) -> None:
        if number == 0:
            numbers = torch.full((1,), -1)
            backend.broadcast(tensor=numbers, src=0)
            told.append(numbers.item())
        result = backend.all_reduce(torch.full((1,), float(number)), None)
        assert result == "sent" or result.wait() is None
        if fails:
            raise torch.OutOfMemoryError("injected")
        attempts.micro_batch_done()

    def work() -> str:
        attempts.begin(3)
        for number in range(3):
            micro_batch(number, fails=number == 1 and not failed and not failed.append(True))
        return "done"

    def idle(last: bool) -> None:
        micro_batch(len(lasts))
        lasts.append(last)

    assert attempts.retrying(budget, work, undo=None, idle=idle, gradient=True) == "done"
    once = [("broadcast", [-1]), ("all_reduce", [0.0]), ("all_reduce", [1.0]), ("all_reduce", [2.0])]
    assert backend.sent == once * 2
    assert told == [7, 7, 7]
    assert lasts == [False, False, True]
    assert budget.tokens == 32
    # Nothing is in front of DeepSpeed's collectives any more.
    assert vars(backend).keys() == {"sent"}


def test_what_is_not_known_is_not_repeated(backend):
    """An optimizer of another class, one that lacks something, options under which more would have to be undone."""

    def left(**changes: Any) -> bool:
        engine = Engine()
        for name, value in changes.items():
            setattr(engine.optimizer, name, value)
        return can_be_left(engine)

    assert left()
    assert not left(__class__=type("BF16_Optimizer", (DeepSpeedZeroOptimizer,), {}))
    assert not left(optimizer=type("MuonWithAuxAdam", (), {})())
    for name in zero_attempts.ELSEWHERE:
        assert not left(**{name: True})
    for name in ("wall_clock_breakdown", "is_deepcompile_enabled"):
        engine: Any = Engine()
        setattr(engine, name, lambda: True)
        assert not can_be_left(engine)
    engine = Engine()
    del engine.optimizer.all_grad_tensors
    assert not can_be_left(engine)
