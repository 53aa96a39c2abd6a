"""`kl_target`: β follows the KL by the formula of the controller, and the KL settles where it was asked to."""

from __future__ import annotations

from statistics import fmean
from types import SimpleNamespace

import pytest

from rloom import RLOOConfig, RLOOTrainer
from rloom.algo.kl import adapted_beta
from rloom.errors import ConfigError
from rloom.training.kl_weight import KLWeight
from tests.conftest import make_model, make_tokenizer


def vowels(completions, **kwargs):
    return [sum(letter in "aeiou" for letter in text) / 6 for text in completions]


PROMPTS = [{"prompt": text} for text in ["ab", "hello there", "1+1=", "x", "sort 3 1 2>", "why.", "0", "zq"]]


def trained(config, seed=0, **changes):
    options = {"per_device_train_batch_size": 64, "num_generations": 8, "seed": seed, "diagnosis": False, **changes}
    args = config(lr_scheduler_type="constant", advice=False, **options)
    trainer = RLOOTrainer(make_model(seed), vowels, args, PROMPTS, processing_class=make_tokenizer())
    trainer.train()
    return [entry for entry in trainer.state.log_history if "kl" in entry]


def test_a_kl_that_stays_away_moves_beta_geometrically():
    above = below = 0.05
    for _ in range(30):
        above, below = adapted_beta(above, 3.0, 0.1, 0.1), adapted_beta(below, 0.0, 0.1, 0.1)
    assert above == pytest.approx(0.05 * 1.2**30)
    assert below == pytest.approx(0.05 * 0.98**30)
    assert adapted_beta(0.3, 0.1, 0.1, 0.1) == 0.3
    assert adapted_beta(0.3, 0.09, 0.1, 0.5) == pytest.approx(0.3 * 0.95)


@pytest.mark.parametrize("placement", [{}, {"kl_placement": "loss", "kl_estimator": "k3"}])
def test_beta_of_each_update_follows_from_the_kl_before(config, placement):
    found = trained(config, max_steps=5, beta=0.2, kl_target=0.01, kl_target_gain=0.5, **placement)
    expected = 0.2
    for entry in found:
        assert entry["beta"] == pytest.approx(expected)
        away = min(2.0, max(-0.2, entry["kl"] / 0.01 - 1))
        expected *= 1 + 0.5 * away
    # It went down from a KL of 0, and up again: both sides of the formula were seen.
    betas = [entry["beta"] for entry in found]
    assert min(betas) < betas[0]
    assert betas[-1] > min(betas)


def test_beta_stays_within_a_hundred_times_of_where_it_began():
    weight = KLWeight(SimpleNamespace(beta=0.05, kl_target=0.1, kl_target_gain=1.0))
    for kl, end in [(9.0, 5.0), (-1.0, 0.0005), (9.0, 5.0)]:
        for _ in range(60):
            weight.follow(kl)
        assert weight.value == pytest.approx(end)
        # It leaves its bound as soon as the KL does.
        weight.follow(0.11 if end < 1 else 0.09)
        assert weight.value != pytest.approx(end)


def test_beta_is_logged_only_where_it_moves(config):
    assert all("beta" not in entry for entry in trained(config, max_steps=2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_the_kl_settles_near_its_target(config, seed):
    """β = 0.2 holds the KL near 0.05 per token, and 0.02 lets it go to 2.6; the target lies between."""
    found = trained(config, seed=seed, max_steps=150, beta=0.2, kl_target=0.4)
    assert fmean(entry["kl"] for entry in found[:20]) < 0.2
    assert fmean(entry["kl"] for entry in found[-60:]) == pytest.approx(0.4, rel=0.25)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl_target": 0.1, "beta": 0.0}, "beta=0.0 stays 0"),
        ({"kl_target": 0.0}, "kl_target must be positive"),
        ({"kl_target": 0.1, "kl_target_gain": 0.0}, "kl_target_gain must be above 0"),
        ({"kl_target_gain": 0.2}, "has no effect without kl_target"),
    ],
)
def test_what_cannot_go_with_it_is_refused(options, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        RLOOConfig(str(tmp_path), report_to="none", use_cpu=True, **options)
