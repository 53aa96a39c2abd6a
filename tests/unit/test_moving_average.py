"""A reference that follows a bfloat16 policy moves as a float32 one does."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from rloom.models import moving_average
from rloom.models.master_weights import MasterWeights
from rloom.models.optimizers import SplitAdamW, values_of
from rloom.models.reference import REF_ADAPTER, make_reference
from tests.conftest import make_model

ALPHA, SYNCS = 0.01, 7


def a_little_off(model):
    """A policy that training has moved a little: by 1%, of which a hundredth is far below bfloat16's precision."""
    policy = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    return policy


def value(state, name):
    """What a weight of a checkpoint and its rest stand for, in integers: upper half and lower half of a float32."""
    if state[name].dtype == torch.float32:
        return state[name].double()
    bits = state[name].view(torch.int16).long() * 65536 + state[name + ":rest"].long()
    return bits.int().view(torch.float32).double()


def closed_form(start, target, syncs, alpha=ALPHA):
    """Where `syncs` steps of `alpha` lead, in float64."""
    kept = (1 - alpha) ** syncs
    return kept * start.double() + (1 - kept) * target.double()


def assert_rounded(weight, exact):
    """The weight is the nearest bfloat16 number: either one where the value is halfway between two."""
    nearest = exact.float().bfloat16()
    halfway = (exact.float().view(torch.int32) & 0xFFFF) == 0x8000
    assert ((weight == nearest) | halfway).all()


@pytest.mark.parametrize("offload", [False, True])
def test_a_small_alpha_is_not_lost(offload):
    start = make_model().bfloat16()
    policy = a_little_off(start)
    reference = make_reference(start, new_adapter=False, follows=True, other=None, offload=offload)
    for _ in range(SYNCS):
        reference.sync(policy, ALPHA)
    state = reference.state_dict()
    for name, target in policy.named_parameters():
        expected = closed_form(start.get_parameter(name), target, SYNCS)
        torch.testing.assert_close(value(state, name), expected, rtol=SYNCS * 2**-22, atol=1e-9)
        assert_rounded(reference.model.get_parameter(name), value(state, name))


def test_a_long_way_in_small_steps_is_gone_to_its_end():
    start = make_model().bfloat16()
    policy = a_little_off(start)
    reference = make_reference(start, new_adapter=False, follows=True, other=None)
    for _ in range(1000):
        reference.sync(policy, ALPHA)
    for mine, theirs in zip(reference.model.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-8, atol=0)  # 1 step of bfloat16 at most
        assert (mine == theirs).float().mean() > 0.99


def test_float32_weights_move_as_ever():
    start = make_model()
    policy = a_little_off(start)
    reference = make_reference(start, new_adapter=False, follows=True, other=None)
    reference.sync(policy, ALPHA)
    assert reference.state_dict().keys() == dict(start.named_parameters()).keys()
    for name, parameter in start.named_parameters():
        expected = parameter.detach().mul(1 - ALPHA).add(policy.get_parameter(name).detach(), alpha=ALPHA)
        assert torch.equal(reference.model.get_parameter(name), expected)


def test_large_weights_are_mixed_in_pieces(monkeypatch):
    start = make_model().bfloat16()
    policy = a_little_off(start)
    whole, pieces = (make_reference(start, new_adapter=False, follows=True, other=None) for _ in range(2))
    whole.sync(policy, ALPHA)
    monkeypatch.setattr(moving_average, "ELEMENTS_AT_A_TIME", 40)  # less than two rows of 32, more than a norm

    def looked_at(p, piece):
        assert p[piece].numel() <= 48  # a row of down_proj: no smaller piece is a view
        return p[piece]

    pieces.sync(policy, ALPHA, looked_at)
    assert all(torch.equal(part, pieces.state_dict()[name]) for name, part in whole.state_dict().items())


def test_a_reference_that_stands_still_keeps_no_bits():
    reference = make_reference(make_model().bfloat16(), new_adapter=False, follows=False, other=None)
    assert not any(tensor.dtype == torch.int16 for tensor in reference.state_dict().values())
    with pytest.raises(AssertionError, match="stand still"):
        reference.sync(reference.model, ALPHA)


@pytest.mark.parametrize("kind", ["split", "master"])
def test_the_bits_that_the_optimizer_keeps_count(kind):
    """With α=1 the reference is the policy, to the last bit of the float32 number that its optimizer has."""
    start = make_model().bfloat16()
    policy, precise = copy.deepcopy(start), copy.deepcopy(start).float()
    options = {"lr": 1e-5, "weight_decay": 0.0}
    plain = torch.optim.AdamW(precise.parameters(), fused=kind == "split", **options)
    if kind == "split":
        optimizer = SplitAdamW(policy.parameters(), **options)
    else:
        optimizer = MasterWeights(policy.parameters(), make=torch.optim.AdamW, **options)
    torch.manual_seed(2)
    for mine, theirs in zip(policy.parameters(), precise.parameters(), strict=True):
        mine.grad = theirs.grad = torch.randn(mine.shape)
    optimizer.step()
    plain.step()
    reference = make_reference(start, new_adapter=False, follows=True, other=None)
    reference.sync(policy, 1.0, values_of(optimizer))
    for name, expected in precise.named_parameters():
        assert torch.equal(value(reference.state_dict(), name), expected.detach().double())
        assert not torch.equal(expected, start.get_parameter(name).float())


def test_a_checkpoint_goes_on_to_the_same_bits():
    start = make_model().bfloat16()
    policy = a_little_off(start)
    through, begun, resumed = (make_reference(start, new_adapter=False, follows=True, other=None) for _ in range(3))
    for _ in range(4):
        through.sync(policy, ALPHA)
    for _ in range(2):
        begun.sync(policy, ALPHA)
    resumed.load_state_dict(copy.deepcopy(begun.state_dict()))
    for _ in range(2):
        resumed.sync(policy, ALPHA)
    ends = [through.state_dict(), resumed.state_dict()]
    assert any(rest.any() for name, rest in ends[0].items() if name.endswith(":rest"))
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(part, ends[1][name]) for name, part in ends[0].items())


def test_a_checkpoint_without_the_bits_begins_them_at_zero():
    start = make_model().bfloat16()
    policy = a_little_off(start)
    reference = make_reference(start, new_adapter=False, follows=True, other=None)
    reference.sync(policy, ALPHA)  # bits that must not survive
    older = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    reference.load_state_dict(older)
    state = reference.state_dict()
    assert all(torch.equal(value(state, name), weight.double()) for name, weight in older.items())


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_checkpoint_in_another_dtype_goes_on_to_the_same_bits(dtypes):
    """As where processes that hold parts in bfloat16 go on from one that has float32 weights, and the other way."""
    start = torch.linspace(-1, 1, 12).bfloat16()
    averages = [moving_average.MovingAverage({"w": start.to(dtype, copy=True)}, moves=True) for dtype in dtypes]
    averages[0].move([start.float() * 1.01], ALPHA, lambda theirs, piece: theirs[piece])
    averages[1].load_state_dict(averages[0].state_dict())
    assert torch.equal(averages[1].value("w"), averages[0].value("w"))
    assert not torch.equal(averages[0].value("w"), start.float())


def bfloat16_adapters():
    """As QLoRA has them, and a bfloat16 copy of the head."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
    return get_peft_model(make_model().bfloat16(), lora, autocast_adapter_dtype=False)


def test_adapters_lose_nothing_either():
    policy = bfloat16_adapters()
    reference = make_reference(policy, new_adapter=False, follows=True, other=None)
    start = {name: parameter.clone() for name, parameter in reference.state_dict().items()}
    names = [name for name in start if not name.endswith(":rest")]
    assert len(names) == 9  # A and B of two projections in two layers, and the head
    with torch.no_grad():
        for name in names:
            policy.get_parameter(name.replace(REF_ADAPTER, "default")).mul_(1.01)
    for _ in range(SYNCS):
        reference.sync(policy, ALPHA)
    for name in names:
        target = policy.get_parameter(name.replace(REF_ADAPTER, "default"))
        state = reference.state_dict()
        expected = closed_form(start[name], target, SYNCS)
        torch.testing.assert_close(value(state, name), expected, rtol=SYNCS * 2**-22, atol=1e-9)
        assert_rounded(policy.get_parameter(name), value(state, name))


def test_the_copy_of_a_bfloat16_adapter_computes_as_it_does():
    policy = bfloat16_adapters().eval()
    reference = make_reference(policy, new_adapter=False, follows=True, other=None)
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        expected = policy(ids).logits
        with reference.use(policy) as module:
            assert torch.equal(module(ids).logits, expected)


def test_weights_that_are_cast_after_the_reference_was_made_keep_their_bits():
    """DeepSpeed makes the policy bfloat16 when training begins, and the reference's adapter with it."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    policy = get_peft_model(make_model(), lora)
    reference = make_reference(policy, new_adapter=True, follows=True, other=None)
    policy.bfloat16()
    start = {name: weight.detach().float() for name, weight in reference.weights.weights.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 0.01 * torch.randn_like(parameter))
    for _ in range(SYNCS):
        reference.sync(policy, ALPHA)
    state = reference.state_dict()
    for name, first in start.items():
        target = policy.get_parameter(name.replace(REF_ADAPTER, "default")).detach().float()
        torch.testing.assert_close(value(state, name), closed_form(first, target, SYNCS), rtol=1e-6, atol=1e-8)


class Rows:
    """One of three processes that hold some rows of each weight. What the others have is in `all_parts`."""

    def __init__(self, rank: int, all_parts: list) -> None:
        self.rank, self.all_parts = rank, all_parts

    def first_row(self, p):
        return min(self.rank * -(-len(p) // 3), len(p))

    def own_part(self, p):
        return p[self.first_row(p) : min((self.rank + 1) * -(-len(p) // 3), len(p))]

    def joined(self, p, part):
        self.all_parts.append((self.rank, part.clone()))
        return part


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("at_once", [1 << 22, 12])
def test_processes_that_move_their_rows_are_as_one(dtype, at_once, monkeypatch):
    """Some have fewer rows than others, or none. Saved and loaded, they go on with their low bits."""
    monkeypatch.setattr(moving_average, "ELEMENTS_AT_A_TIME", at_once)
    torch.manual_seed(2)
    start = {"many": torch.randn(7, 5).to(dtype), "few": torch.randn(2, 3).to(dtype), "one": torch.randn(1).to(dtype)}
    targets = [weight.float() * 1.01 for weight in start.values()]

    def value(theirs, piece):
        return theirs[piece]

    whole = moving_average.MovingAverage({n: w.clone() for n, w in start.items()}, moves=True)
    for _ in range(4):
        whole.move(targets, ALPHA, value)
    expected = whole.state_dict()
    parts: list = []
    for rank in range(3):
        cut = [
            moving_average.MovingAverage({n: w.clone() for n, w in start.items()}, moves=True, parts=Rows(rank, parts))
            for _ in range(2)
        ]
        for _ in range(2):
            cut[0].move(targets, ALPHA, value)
        # What a checkpoint of all of them has, the second one goes on with.
        halfway = moving_average.MovingAverage({n: w.clone() for n, w in start.items()}, moves=True)
        for _ in range(2):
            halfway.move(targets, ALPHA, value)
        cut[1].load_state_dict(halfway.state_dict())
        for one in cut:
            for _ in range(2):
                one.move(targets, ALPHA, value)
            found = one.state_dict()
            assert found.keys() == expected.keys()
            for name, values in found.items():
                assert torch.equal(values, Rows(rank, []).own_part(expected[name])), (rank, name)
    # Processes ask for the same in the same order, or would wait for each other for ever.
    asked = [[part.dtype for rank, part in parts if rank == one] for one in range(3)]
    assert asked[0] == asked[1] == asked[2]
    # Backends of processes do not send numbers of 16 bits that are no floats.
    assert {part.dtype for _, part in parts} == {dtype} | ({torch.int32} if dtype == torch.bfloat16 else set())
