"""The bookkeeping around flash attention, on a CPU: its two kernels are replaced by their formulas, written plainly.

That the kernels themselves do what is asked of them is tested on a GPU (tests/gpu).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from rloom.data.packing import pack
from rloom.models import flash
from rloom.models.two_part import two_part
from rloom.types import Rollout

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def sequences(call):
    ends_q, ends_k = call[0].tolist(), call[1].tolist()
    return zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True)


def scores(q, k, scale, window):
    """(H, Q, K), causal and aligned at the ends; keys of a group serve several heads."""
    k = k.repeat_interleave(HEADS // KV_HEADS, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    own = torch.arange(len(q))[:, None] + len(k) - len(q)
    other = torch.arange(len(k))[None]
    hidden = (other > own) | ((other <= own - window) if window else torch.zeros(1, dtype=torch.bool))
    return s.masked_fill(hidden, -torch.inf)


def plain_forward(q, k, v, call, scale, window):
    out, lse = torch.empty_like(q), torch.empty(HEADS, len(q))
    for (a, b), (c, d) in sequences(call):
        s = scores(q[a:b], k[c:d], scale, window)
        values = v[c:d].repeat_interleave(HEADS // KV_HEADS, 1)
        out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1), values)
        lse[:, a:b] = s.logsumexp(-1)
    return out, lse


def plain_backward(grad, q, k, v, out, lse, call, scale, window):
    """Flash attention's backward: p from the given log-sum-exp, delta from the given output."""
    repeat = HEADS // KV_HEADS
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for (a, b), (c, d) in sequences(call):
        p = (scores(q[a:b], k[c:d], scale, window) - lse[:, a:b, None]).exp()
        delta = (grad[a:b] * out[a:b]).sum(-1).T[..., None]
        dp = torch.einsum("qhd,khd->hqk", grad[a:b], v[c:d].repeat_interleave(repeat, 1))
        ds = p * (dp - delta) * scale
        dq[a:b] = torch.einsum("hqk,khd->qhd", ds, k[c:d].repeat_interleave(repeat, 1))
        for total, found in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[a:b])),
            (dv, torch.einsum("hqk,qhd->khd", p, grad[a:b])),
        ):
            total[c:d] += found.view(d - c, KV_HEADS, repeat, WIDTH).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_two_calls_and_their_gradients(window, sinks, monkeypatch):
    monkeypatch.setattr(flash, "_flash", plain_forward)
    monkeypatch.setattr(flash, "_flash_backward", plain_backward)
    lengths = [(5, 3), (5, 6), (2, 4), (7, 1), (7, 5)]
    rollout = Rollout(
        prompt_ids=[[1] * p for p, _ in lengths],
        completion_ids=[[1] * c for _, c in lengths],
        groups=torch.tensor([0, 0, 1, 2, 2]),
        scores=torch.zeros(5, 1),
        score=torch.zeros(5),
        trained=[True] * 5,
    )
    row = pack(rollout, range(5), torch.device("cpu"))
    torch.manual_seed(0)
    total = row.input_ids.shape[1]
    q = torch.randn(total, HEADS, WIDTH, requires_grad=True)
    k, v = (torch.randn(total, KV_HEADS, WIDTH, requires_grad=True) for _ in range(2))
    sink = torch.randn(HEADS, requires_grad=True) if sinks else None
    grad = torch.randn(total, HEADS, WIDTH)
    expected = two_part(
        *(x.transpose(0, 1) for x in (q, k, v)), row, scale=0.3, window=window, softcap=None, sinks=sink, dropout=0.0
    ).transpose(0, 1)
    wanted = torch.autograd.grad(expected, [x for x in (q, k, v, sink) if x is not None], grad)
    with torch.no_grad():
        index = flash.FlashIndex.of(row, torch.device("cpu"))
        out, lse = flash.flash_forward(q, k, v, sink, index, 0.3, window)
        found = flash.flash_grads(grad, q, k, v, out, lse, sink, index, 0.3, window)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, wanted, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)
    assert (found[3] is None) == (sink is None)
