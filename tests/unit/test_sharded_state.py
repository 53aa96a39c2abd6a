"""What FSDP2's processes load, by a process group of one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from rloom.models.low_bits import split_float32
from rloom.models.master_weights import MasterWeights
from rloom.training import sharded_state
from rloom.training.sharded_state import ShardedState, _join_low_bits
from tests.conftest import make_model


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


def as_one():
    """A model of one process, and plain SGD, which has no state of its own, on float32 copies."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    return model, MasterWeights([{"params": list(model.parameters())}], make=torch.optim.SGD, lr=1e-3)


def in_parts(mesh):
    """The same in parts, which are float32, and what saves and loads it."""
    model, _ = as_one()
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach().float(), mesh, [Shard(0)])))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), ShardedState(model, dtypes, group=None, main=True)


def stepped(model, optimizer) -> list:
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1, dtype=torch.float32)
    optimizer.step()
    return list(model.parameters())


def test_weights_without_a_state_keep_their_low_bits(mesh):
    """However many processes go on."""
    model, optimizer, state = in_parts(mesh)
    expected = [p.to_local().detach().clone() for p in stepped(model, optimizer)]
    with state.whole_weights(model), state.whole_optimizer(optimizer):
        weights, whole = dict(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    other, theirs, loads = in_parts(mesh)
    one, alone = as_one()
    one.load_state_dict(weights)
    alone.load_state_dict(copy.deepcopy(whole))
    with loads.whole_weights(other, loading=True), loads.whole_optimizer(theirs, loading=True):
        other.load_state_dict(weights)
        theirs.load_state_dict(whole)
    for value, part, p in zip(expected, other.parameters(), one.parameters(), strict=True):
        assert split_float32(value)[1].any()
        assert torch.equal(part.to_local(), value)
        assert torch.equal(alone.masters[p], value)
    assert not any(alone.state_dict()["state"].values())


def test_copies_of_one_process_are_taken_over(mesh):
    one, alone = as_one()
    stepped(one, alone)
    other, theirs, loads = in_parts(mesh)
    with loads.whole_weights(other, loading=True), loads.whole_optimizer(theirs, loading=True):
        other.load_state_dict(one.state_dict())
        theirs.load_state_dict(alone.state_dict())
    for part, master in zip(other.parameters(), alone.masters.values(), strict=True):
        assert torch.equal(part.to_local(), master)


def test_of_a_model_with_adapters_what_peft_saves_is_gathered(mesh, monkeypatch):
    """All adapters, also one that is frozen, and embeddings. The rest of the model stays where it is."""
    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    model.add_adapter("frozen", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    expected = {name: get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config}
    expected = {name: {key: value.clone() for key, value in one.items()} for name, one in expected.items()}
    state = ShardedState(model, {name: p.dtype for name, p in model.named_parameters()}, group=None, main=True)
    fully_shard(model, mesh=mesh)
    gathered = []
    monkeypatch.setattr(sharded_state, "whole_of", lambda part: gathered.append(part) or part.full_tensor())
    with state.whole_weights(model):
        for name, one in expected.items():
            saved = get_peft_model_state_dict(model, adapter_name=name)
            assert list(saved) == list(one)
            assert all(torch.equal(saved[key], one[key]) for key in one)
    assert len(gathered) == sum(map(len, expected.values())) + 1  # the input's embeddings
