"""The chunked head against log_softmax in float64."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from rloom.models import head as module
from rloom.models.head import LogitTransform, captured_head, exact_kl_chunks, run_head

TRANSFORMS = {
    "plain": LogitTransform(),
    "temperature": LogitTransform(temperature=0.7),
    "scale": LogitTransform(scale=0.0625, temperature=1.3),
    "softcap": LogitTransform(softcap=5.0, temperature=0.9),
    "both": LogitTransform(scale=0.5, softcap=3.0, temperature=1.1),
}


def reference(hidden, weight, bias, targets, t: LogitTransform):
    """The formulas, plainly, in float64."""
    z = hidden @ weight.T + (0 if bias is None else bias)
    z = z * t.scale
    if t.softcap is not None:
        z = t.softcap * torch.tanh(z / t.softcap)
    logp = (z / t.temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("chunk", [3, 1000, "kept"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_linear_head(name, bias, chunk, monkeypatch):
    monkeypatch.setattr(module, "rows_at_a_time", lambda *_: 3 if chunk == "kept" else chunk)
    torch.manual_seed(0)
    head = nn.Linear(16, 50, bias=bias)
    hidden, targets = torch.randn(11, 16, requires_grad=True), torch.randint(50, (11,))
    upstream = torch.randn(11)
    out = run_head(head, head.forward, hidden, targets, TRANSFORMS[name], keep=chunk == "kept")
    (out.logprobs * upstream).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, *head.parameters())]
    logp, entropy = reference(exact[0], exact[1], exact[2] if bias else None, targets, TRANSFORMS[name])
    (logp * upstream.double()).sum().backward()
    torch.testing.assert_close(out.logprobs.double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(out.entropy.double(), entropy, rtol=0, atol=1e-5)
    assert not out.entropy.requires_grad
    for mine, theirs in zip((hidden, *head.parameters()), exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=0, atol=1e-5)


class Wrapped(nn.Module):
    """A head that is no plain linear layer."""

    def __init__(self):
        super().__init__()
        self.inner, self.low = nn.Linear(16, 50), nn.Linear(16, 2, bias=False)
        self.up = nn.Linear(2, 50, bias=False)
        self.out_features = 50

    def forward(self, x):
        return self.inner(x) + self.up(self.low(x))


def test_kept_logits_serve_one_backward_and_are_made_again_for_the_next():
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(16, 50), torch.randn(9, 16), torch.randint(50, (9,))
    out = run_head(head, head.forward, hidden, targets, LogitTransform(), keep=True)
    (first,) = torch.autograd.grad(out.logprobs.sum(), head.weight, retain_graph=True)
    (second,) = torch.autograd.grad(out.logprobs.sum(), head.weight)
    torch.testing.assert_close(first, second)


def test_nothing_is_kept_where_no_backward_follows(monkeypatch):
    sizes = []
    monkeypatch.setattr(module, "rows_at_a_time", lambda *_: 4)
    monkeypatch.setattr(module, "row_stats", lambda z, *args: sizes.append(len(z)) or [torch.zeros(len(z))] * 3)
    head = nn.Linear(16, 50)
    with torch.no_grad():
        run_head(head, head.forward, torch.randn(9, 16), torch.zeros(9, dtype=int), LogitTransform(), keep=True)
    assert sizes == [4, 4, 1]


@pytest.mark.parametrize("keep", [False, True])
def test_any_other_head_goes_through_its_module(keep, monkeypatch):
    monkeypatch.setattr(module, "rows_at_a_time", lambda *_: 4)
    torch.manual_seed(0)
    head, hidden, targets = Wrapped(), torch.randn(9, 16, requires_grad=True), torch.randint(50, (9,))
    out = run_head(head, head.forward, hidden, targets, LogitTransform(temperature=0.8), keep=keep)
    out.logprobs.sum().backward()
    grads = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    expected = (head(hidden.detach()) / 0.8).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    expected.sum().backward()
    torch.testing.assert_close(out.logprobs, expected)
    for mine, parameter in zip(grads, head.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_exact_kl_in_chunks(monkeypatch):
    monkeypatch.setattr(module, "rows_at_a_time", lambda *_: 4)
    torch.manual_seed(0)
    policy, other = nn.Linear(16, 50), nn.Linear(16, 50)
    h, g = torch.randn(9, 16, requires_grad=True), torch.randn(9, 16)
    targets = torch.randint(50, (9,))
    t = LogitTransform(softcap=4.0, temperature=1.2)
    kl = exact_kl_chunks(
        run_head(policy, policy.forward, h, targets, t), run_head(other, other.forward, g, targets, t), 50, nullcontext
    )
    p, q = (t.apply(m(x)).log_softmax(-1) for m, x in ((policy, h), (other, g)))
    expected = (p.exp() * (p - q)).sum(-1)
    torch.testing.assert_close(kl, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), h, retain_graph=True)[0] for x in (kl, expected)))


def test_a_hook_on_the_head_is_run_and_comes_back(model):
    plain = model.lm_head.forward
    model.lm_head.forward = hook = lambda hidden: 2 * plain(hidden)
    ids = torch.tensor([[4, 5, 6]])
    expected = model(ids).logits[0, :2].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    with captured_head(model, torch.tensor([0, 1]), ids[0, 1:], LogitTransform()) as outputs:
        model(ids)
    torch.testing.assert_close(outputs[0].logprobs, expected)
    assert model.lm_head.__dict__["forward"] is hook


def test_the_head_is_given_back(model):
    before = model.lm_head.forward
    ids = torch.tensor([[4, 5, 6]])
    plain = model(ids).logits
    with captured_head(model, None, torch.tensor([5, 6, 7]), LogitTransform()) as outputs:
        assert model(ids).logits.shape == (1, 3, 1)
    assert len(outputs) == 1
    assert model.lm_head.forward == before
    assert torch.equal(model(ids).logits, plain)
