"""What a reward function is worth to RLOO, found out before a run: how its scores spread and tie, and what games it.

Only differences within a group teach anything, so that is what is looked at. And a policy finds whatever scores: so
completions that nobody wants are scored too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rloom.rewards.base import RewardBatch
from rloom.rewards.calling.reward_set import RewardSet
from rloom.rewards.completion_text import text_of

DEGENERATE = ("empty", "prompt copied", "one token repeated", "format alone", "digits sprayed")


@dataclass(slots=True, kw_only=True)
class Sample:
    """A prompt, the data set's other columns, and completions of it."""

    prompt: Any
    columns: dict[str, Any]
    completions: list[Any]
    completion_ids: list[list[int]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Report:
    """What was found of one function. `problems` are reasons not to train with it, `remarks` things to know."""

    name: str
    count: int
    low: float
    high: float
    mean: float
    std: float
    std_within: float
    share_within: float
    tied_groups: float
    ties: float
    none: float
    errors: int
    seconds_per_sample: float
    length_correlation: float
    noise: float | None = None  # standard deviation of a score when it is asked for again; None: it was not
    changed: float = 0.0  # the share of completions whose score was another one
    degenerate: dict[str, float | None] = field(default_factory=dict)
    degenerate_errors: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def check_rewards(rewards: RewardSet, samples: Sequence[Sample], *, twice: bool = True) -> list[Report]:
    """Score the completions, again for noise, then the degenerate ones, and say for each function what came of it."""
    batch = _batch(samples)
    scored = rewards.score(batch)
    # There is nothing to see in what gave no scores, and its failures would be told twice.
    again = rewards.score(batch).scores if twice and not scored.scores.isnan().all() else None
    costs = dict(scored.costs)
    groups = torch.tensor([index for index, sample in enumerate(samples) for _ in sample.completions])
    lengths = torch.tensor([float(len(ids)) for ids in batch.completion_ids])
    degenerate = {kind: rewards.score(_batch([_degenerate(s, kind) for s in samples])) for kind in DEGENERATE}
    reports = []
    for i, name in enumerate(rewards.names):
        report = _measured(name, scored.scores[:, i], groups, lengths, costs)
        if again is not None and not scored.scores[:, i].isnan().all():
            report.noise, report.changed = _noise(scored.scores[:, i], again[:, i])
        for kind, odd in degenerate.items():
            mean = odd.scores.nanmean(0)[i].item()
            report.degenerate[kind] = None if math.isnan(mean) else mean
            if failed := _errors(dict(odd.costs), name):
                report.degenerate_errors[kind] = failed
        reports.append(_judged(report))
    return reports


def _batch(samples: Sequence[Sample]) -> RewardBatch:
    names = list(dict.fromkeys(name for sample in samples for name in sample.columns))
    rows = [(sample, index) for sample in samples for index in range(len(sample.completions))]
    return RewardBatch(
        prompts=[s.prompt for s, _ in rows],
        completions=[s.completions[i] for s, i in rows],
        # Where there was no tokenizer, characters stand for token ids.
        completion_ids=[
            s.completion_ids[i] if s.completion_ids else [ord(c) for c in text_of(s.completions[i])] for s, i in rows
        ],
        columns={name: [s.columns.get(name) for s, _ in rows] for name in names},
    )


# -- measuring


def _measured(name: str, column: Tensor, groups: Tensor, lengths: Tensor, costs: dict[str, float]) -> Report:
    known = ~column.isnan()
    values = column[known].double()
    parts = [column[(groups == g) & known].double() for g in groups.unique()]
    parts = [part for part in parts if len(part) > 1]
    within = [part.var(correction=0).item() for part in parts]
    total = values.var(correction=0).item() if len(values) else 0.0
    pairs = [(a == b).item() for part in parts for i, a in enumerate(part) for b in part[i + 1 :]]
    return Report(
        name=name,
        count=len(column),
        low=values.min().item() if len(values) else math.nan,
        high=values.max().item() if len(values) else math.nan,
        mean=values.mean().item() if len(values) else math.nan,
        std=math.sqrt(total),
        std_within=math.sqrt(_mean(within)) if within else 0.0,
        share_within=_mean(within) / total if within and total > 0 else 0.0,
        tied_groups=_mean([v == 0.0 for v in within]) if within else 1.0,
        ties=_mean(pairs) if pairs else 1.0,
        none=1.0 - known.double().mean().item(),
        errors=_errors(costs, name),
        seconds_per_sample=costs.get(f"rewards/{name}/time", 0.0) / max(len(column), 1),
        length_correlation=_correlation(values, lengths[known].double()),
    )


def _noise(first: Tensor, second: Tensor) -> tuple[float, float]:
    """The standard deviation of a score around its own mean, from two of each; and the share that changed.

    >>> _noise(torch.tensor([1.0, 0.0, torch.nan]), torch.tensor([1.0, 2.0, torch.nan]))
    (1.0, 0.3333333333333333)
    """
    difference = (first - second).double()
    known = difference[~difference.isnan()]
    changed = (first != second) & ~(first.isnan() & second.isnan())
    # Each of two independent draws has half of their difference's variance.
    return math.sqrt(known.square().mean().item() / 2) if len(known) else 0.0, changed.double().mean().item()


def _errors(costs: dict[str, float], name: str) -> int:
    return int(sum(costs.get(f"rewards/{name}/{kind}", 0) for kind in ("errors", "timeouts", "crashes")))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's; 0 where one of them does not vary."""
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return 0.0
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


# -- completions that nobody wants


def degenerate_completions(sample: Sample) -> dict[str, str]:
    """Completions of one prompt that nobody wants, and that a policy may find when they score well.

    >>> sample = Sample(prompt="2+2?", columns={"answer": "4"}, completions=["<think>2+2</think> 4"])
    >>> degenerate_completions(sample)["format alone"]
    '<think></think> '
    """
    prompt = sample.prompt if isinstance(sample.prompt, str) else text_of(sample.prompt)
    example = text_of(max(sample.completions, key=lambda c: len(text_of(c)), default=""))
    words = example.split() or ["the"]
    return {
        "empty": "",
        "prompt copied": prompt,
        "one token repeated": " ".join([words[0]] * 100),
        "format alone": _skeleton(example),
        "digits sprayed": _sprayed(sample.columns),
    }


def _sprayed(columns: dict[str, Any]) -> str:
    """Every small number and letter, and every number in the row, so that the right answer is among them."""
    found = re.findall(r"-?\d+(?:\.\d+)?", " ".join(map(str, columns.values())))
    numbers = [str(n) for n in range(51)] + found + [str(n) for n in range(51, 101)]
    return " ".join(numbers + list("ABCDE"))


def _skeleton(text: str) -> str:
    """The format of a completion without its content: tags, fences, boxes, braces."""
    kept = re.findall(r"</?[\w-]+>|```\w*|\\boxed\{|[{}\[\]]|\s+", text)
    return re.sub(r"\s+", " ", "".join(kept))[:2000]


def _degenerate(sample: Sample, kind: str) -> Sample:
    """The same prompt with one degenerate completion, in the form of the others."""
    text = degenerate_completions(sample)[kind]
    completion = text if isinstance(sample.prompt, str) else [{"role": "assistant", "content": text}]
    return Sample(prompt=sample.prompt, columns=sample.columns, completions=[completion])


# -- judging


def _judged(report: Report) -> Report:
    """Put into words what the numbers mean for a run."""
    problem, remark = report.problems.append, report.remarks.append
    if report.degenerate_errors:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in report.degenerate_errors.items())
        problem(f"it failed on degenerate completions, which a policy will write sooner or later: {kinds}")
    if report.none == 1.0:
        problem("it gave no score at all")
        return report
    if report.errors:
        problem(f"it failed on {report.errors} of {report.count} completions; see above for the first")
    if report.std_within == 0.0:
        problem("all completions of a prompt score alike: RLOO compares them with each other, and has nothing to go by")
    elif report.tied_groups > 0.5:
        remark(f"{report.tied_groups:.0%} of the prompts have completions that all score alike: these teach nothing")
    _judge_noise(report, problem, remark)
    if report.none > 0.2:
        remark(f"{report.none:.0%} of the completions got no score")
    if abs(report.length_correlation) > 0.7 and report.std > 0:
        more = "longer" if report.length_correlation > 0 else "shorter"
        remark(f"it mostly rewards {more} completions (correlation with length {report.length_correlation:+.2f})")
    if report.seconds_per_sample > 1.0:
        remark(f"it takes {report.seconds_per_sample:.1f} seconds per completion; see rloom.reward(…) for what helps")
    _judge_degenerate(report, problem)
    return report


def _judge_noise(report: Report, problem: Callable[[str], None], remark: Callable[[str], None]) -> None:
    """A score that differs from itself teaches that much less."""
    if not report.changed or report.noise is None:
        return
    found = f"scored again, {report.changed:.0%} of the same completions had another score (± {report.noise:.3g})"
    # Noise is part of the variance within groups.
    share = (report.noise / report.std_within) ** 2 if report.std_within else 1.0
    if share > 0.5:
        problem(f"{found}: more than half of what sets a prompt's completions apart is noise")
    else:
        remark(f"{found}: about {share:.0%} of the variance within groups is noise")


def _judge_degenerate(report: Report, problem: Callable[[str], None]) -> None:
    """A completion that nobody wants should not do as well as the best, nor far better than the mean."""
    for kind, score in report.degenerate.items():
        if score is None or report.std == 0.0:
            continue
        if score >= report.high - 1e-6 * max(1.0, abs(report.high)) and score > report.low:
            problem(f"a degenerate completion scores as high as the best: {kind} ({score:.3g})")
        elif score > report.mean + report.std:
            problem(f"a degenerate completion scores far above the mean: {kind} ({score:.3g}, mean {report.mean:.3g})")
