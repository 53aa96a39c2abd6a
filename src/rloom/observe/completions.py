"""The latest completions, as a table for people: printed with rich, sent to W&B and Trackio."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rloom.data.images import without_images


class CompletionLog:
    """Prompts, completions, scores and advantages of the latest rollout, one entry per completion."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = self.shown = 0  # completions taken in, and how many of them when the table was last shown
        self.columns: dict[str, Any] = {
            "images": self._column(),
            "prompt": self._column(),
            "completion": self._column(),
            "rewards": defaultdict(self._column),
            "advantages": self._column(),
            "extra": defaultdict(self._column),
        }

    def _column(self) -> deque[Any]:
        return deque(maxlen=self.size)

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
            rows = list({str(table["prompt"][row]): row for row in reversed(rows)}.values())[::-1]
        if limit is not None and len(rows) > limit:
            rows = rows[:limit] if neighbours else [rows[i * len(rows) // limit] for i in range(limit)]
        if rows:
            (console or Console()).print(render(table, rows, title=f"Step {step}"))

    def show(self, step: int, args: Any) -> None:
        """Print the table, and send it to the trackers that take tables, as the options say."""
        count = self.count
        if count == self.shown:  # nothing new: the summary at the end of a run logs once more
            return
        self.shown = count
        self.print(step, args.num_completions_to_print, unique_prompts=args.log_unique_prompts)
        for tracker in _table_trackers(args.report_to):
            import pandas  # comes with the trackers

            frame = pandas.DataFrame(self.table(step))
            if args.log_multimodal and self.columns["images"]:
                missing = len(frame) - len(self.columns["images"])  # after a resume: checkpoints hold no images here
                shown = [*([] for _ in range(missing)), *self.columns["images"]]
                frame["image"] = [[tracker.Image(i) for i in images] for images in shown]
            if args.log_unique_prompts:
                frame = frame[~frame["prompt"].astype(str).duplicated()]
            tracker.log({"completions": tracker.Table(dataframe=frame)})

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


def _table_trackers(report_to: Any) -> list[Any]:
    """The modules of the trackers in use that can show a table."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    trackers = []
    if "wandb" in names:
        import wandb

        if wandb.run is not None:
            trackers.append(wandb)
    if "trackio" in names:
        import trackio

        trackers.append(trackio)
    return trackers


def render(table: dict[str, list[Any]], rows: list[int], *, title: str) -> Table:
    """A rich table of some rows."""
    names = [name for name in table if name != "step"]
    result = Table(title=title, show_lines=True)
    for name in names:
        numeric = name not in ("prompt", "completion")
        result.add_column(escape(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        result.add_row(*(_cell(table[name][row]) for name in names))
    return result


def _cell(value: Any) -> Text:
    if isinstance(value, float):
        return Text("–" if value != value else f"{value:.2f}")
    if isinstance(value, list):  # messages
        return Text(_printable("\n".join(f"{m.get('role')}: {m.get('content')}" for m in value)))
    return Text("–" if value is None else _printable(str(value)))


def _printable(text: str) -> str:
    """Without control characters: a model may write any, and a terminal would obey them."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
