"""How the scores of several reward functions become one reward: gates, clips, normalisation, weights, routes.

All of it works on columns of scores, which are kept as they came: what a function returned is in the log, whatever
becomes of it here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from rloom.algo.normalizers import RunningMoments, clip
from rloom.errors import RewardError, checks_options, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A reward function and the part that its score has in the reward. Made by [`term`] and [`route`]."""

    function: Any
    weight: float | None = None
    clip: tuple[float, float] | None = None
    normalize: bool = False
    only_if: Any = None
    at_least: float = 1.0
    otherwise: float = 0.0
    when: tuple[str, tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.function, Term):
            raise RewardError("a term of a term: give all of it to one `term(…)`")
        if self.clip is not None and not (
            isinstance(self.clip, (tuple, list)) and len(self.clip) == 2 and self.clip[0] < self.clip[1]
        ):
            raise RewardError(f"clip must be (min, max), not {self.clip!r}")
        if self.weight is not None and not isinstance(self.weight, (int, float)):
            raise RewardError(f"weight must be a number, not {self.weight!r}")


@checks_options
def term(
    function: Any,
    *,
    weight: float | None = None,
    clip: tuple[float, float] | None = None,
    normalize: bool = False,
    only_if: Any = None,
    at_least: float = 1.0,
    otherwise: float = 0.0,
    when: tuple[str, Any] | None = None,
) -> Term:
    """Say what part a function's score has in the reward. In this order: rows, gate, clip, normalisation, weight.

    Args:
        function: anything that `reward_funcs` takes.
        weight: of this score in the sum; as `reward_weights`, beside which it cannot be given.
        clip: hold the values within (min, max).
        normalize: by the mean and standard deviation of all values so far, which checkpoints keep.
        only_if: another reward function of the list, by itself or by name. Where its score is below `at_least`, this
            score counts as `otherwise`. Where it gave None or is not for the row, the gate is open; where it failed, it
            is shut.
        at_least, otherwise: see there.
        when: (column, value or values): the rows that this function is for. It is not called on others.

    >>> def accuracy(completions): ...
    >>> def form(completions): ...
    >>> parts = [term(accuracy, only_if=form, weight=2.0), term(form, clip=(0.0, 1.0))]
    """
    if when is not None:
        if not isinstance(when, (tuple, list)) or len(when) != 2:
            raise RewardError(f"when must be (column, value or values), not {when!r}")
        column, values = when
        if isinstance(values, (set, frozenset)):
            # In the same order in every process.
            values = sorted(values, key=repr)
        when = (column, tuple(values) if isinstance(values, (list, tuple)) else (values,))
    return Term(function=function, weight=weight, clip=clip, normalize=normalize, only_if=only_if, at_least=at_least,
                otherwise=otherwise, when=when)  # fmt: skip


def route(column: str, rewards: Mapping[Any, Any]) -> list[Term]:
    """A reward function (or a list of them) for each value of a column.

    >>> def math(completions): ...
    >>> def code(completions): ...
    >>> for one in route("task", {"math": math, "code": [code, term(math, weight=0.1)]}):
    ...     print(one.when)
    ('task', ('math',))
    ('task', ('code',))
    ('task', ('code',))
    """
    if not isinstance(rewards, Mapping):
        raise RewardError(f"route({column!r}, …) takes a dict of the column's values and rewards, not {rewards!r}")
    terms = []
    for value, several in rewards.items():
        for one in several if isinstance(several, (list, tuple)) else [several]:
            if isinstance(one, Term) and one.when is not None:
                raise RewardError(
                    f"route({column!r}, …) says for which rows a term is, and so does its own when={one.when}: give "
                    "one of them (a column that holds both can be made beforehand)"
                )
            term_of_one = one if isinstance(one, Term) else Term(function=one)
            terms.append(replace(term_of_one, when=(column, (value,))))
    return terms


def _is_same(one: Any, other: Any) -> bool:
    """Whether two are one function. A method of an object is a new object each time that it is named."""
    return one is other or (isinstance(one, MethodType) and isinstance(other, MethodType) and one == other)


def as_terms(functions: Sequence[Any], weights: Sequence[float] | None) -> list[Term]:
    """Every reward function as a term, with its weight. Weights are given in one place."""
    terms = [f if isinstance(f, Term) else Term(function=f) for f in functions]
    if weights is not None and any(t.weight is not None for t in terms):
        raise RewardError("weights are given twice, as `reward_weights` and in `term(weight=…)`: give one of them")
    return terms


class Composition:
    """The terms of a run, applied to columns of scores (N, F). Keeps running means and deviations."""

    def __init__(self, terms: Sequence[Term], names: Sequence[str]) -> None:
        self.terms, self.names = list(terms), list(names)
        self.gates = [self._gate(t) for t in self.terms]
        self.moments = {n: RunningMoments() for t, n in zip(self.terms, self.names, strict=True) if t.normalize}

    def _gate(self, one: Term) -> int | None:
        """The column that a term's gate is in."""
        if one.only_if is None:
            return None
        wanted = one.only_if.function if isinstance(one.only_if, Term) else one.only_if
        for index, other in enumerate(self.terms):
            if (_is_same(other.function, wanted) or self.names[index] == wanted) and other is not one:
                return index
        name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", type(wanted).__name__)
        raise RewardError(
            f"only_if={name!r} is not among the other rewards ({', '.join(self.names)})"
            f"{did_you_mean(name, self.names) or '.'} Add it to `reward_funcs`, with weight 0 if it is a gate only"
        )

    @property
    def weights(self) -> list[float] | None:
        """The terms' own weights; None if none has one."""
        if all(t.weight is None for t in self.terms):
            return None
        return [1.0 if t.weight is None else t.weight for t in self.terms]

    def gated(self, scores: Tensor, failed: Tensor | None = None) -> Tensor:
        """Scores with every gate applied. Gates look at raw values, so that their order does not matter.

        `failed` (N, F) says where a score is missing because the function failed, not because it gave None.
        """
        failed = torch.zeros_like(scores, dtype=torch.bool) if failed is None else failed.to(scores.device)
        columns = list(scores.unbind(-1))
        for index, gate in enumerate(self.gates):
            if gate is not None:
                # Without a score the gate is open, unless there should have been one: failing must not pay.
                shut = (scores[:, gate] < self.terms[index].at_least) | failed[:, gate]
                closed = torch.where(columns[index].isnan(), columns[index], self.terms[index].otherwise)
                columns[index] = torch.where(shut, closed, columns[index])
        return torch.stack(columns, -1)

    def scaled(self, scores: Tensor, *, update: bool) -> Tensor:
        """Gated scores, clipped and normalised. `update=False` leaves the running statistics alone (evaluation)."""
        columns = []
        for one, name, column in zip(self.terms, self.names, scores.unbind(-1), strict=True):
            values = clip(column, one.clip)
            if one.normalize:
                if update:
                    self.moments[name].update(values)
                values = self.moments[name].normalize(values)
            columns.append(values)
        return torch.stack(columns, -1)

    def state_dict(self) -> dict[str, list[float]]:
        """The running statistics."""
        return {name: [m.count, m.mean, m.squares] for name, m in self.moments.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on where a checkpoint stopped."""
        for name, (count, mean, squares) in state.items():
            if name in self.moments:
                self.moments[name] = RunningMoments(int(count), mean, squares)
