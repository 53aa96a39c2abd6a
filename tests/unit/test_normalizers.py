"""Means, deviations and clips, with and without values that do not exist."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.algo import RunningMoments, clip, masked_mean, masked_std, normalize

NAN = math.nan


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_mean_and_deviation_pass_over_nan():
    values = tensor(1, NAN, 3, 8, NAN)
    assert masked_mean(values).item() == pytest.approx(4)
    assert masked_std(values).item() == pytest.approx(math.sqrt((9 + 1 + 16) / 2))


def test_mean_and_deviation_of_too_few():
    assert masked_mean(tensor(NAN)).isnan()
    assert masked_std(tensor(NAN, 2)).isnan()
    assert masked_std(tensor()).isnan()


def test_normalize_by_hand():
    # mean 3, deviations −2, −1, 3, variance 14/2
    scale = math.sqrt(7) + 0.25
    torch.testing.assert_close(normalize(tensor(1, 2, 6), eps=0.25), tensor(-2 / scale, -1 / scale, 3 / scale))


def test_normalize_keeps_nan_and_leaves_single_values_alone():
    got = normalize(tensor(1, NAN, 3), eps=0.0)
    assert got[1].isnan()
    torch.testing.assert_close(got[[0, 2]], tensor(-math.sqrt(0.5), math.sqrt(0.5)))
    assert normalize(tensor(NAN, 5)).tolist()[1] == 5
    assert normalize(tensor(5)).tolist() == [5]


def test_normalize_of_equal_values_is_zero():
    assert normalize(tensor(4, 4, 4)).tolist() == [0, 0, 0]


def test_normalize_takes_tokens_as_well():
    got = normalize(torch.tensor([[1.0, NAN], [2.0, 6.0]]), eps=0.0)
    expected = torch.tensor([[-2.0, NAN], [-1.0, 3.0]]) / math.sqrt(7)
    torch.testing.assert_close(got, expected, equal_nan=True)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30))
def test_normalized_values_have_mean_zero_and_deviation_one(values):
    spread = tensor(*values).std().item()
    got = normalize(tensor(*values), eps=1e-4)
    assert got.mean().item() == pytest.approx(0, abs=1e-6)
    assert got.std().item() == pytest.approx(spread / (spread + 1e-4), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), max_size=6), min_size=1, max_size=8))
def test_running_moments_do_not_depend_on_the_split(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(tensor(*batch))
    everything = [value for batch in batches for value in batch]
    assert moments.count == len(everything)
    if everything:
        assert moments.mean == pytest.approx(sum(everything) / len(everything), abs=1e-8)
    if len(everything) > 1:
        assert moments.std == pytest.approx(torch.std(tensor(*everything)).item(), rel=1e-6, abs=1e-6)
    else:
        assert moments.std == 1.0


def test_running_moments_pass_over_nan():
    moments = RunningMoments()
    moments.update(tensor(NAN, NAN))
    assert (moments.count, moments.mean, moments.std) == (0, 0.0, 1.0)
    moments.update(tensor(2, NAN, 4))
    assert (moments.count, moments.mean) == (2, 3.0)
    assert moments.std == pytest.approx(math.sqrt(2))


def test_running_moments_survive_a_large_offset():
    """Σx² − (Σx)²/n would lose all its digits here."""
    moments = RunningMoments()
    for batch in ((1e8 + 1, 1e8 + 2), (1e8 + 3,)):
        moments.update(tensor(*batch))
    assert moments.std == pytest.approx(1.0, rel=1e-6)


def test_running_normalization_uses_the_moments_so_far():
    moments = RunningMoments(count=3, mean=2.0, squares=8.0)  # std = √(8/2) = 2
    got = moments.normalize(tensor(6, NAN, 0), eps=0.0)
    torch.testing.assert_close(got, tensor(2, NAN, -1), equal_nan=True)


def test_clip():
    torch.testing.assert_close(clip(tensor(-5, 0.5, NAN, 9), (-1, 2)), tensor(-1, 0.5, NAN, 2), equal_nan=True)
    assert clip(tensor(-5, 9), None).tolist() == [-5, 9]


def test_running_moments_refuse_infinity():
    moments = RunningMoments()
    moments.update(tensor(1.0, 2.0))
    with pytest.raises(ValueError, match="infinite"):
        moments.update(tensor(3.0, math.inf))
    assert (moments.count, moments.mean) == (2, 1.5)
