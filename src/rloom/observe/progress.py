"""A live view of a run in the terminal: progress, and the few numbers that tell how it goes."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

SHOWN = {
    "reward": "reward",
    "kl": "KL per token",
    "entropy": "entropy",
    "completions/mean_length": "completion length",
}
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
    """Shows progress and the key metrics while training; prints nothing but a final line when there is no terminal."""

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
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the display."""
        self.task = self.progress.add_task("train", total=state.max_steps)
        if self.console.is_terminal:
            self.live.start()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Take the numbers in and redraw."""
        for name, values in self.history.items():
            value = (logs or {}).get(name)
            if value is not None:
                values.append(float(value))
        self.progress.update(self.task, completed=state.global_step)
        self.live.update(self.view(), refresh=self.console.is_terminal)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the last view on the screen."""
        self.live.stop()
        self.console.print(self.view())

    def view(self) -> Panel:
        """The panel: bar, numbers, sparklines."""
        table = Table.grid(padding=(0, 2))
        for name, label in SHOWN.items():
            values = self.history[name]
            latest = f"{values[-1]:8.3f}" if values else "       –"
            table.add_row(label, latest, sparkline(values))
        return Panel(Group(self.progress, table), title="rloom", expand=False)
