"""References that are adapters leave the policy as they found it."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rloom.models.reference import REF_ADAPTER, make_reference
from tests.conftest import make_model


def half_frozen_policy():
    """A user's choice: one half of the adapter frozen, and a norm of the base model trained."""
    policy = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
        if name.endswith("model.norm.weight"):
            parameter.requires_grad_(True)
    return policy


def trained(policy):
    return {name for name, parameter in policy.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("new_adapter", [True, False])
def test_what_is_frozen_stays_frozen(new_adapter):
    policy = half_frozen_policy()
    chosen = trained(policy)
    assert any("lora_B" in name for name in chosen)
    reference = make_reference(policy, new_adapter=new_adapter, follows=False, other=None)
    assert trained(policy) == chosen
    with reference.use(policy) as module:
        assert module is policy
    assert trained(policy) == chosen


def test_a_failure_under_the_reference_leaves_the_policy_as_it_was():
    policy = half_frozen_policy()
    chosen, active = trained(policy), policy.active_adapter
    reference = make_reference(policy, new_adapter=False, follows=False, other=None)

    def fail():
        with reference.use(policy):
            assert policy.active_adapter == REF_ADAPTER
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert trained(policy) == chosen
    assert policy.active_adapter == active


def test_an_earlier_references_adapter_is_replaced_and_frozen():
    policy = half_frozen_policy()
    chosen = trained(policy)
    for _ in range(2):
        make_reference(policy, new_adapter=False, follows=False, other=None)
    assert trained(policy) == chosen


def test_an_adapter_that_was_loaded_frozen_is_trained():
    """As `PeftModel.from_pretrained` gives it: nobody chose what to train."""
    policy = half_frozen_policy().requires_grad_(False)
    reference = make_reference(policy, new_adapter=False, follows=False, other=None)
    expected = {n for n, _ in policy.named_parameters() if "lora_" in n and REF_ADAPTER not in n}
    assert trained(policy) == expected
    with reference.use(policy):
        pass
    assert trained(policy) == expected


class Trips:
    """An offloaded reference whose tensors are copied where they would travel; says which are away from home."""

    def __init__(self, monkeypatch, room=1000):
        self.policy, self.room, to = make_model(), room, torch.Tensor.to
        self.reference = make_reference(self.policy, new_adapter=False, follows=False, other=None, offload=True)
        self.home = {name: p.data_ptr() for name, p in self.reference.model.named_parameters()}

        def travel(tensor, *args, **kwargs):
            self.room -= 1
            if self.room < 0:
                raise torch.OutOfMemoryError("injected")
            return to(tensor, *args, **kwargs).clone()

        monkeypatch.setattr(torch.Tensor, "to", travel)

    def away(self):
        return {name for name, p in self.reference.model.named_parameters() if p.data_ptr() != self.home[name]}


def test_an_offloaded_reference_is_on_the_device_while_it_is_used(monkeypatch):
    trips = Trips(monkeypatch)
    with trips.reference.use_head(trips.policy):
        assert trips.away() == {"lm_head.weight"}
    with trips.reference.staying():
        assert not trips.away()  # nobody has used it yet
        for _ in range(2):
            with trips.reference.use(trips.policy):
                pass
            assert trips.away() == trips.home.keys()
    assert not trips.away()
    tensors = [*trips.reference.model.parameters(), *trips.reference.model.buffers()]
    assert 1000 - trips.room == 1 + len(tensors)


def test_an_offloaded_reference_that_finds_no_room_goes_home(monkeypatch):
    trips = Trips(monkeypatch, room=3)
    with pytest.raises(torch.OutOfMemoryError), trips.reference.use(trips.policy):
        pass
    assert not trips.away()
