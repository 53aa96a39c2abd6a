"""What the page asks for, as plain data. The server gives it on request, and the export writes it down.

Completions are data here, and stay data: the page sets them as text, never as HTML.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from rloom.errors import DataError
from rloom.observe.lines import parts_of
from rloom.observe.metric_table import find
from rloom.observe.page.live import LiveRun
from rloom.observe.page.query import Query, chosen, column, in_order
from rloom.observe.row_index import rows_of_step
from rloom.observe.store import METRICS

MOST_LOGS = 5000
"""Logs of which all are shown. Of more, every second, third, … is."""
SNIPPET = 400
BINS = 40
NAMES = ("min", "mean", "max")
LIVE_SECONDS = 600.0
"""A run that has written nothing for so long is not called live."""


# -- runs and logs


def run_info(run: LiveRun, number: int) -> dict[str, Any]:
    """What a run is, and how much of it there is."""
    records, names = run.snapshot()
    reader, table = run.reader, run.reader.table
    written = [path.stat().st_mtime for path in (*parts_of(reader.store)[-1:], reader.store / METRICS) if path.exists()]
    # A run without a store says nothing between its checkpoints.
    written = written or [nanoseconds / 1e9 for *_, nanoseconds in reader.state_stamp()]
    last = int(run.entries[-1]["step"]) if run.entries else 0
    return {
        "run": number,
        "name": run.name,
        "rows": len(records),
        "complete": table.complete,
        "share": table.share,
        "modes": names.modes,
        "stop_reasons": names.stop_reasons,
        "scores": names.scores,
        "step": max(last, int(records[-1]["step"]) if len(records) else 0),
        "max_steps": reader.max_steps(),
        "live": bool(written) and time.time() - max(written) < LIVE_SECONDS,
        "logs": len(run.entries),
        "generation": run.generation,
        "diagnoses": reader.diagnoses(),
    }


def facts(run: LiveRun) -> dict[str, Any]:
    """Options, environment and what was said at the start."""
    return run.reader.facts()


def metrics(run: LiveRun, after: int = 0) -> dict[str, Any]:
    """The logs from a number on, by metric: `steps`, and for each name the values at these, None where it has none."""
    run.refresh()
    entries = run.entries
    every = max(1, math.ceil(len(entries) / MOST_LOGS)) if after == 0 else 1
    kept = _thinned(entries[after:], every)
    names = {name for entry in kept for name, value in entry.items() if isinstance(value, (int, float))} - {"step"}
    return {
        "steps": [entry["step"] for entry in kept],
        "series": {name: [_finite(entry.get(name)) for entry in kept] for name in sorted(names)},
        "meanings": {name: found.what for name in names if (found := find(name.removeprefix("eval_"))) is not None},
        "every": every,
        "logs": len(entries),
        "generation": run.generation,
    }


def _thinned(entries: Sequence[dict[str, Any]], every: int) -> list[dict[str, Any]]:
    """Every so-many-th log of training, and all evaluations, which are few."""
    if every == 1:
        return list(entries)
    training = [number for number, entry in enumerate(entries) if "loss" in entry]
    dropped = set(training) - set(training[:-1:every]) - set(training[-1:])
    return [entry for number, entry in enumerate(entries) if number not in dropped]


def _finite(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None


# -- rows


def rows(run: LiveRun, query: Query) -> dict[str, Any]:
    """The rows that a query asks for: their number, and some of them, with the beginnings of their texts."""
    began = time.perf_counter()
    found = run.find(query)
    shown = in_order(found.records, found.names, found.places, query.sort, query.offset, query.limit)
    return {
        "count": len(found.places),
        "of": len(found.records),
        "searched": found.searched,
        "final": found.final,
        "share": run.reader.table.share,
        "rows": [_short(run, found.records[place]) for place in shown],
        "seconds": time.perf_counter() - began,
    }


def _short(run: LiveRun, record: np.void) -> dict[str, Any]:
    # As it is on disk: its tokens, and their values, would be decoded for nothing.
    row = run.reader.table.line_of(record) | _found_by(record)
    for name in ("prompt", "completion"):
        row[name] = as_text(row.get(name))[:SNIPPET]
    return {name: row.get(name) for name in (*SHOWN, "prompt", "completion")}


SHOWN = ("id", "step", "mode", "group", "reward", "advantage", "num_tokens", "stop_reason", "scores", "prompt_id",
         "has_tokens")  # fmt: skip


UNSHOWN = ("token_ids", "mask")
"""Fields of a row that the page does not show. They would be much of what is sent."""


def full_row(run: LiveRun, record: np.void) -> dict[str, Any]:
    """A stored row, whole, with what it is found by."""
    return run.reader.row(record) | _found_by(record)


def _found_by(record: np.void) -> dict[str, Any]:
    return {
        "id": f"{int(record['part'])}-{int(record['offset'])}",
        "prompt_id": f"{int(record['prompt']):016x}",
        "has_tokens": bool(record["has_tokens"]),
    }


def as_text(value: Any) -> str:
    """A prompt or a completion as text: a conversation has a line for each message.

    >>> as_text([{"role": "user", "content": "hi"}])
    'user: hi'
    """
    if isinstance(value, list):
        said = [m for m in value if isinstance(m, dict)]
        return "\n".join(f"{m.get('role', '')}: {as_text(m.get('content'))}" for m in said)
    return "" if value is None else str(value)


def group(run: LiveRun, step: int, number: int, mode: str) -> dict[str, Any]:
    """The completions of a group, with what each is compared with. Their texts are whole; what only training needs is
    left out."""
    records, names = run.snapshot()
    if mode not in names.modes:
        raise DataError(f"no rows are of {mode!r}")
    beside = records[rows_of_step(records, step)]
    same = (beside["group"] == number) & (beside["mode"] == names.modes.index(mode))
    found = [full_row(run, beside[place]) for place in np.flatnonzero(same)]
    for row, name in itertools.product(found, UNSHOWN):
        row.pop(name, None)
    rewards = [row.get("reward") for row in found]
    for place, row in enumerate(found):
        others = [r for i, r in enumerate(rewards) if i != place and isinstance(r, (int, float))]
        row["baseline"] = sum(others) / len(others) if others else None
    return {"step": step, "group": number, "mode": mode, "rows": found}


def prompt_course(run: LiveRun, query: Query) -> dict[str, Any]:
    """One prompt through training: for each of its groups the step, and the rewards' least, mean and largest."""
    records, names = run.snapshot()
    found = records[chosen(records, names, query)]
    # The rows of a group in a row: a prompt may have thousands of groups, and each is then a stretch.
    found = found[np.lexsort((found["group"], found["step"]))]
    steps, numbers = found["step"].astype(np.int64), found["group"].astype(np.int64)
    starts = np.flatnonzero(np.diff(steps, prepend=-1).astype(bool) | np.diff(numbers, prepend=-1).astype(bool))
    counts = np.diff(starts, append=len(found))
    columns = [steps[starts].tolist(), numbers[starts].tolist(), counts.tolist(), *_spans(found["reward"], starts)]
    fields = ("step", "group", "count", *NAMES)
    return {"groups": [dict(zip(fields, values, strict=True)) for values in zip(*columns, strict=True)]}


def _spans(values: np.ndarray, starts: np.ndarray) -> list[list[float | None]]:
    """The least, mean and largest finite value of each stretch; None where it has none.

    >>> _spans(np.array([1.0, 3.0, np.nan, np.inf]), np.array([0, 2]))
    [[1.0, None], [2.0, None], [3.0, None]]
    """
    if not len(starts):
        return [[], [], []]
    known = np.isfinite(values)
    counts = np.add.reduceat(known.astype(int), starts)
    least = np.minimum.reduceat(np.where(known, values, np.inf).astype(float), starts)
    total = np.add.reduceat(np.where(known, values, 0).astype(float), starts)
    largest = np.maximum.reduceat(np.where(known, values, -np.inf).astype(float), starts)
    spans = (least, total / np.maximum(counts, 1), largest)
    return [[value if count else None for value, count in zip(span.tolist(), counts, strict=True)] for span in spans]


# -- distributions


def distribution(run: LiveRun, name: str, query: Query) -> dict[str, Any]:
    """How a column's values are spread: a histogram over all rows of a query, and quantiles through the steps."""
    records, names = run.snapshot()
    values = column(records, names, name)
    known = chosen(records, names, query) & np.isfinite(values)
    values, steps = values[known].astype(float), records["step"][known].astype(float)
    if not len(values):
        return {"count": 0, "edges": [], "counts": [], "steps": [], "quantiles": {}}
    counts, edges = np.histogram(values, BINS)
    return {
        "count": len(values),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        **_quantiles(values, steps),
    }


def _quantiles(values: np.ndarray, steps: np.ndarray) -> dict[str, Any]:
    """Quantiles in up to 100 stretches of steps. Rows are in the order of steps."""
    stretches = np.array_split(np.arange(len(values)), min(100, len(np.unique(steps))))
    wanted = (0.05, 0.25, 0.5, 0.75, 0.95)
    table = [np.quantile(values[part], wanted) for part in stretches if len(part)]
    return {
        "steps": [float(steps[part].mean()) for part in stretches if len(part)],
        "means": [float(values[part].mean()) for part in stretches if len(part)],
        "quantiles": {str(q): [float(row[i]) for row in table] for i, q in enumerate(wanted)},
    }
