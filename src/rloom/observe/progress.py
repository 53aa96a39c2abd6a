"""A live view of a run in a terminal or a notebook: progress, key metrics, where the time goes."""

from __future__ import annotations

import html
import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import ProgressCallback, TrainerControl, TrainerState

from rloom.observe.clock import PhaseClock
from rloom.observe.numbers import (
    SHOWN,
    SOMETIMES,
    WINDOW,
    counted,
    duration,
    evaluation_of,
    in_shares,
    is_number,
    memory_in_use,
)
from rloom.observe.numbers import shown_value as shown
from rloom.observe.sparkline import BLOCKS, sparkline
from rloom.observe.view import Rows, View, as_lines, log_line
from rloom.printable import printable

if TYPE_CHECKING:
    from rloom.config import RLOOConfig

REDRAW_SECONDS = 0.25
"""The shortest time between two redraws, but for logs."""


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


class LiveProgress(View, ProgressCallback):
    """Shows progress, key metrics and where the time goes: live in a terminal, as one updated display in a notebook.
    Elsewhere it only prints the last view. It replaces transformers' own progress bar.

    A run in a terminal or a notebook has one without being asked; pass one to choose its `console`, or to have it where
    `disable_tqdm` is set. `narrate=False` leaves out what is said at the start and the end.

    >>> import io
    >>> progress = LiveProgress(Console(file=io.StringIO(), width=60))
    >>> print(*(label for label, _, _ in progress.lines()), sep=", ")
    reward, KL per token, entropy, completion length, truncated, groups without signal
    """

    def __init__(self, console: Console | None = None, *, narrate: bool = True) -> None:
        super().__init__()
        self.console: Console = console or Console()
        self.narrate = narrate
        # What is going on is asked of the trainer's clock, once there is a trainer.
        self.clock: PhaseClock | None = None
        self.drawn = 0.0
        # An evaluation may come before training begins.
        self.open = False
        self.screen: InNotebook | InTerminal = InNotebook() if self.console.is_jupyter else InTerminal(self.console)

    @property
    def history(self) -> dict[str, list[float]]:
        """The values of each metric that is shown, oldest first."""
        return self.numbers.history

    def on_train_begin(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the display."""
        super().on_train_begin(args, state, control, **kwargs)
        self.open = True
        self.screen.start(self)

    def on_step_end(self, args: RLOOConfig, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar, and redraw it if the last time is long enough ago."""
        super().on_step_end(args, state, control, **kwargs)
        if time.monotonic() - self.drawn > REDRAW_SECONDS:
            self._draw()

    def show(self, state: TrainerState, logs: dict[str, Any]) -> None:
        """Redraw with the new values. An evaluation before or after training is a line of its own."""
        self._draw()
        if not self.open and evaluation_of(logs) and not self.console.is_jupyter:
            self.console.print(Text(log_line(self.numbers, logs)), soft_wrap=True)

    def _draw(self) -> None:
        self.drawn = time.monotonic()
        if self.open:
            self.screen.update(self)

    def say(self, rows: Rows) -> None:
        """Print lines above the panel, or below it when that is closed."""
        if self.narrate:
            self.screen.say(rows)

    def close(self) -> None:
        """Leave the last view on the screen."""
        super().close()
        if self.open:
            self.open = False
            self.screen.stop(self)

    # -- what is shown

    def view(self) -> Panel:
        """The panel: bar, numbers, sparklines, times."""
        table = Table.grid(padding=(0, 2))
        for label, latest, line in self.lines():
            table.add_row(label, Text(latest.rjust(8)), Text(line))
        below = Table.grid(padding=(0, 2))
        below.add_column(min_width=max(map(len, SHOWN.values())), no_wrap=True)
        for label, text in self.rest():
            below.add_row(Text(printable(label)), Text(printable(text)))
        return Panel(Group(self._bar(), table, below), title="rloom", expand=False)

    def _bar(self) -> Table:
        numbers = self.numbers
        bar = Table.grid(padding=(0, 2), expand=True)
        for ratio in (None, 1, None, None):
            bar.add_column(ratio=ratio, no_wrap=True)
        total = max(numbers.total, 1)
        bar.add_row("update", ProgressBar(total=total, completed=numbers.step), self.count(), self.times())
        return bar

    def count(self) -> str:
        """How many updates are done, of how many."""
        return f"{self.numbers.step}/{self.numbers.total}"

    def times(self) -> str:
        """How long it has taken and will take."""
        so_far = f"{duration(self.numbers.elapsed())} so far"
        left = self.numbers.left()
        return so_far if left is None or self.numbers.step >= self.numbers.total else f"{so_far}, {duration(left)} left"

    def lines(self) -> list[tuple[str, str, str]]:
        """The lines below the bar: a label, the latest value, a sparkline."""
        found = []
        for name, label in SHOWN.items():
            values = self.history[name]
            if name in SOMETIMES and not values:
                continue
            line = sparkline(values)
            if name == "reward" and (trend := self.numbers.trend()) is not None:
                line += f"  {trend:+.3f} over {counted(min(WINDOW, len(values) // 2), 'log')}"
            found.append((label, shown(name, values[-1]) if values else "–", line))
        return found

    def rest(self) -> list[tuple[str, str]]:
        """The lines below those: evaluations, where the time goes, and the latest diagnosis."""
        numbers = self.numbers
        rows = [(prefix.replace("eval", "evaluation", 1).replace("_", " "), _course(values))
                for prefix, values in list(numbers.evaluations.items())]  # fmt: skip
        if shares := in_shares(numbers.shares()):
            rows.append(("time", f"{duration(numbers.seconds)} per update: {shares}"))
        speed = f"{numbers.tokens_per_second:,.0f} tokens/s, " if is_number(numbers.tokens_per_second) else ""
        rows.append(("speed", f"{speed}memory {memory_in_use()}"))
        if (now := self.clock.current() if self.clock and self.open else None) is not None:
            rows.append(("now", f"{now[0]}, for {duration(now[1])}"))
        if numbers.diagnosis:
            rows.append(("diagnosis", numbers.diagnosis))
        return rows


def _course(values: list[tuple[int, float]]) -> str:
    """Rewards of evaluations, by the update that they came after: the first and the last.

    >>> _course([(0, 0.1), (50, 0.2), (100, 0.4)])
    'reward 0.100 after update 0 → 0.400 after update 100'
    """
    ends = [values[0], values[-1]][: len(values)]
    return "reward " + " → ".join(f"{value:.3f} after update {step}" for step, value in ends)


class InTerminal:
    """Redraws the view in place, once a second and when something happens. Without a terminal, the view is printed once
    at the end."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live: Live | None = None
        self._handlers: list[tuple[Any, Any]] = []

    def start(self, progress: LiveProgress) -> None:
        """Start the live display."""
        if self.console.is_terminal:
            before = {id(sys.stdout), id(sys.stderr)}
            self.live = Live(console=self.console, refresh_per_second=1, transient=True, get_renderable=progress.view)
            self.live.start(refresh=True)
            self._take_over_handlers(before)

    def _take_over_handlers(self, streams: set[int]) -> None:
        """Let log messages appear above the panel: handlers that write to the terminal directly would write into it."""
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        for handler in {handler for logger in loggers for handler in getattr(logger, "handlers", ())}:
            if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams:
                self._handlers.append((handler, handler.setStream(sys.stderr)))

    def update(self, progress: LiveProgress) -> None:
        """Redraw the view."""
        if self.live is not None:
            self.live.refresh()

    def stop(self, progress: LiveProgress) -> None:
        """Stop the live display, and print the last view."""
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers.clear()
        if self.live is not None:
            self.live.stop()
            self.live = None
        self.console.print(progress.view())

    def say(self, rows: Rows) -> None:
        """Print some lines."""
        # `Text` has no markup, and soft wrapping leaves paths and commands whole.
        self.console.print(Text(as_lines(rows)), soft_wrap=True)


class InNotebook:
    """Shows the view as one output of the cell, and updates it. rich's own live view would need ipywidgets."""

    handle: Any = None

    def __init__(self) -> None:
        # What was said at the start, and at the end.
        self.said: list[Rows] = []

    def start(self, progress: LiveProgress) -> None:
        """Create the output."""
        # IPython is installed in every notebook.
        from IPython.display import HTML, display

        self.handle = display(HTML(as_html(progress, self.said)), display_id=True)

    def update(self, progress: LiveProgress) -> None:
        """Update the output."""
        from IPython.display import HTML

        if self.handle is not None:
            self.handle.update(HTML(as_html(progress, self.said)))

    stop = update

    def say(self, rows: Rows) -> None:
        """Keep some lines for the output: those of the start above the numbers, those of the end below."""
        self.said.append(rows)


def as_html(progress: LiveProgress, said: list[Rows]) -> str:
    """The view as HTML for a notebook."""
    numbers = progress.numbers
    rows = "".join(
        f'<tr><td style="text-align:left">{label}</td><td>{latest}</td>'
        f'<td style="text-align:left;font-family:monospace">{line}</td></tr>'
        for label, latest, line in progress.lines()
    )
    below = "".join(
        f'<tr><td style="text-align:left">{html.escape(label)}</td>'
        f'<td style="text-align:left" colspan="2">{html.escape(printable(text))}</td></tr>'
        for label, text in progress.rest()
    )
    style = f'value="{numbers.step}" max="{numbers.total}" style="width:300px;vertical-align:middle"'
    bar = f"<div><progress {style}></progress> update {progress.count()}, {progress.times()}</div>"
    start, *end = [f"<pre>{html.escape(as_lines(one))}</pre>" for one in said] or [""]
    return f"{start}{bar}<table>{rows}{below}</table>{''.join(end)}"
