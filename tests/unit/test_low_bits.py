"""bfloat16 weights move as float32 ones do, and their hidden bits survive a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn

from rloom.models.low_bits import (
    accumulate_in_float32,
    added_as_they_come,
    dither_,
    join_float32,
    split_float32,
    store_float32,
)
from rloom.models.master_weights import MasterWeights
from rloom.models.optimizers import SplitAdamW, optimizer_with_low_bits, warn_of_lost_bits


def test_split_and_join_lose_nothing():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=generator, dtype=torch.int64).int()
    values = bits.view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 3e38)]
    weight, low_bits = split_float32(values)
    assert torch.equal(join_float32(weight, low_bits), values)
    nearest = values.bfloat16()
    same = weight == nearest
    ties = (values.view(torch.int32) & 0xFFFF) == 0x8000  # halfway: either neighbour is nearest
    assert (same | ties).all()


def problem(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
    x, y = torch.randn(256, 32), torch.randn(256, 4)
    return model, x.to(dtype), y


def train(model, x, y, optimizer, steps=200):
    start = [p.detach().clone().float() for p in model.parameters()]
    for _ in range(steps):
        loss = (model(x).float() - y).square().mean()
        loss.backward()
        optimizer.step()
        for p in model.parameters():
            p.grad = None
    moved = sum((p.detach().float() - s).square().sum() for p, s in zip(model.parameters(), start, strict=True))
    with torch.no_grad():
        return float(moved.sqrt()), float((model(x).float() - y).square().mean())


def run(kind, lr):
    if kind == "float32":
        model, x, y = problem(torch.bfloat16)
        model, x = model.float(), x.float()  # the same starting point
        return train(model, x, y, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0))
    model, x, y = problem(torch.bfloat16)
    if kind == "plain":
        return train(model, x, y, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0))
    accumulate_in_float32(model.parameters())
    if kind == "split":
        optimizer = SplitAdamW(model.parameters(), lr=lr, weight_decay=0.0)
    else:
        optimizer = MasterWeights(model.parameters(), make=torch.optim.AdamW, lr=lr, weight_decay=0.0)
    return train(model, x, y, optimizer)


@pytest.mark.parametrize("kind", ["split", "master"])
@pytest.mark.parametrize("lr", [1e-6, 1e-4, 1e-3])
def test_weights_move_as_in_float32(kind, lr):
    distance, loss = run(kind, lr)
    expected, expected_loss = run("float32", lr)
    assert distance == pytest.approx(expected, rel=0.35 if lr == 1e-6 else 0.1)
    assert loss == pytest.approx(expected_loss, rel=0.02)


def test_plain_bfloat16_loses_small_updates():
    """The reason for all this: at 1e-6 nine tenths of the way are lost."""
    assert run("plain", 1e-6)[0] < 0.3 * run("float32", 1e-6)[0]


def test_hidden_bits_equal_a_float32_run_on_the_same_gradients():
    """With the same gradients, the split word follows torch's own float32 AdamW bit for bit."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1000).bfloat16())
    master = nn.Parameter(weight.detach().float())
    accumulate_in_float32([weight])
    ours = SplitAdamW([weight], lr=1e-6, weight_decay=0.1)
    theirs = torch.optim.AdamW([master], lr=1e-6, weight_decay=0.1, fused=True)
    for _ in range(50):
        gradient = torch.randn(1000)
        weight.grad, master.grad = gradient.clone(), gradient.clone()
        ours.step()
        theirs.step()
    assert torch.equal(join_float32(weight.detach(), ours.state[weight]["rest"]), master.detach())


def eight_bit(params, **options):
    """bitsandbytes' own 8-bit AdamW; tensors below 4,096 numbers would otherwise keep 32 bits."""
    import bitsandbytes

    return MasterWeights(params, make=bitsandbytes.optim.AdamW8bit, min_8bit_size=64, **options)


MAKERS = {
    "split": SplitAdamW,
    "master": lambda p, **o: MasterWeights(p, make=torch.optim.AdamW, **o),
    "8-bit": eight_bit,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_checkpoint_to_the_same_bits(kind, tmp_path):
    def build():
        model, x, y = problem(torch.bfloat16)
        accumulate_in_float32(model.parameters())
        return model, x, y, MAKERS[kind](list(model.parameters()), lr=1e-5)

    model, x, y, optimizer = build()
    train(model, x, y, optimizer, steps=20)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c.pt")
    train(model, x, y, optimizer, steps=20)
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    again, x, y, other = build()
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(again, x, y, other, steps=20)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    left, right = optimizer.state_dict(), other.state_dict()
    assert_same(left["state"], right["state"])


def assert_same(left, right):
    """Optimizers nest their state as they like."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_same(value, right[key])
    else:
        assert left == right


def test_schedules_reach_the_inner_optimizer():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    accumulate_in_float32([weight])
    optimizer = MasterWeights([weight], make=torch.optim.SGD, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert optimizer.inner.param_groups[0]["lr"] == 0.5
    weight.grad = torch.ones(4)
    optimizer.step()
    schedule.step()
    assert torch.equal(weight.detach(), torch.full((4,), 0.5, dtype=torch.bfloat16))
    copy.deepcopy(optimizer.state_dict())


def test_weights_that_someone_else_changes_stay_changed():
    """And the bits of those that were not changed stay, too."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    accumulate_in_float32([weight])
    optimizer = MasterWeights([weight], make=torch.optim.SGD, lr=1e-4)
    weight.grad = torch.ones(4)
    optimizer.step()
    with torch.no_grad():
        weight[:2] = 0.5
    weight.grad = torch.zeros(4)
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5, 1.0, 1.0]
    (master,) = optimizer.masters.values()
    assert torch.allclose(master, torch.tensor([0.5, 0.5, 1 - 1e-4, 1 - 1e-4]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["split", "master"])
def test_a_users_optimizer_that_keeps_the_bits_is_not_warned_of(kind, caplog):
    """`optimizers=(SplitAdamW(…), None)` is what the warning recommends: gradients add up in float32 then, too."""
    model, x, y = problem(torch.bfloat16)
    (model(x).float() - y).square().mean().backward()  # what came before does not stand in the way
    before = model[0].weight.grad.clone()
    optimizer = MAKERS[kind](list(model.parameters()), lr=1e-5)
    warn_of_lost_bits(model)
    assert not caplog.records
    assert torch.equal(model[0].weight.grad, before.float())
    assert {p.grad_dtype for p in model.parameters()} == {torch.float32}
    train(model, x, y, optimizer, steps=1)


@pytest.mark.parametrize("all_of_it", [True, False])
def test_a_users_optimizer_that_loses_bits_is_warned_of(all_of_it, caplog):
    model, *_ = problem(torch.bfloat16)
    if all_of_it:
        torch.optim.AdamW(model.parameters())
    else:
        SplitAdamW(model[0].parameters())
    warn_of_lost_bits(model)
    assert "SplitAdamW" in caplog.text


class ScheduleFree(torch.optim.SGD):
    """As the schedulefree package's: `eval` puts an average in the weights' place, `step` wants `train` before."""

    training = False

    def train(self):
        self._swap(True)

    def eval(self):
        self._swap(False)

    def _swap(self, training):
        if training != self.training:
            for p in self.param_groups[0]["params"]:
                p.add_(1.0 if training else -1.0)
        self.training = training

    def step(self, closure=None):
        assert self.training
        return super().step(closure)


def test_schedule_free_optimizers_change_their_modes():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], make=ScheduleFree, lr=0.5)
    optimizer.train()
    assert weight.tolist() == [2.0, 2.0]
    weight.grad = torch.ones(2)
    optimizer.step()
    with torch.no_grad():
        weight[0] = 3.0  # someone else's change survives a change of mode
    optimizer.eval()
    assert weight.tolist() == [2.0, 0.5]


def test_modes_mean_nothing_to_other_optimizers():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], make=torch.optim.SGD, lr=0.5)
    optimizer.train()
    optimizer.eval()
    assert weight.tolist() == [1.0, 1.0]


def test_eight_bit_adamw_moves_the_weights_as_in_float32():
    """Its moments are 8 bits wide, its weights keep theirs: a learning rate far below bfloat16's spacing arrives."""
    model, x, y = problem(torch.bfloat16)
    accumulate_in_float32(model.parameters())
    optimizer = eight_bit(list(model.parameters()), lr=1e-6)
    start = [p.detach().clone() for p in model.parameters()]
    train(model, x, y, optimizer)
    assert torch.uint8 in {s["state1"].dtype for s in optimizer.state.values()}  # biases are too small for it
    exact, x, y = problem(torch.float32)
    first = [p.detach().clone() for p in exact.parameters()]
    train(exact, x, y, torch.optim.AdamW(exact.parameters(), lr=1e-6, weight_decay=0.01))
    masters = list(optimizer.masters.values())
    moved = sum((m - s.float()).square().sum() for m, s in zip(masters, start, strict=True)).sqrt()
    expected = sum((p - s).square().sum() for p, s in zip(exact.parameters(), first, strict=True)).sqrt()
    assert abs(moved / expected - 1) < 0.25


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eight_bit_adamw_keeps_32_bits_for_embeddings(dtype):
    """As transformers' Trainer has it: rows that are rarely met have moments that 8 bits do not hold. What is optimised
    is a copy of a bfloat16 weight, and a float32 one itself where a model has both."""
    import bitsandbytes

    model = Tied().bfloat16()
    model.embedding.to(dtype)
    model.head.weight = model.embedding.weight
    options = {"lr": 1e-3, "optim_bits": 8, "min_8bit_size": 16}
    cls, options = optimizer_with_low_bits(bitsandbytes.optim.AdamW, options, model)
    optimizer = cls([{"params": list(model.parameters())}], **options)
    for p in model.parameters():
        p.grad = torch.ones(p.shape)
    optimizer.step()
    masters = {id(p): master for p, master in optimizer.masters.items()}
    bits = {name: optimizer.state[masters.get(id(p), p)]["state1"].dtype for name, p in model.named_parameters()}
    assert bits["embedding.weight"] == torch.float32
    assert bits["inner.weight"] == torch.uint8
    registered = bitsandbytes.optim.GlobalOptimManager.get_instance().pid2config
    number = id(masters.get(id(model.embedding.weight), model.embedding.weight))
    assert number in registered
    del optimizer, options, masters, model, p
    gc.collect()
    assert number not in registered  # another tensor may have it next


def test_other_optimizers_are_asked_nothing_about_embeddings():
    model = Tied().bfloat16()
    _, options = optimizer_with_low_bits(torch.optim.SGD, {"lr": 1e-3}, model)
    assert options == {"lr": 1e-3, "make": torch.optim.SGD}


class Tied(nn.Module):
    """A head whose weight is the embedding's, and a weight that nothing uses."""

    def __init__(self):
        super().__init__()
        self.embedding, self.inner = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.idle = nn.Parameter(torch.zeros(3))

    def get_output_embeddings(self):
        return self.head

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids))).float().logsumexp(-1).sum()


def gradients(added_in_place, fail=False):
    torch.manual_seed(0)
    model = Tied().bfloat16()
    accumulate_in_float32(model.parameters())
    context = added_as_they_come(model) if added_in_place else contextlib.nullcontext(lambda: None)
    with context as widen:
        for seed in range(3):
            model(torch.randint(11, (5,), generator=torch.Generator().manual_seed(seed))).backward()
            if fail:
                raise torch.OutOfMemoryError
            widen()
    return {name: p.grad for name, p in model.named_parameters()}, model


def test_gradients_that_are_added_as_they_come_are_the_same_to_the_bit():
    ours, model = gradients(True)
    plain, _ = gradients(False)
    assert ours.pop("idle") is None
    assert plain.pop("idle") is None
    for name, gradient in plain.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(ours[name], gradient)
    assert {p.grad_dtype for p in model.parameters()} == {torch.float32}


def test_an_update_that_fails_leaves_no_half_precision_gradient():
    with pytest.raises(torch.OutOfMemoryError):
        gradients(True, fail=True)
    gradients(True)


# -- dither


def moved(shift, *, dither):
    """How far bfloat16 weights of 1.5 are after a float32 update of `shift` gaps, in gaps, in the mean."""
    gap, weight = 2.0**-7, torch.full((400, 400), 1.5, dtype=torch.bfloat16)
    low_bits = torch.zeros_like(weight, dtype=torch.int16)
    if dither:
        dither_(weight, low_bits, seed=3)
    value = join_float32(weight, low_bits)
    assert torch.equal(value.bfloat16(), weight)
    store_float32(value + shift * gap, weight, low_bits)
    return float((weight.double() - 1.5).mean() / gap)


@pytest.mark.parametrize("shift", [-0.8, -0.1, 0.02, 0.3, 0.5, 1.7])
def test_dithered_weights_follow_float32_in_the_mean(shift):
    # The standard error of a share p of 160,000 is at most 0.00125.
    assert moved(shift, dither=True) == pytest.approx(shift, abs=0.006)


def test_undithered_weights_stay_until_half_a_gap():
    assert moved(0.3, dither=False) == 0.0
    assert moved(-0.8, dither=False) == -1.0


def test_what_is_not_dithered():
    special = torch.tensor([[0.0, -0.0, float("inf"), float("nan")]]).bfloat16()
    own = torch.full((2, 2), 7, dtype=torch.int16)
    vector = torch.zeros(64, dtype=torch.int16)
    for weight, low_bits in (
        (special, torch.zeros(1, 4, dtype=torch.int16)),
        (torch.ones(2, 2).bfloat16(), own.clone()),
        (torch.ones(64).bfloat16(), vector),
    ):
        before = low_bits.clone()
        dither_(weight, low_bits, seed=0)
        assert torch.equal(low_bits, before)


def test_each_weight_is_dithered_by_itself_and_every_run_alike():
    def first_bits():
        weights = [nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = SplitAdamW(weights, lr=0.0, dither=True)
        for weight in weights:
            weight.grad = torch.ones(8, 8)
        optimizer.step()
        return [optimizer.state[weight]["rest"] for weight in weights]

    (a, b), (c, d) = first_bits(), first_bits()
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert not torch.equal(a, b)
