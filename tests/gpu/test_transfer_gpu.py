"""Weights by NCCL, whose communicator is a stand-in: NCCL itself refuses two ranks on one GPU."""

from __future__ import annotations

import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rloom.generation.vllm.transfer import NcclGroup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
# Two seconds at the clock of an H200, more on slower ones.
CYCLES = 4_000_000_000


@pytest.fixture
def sleeps(monkeypatch):
    """A communicator that takes its time for a broadcast, on the stream that it is given."""
    made = []

    class Communicator:
        def __init__(self, group, device):
            self.sent, self.destroyed = [], False
            made.append(self)

        def broadcast(self, tensor, src, stream):
            self.sent.append(tensor)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)

        def destroy(self):
            self.destroyed = True

    parts = {
        "vllm.distributed.device_communicators": {"pynccl": SimpleNamespace(PyNcclCommunicator=Communicator)},
        "vllm.distributed.utils": {"StatelessProcessGroup": SimpleNamespace(create=lambda **_: None)},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return made


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_server_that_is_lost_is_not_waited_for(sleeps, is_lost):
    group = NcclGroup("127.0.0.1", 0, 2).join()
    weight = torch.ones(8, device="cuda")
    # Once beforehand: kernels are loaded when they are first called, for seconds where others use the GPU too.
    assert float((weight + 1).sum()) == 16
    torch.cuda.synchronize()
    began = time.monotonic()
    group.broadcast(weight)
    # The device does other things meanwhile.
    assert float((weight + 1).sum()) == 16
    group.wait(lambda: is_lost)
    waited = time.monotonic() - began
    (communicator,) = sleeps
    assert communicator.destroyed == is_lost
    assert (waited < 1.0) == is_lost
    torch.cuda.synchronize()
