"""From scores and token KLs to advantages, and on to the loss, against formulas written out with plain loops.

The last part goes through every group that a tiny policy can sample, so that "unbiased" is an equation there.
"""

from __future__ import annotations

import itertools
import math
from statistics import mean, stdev

import pytest
import torch
from torch import Tensor

from rloom import RLOOConfig
from rloom.algo import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, OBJECTIVES, aggregate, exact_kl, k2, policy_loss
from rloom.training.credit import Credit, Shaper

NAN = math.nan
BETA = 0.5
SCORES = [1.0, 4.0, 2.5, -1.0, 3.0]
GROUPS = [0, 0, 0, 1, 1]
KLS = [[0.5, -0.25, 1.0], [0.1, 0.2], [2.0], [-0.5, 0.3, 0.4], [0.7]]
ROWS = range(5)


def config(**options) -> RLOOConfig:
    return RLOOConfig("out", report_to="none", use_cpu=True, **({"beta": BETA} | options))


def padded(rows: list[list[float]], padding: float = 99.0) -> tuple[Tensor, Tensor]:
    """Ragged rows as (N, T) and their mask; the padding must not be able to hide."""
    width = max(map(len, rows))
    values = [[*row, *[padding] * (width - len(row))] for row in rows]
    mask = [[1.0] * len(row) + [0.0] * (width - len(row)) for row in rows]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(mask, dtype=torch.float64)


def give_credit(settings: RLOOConfig, scores=SCORES, groups=GROUPS, kls=KLS) -> Tensor:
    values, mask = padded(kls)
    credit = Credit(settings)
    score = torch.tensor(scores, dtype=torch.float64)
    if not credit.needs_kl:
        return credit.advantages(score, torch.tensor(groups), None, None)
    return credit.advantages(score, torch.tensor(groups), values, mask)


def token_settings(**options) -> RLOOConfig:
    return config(ratio_level="token", **options)


# -- the formulas, one completion at a time


def siblings(values: list[float], i: int, groups=GROUPS) -> list[float]:
    return [v for j, v in enumerate(values) if j != i and groups[j] == groups[i]]


def left_out(values: list[float]) -> list[float]:
    return [values[i] - mean(siblings(values, i)) for i in ROWS]


def charged(scores: list[float], kls=KLS) -> list[float]:
    return [score - BETA * sum(kl) for score, kl in zip(scores, kls, strict=True)]


def to_go(kl: list[float], t: int) -> float:
    return sum(kl[t:])


def assert_rows(got: Tensor, expected: list[list[float]]) -> None:
    """Each row's tokens as expected, and 0 under the padding."""
    for i, row in enumerate(expected):
        assert got[i].tolist() == pytest.approx([*row, *[0.0] * (got.shape[1] - len(row))], abs=1e-6)


# -- where the KL goes


def test_kl_in_the_reward():
    """reward = score − β·Σ kl, then the baseline. The first by hand: 1 − 0.5·1.25, against 3.85 and 1.5."""
    got = give_credit(config(kl_placement="reward"))
    assert got.shape == (5,)
    assert got[0].item() == pytest.approx(0.375 - (3.85 + 1.5) / 2)
    assert got.tolist() == pytest.approx(left_out(charged(SCORES)))


def test_kl_in_the_reward_token_by_token():
    """Siblings are charged in full; a completion's own token only for the KL from there on."""
    got = give_credit(token_settings(kl_placement="reward_tokens"))
    rewards = charged(SCORES)
    expected = [
        [SCORES[i] - BETA * to_go(KLS[i], t) - mean(siblings(rewards, i)) for t in range(len(KLS[i]))] for i in ROWS
    ]
    assert_rows(got, expected)
    # The first token answers for all of it.
    assert got[:, 0].tolist() == pytest.approx(left_out(rewards))


def test_kl_after_the_baseline():
    got = give_credit(token_settings(kl_placement="reward_tokens_after_baseline"))
    advantages = left_out(SCORES)
    expected = [[advantages[i] - BETA * to_go(KLS[i], t) for t in range(len(KLS[i]))] for i in ROWS]
    assert_rows(got, expected)


def test_kl_in_the_loss_leaves_the_advantages_alone():
    credit = Credit(config(kl_placement="loss", kl_estimator="k2"))
    assert not credit.needs_kl
    values, mask = padded(KLS)
    score, groups = torch.tensor(SCORES, dtype=torch.float64), torch.tensor(GROUPS)
    assert credit.advantages(score, groups, None, None).tolist() == pytest.approx(left_out(SCORES))
    assert credit.advantages(score, groups, values, mask).tolist() == pytest.approx(left_out(SCORES))


@pytest.mark.parametrize("placement", ["reward", "reward_tokens", "reward_tokens_after_baseline"])
def test_beta_zero_needs_no_kl(placement):
    settings = token_settings(beta=0.0, kl_placement=placement)
    assert not Credit(settings).needs_kl
    assert give_credit(settings).tolist() == pytest.approx(left_out(SCORES))


# -- estimators


def by_estimator(name: str, values: list[float]) -> list[float]:
    groups = {g: [v for v, of in zip(values, GROUPS, strict=True) if of == g] for g in set(GROUPS)}
    members = [groups[g] for g in GROUPS]
    return {
        "leave_one_out": lambda: left_out(values),
        "group_mean": lambda: [v - mean(m) for v, m in zip(values, members, strict=True)],
        "group_mean_std": lambda: [(v - mean(m)) / (stdev(m) + 1e-4) for v, m in zip(values, members, strict=True)],
        "batch_mean": lambda: [v - mean(values) for v in values],
        "moving_average": lambda: [v - mean(values) for v in values],  # the first batch
        "none": lambda: list(values),
    }[name]()


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_every_estimator_with_the_kl_in_the_reward(estimator):
    got = give_credit(config(advantage_estimator=estimator))
    assert got.tolist() == pytest.approx(by_estimator(estimator, charged(SCORES)))


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_every_estimator_with_the_kl_after_the_baseline(estimator):
    got = give_credit(token_settings(advantage_estimator=estimator, kl_placement="reward_tokens_after_baseline"))
    advantages = by_estimator(estimator, SCORES)
    assert_rows(got, [[advantages[i] - BETA * to_go(KLS[i], t) for t in range(len(KLS[i]))] for i in ROWS])


def test_which_estimators_look_across_groups():
    across = {name for name in ADVANTAGE_ESTIMATORS if Credit(config(advantage_estimator=name)).needs_batch}
    assert across == {"batch_mean", "moving_average"}
    assert Credit(config(normalize_advantages=True)).needs_batch


def test_the_moving_average_goes_from_batch_to_batch_and_through_a_checkpoint():
    settings = config(advantage_estimator="moving_average", baseline_momentum=0.75, beta=0.0)
    groups = torch.tensor([0, 0])
    credit = Credit(settings)
    credit.advantages(torch.tensor([1.0, 3.0]), groups, None, None)  # b = 2
    assert credit.advantages(torch.tensor([4.0, 8.0]), groups, None, None).tolist() == [2, 6]  # then b = 3
    credit.advantages(torch.tensor([50.0, 70.0]), groups, None, None, update=False)
    resumed = Credit(settings)
    resumed.load_state_dict(credit.state_dict())
    for one in (credit, resumed):
        assert one.advantages(torch.tensor([3.0, 5.0]), groups, None, None).tolist() == [0, 2]


# -- clip and normalisation


def test_advantages_are_clipped_before_the_kl_is_charged():
    settings = token_settings(kl_placement="reward_tokens_after_baseline", advantage_clip=1.0)
    bounded = [max(-1.0, min(1.0, a)) for a in left_out(SCORES)]
    expected = [[bounded[i] - BETA * to_go(KLS[i], t) for t in range(len(KLS[i]))] for i in ROWS]
    assert_rows(give_credit(settings), expected)


def test_normalized_advantages():
    got = give_credit(config(normalize_advantages=True))
    plain = left_out(charged(SCORES))
    assert got.tolist() == pytest.approx([(a - mean(plain)) / (stdev(plain) + 1e-4) for a in plain])


def test_token_advantages_are_normalized_over_tokens():
    settings = token_settings(kl_placement="reward_tokens_after_baseline", normalize_advantages=True)
    rows = [[left_out(SCORES)[i] - BETA * to_go(KLS[i], t) for t in range(len(KLS[i]))] for i in ROWS]
    tokens = [value for row in rows for value in row]
    expected = [[(value - mean(tokens)) / (stdev(tokens) + 1e-4) for value in row] for row in rows]
    assert_rows(give_credit(settings), expected)


# -- what has no score


@pytest.mark.parametrize("placement", ["reward", "reward_tokens", "reward_tokens_after_baseline"])
def test_an_unscorable_completion_counts_nowhere(placement):
    settings = token_settings(kl_placement=placement)
    got = give_credit(settings, scores=[1.0, NAN, 2.5, -1.0, 3.0])
    without = give_credit(
        settings, scores=[1.0, 2.5, -1.0, 3.0], groups=[0, 0, 1, 1], kls=[KLS[i] for i in (0, 2, 3, 4)]
    )
    assert (got[1] == 0).all()
    torch.testing.assert_close(got[[0, 2, 3, 4]], without)


@pytest.mark.parametrize("placement", ["reward", "reward_tokens", "reward_tokens_after_baseline"])
@pytest.mark.parametrize("estimator", ["leave_one_out", "group_mean", "group_mean_std"])
def test_a_completion_without_scored_siblings_gets_nothing(placement, estimator):
    settings = token_settings(kl_placement=placement, advantage_estimator=estimator)
    got = give_credit(settings, scores=[1.0, 4.0, 2.5, NAN, 3.0])
    assert (got[3:] == 0).all()
    assert (got[:3].reshape(3, -1)[:, 0] != 0).all()


def test_normalization_passes_over_what_has_no_score():
    got = give_credit(config(normalize_advantages=True, beta=0.0), scores=[1.0, 4.0, 2.5, NAN, 3.0])
    plain = [1 - 3.25, 4 - 1.75, 2.5 - 2.5]
    expected = [(a - mean(plain)) / (stdev(plain) + 1e-4) for a in plain]
    assert got.tolist() == pytest.approx([*expected, 0, 0])


def test_nothing_could_be_scored():
    for settings in (config(), config(normalize_advantages=True), config(advantage_estimator="moving_average")):
        assert give_credit(settings, scores=[NAN] * 5).tolist() == [0] * 5


# -- shaping


def shape(scores: list[list[float]], *, update: bool = True, shaper: Shaper | None = None, **options) -> list[float]:
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    shaper = shaper or Shaper(config(**({"max_completion_length": 10} | options)), weights)
    lengths, ended = torch.tensor([10, 2, 8]), torch.tensor([False, True, True])
    return shaper(torch.tensor(scores, dtype=torch.float64), lengths, ended, update=update).tolist()


TWO_REWARDS = [[1.0, 2.0], [4.0, NAN], [0.0, -6.0]]  # weighted: 2, 4, −3


def test_scores_are_weighted_and_otherwise_left_alone():
    assert shape(TWO_REWARDS) == [2, 4, -3]


def test_penalties_come_off_the_score():
    assert shape(TWO_REWARDS, missing_eos_penalty=1.5) == [0.5, 4, -3]
    assert shape(TWO_REWARDS, length_regularization="linear", length_coefficient=2.0) == pytest.approx([0, 3.6, -4.6])
    options = {"length_regularization": "soft_overlong", "length_coefficient": 2.0}
    assert shape(TWO_REWARDS, length_margin=4, **options) == pytest.approx([0, 4, -4])
    # Unset, the margin is a fifth of the limit: 2 of 10 and of 12.
    assert shape(TWO_REWARDS, **options) == pytest.approx([0, 4, -3])
    assert shape(TWO_REWARDS, max_completion_length=12, **options) == pytest.approx([2, 4, -3])


def test_penalty_then_normalization_then_clip():
    got = shape(TWO_REWARDS, missing_eos_penalty=1.0, normalize_rewards="batch", reward_clip_range=(-0.9, 0.9))
    values = [1.0, 4.0, -3.0]
    normalized = [(v - mean(values)) / (stdev(values) + 1e-4) for v in values]
    assert normalized[1] > 0.9
    assert normalized[2] < -0.9
    assert got == pytest.approx([normalized[0], 0.9, -0.9])


def test_running_normalization_remembers_and_stands_still_in_evaluation():
    shaper = Shaper(config(normalize_rewards="running"), torch.ones(1, dtype=torch.float64))
    first, second, held_out = [[1.0], [2.0], [6.0]], [[3.0], [NAN], [8.0]], [[100.0], [0.0], [NAN]]
    shape(first, shaper=shaper)
    seen = [1.0, 2.0, 6.0, 3.0, 8.0]
    got = shape(second, shaper=shaper)
    assert got == pytest.approx([(v - mean(seen)) / (stdev(seen) + 1e-4) for v in (3, NAN, 8)], nan_ok=True)
    for _ in range(2):
        got = shape(held_out, shaper=shaper, update=False)
        assert got == pytest.approx([(v - mean(seen)) / (stdev(seen) + 1e-4) for v in (100, 0, NAN)], nan_ok=True)


# -- the objectives of other places, from scores to the loss

OLD = [[-1.0, -2.0, -0.5], [-0.7, -0.3], [-1.2], [-0.4, -0.9, -2.2], [-1.1]]
MOVED = [[0.5, -0.1, 0.3], [-0.6, 0.1], [0.05], [1.4, -0.5, 0.1], [-0.02]]  # log-ratios: many beyond the clip
NUM_TOKENS = 10


def loss_of(settings: RLOOConfig, advantages: Tensor) -> float:
    """The learner's use of the functions: one denominator, of completions or of tokens."""
    old, mask = padded(OLD, 0.0)
    moved, _ = padded(MOVED, 0.0)
    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    terms = policy_loss(
        old + moved,
        old,
        advantages,
        mask,
        level=settings.choices.ratio_level,
        surrogate=settings.choices.surrogate,
        epsilon_low=settings.epsilon,
        epsilon_high=high,
        dual_clip=settings.choices.dual_clip,
    )
    denominator = NUM_TOKENS if settings.choices.loss_aggregation == "token_mean" else len(ROWS)
    return aggregate(terms.values, mask, str(settings.choices.loss_aggregation)).item() / denominator


def ppo(log_ratio: float, advantage: float) -> float:
    ratio = math.exp(log_ratio)
    return -min(ratio * advantage, max(0.8, min(1.2, ratio)) * advantage)


def shaped(settings: RLOOConfig, scores: list[float]) -> list[float]:
    """The scores of a second batch: none of these objectives remembers the first."""
    column = torch.tensor(scores, dtype=torch.float64).unsqueeze(-1)
    lengths, ended = torch.tensor([len(kl) for kl in KLS]), torch.ones(5, dtype=torch.bool)
    shaper = Shaper(settings, torch.ones(1, dtype=torch.float64))
    shaper(7 * column + 3, lengths, ended, update=True)
    return shaper(column, lengths, ended, update=True).tolist()


def test_objective_trl():
    settings = config(objective="trl")
    advantages = left_out(charged(SCORES))
    assert give_credit(settings, shaped(settings, SCORES)).tolist() == pytest.approx(advantages)
    expected = mean(ppo(sum(MOVED[i]), advantages[i]) for i in ROWS)
    assert loss_of(settings, give_credit(settings)) == pytest.approx(expected)


def test_objective_paper():
    settings = config(objective="paper")
    advantages = left_out(charged(SCORES))
    assert give_credit(settings, shaped(settings, SCORES)).tolist() == pytest.approx(advantages)
    expected = mean(-advantages[i] * (sum(OLD[i]) + sum(MOVED[i])) for i in ROWS)
    assert loss_of(settings, give_credit(settings)) == pytest.approx(expected)


def test_objective_openrlhf():
    settings = config(objective="openrlhf")
    scores = [1.0, 40.0, 2.5, -1.0, 3.0]  # the second is 38.25 above its siblings
    held = [max(-10.0, min(10.0, a)) for a in left_out(scores)]
    assert 10.0 in held
    expected = [[held[i] - BETA * to_go(KLS[i], t) for t in range(len(KLS[i]))] for i in ROWS]
    got = give_credit(settings, shaped(settings, scores))
    assert_rows(got, expected)
    tokens = [ppo(MOVED[i][t], expected[i][t]) for i in ROWS for t in range(len(KLS[i]))]
    assert loss_of(settings, got) == pytest.approx(sum(tokens) / NUM_TOKENS)


def test_objective_verl():
    settings = config(objective="verl")
    advantages = left_out(charged(SCORES))
    got = give_credit(settings, shaped(settings, SCORES))
    assert got.tolist() == pytest.approx(advantages)

    def dual(log_ratio: float, advantage: float) -> float:
        return min(ppo(log_ratio, advantage), -3 * advantage) if advantage < 0 else ppo(log_ratio, advantage)

    pairs = [(MOVED[i][t], advantages[i]) for i in ROWS for t in range(len(KLS[i]))]
    assert any(dual(*pair) != ppo(*pair) for pair in pairs)
    assert loss_of(settings, got) == pytest.approx(sum(dual(*pair) for pair in pairs) / NUM_TOKENS)


def test_objective_reinforce_plus_plus():
    settings = config(objective="reinforce++", reward_clip_range=(-1.0, 1.0))  # the default of ±10 would not show here
    normalized = [(s - mean(SCORES)) / (stdev(SCORES) + 1e-4) for s in SCORES]
    held = [max(-1.0, min(1.0, s)) for s in normalized]
    assert held != normalized
    rows = [[held[i] - BETA * to_go(KLS[i], t) for t in range(len(KLS[i]))] for i in ROWS]
    tokens = [value for row in rows for value in row]
    expected = [[(value - mean(tokens)) / (stdev(tokens) + 1e-4) for value in row] for row in rows]
    got = give_credit(settings, shaped(settings, SCORES))
    assert_rows(got, expected)
    losses = [ppo(MOVED[i][t], expected[i][t]) for i in ROWS for t in range(len(KLS[i]))]
    assert loss_of(settings, got) == pytest.approx(sum(losses) / NUM_TOKENS)


def test_every_objective_has_a_test_here():
    assert set(OBJECTIVES) == {"trl", "paper", "openrlhf", "verl", "reinforce++"}


def test_the_objectives_differ():
    """Five names, five losses, on the same completions."""
    losses = []
    for name in OBJECTIVES:
        settings = config(objective=name)
        losses.append(loss_of(settings, give_credit(settings, shaped(settings, SCORES))))
    assert all(abs(a - b) > 1e-3 for a, b in itertools.combinations(losses, 2))


def test_single_options_override_an_objective():
    scores = [1.0, 40.0, 2.5, -1.0, 3.0]
    unbounded = give_credit(config(objective="openrlhf", advantage_clip=0), scores)
    assert unbounded[1, 1].item() == pytest.approx(38.25 - BETA * 0.2)
    sequence = give_credit(config(objective="openrlhf", kl_placement="reward", advantage_clip=0), scores)
    assert sequence.tolist() == pytest.approx(left_out(charged(scores)))
    plain = config(objective="reinforce++", normalize_rewards="off", normalize_advantages=False)
    expected = [[SCORES[i] - BETA * to_go(KLS[i], t) for t in range(len(KLS[i]))] for i in ROWS]
    assert_rows(give_credit(plain, shaped(plain, SCORES)), expected)


# -- soundness, by enumeration
#
# A policy that writes two tokens of a vocabulary of two, the second depending on the first: four completions, so
# 4³ = 64 groups of three. Expectations are sums over all of them.

K = 3
COMPLETIONS = list(itertools.product(range(2), repeat=2))
TRUE_SCORES = [1.0, -0.5, 2.0, 0.3]


class Tiny:
    """Its parameters: logits of the first token, and of the second for either first."""

    def __init__(self, first: list[float], second: list[list[float]]) -> None:
        self.first = torch.tensor(first, dtype=torch.float64, requires_grad=True)
        self.second = torch.tensor(second, dtype=torch.float64, requires_grad=True)

    def logprobs(self) -> Tensor:
        """(4, 2): of each token of each completion."""
        one, two = self.first.log_softmax(-1), self.second.log_softmax(-1)
        return torch.stack([torch.stack([one[a], two[a, b]]) for a, b in COMPLETIONS])

    def token_logits(self) -> Tensor:
        """(4, 2, 2): what each token of each completion was drawn from."""
        return torch.stack([torch.stack([self.first, self.second[a]]) for a, _ in COMPLETIONS])

    def gradient(self, value: Tensor) -> Tensor:
        parts = torch.autograd.grad(value, [self.first, self.second], retain_graph=True)
        return torch.cat([part.flatten() for part in parts])


def policy_and_reference() -> tuple[Tiny, Tiny]:
    return Tiny([0.4, -0.3], [[1.0, 0.2], [-0.6, 0.5]]), Tiny([-0.2, 0.6], [[0.1, 0.9], [0.7, -0.8]])


def objective_gradients() -> tuple[Tensor, Tensor]:
    """∇ E[score] and ∇ KL(π ‖ π_ref), of whole completions, by differentiating the sums themselves."""
    policy, reference = policy_and_reference()
    logprobs = policy.logprobs().sum(-1)
    log_ratio = logprobs - reference.logprobs().sum(-1).detach()
    score = (logprobs.exp() * torch.tensor(TRUE_SCORES, dtype=torch.float64)).sum()
    return policy.gradient(score), policy.gradient((logprobs.exp() * log_ratio).sum())


def expected_gradient(settings: RLOOConfig) -> Tensor:
    """The mean over all groups of the gradient that a step ascends, weighted by the group's probability."""
    policy, reference = policy_and_reference()
    logprobs = policy.logprobs()
    if settings.choices.kl_estimator == "full":
        kl = exact_kl(policy.token_logits(), reference.token_logits()).double().detach()
    else:
        kl = KL_ESTIMATORS[settings.choices.kl_estimator].function(logprobs, reference.logprobs()).detach()
    choices = torch.tensor(list(itertools.product(range(4), repeat=K)))  # (64, K)
    probability = logprobs.detach().sum(-1)[choices].sum(-1).exp()  # (64,)
    rows = choices.flatten()
    groups = torch.arange(len(choices)).repeat_interleave(K)
    score = torch.tensor(TRUE_SCORES, dtype=torch.float64)[rows]
    mask = torch.ones(len(rows), 2, dtype=torch.float64)
    advantages = Credit(settings).advantages(score, groups, kl[rows], mask)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)
    credited = (advantages * logprobs[rows]).sum(-1).reshape(-1, K).mean(-1)  # (64,)
    return policy.gradient((probability * credited).sum())


PLACEMENTS = ["reward", "reward_tokens", "reward_tokens_after_baseline"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("estimator", ["leave_one_out", "none"])
def test_k1_in_the_reward_gives_the_gradient_of_the_objective(placement, estimator):
    """E[step] = ∇(E[score] − β·KL), wherever in the reward the KL goes."""
    got = expected_gradient(token_settings(kl_placement=placement, advantage_estimator=estimator))
    score, kl = objective_gradients()
    torch.testing.assert_close(got, score - BETA * kl)


@pytest.mark.parametrize("placement", ["reward", "reward_tokens"])
def test_the_group_mean_gives_the_same_direction_and_a_smaller_step(placement):
    got = expected_gradient(token_settings(kl_placement=placement, advantage_estimator="group_mean"))
    score, kl = objective_gradients()
    torch.testing.assert_close(got, (K - 1) / K * (score - BETA * kl))


def test_the_group_mean_before_the_kl_shrinks_the_score_only():
    settings = token_settings(kl_placement="reward_tokens_after_baseline", advantage_estimator="group_mean")
    score, kl = objective_gradients()
    torch.testing.assert_close(expected_gradient(settings), (K - 1) / K * score - BETA * kl)


def test_dividing_by_the_deviation_changes_the_direction():
    got = expected_gradient(config(advantage_estimator="group_mean_std", beta=0.0))
    score, _ = objective_gradients()
    assert torch.cosine_similarity(got, score, dim=0) < 0.999


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_k2_and_k3_in_the_reward_do_not_give_the_gradient_of_the_kl(estimator):
    got = expected_gradient(config(kl_estimator=estimator))
    score, kl = objective_gradients()
    assert (got - (score - BETA * kl)).norm() > 0.3 * BETA * kl.norm()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_full_kl_in_the_reward_leaves_out_its_own_token(placement):
    """It charges a token for the KL of the prefixes that it leads to, never for its own: a constant at its token.

    What is missing is exactly what the full KL in the loss gives.
    """
    got = expected_gradient(token_settings(kl_placement=placement, kl_estimator="full"))
    score, kl = objective_gradients()
    assert (got - (score - BETA * kl)).norm() > 0.3 * BETA * kl.norm()
    policy, reference = policy_and_reference()
    probability = policy.logprobs().sum(-1).exp().detach()
    in_loss = (probability * exact_kl(policy.token_logits(), reference.token_logits()).double().sum(-1)).sum()
    torch.testing.assert_close(got, score - BETA * (kl - policy.gradient(in_loss)), rtol=1e-5, atol=1e-6)


def test_k2_and_full_in_the_loss_leave_out_what_a_token_leads_to():
    """Right at each token, given what came before; blind to its influence on the KL of later tokens."""
    policy, reference = policy_and_reference()
    probability = policy.logprobs().sum(-1).exp().detach()
    squared = k2(policy.logprobs(), reference.logprobs().detach())
    full = exact_kl(policy.token_logits(), reference.token_logits()).double()
    sampled, exact = (policy.gradient((probability * kl.sum(-1)).sum()) for kl in (squared, full))
    torch.testing.assert_close(sampled, exact, rtol=1e-5, atol=1e-6)
    _, kl = objective_gradients()
    assert (sampled - kl).norm() > 0.05 * kl.norm()
    torch.testing.assert_close(sampled[2:], kl[2:], rtol=1e-5, atol=1e-6)  # the last token leads to nothing
