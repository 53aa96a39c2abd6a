"""The table of the latest completions: printed with rich, sent to the trackers."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rloom.data.images import without_images
from rloom.observe import trackers
from rloom.observe.cells import as_text
from rloom.printable import printable

if TYPE_CHECKING:
    from rloom.config import RLOOConfig

TABLE_COLUMNS = ("step", "prompt", "completion", "advantage", "images")
"""The fixed columns of the table. Extra columns must have other names."""


class CompletionLog:
    """Prompts, completions, scores and advantages of the latest completions that were trained on, one entry each."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Where tables are printed: a live view on the screen lends its console. None: on the standard output.
        self.console: Console | None = None
        # How many completions were added so far, and how many there were when the table was last shown and sent.
        self.count = self.shown = self.sent = 0
        self.columns: dict[str, Any] = {
            "images": self._column(),
            "prompt": self._column(),
            "completion": self._column(),
            "rewards": defaultdict(self._column),
            "advantages": self._column(),
            # These have no limit, since a user's own scoring adds to them before the rows are added.
            "extra": defaultdict(deque),
        }

    def _column(self) -> deque[Any]:
        return deque(maxlen=self.size)

    def extend(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add completions. A row has one entry per column; those of `rewards` and `extra` are dicts by name."""
        for row in rows:
            self._append(row)
        self.count += len(rows)
        extra = self.columns["extra"]
        for name in [name for name, column in extra.items() if all(value is None for value in column)]:
            # The rows with a value in this column have left the table.
            del extra[name]

    def extra_lengths(self) -> dict[str, int]:
        """How many values each extra column has."""
        return {name: len(column) for name, column in self.columns["extra"].items()}

    def extra_added_since(self, before: dict[str, int], count: int) -> dict[str, list[Any]]:
        """Remove and return what was added to extra columns since: a value for each of `count` completions.

        Subclasses of TRL's trainer add to `_logs["extra"]` while they score.
        """
        columns = self.columns["extra"]
        grown = [name for name, column in columns.items() if len(column) == before.get(name, 0) + count > 0]
        return {name: [columns[name].pop() for _ in range(count)][::-1] for name in grown}

    def _append(self, row: dict[str, Any]) -> None:
        """Add one row to all columns."""
        before = len(self.columns["prompt"])
        for name, value in row.items():
            column = self.columns[name]
            if not isinstance(column, dict):
                column.append(value)
                continue
            # Rows without a value in a column, earlier or later ones, have None.
            for one in {**column, **value}:
                column[one].extendleft([None] * (before - len(column[one])))
                column[one].append(value.get(one))
                if len(column[one]) > self.size:
                    column[one].popleft()

    def table(self, step: int) -> dict[str, list[Any]]:
        """The table as columns of equal length, by name."""
        logs = self.columns
        count = len(logs["prompt"])
        named = {**logs["rewards"], **logs["extra"], "advantage": logs["advantages"]}
        padded = {name: ([None] * (count - len(v)) + list(v))[-count:] for name, v in named.items()}
        return {
            "step": [step] * count,
            "prompt": [without_images(p) for p in logs["prompt"]],
            "completion": [without_images(c) for c in logs["completion"]],
            **padded,
        }

    def print(
        self,
        step: int,
        limit: int | None,
        *,
        unique_prompts: bool = False,
        console: Console | None = None,
        neighbours: bool = False,
    ) -> None:
        """Print the table, or `limit` rows of it: spread over the table, or neighbours, which are of one group."""
        table = self.table(step)
        rows = list(range(len(table["prompt"])))
        if unique_prompts:
            rows = _first_of_each(table["prompt"])
        if limit is not None and len(rows) > limit:
            rows = rows[:limit] if neighbours else [rows[i * len(rows) // limit] for i in range(limit)]
        if rows:
            (console or self.console or Console()).print(render(table, rows, title=f"Step {step}"))

    def show(self, step: int, args: RLOOConfig, writer: Any = None) -> None:
        """Print the table and send it to the trackers, as the options say."""
        # The summary at the end of a run logs once more, without new completions.
        if self.count == self.shown:
            return
        self.shown = self.count
        self.print(step, args.num_completions_to_print, unique_prompts=args.log_unique_prompts)
        self.send(step, args, writer)

    def send(self, step: int, args: RLOOConfig, writer: Any = None) -> None:
        """Send the table to the trackers, unless it is unchanged. `writer` is TensorBoard's."""
        if self.count == self.sent:
            return
        self.sent = self.count
        table = self.table(step)
        rows = list(range(len(table["prompt"])))
        if args.log_unique_prompts:
            rows = _first_of_each(table["prompt"])
        images = None
        if args.log_multimodal and self.columns["images"]:
            # Checkpoints hold no images, so rows from before a resume have none.
            missing = len(table["prompt"]) - len(self.columns["images"])
            shown = [*([] for _ in range(missing)), *self.columns["images"]]
            images = [shown[row] for row in rows]
        some = {name: [values[row] for row in rows] for name, values in table.items()}
        trackers.send(some, args.report_to, step=step, images=images, writer=writer)

    def state_dict(self) -> str:
        """The table as JSON, without images. Values that JSON does not know become text."""
        plain = {
            name: {k: list(v) for k, v in value.items()} if isinstance(value, dict) else list(value)
            for name, value in self.columns.items()
            if name != "images"
        }
        plain["prompt"] = [without_images(prompt) for prompt in plain["prompt"]]
        return json.dumps(plain, default=str)

    def load_state_dict(self, state: str) -> None:
        """Restore the state of a checkpoint."""
        for name, value in json.loads(state).items():
            if isinstance(value, dict):
                for key, values in value.items():
                    self.columns[name][key] = deque(values, maxlen=self.size)
            else:
                self.columns[name] = deque(value, maxlen=self.size)


def sendable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table in a form that can be sent to another process. Values of reward functions may be any object."""
    return [{**row, "extra": sendable_values(row["extra"])} for row in rows]


def sendable_values(columns: dict[str, Any]) -> dict[str, Any]:
    """A user's own columns in a form that can be sent to another process."""
    return {name: _sendable(value) for name, value in columns.items()}


def _sendable(value: Any) -> Any:
    """The value, moved off the GPU; as text if it cannot be pickled."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    try:
        value = value.cpu() if isinstance(value, Tensor) else value
        pickle.dumps(value)
        return value
    except Exception:
        # A user's own object may raise anything, also in `str`.
        try:
            return str(value)
        except Exception:
            return f"a {type(value).__name__}"


def _first_of_each(prompts: list[Any]) -> list[int]:
    """The first row of each prompt."""
    return list({str(prompts[row]): row for row in reversed(range(len(prompts)))}.values())[::-1]


def render(table: dict[str, list[Any]], rows: list[int], *, title: str) -> Table:
    """A rich table of some rows."""
    names = [name for name in table if name != "step"]
    result = Table(title=title, show_lines=True)
    for name in names:
        numeric = name not in ("prompt", "completion")
        result.add_column(escape(printable(name)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        result.add_row(*(Text(as_text(table[name][row])) for name in names))
    return result
