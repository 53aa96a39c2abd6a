"""A run in a terminal: `rloom show RUN --text`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rloom.observe.page import answers
from rloom.observe.page.live import LiveRun, live_runs
from rloom.observe.sparkline import sparkline
from rloom.printable import printable

FIRST = (
    "reward", "eval_reward", "reward_std", "kl", "beta", "entropy", "completions/mean_length",
    "completions/clipped_ratio", "frac_reward_zero_std", "loss", "grad_norm", "step_time",
)  # fmt: skip
"""Metrics that are shown, where they were logged, and then those of single rewards."""
WIDEST, NARROWEST = 40, 8
"""Blocks of a course. One that is narrower than its logs has the mean of several in a block."""
GAP = 2
"""Columns between those of the table."""
WORDS = 400
"""Characters of a completion that are shown."""
NEWEST = 20
"""Steps whose best and worst completions are shown."""


def show_text(folders: Sequence[str], console: Console | None = None) -> None:
    """Print what runs have logged and written."""
    console = console or Console()
    for number, run in enumerate(live_runs(folders)):
        run.catch_up()
        _show(run, number, console)


def _show(run: LiveRun, number: int, console: Console) -> None:
    info, logged = answers.run_info(run, number), answers.metrics(run)
    steps = f"update {info['step']:,}" + (f" of {info['max_steps']:,}" if info["max_steps"] else "")
    console.print(Text(printable(f"{info['name']}: {steps}, {info['rows']:,} completions stored"), style="bold"))
    for label, words in answers.facts(run).get("about", {}).items():
        console.print(Text(printable(f"  {label}: {words}")))
    console.print(_curves(logged["series"], console.width))
    if times := _times(logged["series"]):
        console.print(Text(printable(f"time of an update: {times}")))
    for one in info["diagnoses"]:
        console.print(Text(printable(f"diagnosis at update {one['step']}: {one['diagnosis']}"), style="yellow"))
    _completions(run, console)


def _curves(series: dict[str, list[float | None]], width: int) -> Table:
    """Each metric's first and last value, and its course, in the columns that are left on the line."""
    rows, others = [("metric", "first", "last")], [name for name in series if _is_of_reward(name)]
    courses = []
    for name in [name for name in (*FIRST, *others) if name in series]:
        known = [value for value in series[name] if value is not None]
        if known:
            rows.append((printable(name), f"{known[0]:.4g}", f"{known[-1]:.4g}{_interval(series, name)}"))
            courses.append(known)
    left = width - sum(max(map(cell_len, column)) + GAP for column in zip(*rows, strict=True))
    table = Table(*rows[0], box=None, pad_edge=False)
    table.add_column("course", no_wrap=True)
    for row, known in zip(rows[1:], courses, strict=True):
        table.add_row(Text(row[0]), *row[1:], sparkline(known, max(NARROWEST, min(WIDEST, left))))
    return table


def _is_of_reward(name: str) -> bool:
    return name.startswith("rewards/") and name.endswith("/mean")


def _interval(series: dict[str, list[float | None]], name: str) -> str:
    ends = [[v for v in series.get(f"{name}_{end}", []) if v is not None] for end in ("low", "high")]
    return f" [{ends[0][-1]:.4g}, {ends[1][-1]:.4g}]" if all(ends) else ""


def _times(series: dict[str, list[float | None]]) -> str:
    """The mean seconds of an update's phases."""
    means = {}
    for name, values in series.items():
        known = [value for value in values if value is not None]
        if name.startswith("time/") and known:
            means[name.removeprefix("time/")] = sum(known) / len(known)
    return ", ".join(f"{phase} {seconds:.3g} s" for phase, seconds in means.items() if seconds > 0)


def _completions(run: LiveRun, console: Console) -> None:
    """The best and the worst of the newest completions of training."""
    records, names = run.snapshot()
    if "train" not in names.modes:
        return
    scored = (records["mode"] == names.modes.index("train")) & ~np.isnan(records["reward"])
    places = np.flatnonzero(scored)
    places = places[records["step"][places] > int(records["step"][-1]) - NEWEST] if len(places) else places
    if not len(places):
        return
    rewards = records["reward"][places]
    for title, place in (("best", places[np.argmax(rewards)]), ("worst", places[np.argmin(rewards)])):
        row = answers.full_row(run, records[place])
        _completion(f"{title} of the last {NEWEST} updates", row, console)


def _completion(title: str, row: dict[str, Any], console: Console) -> None:
    numbers = {name: row.get(name) for name in ("step", "reward", "advantage")} | row.get("scores", {})
    words = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items() if isinstance(value, (int, float)))
    console.print(Text(printable(f"{title}: {words}; ended by {row.get('stop_reason')}"), style="bold"))
    for name in ("prompt", "completion"):
        text = answers.as_text(row.get(name))
        shown = printable(text[:WORDS]) + (" …" if len(text) > WORDS else "")
        console.print(Text(f"  {name}: {shown}"))
