"""What shows a run while it trains: a live panel, a line per log, or the dictionary. A run has one of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.utils import logging as transformers_logging

from rloom.observe.numbers import SHOWN, RunNumbers, duration, evaluation_of, in_shares, is_number, memory_in_use
from rloom.observe.numbers import shown_value as shown
from rloom.printable import printable

if TYPE_CHECKING:
    from rloom.config import RLOOConfig

Rows = Sequence[tuple[str, str]]
"""What is said at the start or the end of a run: labels, and what there is to say to each. The first is a title."""


class Report(Protocol):
    """Knows what is to be said about a run."""

    def start(self) -> Rows:
        """What will happen."""
        ...

    def end(self, numbers: RunNumbers) -> Rows:
        """What has happened."""
        ...


class View(TrainerCallback):
    """Shows a run. Subclasses say how."""

    console: Console | None = None
    """Where tables of completions are printed while this view is open. None: where they like."""
    report: Report | None = None

    def __init__(self) -> None:
        self.numbers = RunNumbers()
        # Whether transformers' bars were on before this view was opened.
        self._bars = False

    def on_train_begin(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say what will happen, and open the view."""
        self.numbers.begin(state)
        if self.report is not None:
            self.say(self.report.start())
        # Bars of checkpoints that are written would be drawn into this view.
        self._bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()

    def on_step_end(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An update is done."""
        self.numbers.move(state)

    def on_log(
        self,
        args: RLOOConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show what is logged."""
        self.numbers.move(state)
        self.numbers.take_in(state, logs or {})
        self.show(state, logs or {})

    def on_train_end(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the view, and say what has happened."""
        self.close()
        if self.report is not None:
            self.say(self.report.end(self.numbers))

    # A bar of transformers' would show these.

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing to show."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing to show: the evaluation has logged its numbers."""

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Nothing to show."""

    def show(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Show a log."""

    def note(self, diagnosis: str) -> None:
        """Keep the latest diagnosis. Who makes it logs it, too."""
        self.numbers.diagnosis = diagnosis

    def say(self, rows: Rows) -> None:
        """Print some lines."""
        print_text(as_lines(rows))

    def close(self) -> None:
        """Leave the screen to others, also after an error. May be called again."""
        self.numbers.finish()
        if self._bars:
            transformers_logging.enable_progress_bar()
        self._bars = False


class LogLines(View, PrinterCallback):
    """Prints one line per log, what matters first. `trainer.remove_callback(PrinterCallback)` removes it."""

    def show(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Print the line."""
        # transformers sums up at the end. We do too.
        if "train_runtime" not in logs and logs:
            print_text(log_line(self.numbers, logs))


class LogDict(View, PrinterCallback):
    """Prints each log as a dictionary, as transformers does."""

    def show(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Print the dictionary."""
        PrinterCallback.on_log(self, None, state, None, logs=dict(logs))


def print_text(text: str) -> None:
    """Print to the standard output. A terminal that knows few characters must not end a run."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def log_line(numbers: RunNumbers, logs: dict[str, Any]) -> str:
    """A log as one line."""
    if prefix := evaluation_of(logs):
        return printable(f"{_title(prefix)} after update {numbers.step}: " + " | ".join(evaluated(prefix, logs)))
    if "loss" not in logs:
        # A user's own.
        values = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in logs.items() if k != "epoch"}
        return printable(f"update {numbers.step}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
    parts = [_progress(numbers), *_learning(numbers, logs), *_trouble(logs), *_speed(numbers)]
    return printable(" | ".join(part for part in parts if part))


def _title(prefix: str) -> str:
    return "evaluation" if prefix == "eval" else f"evaluation {prefix.removeprefix('eval_')}"


def _progress(numbers: RunNumbers) -> str:
    return f"update {str(numbers.step).rjust(len(str(numbers.total)))}/{numbers.total}"


def _learning(numbers: RunNumbers, logs: dict[str, Any]) -> list[str]:
    """What is learnt: the reward first, with its trend and its parts."""
    found = {name: shown(name, float(logs[name])) for name in SHOWN if is_number(logs.get(name))}
    trend = numbers.trend()
    reward = [found["reward"]] if "reward" in found else []
    reward += [f"trend {trend:+.3f}"] if reward and trend is not None else []
    parts = _of_rewards(logs, "mean")
    if len(parts) > 1:
        reward += [f"{name} {value:.3f}" for name, value in parts.items()]
    length, cut = found.get("completions/mean_length"), found.get("completions/clipped_ratio")
    return [
        f"reward {', '.join(reward)}" if reward else "",
        f"kl {found['kl']}" if "kl" in found else "",
        f"beta {found['beta']}" if "beta" in found else "",
        f"entropy {found['entropy']}" if "entropy" in found else "",
        f"length {length}, {cut} truncated" if length and cut else "",
        f"{found['frac_reward_zero_std']} of groups without signal" if "frac_reward_zero_std" in found else "",
    ]


def _of_rewards(logs: dict[str, Any], what: str) -> dict[str, float]:
    """A metric of each reward, by the reward's name."""
    ends = {name: name.removeprefix("rewards/").removesuffix(f"/{what}") for name in logs
            if name.startswith("rewards/") and name.endswith(f"/{what}")}  # fmt: skip
    return {short: float(logs[name]) for name, short in ends.items() if is_number(logs[name])}


def _trouble(logs: dict[str, Any]) -> list[str]:
    """What should not be there, and is logged only where it is."""
    found = []
    for name, words in (("completions/unscored_ratio", "{:.0%} unscored"), ("updates/skipped", "{:g} updates skipped")):
        found += [words.format(float(logs[name]))] if is_number(logs.get(name)) else []
    for what in ("errors", "timeouts", "crashes"):
        found += [f"{what} of {name}: {count:g}" for name, count in _of_rewards(logs, what).items()]
    return found


def _speed(numbers: RunNumbers) -> list[str]:
    shares = in_shares(numbers.shares())
    return [
        f"{duration(numbers.seconds)}{': ' if shares else ''}{shares}",
        f"{numbers.tokens_per_second:,.0f} tokens/s" if is_number(numbers.tokens_per_second) else "",
        memory_in_use(),
        f"{duration(numbers.left())} left" if numbers.step < numbers.total else "",
    ]


def evaluated(prefix: str, logs: dict[str, Any]) -> list[str]:
    """What an evaluation has found.

    >>> evaluated("eval", {"eval_reward": 0.5, "eval_reward_low": 0.4, "eval_reward_high": 0.6, "eval_runtime": 3.0})
    ['reward 0.500 [0.400, 0.600]', '3 s']
    """
    found = {name.removeprefix(f"{prefix}_"): value for name, value in logs.items() if is_number(value)}
    parts = []
    for name in ("reward", "win_rate", *(name for name in found if "/pass@" in name), "kl", "completions/mean_length"):
        if name in found and not name.endswith(("_low", "_high")):
            ends = [found.get(f"{name}_{end}") for end in ("low", "high")]
            interval = f" [{ends[0]:.3f}, {ends[1]:.3f}]" if None not in ends else ""
            short = name.removeprefix("rewards/").replace("completions/mean_length", "length")
            parts.append(f"{short} {found[name]:.3f}{interval}")
    return [*parts, duration(found.get("runtime"))]


def as_lines(rows: Rows) -> str:
    """Rows as text, the labels in a column.

    >>> print(as_lines([("rloom", "training"), ("model", "a llama"), ("files", "out")]))
    rloom: training
      model  a llama
      files  out
    """
    (first, title), *others = rows
    width = max((len(label) for label, _ in others), default=0)
    lines = [f"{first}: {title}", *(f"  {label.ljust(width)}  {text}" for label, text in others)]
    return printable("\n".join(lines))
