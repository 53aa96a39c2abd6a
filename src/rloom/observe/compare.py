"""Where two runs part: the first step at which their completions, scores, advantages or logs differ. Needs no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rloom.observe.runs import RunReader

CAUSES = (
    ("prompt", "prompts"), ("token_ids", "completions"), ("completion", "completions"), ("stop_reason", "completions"),
    ("scores", "scores"), ("failures", "scores"), ("reward", "rewards"), ("advantage", "advantages"),
)  # fmt: skip
"""Fields of a completion and what they belong to, in the order in which a step makes them: the first that differs is
the cause of the others."""

VERSIONS = ("python", "rloom", "torch", "transformers")
"""Packages whose versions are compared."""

LOGGED = ("loss", "grad_norm", "learning_rate")
"""Logged numbers that are compared, after a step's completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that differs: `what` at `where`, in either run."""

    what: str
    where: str
    values: tuple[Any, Any]


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Two runs held against each other. `step` is None where they do not part."""

    step: int | None = None
    first: Difference | None = None  # of that step
    others: list[str] = field(default_factory=list)  # what else differs in that step
    options: list[Difference] = field(default_factory=list)
    compared: int = 0  # steps whose completions both have, and that where they part
    ends: tuple[int, int] = (0, 0)  # the last step of each, as far as they were read


def compare_runs(one: str | Path, other: str | Path) -> Comparison:
    """Compare two runs step by step, until they part. Completions are read one step at a time."""
    runs = RunReader(one), RunReader(other)
    found = Comparison(options=list(_options(_facts_of(runs[0]), _facts_of(runs[1]))))
    logs = _log_of(runs[0]), _log_of(runs[1])
    # Also steps that train on completions of an earlier one.
    logged = deque(sorted(logs[0].keys() & logs[1].keys()))
    ends = [0, 0]
    for a, b in zip_longest(*(run.steps() for run in runs)):
        for index, pair in enumerate((a, b)):
            ends[index] = pair[0] if pair is not None else ends[index]
        if a is None or b is None:
            # One run is longer. What both have is the same.
            break
        step = min(a[0], b[0])
        if _part_by_log(found, logs, logged, before=step):
            break
        if _part_at(found, step, [*_in_step(a, b), *_in_log(step, *logs)]):
            break
    if found.step is None:
        _part_by_log(found, logs, logged, before=None)
    found.ends = (max([ends[0], *logs[0]]), max([ends[1], *logs[1]]))
    return found


def _facts_of(run: RunReader) -> dict[str, Any]:
    """Model, data, rewards, options and versions of a run."""
    stored = run.facts()
    # A checkpoint has them under `versions`, the store with more beside them under `environment`.
    known = stored.get("versions") or stored.get("environment") or {}
    versions = {name: value for name, value in known.items() if name in VERSIONS}
    facts = {"fixed": stored.get("fixed"), "options": stored.get("options"), "versions": versions}
    return {name: value for name, value in facts.items() if value}


def _log_of(run: RunReader) -> dict[int, dict[str, Any]]:
    """What was logged after each update."""
    return {entry["step"]: entry for entry in run.metrics() if "loss" in entry}


def _part_at(found: Comparison, step: int, differences: list[Difference]) -> bool:
    """Count a step, and note what differs in it. Returns whether something does."""
    found.compared += 1
    if differences:
        found.step, found.first = step, differences[0]
        found.others = list(dict.fromkeys(d.what for d in differences if d.what != differences[0].what))
    return bool(differences)


def _part_by_log(
    found: Comparison, logs: tuple[Mapping[int, Any], ...], logged: deque[int], *, before: int | None
) -> bool:
    """Whether logs differ at a step before one with completions; None: at any that is left."""
    while logged and (before is None or logged[0] < before):
        step = logged.popleft()
        if differences := list(_in_log(step, *logs)):
            return _part_at(found, step, differences)
    return False


def _in_step(a: tuple[int, list[dict[str, Any]]], b: tuple[int, list[dict[str, Any]]]) -> Iterator[Difference]:
    """What differs between the completions of a step, causes first."""
    if a[0] != b[0]:
        yield Difference(what="schedule", where="the next step with completions", values=(a[0], b[0]))
        return
    for name, what in CAUSES:
        for number, (left, right) in enumerate(zip(a[1], b[1], strict=False)):
            if left.get(name) != right.get(name):
                yield Difference(
                    what=what, where=f"{name} of sample {number}", values=(left.get(name), right.get(name))
                )
                break
    if len(a[1]) != len(b[1]):
        yield Difference(what="schedule", where="number of completions", values=(len(a[1]), len(b[1])))


def _in_log(step: int, one: Mapping[int, Any], other: Mapping[int, Any]) -> Iterator[Difference]:
    if step in one and step in other:
        for name in LOGGED:
            values = one[step].get(name), other[step].get(name)
            if values[0] != values[1]:
                yield Difference(what="log", where=name, values=values)


def _options(one: Mapping[str, Any], other: Mapping[str, Any], where: str = "") -> Iterator[Difference]:
    """Model, data, rewards, options and versions that differ.

    >>> [d.where for d in _options({"options": {"seed": 1, "beta": 0}}, {"options": {"seed": 2, "beta": 0}})]
    ['options seed']
    """
    for name in sorted({*one, *other}, key=str):
        left, right = one.get(name), other.get(name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            yield from _options(left, right, f"{where} {name}".strip())
        elif left != right:
            yield Difference(what="options", where=f"{where} {name}".strip(), values=(left, right))
