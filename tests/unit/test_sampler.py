"""What is drawn, against the exact distribution and against `model.generate`'s own filters."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as library

from rloom.generation.base import Sampling
from rloom.generation.native.sampling.noise import key_of, uniform
from rloom.generation.native.sampling.sampler import Sampler

OPTIONS = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"temperature": 1.4, "top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 0.8},
]
SEEN = [2, 5, 7]


def make(**options):
    return Sampler(Sampling(max_completion_length=4, eos_token_ids=(), pad_token_id=0, **options))


def exact(logits, options):
    """`model.generate`'s processors, in its order; probabilities."""
    ids = torch.tensor([SEEN])
    chain = []
    if "repetition_penalty" in options:
        chain.append(library.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    chain.append(library.TemperatureLogitsWarper(options.get("temperature", 1.0)))
    if "top_k" in options:
        chain.append(library.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        chain.append(library.TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        chain.append(library.MinPLogitsWarper(options["min_p"]))
    scores = logits.unsqueeze(0).clone()
    for process in chain:
        scores = process(ids, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize("options", OPTIONS)
def test_frequencies_are_those_of_the_exact_distribution(options):
    torch.manual_seed(1)
    logits = torch.randn(12) * 1.5
    count = 40_000
    keys = torch.tensor([key_of(5, i // 8, i % 8) for i in range(count)])
    seen = torch.zeros(12, dtype=torch.bool)
    seen[SEEN] = True
    rows = logits.expand(count, -1)
    drawn = make(**options)(rows, keys, torch.arange(count) % 50, seen.expand(count, -1))
    expected = exact(logits, options)
    found = torch.bincount(drawn.tokens, minlength=12).double()
    possible = expected > 0
    assert found[~possible].sum() == 0
    chi_square = ((found - count * expected) ** 2 / (count * expected))[possible].sum()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5  # five standard deviations above its mean
    torch.testing.assert_close(drawn.drawn_logprobs, expected.log()[drawn.tokens].float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_plain_logprobs_and_entropy_know_neither_filters_nor_penalty(options):
    torch.manual_seed(2)
    logits = torch.randn(3, 12)
    sampler = make(**options)
    seen = torch.zeros(3, 12, dtype=torch.bool)
    seen[:, SEEN] = True
    drawn = sampler(logits, torch.arange(3), torch.arange(3), seen)
    plain = (logits / options.get("temperature", 1.0)).log_softmax(-1)
    torch.testing.assert_close(drawn.logprobs, plain.gather(1, drawn.tokens[:, None])[:, 0])
    torch.testing.assert_close(drawn.entropies, -(plain.exp() * plain).sum(-1))


def test_temperature_zero_takes_the_likeliest():
    logits = torch.randn(5, 30)
    assert torch.equal(make(temperature=0.0)(logits, torch.arange(5), torch.arange(5)).tokens, logits.argmax(-1))


def test_noise_is_uniform_and_independent_across_samples_and_positions():
    keys = torch.tensor([key_of(0, prompt, sample) for prompt in range(200) for sample in range(8)])
    table = torch.stack([uniform(keys, torch.full_like(keys, t)) for t in range(64)], 1).double()  # (1600, 64)
    counts = torch.histc(table.flatten().float(), 50, 0, 1)
    mean = table.numel() / 50
    assert ((counts - mean) ** 2 / mean).sum() < 49 + 5 * 98**0.5
    centred = table - 0.5
    neighbours = (centred[:, 1:] * centred[:, :-1]).mean() * 12
    siblings = (centred[1::2] * centred[::2]).mean() * 12
    assert abs(neighbours) < 0.02
    assert abs(siblings) < 0.02
    assert ((table > 0) & (table < 1)).all()
