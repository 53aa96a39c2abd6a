"""The page of runs as one file: all curves, and a bounded sample of completions. It needs no server and no network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rloom.observe.page import answers
from rloom.observe.page.live import LiveRun, live_runs
from rloom.observe.page.query import Query
from rloom.observe.page.server import SCRIPTS, STATIC, STYLES
from rloom.observe.row_index import rows_of_step
from rloom.observe.row_json import shallow, strict_json

SAMPLE = 400
"""Completions of each run that an export holds, unless another number is asked for."""
LONGEST = 20_000
"""Characters of a prompt, a completion or another field of a row that an export holds."""


SHORT = 40
"""Texts that are never cut."""


def export(folders: Sequence[str], path: str | Path, *, sample: int = SAMPLE) -> int:
    """Write the page of runs to a file. Returns its size in bytes."""
    runs = live_runs(folders)
    for run in runs:
        run.catch_up()
    data = {"runs": [_run_data(run, number, sample) for number, run in enumerate(runs)]}
    made = document(data).encode("utf-8", "surrogatepass")
    Path(path).write_bytes(made)
    return len(made)


def document(data: Any) -> str:
    """The page with its styles, scripts and data inside. Only these very scripts may run in it."""
    styles = "\n".join(_read(name) for name in STYLES)
    scripts = "\n".join(_read(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src '{_hash(scripts)}'; style-src '{_hash(styles)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # In a script element, only "<" could end the data.
    safe = strict_json(data).replace("<", "\\u003c")
    parts = {
        "<!-- policy -->": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        "<!-- styles -->": f"<style>{styles}</style>",
        "<!-- data -->": f'<script type="application/json" id="data">{safe}</script>',
        "<!-- scripts -->": f"<script>{scripts}</script>",
    }
    made = []
    # Each part is put in once: what it holds is not looked at again.
    rest = _read("page.html")
    for mark, part in parts.items():
        before, rest = rest.split(mark, 1)
        made += [before, part]
    return "".join([*made, rest])


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _run_data(run: LiveRun, number: int, sample: int) -> dict[str, Any]:
    info = answers.run_info(run, number) | {"live": False}
    query = Query(mode="train" if "train" in info["modes"] else None)
    columns = ["reward", "advantage", "num_tokens", *(f"score:{name}" for name in info["scores"])]
    return {
        "info": info,
        "facts": answers.facts(run),
        "metrics": answers.metrics(run),
        "distributions": {name: answers.distribution(run, name, query) for name in columns},
        "rows": sampled_rows(run, sample),
    }


def sampled_rows(run: LiveRun, sample: int) -> list[dict[str, Any]]:
    """Whole groups with up to `sample` completions in all, or one group: some of those whose tokens' values are stored,
    those with the highest and the lowest rewards, and others evenly over the run."""
    records, names = run.snapshot()
    wanted: dict[tuple[int, int, int], None] = {}
    total = 0
    for place in _interesting(records, sample):
        key = tuple(int(records[place][name]) for name in ("step", "mode", "group"))
        if key in wanted:
            continue
        size = _group_size(records, *key)
        if total and total + size > sample:
            continue
        wanted[key] = None  # type: ignore[index]
        total += size
    rows: list[dict[str, Any]] = []
    for step, mode, group in sorted(wanted):
        rows += answers.group(run, step, group, names.modes[mode])["rows"] if group >= 0 else []
    # The texts of tokens are short, and as many as their values.
    return [{name: value if name == "tokens" else _cut(shallow(value)) for name, value in row.items()} for row in rows]


def _interesting(records: np.ndarray, sample: int) -> list[int]:
    """Places of rows, the most wanted first: a quarter with tokens' values, a quarter at the ends of reward, others."""
    if not len(records):
        return []
    told = np.flatnonzero(records["has_tokens"])
    order = np.argsort(records["reward"], kind="stable")
    known = order[: len(records) - int(np.count_nonzero(np.isnan(records["reward"])))]
    part = max(1, sample // 32)
    ends = [*known[:part], *known[::-1][:part]]
    return [int(place) for place in (*_spread(told, part), *ends, *_spread(np.arange(len(records)), sample))]


def _spread(places: np.ndarray, count: int) -> np.ndarray:
    """Some of the places, evenly, the last one first."""
    if not len(places):
        return places
    return places[np.unique(np.linspace(0, len(places) - 1, min(count, len(places))).astype(int))][::-1]


def _group_size(records: np.ndarray, step: int, mode: int, group: int) -> int:
    beside = records[rows_of_step(records, step)]
    return int(np.count_nonzero((beside["mode"] == mode) & (beside["group"] == group)))


def _cut(value: Any) -> Any:
    """A text, or messages or columns with texts in them, without what goes beyond `LONGEST` characters in all."""
    left = LONGEST

    def cut(one: Any) -> Any:
        nonlocal left
        if isinstance(one, list):
            return [cut(element) for element in one]
        if isinstance(one, dict):
            return {name: cut(element) for name, element in one.items()}
        # Roles of messages, and other short texts, are shorter than the words that would stand for them.
        if not isinstance(one, str) or len(one) <= SHORT:
            return one
        kept, left = one[:left], max(0, left - len(one))
        missing = len(one) - len(kept)
        return f"{kept} … ({missing:,} characters are not in this export)" if missing else one

    return cut(value)
