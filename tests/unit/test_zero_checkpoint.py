"""Whole checkpoints under DeepSpeed, without DeepSpeed: a stand-in keeps masters and moments in flat buffers."""

from __future__ import annotations

import copy
import logging
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from rloom.errors import ConfigError
from rloom.models.low_bits import LOW_BITS, split_float32
from rloom.training import zero_checkpoint
from rloom.training.zero_checkpoint import ZeroState, check_files, processes_in
from tests.conftest import make_model


class Place:
    """Where a weight's entries are in a flat buffer; here a buffer has one weight."""

    def __init__(self, number: int) -> None:
        self.param_group_index, self.fields = number, {}

    def set_optim_state_fragment(self, buffer, state) -> None:
        self.fields = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.shape == buffer.shape}


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch):
    """DeepSpeed's functions, for weights that `taken` has taken."""
    package, utils = ModuleType("deepspeed"), ModuleType("deepspeed.utils")
    package.zero = SimpleNamespace(GatheredParameters=lambda params, modifier_rank=None: nullcontext())
    utils.safe_get_full_fp32_param = lambda p: p.master.detach().view_as(p).clone()
    utils.safe_set_full_fp32_param = lambda p, value: p.master.data.copy_(value.flatten())
    utils.safe_get_full_optimizer_state = lambda p, name: p._hp_mapping.fields[name].view_as(p).clone()
    utils.safe_set_full_optimizer_state = lambda p, value, name: p._hp_mapping.fields[name].copy_(value.flatten())
    utils.safe_set_local_fp32_param = utils.safe_set_local_optimizer_state = None
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)


def taken(dtype=torch.float32, base=torch.optim.AdamW, **scaler):
    """A model whose optimizer steps flat float32 buffers, a group of it being empty; and what saves it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).to(dtype)
    state = ZeroState(model, main=True)
    optimizer = base([{"params": [model.weight], "lr": 0.5}, {"params": []}, {"params": [model.bias], "lr": 0.1}])
    with state.preparing(accelerator := SimpleNamespace(prepare=lambda *things: things)):
        accelerator.prepare(model, optimizer)
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
    for number, (p, group) in enumerate(zip(model.parameters(), optimizer.param_groups, strict=True)):
        p.master, p._hp_mapping = nn.Parameter(p.detach().float().flatten()), Place(number)
        group["params"] = [p.master]
    zero = SimpleNamespace(optimizer=optimizer, dynamic_loss_scale=bool(scaler), loss_scaler=SimpleNamespace(**scaler))
    return model, SimpleNamespace(optimizer=zero, step=lambda: step(model, optimizer)), state


def step(model, optimizer) -> None:
    for number, p in enumerate(model.parameters()):
        p.master.grad = torch.linspace(-1, 1, p.numel()) * 1e-3 * (number + 1)
    optimizer.step()
    for p in model.parameters():
        p.data.copy_(p.master.view_as(p))


def saved(model, zero, state) -> tuple[dict, dict]:
    with state.whole_weights(model):
        weights = dict(model.state_dict())
    with state.whole_optimizer(zero):
        return weights, copy.deepcopy(zero.state_dict())


def load(model, zero, state, weights, optimizer) -> None:
    with state.whole_weights(model, loading=True):
        model.load_state_dict(weights)
    with state.whole_optimizer(zero, loading=True):
        zero.load_state_dict(optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_saved_goes_on_to_the_same_bits(dtype):
    model, zero, state = taken(dtype)
    zero.step()
    weights, optimizer = saved(model, zero, state)
    assert weights["weight"].dtype == (torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    zero.step()
    again, other, theirs = taken(dtype)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
            p.master.zero_()
    load(again, other, theirs, weights, optimizer)
    other.step()
    for p, resumed in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, resumed)
        assert torch.equal(p.master, resumed.master)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(*(one._hp_mapping.fields[name] for one in (p, resumed)))


def test_weights_without_a_state_keep_their_low_bits():
    """Plain SGD has no state of its own."""
    model, zero, state = taken(torch.bfloat16, torch.optim.SGD)
    zero.step()
    expected = [p.master.detach().clone() for p in model.parameters()]
    assert any(split_float32(master)[1].any() for master in expected)
    other = taken(torch.bfloat16, torch.optim.SGD)
    load(*other, *saved(model, zero, state))
    assert all(torch.equal(p.master, master) for p, master in zip(other[0].parameters(), expected, strict=True))


def test_masters_may_be_bfloat16(monkeypatch):
    """As DeepSpeed has them with `bf16_master_weights_and_grads`; then there are no low bits."""
    model, zero, state = taken(torch.bfloat16)
    zero.step()
    monkeypatch.setattr(sys.modules["deepspeed.utils"], "safe_get_full_fp32_param", lambda p: p.detach().clone())
    weights, whole = saved(model, zero, state)
    for number, p in enumerate(model.parameters()):
        assert whole["state"][number][LOW_BITS].shape == p.shape
        assert not whole["state"][number][LOW_BITS].any()
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_frozen_embeddings_are_saved_with_an_adapter(monkeypatch):
    """peft saves those that have an adapter. Other frozen parts are not gathered."""
    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["lm_head", "q_proj"]))
    state = ZeroState(model, main=True)
    for number, p in enumerate(model.parameters()):
        p.ds_id = number
    gathered = []
    monkeypatch.setattr(zero_checkpoint, "_weight", lambda p: gathered.append(p) or p.detach())
    with state.whole_weights(model):
        saved = get_peft_model_state_dict(model)
    base = {name: value for name, value in saved.items() if "base_layer" in name}
    assert list(base) == ["base_model.model.lm_head.base_layer.weight"]
    assert torch.equal(*base.values(), model.get_output_embeddings().base_layer.weight)
    assert len(gathered) == len(saved) + 1  # the input's embeddings


def test_a_plain_optimizer_goes_on_from_it():
    """Of a plain one that was in all groups and steps; each weight counts its own steps."""
    model, zero, state = taken()
    zero.step()
    weights, whole = saved(model, zero, state)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(weights)
    groups = [{"params": [plain.weight]}, {"params": []}, {"params": [plain.bias]}]
    optimizer = torch.optim.AdamW(groups)
    optimizer.load_state_dict(whole)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3, 0.1]
    for number, p in enumerate(plain.parameters()):
        p.grad = (torch.linspace(-1, 1, p.numel()) * 1e-3 * (number + 1)).view_as(p)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in plain.parameters()] == [2.0, 2.0]
    zero.step()
    for p, expected in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, expected)


def test_the_schedules_rates_are_saved():
    model, zero, state = taken()
    zero.step()
    for group in zero.optimizer.optimizer.param_groups:
        group["lr"] /= 4
    assert [group["lr"] for group in saved(model, zero, state)[1]["param_groups"]] == [0.125, 1e-3, 0.025]


def test_nothing_is_there_before_the_first_step():
    model, zero, state = taken()
    weights, whole = saved(model, zero, state)
    assert whole["state"] == {}
    other = taken()
    load(*other, weights, whole)
    other[1].step()


def test_masters_of_an_optimizer_with_its_own_are_taken_over():
    """As `MasterWeights` saves them: they have more bits than the weights."""
    model, zero, state = taken(torch.bfloat16)
    zero.step()
    weights, whole = saved(model, zero, state)
    expected = [torch.full_like(p, 1.001, dtype=torch.float32) for p in model.parameters()]
    for values in whole["state"].values():
        del values[LOW_BITS]
    other = taken(torch.bfloat16)
    load(*other, weights, {**whole, "masters": expected})
    for p, value in zip(other[0].parameters(), expected, strict=True):
        assert torch.equal(p.master.view_as(p), value)
        assert torch.equal(p, value.bfloat16())


def test_low_bits_beside_float32_weights_change_nothing():
    """A number half-way between two bfloat16 numbers is rounded up here, and to the even one by torch."""
    model, zero, state = taken()
    zero.step()
    weights, whole = saved(model, zero, state)
    weights = {name: torch.full_like(value, 1 + 2**-8) for name, value in weights.items()}
    for number, value in enumerate(weights.values()):
        whole["state"][number][LOW_BITS] = split_float32(value)[1]
    other = taken()
    load(*other, weights, whole)
    assert all(torch.equal(p.master, torch.full_like(p.master, 1 + 2**-8)) for p in other[0].parameters())


def test_unequal_steps_are_told(caplog):
    model, zero, state = taken()
    zero.step()
    weights, whole = saved(model, zero, state)
    whole["state"][1]["step"] = torch.tensor(5.0)
    other = taken()
    with caplog.at_level(logging.WARNING):
        load(*other, weights, whole)
    assert "unequally often" in caplog.text
    assert [float(s["step"]) for s in other[1].optimizer.optimizer.state.values()] == [5.0, 5.0]


def test_other_optimizers_are_refused():
    model, zero, state = taken()
    zero.step()
    weights, whole = saved(model, zero, state)
    fewer = {**whole, "param_groups": whole["param_groups"][:1]}
    with pytest.raises(ConfigError, match=r"groups of \[1\] weights, and this run's \[1, 0, 1\]"):
        load(*taken(), weights, fewer)
    whole["state"][0]["exp_avg_sq_row"] = torch.zeros(2)
    with pytest.raises(ConfigError, match="keeps exp_avg_sq_row in another shape"):
        load(*taken(), weights, whole)


def test_optimizers_of_deepspeeds_count_in_plain_numbers():
    theirs = type("FusedAdam", (torch.optim.AdamW,), {"__module__": "deepspeed.ops.adam"})
    model, zero, state = taken()
    zero.step()
    weights, whole = saved(model, zero, state)
    other = taken(base=theirs)
    load(*other, weights, whole)
    inner = other[1].optimizer.optimizer
    assert [type(s["step"]) for s in inner.state.values()] == [int, int]
    assert [group["step"] for group in inner.param_groups] == [1, 1]
    again = saved(other[0], other[1], other[2])[1]
    assert torch.equal(again["state"][0]["step"], torch.tensor(1.0))


def test_the_loss_scale_goes_on():
    model, zero, state = taken(cur_scale=64.0, cur_iter=3, mode="dynamic")
    zero.step()
    weights, whole = saved(model, zero, state)
    assert whole["loss_scaler"] == {"cur_scale": 64.0, "cur_iter": 3}
    other = taken(cur_scale=65536.0, cur_iter=0, mode="dynamic")
    load(*other, weights, whole)
    assert vars(other[1].optimizer.loss_scaler) == {"cur_scale": 64.0, "cur_iter": 3, "mode": "dynamic"}


def test_weights_of_another_shape_are_refused():
    model, _, state = taken()
    with state.whole_weights(model, loading=True), pytest.raises(RuntimeError, match="size mismatch for weight"):
        model.load_state_dict({"weight": torch.zeros(5, 3), "bias": torch.zeros(2)})


def test_files_of_deepspeeds_are_for_as_many(tmp_path):
    check_files(tmp_path, count=3, by_deepspeed=False)
    parts = tmp_path / "global_step4"
    parts.mkdir()
    for rank in range(2):
        (parts / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    (parts / "mp_rank_00_model_states.pt").touch()
    assert processes_in(tmp_path) == 2
    check_files(tmp_path, count=2, by_deepspeed=True)
    # Without DeepSpeed, with one process more.
    for count in (0, 3):
        with pytest.raises(ConfigError, match=r"in parts for 2 process\(es\): go on with 2 under DeepSpeed"):
            check_files(tmp_path, count=count, by_deepspeed=False)
    with pytest.raises(ConfigError, match="offload to the cpu"):
        check_files(parts, count=2, by_deepspeed=True)
