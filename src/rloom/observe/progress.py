"""A live view of a run in a terminal or a notebook: progress and key metrics."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback, TrainerControl, TrainerState

if TYPE_CHECKING:
    from rloom.config import RLOOConfig

SHOWN = {
    "reward": "reward",
    "kl": "KL per token",
    "entropy": "entropy",
    "completions/mean_length": "completion length",
}
REDRAW_SECONDS = 0.25
"""The shortest time between two redraws."""
BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Values as a row of blocks, each the mean of an equal share of them.

    >>> sparkline([0.0, 1.0, 2.0, 3.0], width=4)
    '▁▃▆█'
    """
    if not values:
        return ""
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((m - low) / span * (len(BLOCKS) - 1))] for m in means)


def plot(values: list[float], *, title: str, height: int = 10, width: int = 60) -> Text:
    """A curve drawn with blocks, with its scale on the left."""
    if len(values) < 2:
        return Text("")
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    lines = [title]
    for row in range(height, 0, -1):
        label = f"{low + span * row / height:6.2f} ┤" if row in (height, height // 2) else "       │"
        cells = [min(max((m - low) / span * height - (row - 1), 0.0), 1.0) for m in means]
        lines.append(label + "".join(" " if c <= 0 else BLOCKS[round(c * (len(BLOCKS) - 1))] for c in cells))
    lines.append(f"{low:6.2f} ┼" + "─" * width)
    lines.append(f"        1{str(len(values)).rjust(max(width - 1, 4))}")
    return Text("\n".join(lines))


class LiveProgress(TrainerCallback):
    """Shows progress and key metrics while training: live in a terminal, as one updated display in a notebook.
    Elsewhere it only prints the last view. It replaces transformers' own progress bar."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self.history: dict[str, list[float]] = {name: [] for name in SHOWN}
        self.progress = Progress(
            TextColumn("update"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.drawn = 0.0
        # There is no task until training begins. An evaluation may come before.
        self.task: Any = None
        self.screen: InNotebook | InTerminal = InNotebook() if self.console.is_jupyter else InTerminal(self.console)

    def on_train_begin(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the display."""
        self.task = self.progress.add_task("train", total=state.max_steps)
        self.screen.start(self)

    def on_step_end(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar, and redraw it if the last time is long enough ago."""
        self._move(state)
        if time.monotonic() - self.drawn > REDRAW_SECONDS:
            self._draw()

    def on_log(
        self,
        args: RLOOConfig,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the new values and redraw."""
        for name, values in self.history.items():
            value = (logs or {}).get(name)
            if value is not None and math.isfinite(float(value)):
                values.append(float(value))
        self._move(state)
        self._draw()

    def _move(self, state: TrainerState) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=state.global_step)

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        if self.task is not None:
            self.screen.update(self)

    def on_train_end(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the last view on the screen."""
        self.screen.stop(self)

    def view(self) -> Panel:
        """The panel: bar, numbers, sparklines."""
        table = Table.grid(padding=(0, 2))
        for label, latest, line in self.lines():
            table.add_row(label, latest.rjust(8), line)
        return Panel(Group(self.progress, table), title="rloom", expand=False)

    def lines(self) -> list[tuple[str, str, str]]:
        """The lines below the bar: a label, the latest value, a sparkline."""
        return [
            (label, f"{values[-1]:.3f}" if values else "–", sparkline(values))
            for label, values in ((label, self.history[name]) for name, label in SHOWN.items())
        ]


class InTerminal:
    """Redraws the view in place. Without a terminal, the view is printed once at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def start(self, progress: LiveProgress) -> None:
        """Start the live display."""
        if self.console.is_terminal:
            self.live.start()

    def update(self, progress: LiveProgress) -> None:
        """Redraw the view."""
        if self.console.is_terminal:
            self.live.update(progress.view(), refresh=True)

    def stop(self, progress: LiveProgress) -> None:
        """Stop the live display, and print the last view."""
        self.live.stop()
        self.console.print(progress.view())


class InNotebook:
    """Shows the view as one output of the cell, and updates it. rich's own live view would need ipywidgets."""

    handle: Any = None

    def start(self, progress: LiveProgress) -> None:
        """Create the output."""
        # IPython is installed in every notebook.
        from IPython.display import HTML, display

        self.handle = display(HTML(as_html(progress)), display_id=True)

    def update(self, progress: LiveProgress) -> None:
        """Update the output."""
        from IPython.display import HTML

        if self.handle is not None:
            self.handle.update(HTML(as_html(progress)))

    stop = update


def as_html(progress: LiveProgress) -> str:
    """The view as HTML for a notebook."""
    task = progress.progress.tasks[-1]
    done, total = int(task.completed), int(task.total or 0)
    times = [f"{seconds:.0f} s {what}" for seconds, what in ((task.elapsed, "so far"), (task.time_remaining, "left"))
             if seconds is not None]  # fmt: skip
    rows = "".join(
        f'<tr><td style="text-align:left">{label}</td><td>{latest}</td>'
        f'<td style="text-align:left;font-family:monospace">{line}</td></tr>'
        for label, latest, line in progress.lines()
    )
    bar = f'<progress value="{done}" max="{total}" style="width:300px;vertical-align:middle"></progress>'
    return f"<div>{bar} update {done}/{total}, {', '.join(times)}</div><table>{rows}</table>"
