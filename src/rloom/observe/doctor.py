"""Applies the rules of diagnosis: at each log of a run, to a whole history, and to decide whether a run shall stop."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloom.observe.courses import Logs
from rloom.observe.diagnose import RULES, Rule
from rloom.printable import get_logger

if TYPE_CHECKING:
    from rloom.config import RLOOConfig

logger = get_logger(__name__)

KEPT = 500
"""Log entries that rules see from the beginning, and from the end."""
PREFIXES = 1000
"""How many beginnings of a history are looked at, at most: of a longer one, evenly spread."""

NAMES = tuple(rule.__name__ for rule in RULES)
ALL = "all"
"""Stands for all of them in `early_stop_on`."""

Entries = Sequence[dict[str, Any]]


def logs_of(entries: Entries, end: int | None = None) -> Logs:
    """What rules see of the first `end` entries (None: of all). They use the beginning and the end; reading all entries
    of a long run would make each log slow."""
    end = len(entries) if end is None else end
    return Logs([*entries[:KEPT], *entries[end - KEPT : end]] if end > 2 * KEPT else entries[:end])


def apply(rule: Rule, logs: Logs, args: RLOOConfig) -> str | None:
    """What a rule says. One that fails says nothing: a hint ends no run, and keeps no other rule from being asked."""
    try:
        return rule(logs, args)
    except Exception as error:
        _warn_once(rule.__name__, f"{type(error).__name__}: {error}")
        return None


@functools.cache
def _warn_once(rule: str, error: str) -> None:
    logger.warning("the diagnosis %s failed on these logs and is left out (%s); please report it", rule, error)


class Doctor:
    """Applies all rules at each log. A rule that has reported something is silent for `quiet` updates."""

    def __init__(self, quiet: int = 100) -> None:
        self.quiet = quiet
        # The update at which each rule last reported something.
        self.spoke: dict[str, int] = {}

    def look(self, entries: Entries, args: RLOOConfig, step: int) -> list[str]:
        """The lines that the rules report at this log, of `named`.

        >>> from types import SimpleNamespace
        >>> doctor, args = Doctor(), SimpleNamespace(max_completion_length=8)
        >>> logs = [{"completions/clipped_ratio": 0.8}] * 3
        >>> [line.split(",")[0] for line in doctor.look(logs, args, step=3)]
        ['80% of completions are cut off: raise max_completion_length (now 8)']
        >>> doctor.look(logs, args, step=4)
        []
        """
        return [line for _, line in self.named(entries, args, step)]

    def named(self, entries: Entries, args: RLOOConfig, step: int) -> list[tuple[str, str]]:
        """The names of rules that report something at this log, and their lines."""
        logs, found = logs_of(entries), []
        for rule in RULES:
            name = rule.__name__
            if name in self.spoke and step - self.spoke[name] < self.quiet:
                continue
            line = apply(rule, logs, args)
            if line is not None:
                self.spoke[name] = step
                found.append((name, line))
        return found


@dataclass(slots=True, kw_only=True)
class Finding:
    """What a rule has found in a history."""

    name: str
    line: str  # as it was when the rule last fired
    first: int  # the step at which it first fired
    last: int  # … and last
    lasts: bool  # it still holds at the end


def examine(entries: Entries, args: RLOOConfig) -> list[Finding]:
    """What the rules would have said during a run, in the order in which they would have said it.

    >>> from types import SimpleNamespace
    >>> (found,) = examine([{"step": n, "loss": 0.0, "kl": 0.7 * n} for n in range(1, 5)], SimpleNamespace())
    >>> found.name, found.first, found.lasts
    ('kl_explodes', 3, True)
    """
    ends = [n for n, entry in enumerate(entries, 1) if is_update(entry)]
    stride = -(-len(ends) // PREFIXES)
    found: dict[str, Finding] = {}
    # Counted from the end, so that the last log is always looked at.
    for end in reversed(ends[::-1][:: max(1, stride)]):
        logs, step = logs_of(entries, end), _step(entries[end - 1], end)
        for rule in RULES:
            line = apply(rule, logs, args)
            if line is None:
                continue
            known = found.setdefault(
                rule.__name__, Finding(name=rule.__name__, line=line, first=step, last=step, lasts=False)
            )
            known.line, known.last, known.lasts = line, step, end == ends[-1]
    return list(found.values())


def _step(entry: dict[str, Any], otherwise: int) -> int:
    """The step of a log. Foreign logs may have anything there.

    >>> [_step({"step": step}, 7) for step in (3, "3", 3.0, None, float("nan"), "three", [3])]
    [3, 3, 3, 7, 7, 7, 7]
    """
    try:
        return int(entry.get("step") or otherwise)
    except (TypeError, ValueError, OverflowError):
        return otherwise


def is_update(entry: dict[str, Any]) -> bool:
    """Whether an entry is a log of training, and not of an evaluation or of the run's end.

    >>> [is_update(entry) for entry in ({"reward": 1.0, "step": 3}, {"eval_reward": 1.0}, {"train_runtime": 9.0})]
    [True, False, False]
    """
    own = [name for name in entry if name not in ("step", "epoch") and not str(name).startswith("eval_")]
    return bool(own) and "train_runtime" not in own


def lasting(names: Sequence[str], entries: Entries, args: RLOOConfig, patience: int) -> str | None:
    """The line of a named rule that holds at each of the latest `patience` logs; None where there is none.

    It follows from the history alone, so that a resumed run stops where the run would have stopped.
    """
    # From the end: this is asked at every log of a run.
    updates = (end for end in range(len(entries), 0, -1) if is_update(entries[end - 1]))
    ends = list(itertools.islice(updates, patience))[::-1]
    if len(ends) < patience:
        return None
    views = [logs_of(entries, end) for end in ends]
    rules: list[Rule] = [rule for rule in RULES if rule.__name__ in names]
    for rule in rules:
        lines = [apply(rule, view, args) for view in views]
        if all(line is not None for line in lines):
            return f"{rule.__name__}: {lines[-1]}"
    return None
