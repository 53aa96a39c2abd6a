"""Sends the table of completions to trackers: wandb, trackio, MLflow, TensorBoard."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from rloom.observe.cells import as_text

Columns = dict[str, list[Any]]

ROWS_IN_TENSORBOARD = 20
"""TensorBoard shows text, not tables, so it gets only a sample of the rows."""
MARKDOWN = str.maketrans({char: f"&#{ord(char)};" for char in "|*_`[]\\~"} | {"\n": "<br>"})
"""Escapes characters with a meaning in Markdown."""


def send(table: Columns, report_to: Any, *, step: int, images: Sequence[Sequence[Any]] | None, writer: Any) -> None:
    """Send a table to every tracker in use. `images` are those of each row, `writer` is TensorBoard's."""
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    for name in names:
        if name in SENDERS:
            SENDERS[name](table, step, images, writer)


def _to_wandb(table: Columns, step: int, images: Sequence[Sequence[Any]] | None, writer: Any) -> None:
    import wandb

    if wandb.run is not None:
        _log_frame(wandb, table, images)


def _to_trackio(table: Columns, step: int, images: Sequence[Sequence[Any]] | None, writer: Any) -> None:
    import trackio

    _log_frame(trackio, table, images)


def _log_frame(tracker: Any, table: Columns, images: Sequence[Sequence[Any]] | None) -> None:
    # The trackers install pandas.
    import pandas

    frame = pandas.DataFrame(table)
    if images is not None:
        frame["image"] = [[tracker.Image(image) for image in row] for row in images]
    tracker.log({"completions": tracker.Table(dataframe=frame)})


def _to_mlflow(table: Columns, step: int, images: Sequence[Sequence[Any]] | None, writer: Any) -> None:
    """Append to one artifact, with the step as a column. Its cells are plain values, so messages become text."""
    import mlflow

    # Without an active run, MLflow would begin one of its own.
    if mlflow.active_run() is not None:
        plain = {name: [as_text(v) if isinstance(v, list) else v for v in values] for name, values in table.items()}
        mlflow.log_table(data=plain, artifact_file="completions.json")


def _to_tensorboard(table: Columns, step: int, images: Sequence[Sequence[Any]] | None, writer: Any) -> None:
    if writer is not None:
        writer.add_text("completions", as_markdown(table, ROWS_IN_TENSORBOARD), step)


SENDERS: dict[str, Callable[[Columns, int, Sequence[Sequence[Any]] | None, Any], None]] = {
    "wandb": _to_wandb,
    "trackio": _to_trackio,
    "mlflow": _to_mlflow,
    "tensorboard": _to_tensorboard,
}


def as_markdown(table: Columns, limit: int) -> str:
    """At most `limit` rows as Markdown, spread over the table. Markup in a model's text is escaped.

    >>> print(as_markdown({"step": [1], "completion": ["a|b <i>"], "score": [0.5]}, limit=5))
    | completion | score |
    |---|---|
    | a&#124;b &lt;i&gt; | 0.50 |
    """
    names = [name for name in table if name != "step"]
    count = len(table[names[0]]) if names else 0
    rows = [i * count // limit for i in range(limit)] if count > limit else range(count)
    lines = [names, *([as_text(table[name][row]) for name in names] for row in rows)]
    shown = [
        "| " + " | ".join(html.escape(cell, quote=False).translate(MARKDOWN) for cell in line) + " |" for line in lines
    ]
    return "\n".join([shown[0], "|" + "---|" * len(names), *shown[1:]])


def tensorboard_writer(callbacks: Sequence[Any]) -> Any:
    """The writer of transformers' TensorBoard callback; None if there is none."""
    return next((c.tb_writer for c in callbacks if getattr(c, "tb_writer", None) is not None), None)
