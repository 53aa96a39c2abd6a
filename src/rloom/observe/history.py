"""Reads the logs of a run from the disk: of one that has ended, of one that is running, and of other trainers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

from rloom.errors import DataError
from rloom.observe.metric_table import find

OTHER_NAMES = {
    # TRL, before and beside what it has in common with rloom
    "completion_length": "completions/mean_length",
    "clip_ratio": "clip_ratio/region_mean",
    "completions/clipped_completions_ratio": "completions/clipped_ratio",
    "objective/scores": "reward",
    "policy/entropy_avg": "entropy",
    "policy/clipfrac_avg": "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/mean": "mismatch/mean",
    "lr": "learning_rate",
    # verl
    "critic/score/mean": "reward",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/pg_clipfrac": "clip_ratio/region_mean",
    "response_length/mean": "completions/mean_length",
    "response_length/clip_ratio": "completions/clipped_ratio",
    "training/global_step": "step",
    # trackers
    "_step": "step",
    "global_step": "step",
}
"""Names that other trainers and trackers use for our metrics. Those that mean something else (a KL per completion) are
not here."""


@dataclass(slots=True, kw_only=True)
class History:
    """A run's log entries under our names, and what is known of its options."""

    entries: list[dict[str, Any]]
    source: Path
    options: SimpleNamespace = field(default_factory=SimpleNamespace)


def read_history(path: str | Path) -> History:
    """The logs in a run's output folder (or a checkpoint's), in a `trainer_state.json`, or in a file of JSON lines.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "metrics.jsonl"
    ...     _ = file.write_text('{"train/completion_length": 12.0, "_step": 5}')
    ...     read_history(file).entries
    [{'completions/mean_length': 12.0, 'step': 5}]
    """
    path = Path(path)
    if path.is_dir():
        found = _of_folder(path)
    elif path.is_file():
        found = History(entries=_of_file(path), source=path)
    else:
        raise DataError(f"there is no file or folder {path}")
    found.entries = [_renamed(entry) for entry in found.entries]
    if not found.entries:
        raise DataError(f"{found.source} has no logs yet")
    if not any(_is_metric(name, value) for entry in found.entries for name, value in entry.items()):
        raise DataError(
            f"{found.source} has no metric in any of its {counted(len(found.entries))}, such as reward or kl: name the "
            "folder of a run, its trainer_state.json or a file with what it logged"
        )
    return found


def counted(lines: int) -> str:
    """
    >>> counted(1), counted(2000)
    ('1 line', '2,000 lines')
    """
    return f"{lines:,} line{'' if lines == 1 else 's'}"


def _is_metric(name: str, value: Any) -> bool:
    """Whether a value is one that rules may read; a metric may be None, too."""
    if name in ("step", "epoch"):
        return False
    return find(name.removeprefix("eval_")) is not None and (value is None or isinstance(value, (int, float)))


def _of_folder(folder: Path) -> History:
    """What a run has logged. Of one without any logs, what its stored completions tell.

    Never both: a log has the rewards that functions gave, the store those after penalties and normalization.
    """
    # The reader imports numpy.
    from rloom.observe.runs import RunReader

    run = RunReader(folder)
    options = {name: value for name, value in _dict(run.facts().get("options")).items() if value is not None}
    return History(entries=run.metrics() or _of_store(folder), source=folder, options=SimpleNamespace(**options))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _of_file(file: Path) -> list[dict[str, Any]]:
    """The entries of a state, of a list, or of JSON lines."""
    try:
        text = file.read_text(encoding="utf-8")
        try:
            content = json.loads(text)
        except ValueError:
            content = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as JSON, nor as lines of it: {error}") from None
    if isinstance(content, dict):
        content = content.get("log_history", [content])
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise DataError(f"{file} has no logs: a log_history, or one object of metrics per line, is expected")
    return content


def _renamed(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry under our names. What trackers put in front (`train/`) is taken off; our own names come first."""
    plain = {str(name).removeprefix("train/"): value for name, value in entry.items()}
    others = {OTHER_NAMES[name]: value for name, value in plain.items() if name in OTHER_NAMES}
    return others | {name: value for name, value in plain.items() if name not in OTHER_NAMES}


# -- from the store


def _of_store(folder: Path) -> list[dict[str, Any]]:
    """What can be told of updates from their completions alone."""
    # The store's module imports numpy.
    from rloom.observe.store import read_store

    try:
        rows = [row for row in read_store(folder) if row.get("mode") == "train"]
    except FileNotFoundError:
        return []
    return [_entry(step, list(part)) for step, part in groupby(rows, key=lambda row: row["step"])]


def _entry(step: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The metrics of an update's completions. Their reward is that after penalties."""
    known = [row for row in rows if row.get("reward") is not None]
    groups: dict[Any, list[float]] = {}
    for row in known:
        groups.setdefault(row.get("group"), []).append(row["reward"])
    alike = [max(values) - min(values) < 1e-8 for values in groups.values() if len(values) > 1]
    rewards = [row["reward"] for row in known]
    entry = {
        "step": step,
        "reward": fmean(rewards) if rewards else None,
        "reward_std": stdev(rewards) if len(rewards) > 1 else None,
        "frac_reward_zero_std": fmean(alike) if alike else None,
        "completions/mean_length": fmean(row.get("num_tokens", 0) for row in rows),
        "completions/clipped_ratio": fmean(row.get("stop_reason") in ("length", "aborted") for row in rows),
    }
    unscored = 1 - len(known) / len(rows)
    return entry | ({"completions/unscored_ratio": unscored} if unscored else {})
