"""The latest completions, as a table for people: printed with rich, sent to the trackers."""

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
"""Of the table, beside one for each reward; extra columns have other names."""


class CompletionLog:
    """Prompts, completions, scores and advantages of the latest completions that were trained on, one entry each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = self.shown = self.sent = 0  # completions taken in, and how many when they were last shown and sent
        self.columns: dict[str, Any] = {
            "images": self._column(),
            "prompt": self._column(),
            "completion": self._column(),
            "rewards": defaultdict(self._column),
            "advantages": self._column(),
            "extra": defaultdict(deque),  # longer while a user's own scoring adds to them
        }

    def _column(self) -> deque[Any]:
        return deque(maxlen=self.size)

    def extend(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add completions: entries by the columns' names, those of `rewards` and `extra` by name once more."""
        for row in rows:
            self._append(row)
        self.count += len(rows)
        extra = self.columns["extra"]
        for name in [name for name, column in extra.items() if all(value is None for value in column)]:
            del extra[name]  # its rows have left the table

    def extra_lengths(self) -> dict[str, int]:
        """How many values each extra column has."""
        return {name: len(column) for name, column in self.columns["extra"].items()}

    def extra_added_since(self, before: dict[str, int], count: int) -> dict[str, list[Any]]:
        """Take out what somebody added to extra columns since, a value for each of `count` completions.

        TRL's trainer has its subclasses add to `_logs["extra"]` while they score.
        """
        columns = self.columns["extra"]
        grown = [name for name, column in columns.items() if len(column) == before.get(name, 0) + count > 0]
        return {name: [columns[name].pop() for _ in range(count)][::-1] for name in grown}

    def _append(self, row: dict[str, Any]) -> None:
        before = len(self.columns["prompt"])
        for name, value in row.items():
            column = self.columns[name]
            if not isinstance(column, dict):
                column.append(value)
                continue
            for one in {**column, **value}:  # rows from before a column was there, and later ones without, have None
                column[one].extendleft([None] * (before - len(column[one])))
                column[one].append(value.get(one))
                if len(column[one]) > self.size:
                    column[one].popleft()

    def table(self, step: int) -> dict[str, list[Any]]:
        """Equal-length columns by name."""
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
        """Print the table, or a sample of `limit` rows: spread over it, or neighbours, which are a prompt's group."""
        table = self.table(step)
        rows = list(range(len(table["prompt"])))
        if unique_prompts:
            rows = _first_of_each(table["prompt"])
        if limit is not None and len(rows) > limit:
            rows = rows[:limit] if neighbours else [rows[i * len(rows) // limit] for i in range(limit)]
        if rows:
            (console or Console()).print(render(table, rows, title=f"Step {step}"))

    def show(self, step: int, args: RLOOConfig, writer: Any = None) -> None:
        """Print the table, and send it to the trackers, as the options say."""
        if self.count == self.shown:  # nothing new: the summary at the end of a run logs once more
            return
        self.shown = self.count
        self.print(step, args.num_completions_to_print, unique_prompts=args.log_unique_prompts)
        self.send(step, args, writer)

    def send(self, step: int, args: RLOOConfig, writer: Any = None) -> None:
        """The table to the trackers, once for what is in it. `writer` is TensorBoard's."""
        if self.count == self.sent:
            return
        self.sent = self.count
        table = self.table(step)
        rows = list(range(len(table["prompt"])))
        if args.log_unique_prompts:
            rows = _first_of_each(table["prompt"])
        images = None
        if args.log_multimodal and self.columns["images"]:
            missing = len(table["prompt"]) - len(self.columns["images"])  # after a resume: checkpoints hold no images
            shown = [*([] for _ in range(missing)), *self.columns["images"]]
            images = [shown[row] for row in rows]
        some = {name: [values[row] for row in rows] for name, values in table.items()}
        trackers.send(some, args.report_to, step=step, images=images, writer=writer)

    def state_dict(self) -> str:
        """As JSON; values that JSON does not know become text."""
        plain = {
            name: {k: list(v) for k, v in value.items()} if isinstance(value, dict) else list(value)
            for name, value in self.columns.items()
            if name != "images"
        }
        plain["prompt"] = [without_images(prompt) for prompt in plain["prompt"]]
        return json.dumps(plain, default=str)

    def load_state_dict(self, state: str) -> None:
        """Go on where a checkpoint stopped."""
        for name, value in json.loads(state).items():
            if isinstance(value, dict):
                for key, values in value.items():
                    self.columns[name][key] = deque(values, maxlen=self.size)
            else:
                self.columns[name] = deque(value, maxlen=self.size)


def sendable(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table as another process can be sent them: what a reward function added may be anything."""
    return [{**row, "extra": sendable_values(row["extra"])} for row in rows]


def sendable_values(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns of a user's own as another process can be sent them."""
    return {name: _sendable(value) for name, value in columns.items()}


def _sendable(value: Any) -> Any:
    """The value, not on a GPU, which is this process' own; as text where it cannot travel."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    try:
        value = value.cpu() if isinstance(value, Tensor) else value
        pickle.dumps(value)
        return value
    except Exception:  # of the user's own objects, which may not even have a text
        try:
            return str(value)
        except Exception:
            return f"a {type(value).__name__}"


def _first_of_each(prompts: list[Any]) -> list[int]:
    """The row in which each prompt stands first."""
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
