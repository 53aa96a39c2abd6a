"""References that are adapters leave the policy as they found it."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig, get_peft_model

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


# -- parameters that adapters share: biases (peft's `bias=`), and what else a user trains of the base model


def with_biases(bias, **options):
    """A policy with trained biases, which peft keeps in the base model whatever adapter is on."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias=bias, init_lora_weights=False, **options)
    return get_peft_model(make_model(attention_bias=True), lora).eval()


def logits(module):
    with torch.no_grad():
        return module(torch.arange(4, 40)[None]).logits


def train_a_little(policy):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("bias", ["lora_only", "all"])
@pytest.mark.parametrize("follows", [False, True])
def test_an_adapter_with_biases_is_its_own_reference(bias, follows):
    policy = with_biases(bias)
    chosen, before = trained(policy), logits(policy)
    assert any(name.endswith("q_proj.base_layer.bias") for name in chosen)
    reference = make_reference(policy, new_adapter=False, follows=follows, other=None)
    assert trained(policy) == chosen
    train_a_little(policy)
    after = logits(policy)
    with reference.use(policy) as module:
        assert torch.equal(logits(module), before)
    assert torch.equal(logits(policy), after)
    assert trained(policy) == chosen


@pytest.mark.parametrize("make", [half_frozen_policy, lambda: with_biases("lora_only")], ids=["a norm", "biases"])
def test_without_the_adapter_the_model_is_as_it_was_given(make):
    """Also where more than the adapter is trained. peft only warns that biases stay."""
    policy = make().eval()
    twin = copy.deepcopy(policy).unload()
    reference = make_reference(policy, new_adapter=True, follows=False, other=None)
    train_a_little(policy)
    with reference.use(policy) as module:
        assert torch.equal(logits(module), logits(twin))


def test_biases_follow_the_policy():
    policy = with_biases("lora_only")
    names = trained(policy)
    start = {name: policy.get_parameter(name).detach().clone() for name in names}
    reference = make_reference(policy, new_adapter=True, follows=True, other=None)
    train_a_little(policy)
    reference.sync(policy, 0.25)
    expected = copy.deepcopy(policy)
    for name in names:
        expected.get_parameter(name).data = start[name] * 0.75 + policy.get_parameter(name).detach() * 0.25
    with reference.use(policy) as module:
        torch.testing.assert_close(logits(module), logits(expected))


def test_biases_are_in_the_checkpoint():
    policy = with_biases("lora_only")
    reference = make_reference(policy, new_adapter=True, follows=True, other=None)
    train_a_little(policy)
    reference.sync(policy, 0.25)
    again = with_biases("lora_only")
    resumed = make_reference(again, new_adapter=True, follows=True, other=None)
    resumed.load_state_dict(reference.state_dict())
    again.load_state_dict(policy.state_dict())
    with reference.use(policy) as left, resumed.use(again) as right:
        assert torch.equal(logits(left), logits(right))


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
    with trips.reference.use(trips.policy, head_only=True):
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


def test_biases_of_a_policy_that_was_cast_since():
    policy = with_biases("all")
    reference = make_reference(policy, new_adapter=True, follows=False, other=None)
    policy.bfloat16()
    with reference.use(policy) as module:
        assert logits(module).dtype == torch.bfloat16


def test_an_adapter_may_be_called_like_a_part_of_the_model():
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias="lora_only", init_lora_weights=False)
    policy = get_peft_model(make_model(attention_bias=True), lora, adapter_name="model").eval()
    twin = copy.deepcopy(policy).unload()
    reference = make_reference(policy, new_adapter=True, follows=False, other=None)
    assert all(name.endswith("bias") for name in reference.shared)
    train_a_little(policy)
    with reference.use(policy) as module:
        assert torch.equal(logits(module), logits(twin))


def test_an_adapter_whose_parameters_do_not_have_its_name():
    policy = get_peft_model(make_model(), AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM"))
    expected = logits(make_model().eval())
    reference = make_reference(policy.eval(), new_adapter=True, follows=False, other=None)
    train_a_little(policy)
    with reference.use(policy) as module:
        torch.testing.assert_close(logits(module), expected)


@pytest.mark.parametrize("init", [True, "gaussian", "pissa", "pissa_niter_4", "olora"])
def test_the_reference_is_the_policy_as_it_starts(init):
    """PiSSA and OLoRA put a part of the base weights into the adapter: without it the model is another."""
    torch.manual_seed(0)
    policy = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init))
    ids = torch.arange(10).unsqueeze(0)
    start = policy(input_ids=ids).logits.detach()
    reference = make_reference(policy, new_adapter=True, follows=False, other=None)
    torch.testing.assert_close(policy(input_ids=ids).logits.detach(), start)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5)
    assert not torch.allclose(policy(input_ids=ids).logits.detach(), start, atol=1e-2)
    with reference.use(policy) as module:
        torch.testing.assert_close(module(input_ids=ids).logits.detach(), start, rtol=1e-4, atol=1e-4)
    assert (reference.adapter is None) == (init in (True, "gaussian"))
