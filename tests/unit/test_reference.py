"""References that are adapters leave the policy as they found it."""

from __future__ import annotations

import pytest
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
