"""The script that measures what documents claim: its arithmetic, and its one identity."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def claims():
    spec = importlib.util.spec_from_file_location("claims", ROOT / "bench" / "claims.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(sys.modules, "claims", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    monkeypatch.undo()


def test_leave_one_out_is_the_group_mean_scaled(claims):
    found = claims.measure(3, (2, 4))
    for k, noise in found.items():
        for kind in claims.REWARDS:
            ours, theirs = noise[kind, "leave-one-out"], noise[kind, "group mean"]
            torch.testing.assert_close(ours.mean, theirs.mean * k / (k - 1), rtol=1e-3, atol=1e-6)
    assert claims.noise_table(found).count("\n") == 1 + 2 * 2


def test_variance_is_the_trace_of_the_covariance(claims):
    samples = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    noise = claims.Noise()
    for sample in samples:
        noise.add(sample)
    assert noise.variance == pytest.approx(samples.var(0).sum().item(), rel=1e-4)


def test_memory_by_hand(claims):
    assert claims.memory(2**30, value=True, reward=True) == 2 * 16 + 2 * 2
    assert claims.memory(2**30, value=False, reward=False) == 16 + 2
    page = (ROOT / "docs" / "claims.md").read_text()
    assert claims.memory_table() in page  # the page shows what the script computes


def test_the_page_names_no_number_that_the_table_lacks(claims):
    page = (ROOT / "docs" / "claims.md").read_text()
    assert re.search(r"\| exact \| 16 \|", page)
    assert re.search(r"\| digits \| 2 \|", page)
