"""The numbers of a run that its views show: their course, their trend, speed, memory, time left."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import psutil
import torch
from transformers import TrainerState

from rloom.observe.clock import PHASES

SHOWN = {
    "reward": "reward",
    "kl": "KL per token",
    "beta": "weight of the KL",
    "entropy": "entropy",
    "completions/mean_length": "completion length",
    "completions/clipped_ratio": "truncated",
    "frac_reward_zero_std": "groups without signal",
}
"""The metrics that are shown, and what they are called there."""
SOMETIMES = ("beta",)
"""Those of them that only some runs log: β, where `kl_target` adapts it."""
SHARES = ("completions/clipped_ratio", "frac_reward_zero_std")
"""Those of them that are shares."""
WINDOW = 10
"""Logs that a trend, and the times of an update, are averaged over."""
STEPS = 20
"""Updates that the time left is estimated from."""
GIB = 2**30


class RunNumbers:
    """Collects what is logged, and says what it amounts to. A resumed run has the logs of its checkpoint.

    >>> numbers = RunNumbers()
    >>> for value in (0.1, 0.1, 0.3, 0.3):
    ...     numbers.take_in(TrainerState(), {"loss": 0.0, "reward": value})
    >>> round(numbers.trend(), 3)
    0.2
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.step, self.total = 0, 0
        self.began = self._now()
        self.history: dict[str, list[float]] = {name: [] for name in SHOWN}
        # Rewards of evaluations, each by its prefix, with the update that it came after.
        self.evaluations: dict[str, list[tuple[int, float]]] = {}
        self.diagnosis = ""
        # Whether what is here belongs to a run that has ended.
        self._over = False
        self.tokens_before = 0
        self._forget_times()

    def _forget_times(self) -> None:
        self._ends: deque[float] = deque([self.began], maxlen=STEPS + 1)
        # Seconds of phases, and of all else, of each of the latest logs, per update.
        self.phases: deque[dict[str, float]] = deque(maxlen=WINDOW)
        self.seconds = self.tokens_per_second = math.nan
        self._last = (self.began, self.step, math.nan)

    def begin(self, state: TrainerState) -> None:
        """Start to count. What a checkpoint has logged belongs to the run, and so does an evaluation just before it."""
        self.step, self.total, self.began = state.global_step, state.max_steps, self._now()
        self._forget_times()
        self.tokens_before = state.num_input_tokens_seen
        self._last = (self.began, self.step, float(self.tokens_before))
        self.history, self.diagnosis = {name: [] for name in SHOWN}, ""
        if state.log_history or self._over:
            self.evaluations = {}
        self._over = False
        for logs in state.log_history:
            self._keep(int(logs.get("step", 0)), logs)

    def finish(self) -> None:
        """The run has ended. Its numbers stay until the next one."""
        self._over = True

    def move(self, state: TrainerState) -> None:
        """An update is done."""
        if state.global_step > self.step:
            self._ends.append(self._now())
        self.step = state.global_step

    def take_in(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Add what was logged: by training, or by an evaluation."""
        self._keep(state.global_step, logs)
        if "loss" in logs:
            self._time(state, logs)
        elif prefix := evaluation_of(logs):
            # An evaluation is no part of an update's time.
            spent = float(logs.get(f"{prefix}_runtime") or 0.0)
            self._last = (self._last[0] + spent, *self._last[1:])
            self._ends = deque((end + spent for end in self._ends), maxlen=STEPS + 1)

    def _keep(self, step: int, logs: dict[str, Any]) -> None:
        for name, values in self.history.items():
            if is_number(logs.get(name)):
                values.append(float(logs[name]))
        prefix = evaluation_of(logs)
        if prefix and self._over:
            self.evaluations, self._over = {}, False
        if prefix and is_number(logs.get(f"{prefix}_reward")):
            self.evaluations.setdefault(prefix, []).append((step, float(logs[f"{prefix}_reward"])))

    def _time(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Speed since the last log."""
        now, tokens = self._now(), float(state.num_input_tokens_seen)
        since, step, tokens_then = self._last
        self._last = (now, state.global_step, tokens)
        if state.global_step <= step or now <= since:
            return
        self.seconds = (now - since) / (state.global_step - step)
        self.tokens_per_second = (tokens - tokens_then) / (now - since)
        self.phases.append({phase: float(logs.get(f"time/{phase}") or 0.0) for phase in PHASES})

    def latest(self, name: str) -> float | None:
        """The last value of a metric."""
        return self.history[name][-1] if self.history[name] else None

    def trend(self, name: str = "reward") -> float | None:
        """How far the mean of the latest logs is from that of as many before them."""
        values = self.history[name]
        size = min(WINDOW, len(values) // 2)
        return fmean(values[-size:]) - fmean(values[-2 * size : -size]) if size else None

    def ends(self, name: str = "reward") -> tuple[float, float, int] | None:
        """The means of a metric over the first and the last logs, and over how many."""
        return ends_of(self.history[name]) if self.history[name] else None

    def shares(self) -> dict[str, float]:
        """The share of each phase in the time of the latest updates. Phases without time are left out."""
        # A panel asks from a thread of its own.
        latest = list(self.phases)
        return as_shares({phase: fmean(one[phase] for one in latest) for phase in PHASES} if latest else {})

    def elapsed(self) -> float:
        """Seconds of training since it began in this process."""
        return self._now() - self.began

    def left(self) -> float | None:
        """Seconds until the last update, by the time of the latest ones."""
        if len(self._ends) < 2:
            return None
        pace = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        # An update that takes longer than others says nothing about those to come.
        running = min(self._now() - self._ends[-1], pace)
        return max(0.0, (self.total - self.step) * pace - running)


def ends_of(values: Sequence[float]) -> tuple[float, float, int]:
    """The means of the first and of the last values, and of how many: a fifth of a short run, which learns as it goes.

    >>> ends_of([0.0, 1.0, 1.0, 3.0]), ends_of(range(10)), ends_of(range(1000))
    ((0.0, 3.0, 1), (0.5, 8.5, 2), (4.5, 994.5, 10))
    """
    size = min(WINDOW, max(1, len(values) // 5))
    return fmean(values[:size]), fmean(values[-size:]), size


def which_ends(size: int) -> str:
    """What values at the start and the end are of, in words.

    >>> which_ends(1), which_ends(3)
    ('the first and the last log', 'means of the first and the last 3 logs')
    """
    return "the first and the last log" if size == 1 else f"means of the first and the last {size} logs"


def as_shares(seconds: dict[str, float]) -> dict[str, float]:
    """
    >>> as_shares({"generation": 3.0, "rewards": 0.0, "update": 1.0})
    {'generation': 0.75, 'update': 0.25}
    """
    whole = sum(seconds.values())
    return {phase: value / whole for phase, value in seconds.items() if value > 0}


def is_number(value: Any) -> bool:
    """Whether a logged value can be shown: not None, not infinite, no text."""
    try:
        return value is not None and not isinstance(value, str) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def evaluation_of(logs: dict[str, Any]) -> str | None:
    """The prefix of an evaluation's log; None for another.

    >>> evaluation_of({"eval_hard_reward": 0.5, "eval_hard_runtime": 2.0}), evaluation_of({"train_runtime": 2.0})
    ('eval_hard', None)
    """
    ends = [name.removesuffix("_runtime") for name in logs if name.endswith("_runtime")]
    return next((prefix for prefix in ends if f"{prefix}_reward" in logs), None)


# -- in words


def duration(seconds: float | None) -> str:
    """
    >>> duration(0.0712), duration(42.3), duration(192), duration(7500), duration(97200), duration(None)
    ('0.071 s', '42 s', '3 min 12 s', '2 h 05 min', '1 d 3 h', '–')
    """
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for unit, below, size, smaller, width in (("min", 3600, 60, "s", 1), ("h", 86400, 3600, "min", 2)):
        if whole < 60:
            return f"{whole} s"
        if whole < below:
            return f"{whole // size} {unit} {whole % size // (size // 60):0{width}} {smaller}"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def counted(count: float, what: str) -> str:
    """
    >>> counted(1, "log"), counted(0.375, "epoch"), counted(1200, "update"), counted(1000.0, "epoch")
    ('1 log', '0.375 epochs', '1,200 updates', '1,000 epochs')
    """
    number = f"{count:,}" if isinstance(count, int) else f"{count:,.0f}" if count >= 100 else f"{count:.3g}"
    return f"{number} {what}{'' if count == 1 else 's'}"


def shown_value(name: str, value: float) -> str:
    """A metric's value as it is shown.

    >>> shown_value("frac_reward_zero_std", 0.125), shown_value("completions/mean_length", 143.21)
    ('12%', '143.2')
    >>> shown_value("kl", -0.00001), shown_value("beta", 0.00051)
    ('0.000', '0.00051')
    """
    if name in SHARES:
        return f"{value:.0%}"
    if name == "beta":
        return f"{value:.3g}"
    text = f"{value:.1f}" if name == "completions/mean_length" else f"{value:.3f}"
    return text.removeprefix("-") if float(text) == 0 else text


def in_shares(shares: dict[str, float]) -> str:
    """
    >>> in_shares({"generation": 0.7, "rewards": 0.001, "update": 0.299})
    'generation 70%, update 30%'
    """
    return ", ".join(f"{phase} {share:.0%}" for phase, share in shares.items() if share >= 0.005)


def memory_in_use() -> str:
    """The largest memory that this process has held on its GPU, of all that there is; without a GPU, the host's.

    >>> memory_in_use().endswith("GiB")
    True
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.max_memory_reserved():
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return f"{torch.cuda.max_memory_reserved() / GIB:.1f} of {whole / GIB:.0f} GiB"
    return f"{psutil.Process().memory_info().rss / GIB:.1f} GiB"
