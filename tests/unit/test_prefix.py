"""The kernels of packed attention, in Triton's interpreter, against the plain form. On a GPU: tests/gpu."""

from __future__ import annotations

import os

import pytest
import torch

from rloom.data.packing import pack
from rloom.models.block_attention import attend_blocks
from rloom.models.prefix import Options, Tiles, launch, prefix_forward, prefix_grads
from rloom.types import Rollout

pytest.importorskip("triton")
needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU the kernels are compiled: tests/gpu"
)
LENGTHS = [(35, 3), (35, 40), (2, 4), (20, 1), (20, 33)]


def make_row():
    rollout = Rollout(
        prompt_ids=[[1] * p for p, _ in LENGTHS],
        completion_ids=[[1] * c for _, c in LENGTHS],
        groups=torch.tensor([0, 0, 1, 2, 2]),
        scores=torch.zeros(5, 1),
        score=torch.zeros(5),
        trained=[True] * 5,
    )
    return pack(rollout, range(5), torch.device("cpu"))


@needs_interpreter
@pytest.mark.parametrize(
    ("heads", "widths", "window", "softcap", "sinks", "tile"),
    [
        ((4, 2), (8, 8), None, None, False, 16),
        ((4, 2), (24, 16), 7, None, True, 16),  # values narrower than keys, as in MLA; not a power of two
        ((2, 2), (16, 16), None, 5.0, False, 32),
        ((2, 1), (16, 16), 9, 5.0, True, 32),
    ],
)
def test_kernels_do_what_the_plain_form_does(heads, widths, window, softcap, sinks, tile):
    row, cpu = make_row(), torch.device("cpu")
    torch.manual_seed(0)
    count = row.input_ids.shape[1]
    q = torch.randn(count, heads[0], widths[0], requires_grad=True)
    k = torch.randn(count, heads[1], widths[0], requires_grad=True)
    v = torch.randn(count, heads[1], widths[1], requires_grad=True)
    sink = torch.randn(heads[0], requires_grad=True) if sinks else None
    grad = torch.randn(count, heads[0], widths[1])
    options = {"scale": 0.3, "window": window, "softcap": softcap}
    plain = attend_blocks(*(x.transpose(0, 1) for x in (q, k, v)), row, sinks=sink, dropout=0.0, **options).transpose(
        0, 1
    )
    wanted = torch.autograd.grad(plain, [x for x in (q, k, v, sink) if x is not None], grad)
    with torch.no_grad():
        tiles = Tiles.of(row, cpu, tile)
        out, lse = prefix_forward(q, k, v, sink, tiles, Options(**options))
        found = prefix_grads(grad, q, k, v, out, lse, sink, tiles, Options(**options))
    torch.testing.assert_close(out, plain.detach(), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found, wanted, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert (found[3] is None) == (sink is None)


def test_tiles_cover_every_token_once_and_cross_no_end():
    row = make_row()
    tiles = Tiles.of(row, torch.device("cpu"), 16)
    covered = []
    for start, end, own, prompt, length, after, after_end in tiles.table.tolist():
        assert own <= start < end
        assert (length == 0) == (after < after_end)  # a prompt has completions after it, a completion a prompt
        assert length == 0 or prompt + length <= row.num_prompt_tokens
        covered += range(start, min(start + 16, end))
    assert sorted(covered) == list(range(row.input_ids.shape[1]))


@pytest.mark.parametrize(("width", "limit"), [(16, 64), (64, 64), (80, 128), (256, 256)])
def test_every_width_that_fits_has_a_launch(width, limit):
    from rloom.models.prefix import LAUNCHES, LAUNCHES_FLOAT32

    for dtype, launches in ((torch.bfloat16, LAUNCHES), (torch.float16, LAUNCHES), (torch.float32, LAUNCHES_FLOAT32)):
        heads = torch.empty(1, 1, width, dtype=dtype)
        assert launch(heads, heads) is launches[limit]
