"""What FSDP2's processes load, by a process group of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rloom.models.low_bits import split_float32
from rloom.training.sharded_state import _join_low_bits


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("saved_in", [torch.float32, torch.bfloat16])
def test_low_bits_belong_to_the_weight_that_they_were_counted_from(mesh, saved_in):
    """Also beside float32 weights, which have them already. Half-way between two bfloat16 numbers these are counted
    from the upper one, and torch rounds to the even one."""
    value = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.1])
    weight, low_bits = split_float32(value)
    loaded = value.clone() if saved_in == torch.float32 else weight.float()
    part = distribute_tensor(loaded, mesh, [Shard(0)])
    _join_low_bits(part, low_bits)
    assert torch.equal(part.to_local(), value)
