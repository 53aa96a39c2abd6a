"""Gates, clips, running normalisation, routes and weights, with values worked out by hand."""

from __future__ import annotations

import pytest
import torch

import rloom
from rloom.errors import RewardError
from rloom.rewards import FunctionReward, RewardBatch, RewardSet
from rloom.rewards.compose import Composition, as_terms, route, term

nan = float("nan")


def accuracy(completions): ...


def form(completions): ...


def composition(*terms):
    terms = as_terms(terms, None)
    return Composition(terms, [t.function.__name__ for t in terms])


def test_a_gate():
    whole = composition(term(accuracy, only_if=form, otherwise=-1.0), form)
    scores = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, nan], [nan, 0.0]])
    assert whole.gated(scores)[:, 0].tolist()[:3] == [1.0, -1.0, 1.0]
    assert whole.gated(scores)[3, 0].isnan()  # no score stays no score
    assert torch.equal(whole.gated(scores)[:2, 1], scores[:2, 1])
    by_name = composition(term(accuracy, only_if="form", at_least=0.5), form)
    assert by_name.gated(torch.tensor([[1.0, 0.5], [1.0, 0.4]]))[:, 0].tolist() == [1.0, 0.0]


def test_a_gate_that_is_not_there():
    with pytest.raises(RewardError, match=r"only_if='forms' is not among the other rewards .*did you mean 'form'"):
        composition(term(accuracy, only_if="forms"), form)
    with pytest.raises(RewardError, match="not among the other rewards"):
        composition(term(accuracy, only_if=accuracy), form)


def test_clip_and_running_normalisation():
    whole = composition(term(accuracy, clip=(0.0, 2.0), normalize=True), form)
    scores = torch.tensor([[0.0, 7.0], [9.0, 8.0]])
    first = whole.scaled(scores, update=True)
    assert first[:, 0].tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-3)  # of 0 and 2, mean 1
    assert first[:, 1].tolist() == [7.0, 8.0]
    state = whole.state_dict()
    before = whole.scaled(torch.tensor([[1.0, 0.0]]), update=False)
    assert before[0, 0].item() == pytest.approx(0.0, abs=1e-6)
    assert whole.state_dict() == state  # evaluation leaves it alone
    other = composition(term(accuracy, normalize=True), form)
    other.load_state_dict(state)
    assert other.state_dict() == state == {"accuracy": [2, 1.0, 2.0]}


def test_weights_in_one_place():
    assert composition(term(accuracy, weight=2.0), form).weights == [2.0, 1.0]
    assert composition(accuracy, form).weights is None
    with pytest.raises(RewardError, match="given twice"):
        as_terms([term(accuracy, weight=2.0)], [1.0])
    with pytest.raises(RewardError, match="clip must be"):
        term(accuracy, clip=(1.0, 1.0))
    with pytest.raises(RewardError, match="a term of a term"):
        term(term(accuracy))


def test_routes_call_a_function_on_its_rows_alone():
    seen = []

    def double(completions, log_extra):
        seen.append(list(completions))
        log_extra("note", [c.upper() for c in completions])
        return [2.0] * len(completions)

    def half(completions):
        return [0.5] * len(completions)

    terms = route("task", {"math": double, "code": [half, term(half, weight=0.1)]})
    assert [t.weight for t in terms] == [None, None, 0.1]
    batch = RewardBatch(
        prompts=["p"] * 3, completions=["a", "b", "c"], completion_ids=[[1]] * 3,
        columns={"task": ["math", "code", "math"]},
    )  # fmt: skip
    rewards = RewardSet([FunctionReward(t.function) for t in terms], None, when=[t.when for t in terms])
    scored = rewards.score(batch)
    assert scored.scores.nan_to_num(-1).tolist() == [[2.0, -1.0, -1.0], [-1.0, 0.5, 0.5], [2.0, -1.0, -1.0]]
    assert seen == [["a", "c"]]
    assert scored.extra == {"note": ["A", None, "C"]}
    batch.columns = {"tsk": ["math"] * 3}
    with pytest.raises(RewardError, match=r"column 'task'.*did you mean 'tsk'"):
        rewards.score(batch)
    batch.columns = {"task": ["other"] * 3}
    assert rewards.score(batch).scores.isnan().all()
    assert len(seen) == 1


def test_several_values_of_a_column():
    assert term(accuracy, when=("task", ["b", "a"])).when == ("task", ("b", "a"))
    # A set has another order in each process.
    assert term(accuracy, when=("task", {"b", "a", "c"})).when == ("task", ("a", "b", "c"))
    assert rloom.term is term


def test_a_gate_whose_function_failed_is_shut():
    parts = composition(term(accuracy, only_if=form, otherwise=-1.0), form)
    scores = torch.tensor([[1.0, nan], [1.0, nan], [1.0, 1.0]])
    assert parts.gated(scores)[:, 0].tolist() == [1.0, 1.0, 1.0]  # it gave None: the gate is open
    failed = torch.tensor([[False, True], [False, False], [False, False]])
    assert parts.gated(scores, failed)[:, 0].tolist() == [-1.0, 1.0, 1.0]


def test_a_routed_term_with_rows_of_its_own():
    with pytest.raises(RewardError, match="give one of them"):
        route("task", {"math": term(accuracy, when=("level", "hard"))})


class Scorer:
    def form(self, completions): ...

    def accuracy(self, completions): ...


def test_methods_as_gates():
    scorer = Scorer()
    assert composition(term(scorer.accuracy, only_if=scorer.form), term(scorer.form)).gates == [1, None]
    with pytest.raises(RewardError, match="not among the other rewards"):
        composition(term(scorer.accuracy, only_if=Scorer().form), term(scorer.form))


def test_a_gate_that_failed_is_shut_whatever_number_failures_get():
    def gate(completions):
        raise RuntimeError("down")

    def good(completions):
        return [6.0] * len(completions)

    terms = as_terms([term(good, only_if=gate), gate], None)
    rewards = RewardSet([FunctionReward(one.function) for one in terms], None, on_error=1.0)
    scored = rewards.score(RewardBatch(prompts=["p"] * 2, completions=["a", "b"], completion_ids=[[1]] * 2, columns={}))
    composition = Composition(terms, rewards.names)
    assert composition.gated(scored.scores, scored.failed).tolist() == [[0.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: term(f, clip=5), r"clip must be \(min, max\), not 5"),
        (lambda f: term(f, weight="2"), "weight must be a number, not '2'"),
        (lambda f: term(f, when="math"), r"when must be \(column, value or values\), not 'math'"),
        (lambda f: route("task", ["a"]), "takes a dict"),
        (lambda f: term(f, onlyif=f), r"term\(\) has no option 'onlyif'; did you mean 'only_if'\?"),
        (lambda f: rloom.rewards.code_execution(timelimit=2), "did you mean 'time_limit'"),
        (lambda f: rloom.rewards.length(maximim=2), "did you mean 'maximum'"),
        (lambda f: rloom.reward(f, isolated=True, time_limit="5"), "a number of seconds above 0, not '5'"),
    ],
)
def test_what_is_written_wrong_is_told(make, message):
    with pytest.raises((RewardError, TypeError), match=message):
        make(lambda completions: [1.0])
