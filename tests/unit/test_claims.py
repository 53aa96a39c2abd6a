"""The scripts that measure what documents claim: their arithmetic, PPO's formulas, and that they run."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from rloom.algo import leave_one_out

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "claims.md").read_text()


@pytest.fixture(scope="module")
def claims():
    """`bench/claims.py`; its neighbours `learning` and `ppo` are found as they are when it is run as a script."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    yield importlib.import_module("claims")
    monkeypatch.undo()
    for name in ("claims", "learning", "ppo"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def ppo(claims):
    return sys.modules["ppo"]


@pytest.fixture(scope="module")
def learning(claims):
    return sys.modules["learning"]


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
    assert claims.memory_table() in PAGE  # the page shows what the script computes


def test_the_page_names_no_number_that_the_table_lacks(claims):
    assert re.search(r"\| exact \| 16 \|", PAGE)
    assert re.search(r"\| digits \| 2 \|", PAGE)


def test_quick_prints_every_table(claims, capsys):
    claims.main(["--quick"])
    out = capsys.readouterr().out
    for part in ("leave-one-out | group mean", "at the peak of an update", "missing_eos_penalty=1", "PPO, 1 pass"):
        assert part in out


# -- learning with and without an option


def test_the_page_answers_every_question(learning):
    for question, arms in learning.QUESTIONS.items():
        assert f"| **{question}** |" in PAGE
        assert all(f"| {arm.name} | " in PAGE for arm in arms)


def test_intervals_are_student_s(learning):
    values = [0.1, 0.4, 0.2, 0.5, 0.3, 0.3]
    mean, half = learning.interval(values)
    assert (mean, half) == pytest.approx((0.3, 2.571 * torch.tensor(values).std().item() / 6**0.5), rel=1e-3)
    assert learning.change([1.0, 2.0, 3.1], [0.0, 1.0, 2.0]) == "**+1.03 ± 0.14**"
    assert learning.change([1.0, 2.0], [2.0, 1.0]) == "+0.00 ± 12.71"


def test_rewards_of_the_arms(learning):
    given = {"completions": ["012", "021"] * 500, "answer": ["012"] * 1000}
    scores = {kind: learning.make_reward(kind, 0)(**given) for kind in ("digits", "hundredth", "hundredfold", "wild")}
    assert scores["digits"][:2] == [3.0, 1.0]
    assert scores["hundredth"][:2] == [0.01, 0.0]
    assert scores["hundredfold"][:2] == [150.0, 50.0]
    assert 2 < sum(abs(score) == 100 for score in scores["wild"]) < 25


# -- PPO


@pytest.fixture
def run_of(ppo):
    """A run of a method on the model's first weights, and a rollout."""

    def make(**settings):
        model, tokenizer, rows = ppo.start(0)
        run = ppo.Run(ppo.Settings(completions=16, **settings), model, tokenizer, 0)
        return run, run.sample(rows, 0)

    return make


def test_generalised_advantages_by_hand(ppo):
    rewards, values = torch.tensor([[1.0, 0, 2], [0, 3, 9]]), torch.tensor([[0.5, 1, -1], [2.0, 1, 9]])
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]])
    # One step: r_t + V_{t+1} − V_t. All steps: the rewards to come, less V_t.
    assert ppo.generalised_advantages(rewards, values, mask, 0.0).tolist() == [[1.5, -2.0, 3.0], [-1.0, 2.0, 0.0]]
    assert ppo.generalised_advantages(rewards, values, mask, 1.0).tolist() == [[2.5, 1.0, 3.0], [1.0, 2.0, 0.0]]
    assert ppo.generalised_advantages(rewards, values, mask, 0.5)[0].tolist() == [1.25, -0.5, 3.0]


def test_clips_by_hand(ppo):
    log_ratio = torch.tensor([1.5, 1.5, 0.5, 0.5]).log()
    found = ppo.clipped_surrogate(log_ratio, torch.tensor([1.0, -1, 1, -1]), 0.2)
    torch.testing.assert_close(found, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
    # The worse of the value and of the value held near the old one.
    found = ppo.clipped_value_loss(torch.tensor([1.0, 1.0]), torch.zeros(2), torch.tensor([1.0, 0.0]), 0.2)
    torch.testing.assert_close(found, torch.tensor([0.5 * 0.8**2, 0.5]))


def test_completions_end_with_their_first_eos(run_of):
    run, batch = run_of(method="ppo")
    end = run.tokenizer.eos_token_id
    for drawn, mask in zip(batch.ids[:, 6:].tolist(), batch.mask.tolist(), strict=True):
        length = drawn.index(end) + 1 if end in drawn else len(drawn)
        assert mask == [1.0] * length + [0.0] * (len(drawn) - length)
    assert len(batch.groups.unique()) == 16  # one completion per prompt


def gradient(network, loss):
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(network.parameters()))])


def test_the_first_pass_is_the_policy_gradient(ppo, run_of):
    run, batch = run_of(method="rloo", beta=0.0)
    own = run.logprobs(run.policy, batch)
    expected = gradient(run.policy, -(leave_one_out(batch.score, batch.groups) * own.sum(1)).mean())
    found = gradient(run.policy, run._rloo_loss(batch, own.detach())())
    torch.testing.assert_close(found, expected)
    run, batch = run_of(method="ppo", beta=0.0, trace=1.0)
    own = run.logprobs(run.policy, batch)
    # The value is 0 at the start, so that each token's advantage is the score, normalised over tokens.
    advantages = ppo.whitened(batch.score[:, None].expand_as(own), batch.mask)
    expected = gradient(run.policy, -(advantages * own).sum() / batch.mask.sum())
    loss = run._ppo_loss(batch, own.detach())()
    torch.testing.assert_close(gradient(run.policy, loss), expected, rtol=1e-4, atol=1e-5)


def test_the_kl_is_charged_at_each_token_and_the_score_given_at_the_last(run_of):
    run, batch = run_of(method="ppo", beta=0.5)
    batch.score += 7
    own = run.logprobs(run.policy, batch).detach()
    found = run.token_rewards(batch, own, own - 1.0 * batch.mask)
    for rewards, mask, score in zip(found.tolist(), batch.mask.tolist(), batch.score.tolist(), strict=True):
        length = int(sum(mask))
        expected = [-0.5] * (length - 1) + [score - 0.5] + [0.0] * (len(mask) - length)
        assert rewards == pytest.approx(expected, abs=1e-5)


def test_the_value_model_learns(run_of):
    run, batch = run_of(method="ppo", beta=0.0, trace=1.0, value_learning_rate=3e-3)

    def error():
        values = run.value(batch.ids, batch.attention)[:, batch.predicting]
        return ((values - batch.score[:, None]) * batch.mask).square().sum()

    before = error()
    for _ in range(15):
        run.update(batch)
    assert error() < before / 2


def test_bytes_are_those_of_the_tensors(ppo, run_of):
    sizes = {method: ppo.memory_of(*run_of(method=method)) for method in ("rloo", "ppo")}
    run, _ = run_of(method="ppo")
    policy, value = (sum(p.numel() for p in model.parameters()) for model in (run.policy, run.value))
    assert sizes["rloo"].parameters == 4 * 2 * policy
    assert sizes["rloo"].gradients == 4 * policy
    assert sizes["ppo"].parameters - sizes["rloo"].parameters == 4 * value
    assert sizes["ppo"].gradients - sizes["rloo"].gradients == 4 * value
    # AdamW's two moments, and a counter for each tensor.
    counters = 4 * len(list(run.value.parameters()))
    assert sizes["ppo"].optimizer - sizes["rloo"].optimizer == 8 * value + counters
    assert sizes["ppo"].peak > sizes["ppo"].held
    assert sizes["rloo"].peak < sizes["ppo"].peak


def test_the_peak_counts_what_is_there_at_once(ppo):
    def work():
        first = torch.zeros(1 << 20)
        second = torch.zeros(1 << 20)
        del first, second
        torch.zeros(1 << 20)

    assert ppo.peak_above(work) == 2 * (4 << 20)
