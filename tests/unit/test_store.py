"""The run's store: nothing is lost but the line that a kill cut, nothing is there twice."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from rloom.observe import read_store
from rloom.observe.page.export import export
from rloom.observe.row_json import is_shallow
from rloom.observe.store import FOLDER, RunStore


def row(number: int, **changes):
    return {"prompt": "p", "completion": f"c{number}", "scores": {"f": float(number)}, "advantage": None, **changes}


def written(store: RunStore, *steps: int, mode: str = "train") -> None:
    for step in steps:
        store.write([row(10 * step, advantage=0.5), row(10 * step + 1, advantage=-0.5)], step, mode)


def steps(folder: Path) -> list[int]:
    return [r["step"] for r in read_store(folder)]


def only_part(folder: Path) -> Path:
    (part,) = (folder / FOLDER).glob("*.jsonl")
    return part


def test_what_is_written_is_read(tmp_path):
    store = RunStore(tmp_path)
    store.begin()
    store.write([row(1, failures={"g": "timeouts: TimeoutError: "}), row(2, advantage=0.25)], 3)
    first, second = read_store(tmp_path)
    assert first == {"step": 3, "mode": "train", **row(1, failures={"g": "timeouts: TimeoutError: "})}
    assert second["advantage"] == 0.25
    assert read_store(tmp_path, first=4) == read_store(tmp_path, last=2) == []


def test_scores_stay_and_texts_go(tmp_path):
    store = RunStore(tmp_path, texts=False)
    store.write([row(1, extra={"why": "because"})], 1)
    assert read_store(tmp_path) == [{"step": 1, "mode": "train", "scores": {"f": 1.0}, "advantage": None}]


@pytest.mark.parametrize("part_bytes", [1, 10**6])
def test_rows_of_later_steps_come_once_after_a_resume(tmp_path, part_bytes):
    store = RunStore(tmp_path, part_bytes=part_bytes)
    store.begin()
    written(store, 1, 2, 3, 4)
    again = RunStore(tmp_path, part_bytes=part_bytes)
    again.resume(2)
    assert steps(tmp_path) == [1, 1, 2, 2]
    written(again, 3, 4, 5)
    assert steps(tmp_path) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert len(list((tmp_path / FOLDER).glob("*.jsonl"))) == (5 if part_bytes == 1 else 1)


def test_a_torn_last_line_is_passed_over_and_dropped(tmp_path, caplog):
    written(RunStore(tmp_path), 1)
    part = only_part(tmp_path)
    with part.open("a") as file:
        file.write('{"step": 2, "scores": {"f')
    assert steps(tmp_path) == [1, 1]
    again = RunStore(tmp_path)
    again.resume(2)
    written(again, 3)
    assert steps(tmp_path) == [1, 1, 3, 3]
    assert "unfinished" in caplog.text


def test_a_torn_line_longer_than_a_block(tmp_path):
    written(RunStore(tmp_path), 1)
    with only_part(tmp_path).open("a") as file:
        file.write("x" * (2**20 + 5))
    RunStore(tmp_path).resume(1)
    assert only_part(tmp_path).read_bytes().endswith(b"}\n")


@pytest.mark.parametrize("depth", [90, 150, 900, 990, 5000])
@pytest.mark.parametrize("value", ["text", math.nan])
def test_what_is_nested_deeply_can_be_read_by_all(tmp_path, depth, value):
    """A reward may log what a completion is as JSON."""
    deep = value
    for _ in range(depth):
        deep = [deep]
    loop = {"node": [deep]}
    loop["itself"], loop["node again"] = loop, [loop]
    kept = {"prompt": [{"role": "user", "content": "[" * 500}], "completion": "{" * 500, "reward": 0.5, "group": 0}
    RunStore(tmp_path).write([{**kept, "extra": {"parsed": deep, "one": 1}}, {**kept, "extra": {"loop": loop}}], step=1)
    first, second = read_store(tmp_path)
    assert is_shallow(first)
    assert is_shallow(second)
    assert first["completion"] == second["completion"] == kept["completion"]
    if value == "text":
        assert (first["prompt"], first["extra"]["one"]) == (kept["prompt"], 1)
    assert export([str(tmp_path)], tmp_path / "page.html") > 0


DAMAGE = [b"{half\n", b"\0" * 4096 + b"\n", b"\xff\xfe\n", b"17\n", b'{"no": "step"}\n', b"[" * 10**5 + b"\n"]


@pytest.mark.parametrize("damage", DAMAGE, ids=["half", "zeros", "no text", "a number", "no step", "deep"])
def test_damaged_lines_are_counted_and_passed_over(tmp_path, caplog, damage):
    written(RunStore(tmp_path), 1, 2, 3)
    part = only_part(tmp_path)
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join([*lines[:1], damage, *lines[1:2], damage, *lines[2:]]))
    assert steps(tmp_path) == [1, 1, 2, 2, 3, 3]
    assert f"2 lines are damaged in {part}" in caplog.text
    caplog.clear()
    again = RunStore(tmp_path)
    again.resume(2)
    assert f"2 lines are damaged in {part}" in caplog.text
    written(again, 3, 4)
    assert steps(tmp_path) == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("name", ["2024-notes.jsonl", "1.jsonl", "000000001-copy.jsonl", "notes.txt"])
def test_a_foreign_file_is_let_be(tmp_path, name):
    written(RunStore(tmp_path), 1, 2)
    (tmp_path / FOLDER / name).write_text("mine")
    again = RunStore(tmp_path)
    again.resume(1)
    written(again, 2)
    assert steps(tmp_path) == [1, 1, 2, 2]
    assert (tmp_path / FOLDER / name).read_text() == "mine"
    again.begin()
    assert (tmp_path / f"{FOLDER}-1" / name).read_text() == "mine"


def refuse(*args, **kwargs):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def test_a_store_that_cannot_be_set_aside_is_left_alone(tmp_path, monkeypatch, caplog):
    written(RunStore(tmp_path), 1)
    store = RunStore(tmp_path)
    monkeypatch.setattr(Path, "rename", refuse)
    store.begin()
    assert "NOT written down" in caplog.text
    written(store, 1, 2)
    assert steps(tmp_path) == [1, 1]
    monkeypatch.undo()
    store.begin()  # the next run can
    written(store, 1, 2)
    assert steps(tmp_path) == [1, 1, 2, 2]


@pytest.mark.parametrize(("owner", "name"), [(os, "truncate"), (Path, "open")])
def test_a_store_that_cannot_be_cut_is_set_aside(tmp_path, monkeypatch, caplog, owner, name):
    written(RunStore(tmp_path), 1, 2)
    store = RunStore(tmp_path)
    monkeypatch.setattr(owner, name, refuse)
    store.resume(1)
    monkeypatch.undo()
    assert "begins anew" in caplog.text
    written(store, 2)
    assert steps(tmp_path) == [2, 2]
    assert len(list((tmp_path / f"{FOLDER}-1").glob("*.jsonl"))) == 1


def test_a_folder_where_nothing_may_be_changed_costs_the_store_and_not_the_run(tmp_path, monkeypatch, caplog):
    written(RunStore(tmp_path), 1, 2)
    store = RunStore(tmp_path)
    for owner, name in [(os, "truncate"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir")]:
        monkeypatch.setattr(owner, name, refuse)
    store.resume(1)
    written(store, 2)
    monkeypatch.undo()
    assert "NOT written down" in caplog.text
    assert steps(tmp_path) == [1, 1, 2, 2]


def test_a_new_run_sets_an_earlier_one_aside(tmp_path):
    store = RunStore(tmp_path)
    written(store, 0, mode="eval")
    store.begin()  # its own evaluation, before training
    written(store, 1)
    assert steps(tmp_path) == [0, 0, 1, 1]
    for name in (f"{FOLDER}-1", f"{FOLDER}-2"):
        store.begin()
        assert not (tmp_path / FOLDER).exists()
        assert len(list((tmp_path / name).glob("*.jsonl"))) == 1
        written(store, 1)


def test_evaluating_does_not_write_into_another_run(tmp_path, caplog):
    written(RunStore(tmp_path), 1)
    written(RunStore(tmp_path), 0, mode="eval")
    assert steps(tmp_path) == [1, 1]
    assert "belongs to another run" in caplog.text


def groups(folder: Path) -> list[tuple[int, str, int]]:
    return [(r["step"], r["mode"], r["group"]) for r in read_store(folder)]


@pytest.mark.parametrize("part_bytes", [1, 10**6])
def test_a_group_has_a_number_of_its_own_in_its_step(tmp_path, part_bytes):
    def rows(*numbers):
        return [row(n, group=n) for n in numbers]

    store = RunStore(tmp_path, part_bytes=part_bytes)
    store.begin()
    store.write(rows(0, 0, 1, 1), 1)
    store.write(rows(0, 0), 1)  # of another process
    for mode in ("eval", "eval", "test", "eval"):
        store.write(rows(0, 1), 1, mode)
    expected = [(1, "train", n) for n in (0, 0, 1, 1, 2, 2)]
    expected += [(1, "eval", n) for n in range(4)] + [(1, "test", n) for n in range(2)]
    expected += [(1, "eval", n) for n in (4, 5)]
    assert groups(tmp_path) == expected
    store.write(rows(0), 2)
    assert groups(tmp_path) == [*expected, (2, "train", 0)]
    again = RunStore(tmp_path, part_bytes=part_bytes)
    again.resume(1)
    again.write(rows(0), 1, "eval")  # once more, as of the step that was resumed from
    again.write(rows(0), 2)
    assert groups(tmp_path) == [*expected, (1, "eval", 6), (2, "train", 0)]
    again.begin()
    again.write(rows(0), 1)
    assert groups(tmp_path) == [(1, "train", 0)]


def test_anything_can_be_kept(tmp_path):
    endless: list = []
    endless.append(endless)

    class Silent:
        def __str__(self):
            raise RuntimeError

    store = RunStore(tmp_path)
    values = [endless, {(1, 2): 3}, object, Silent(), float("nan"), "half a pair: \ud800", "two\nlines\u2028here"]
    store.write([row(n, extra={"value": value}, completion="\ud800\n\u2028") for n, value in enumerate(values)], 1)
    rows = read_store(tmp_path)
    assert [r["completion"] for r in rows] == ["\ud800\n\u2028"] * len(values)
    assert rows[5]["extra"]["value"] == values[5]


def test_ten_megabytes_are_kept_whole(tmp_path):
    store = RunStore(tmp_path)
    store.write([row(1, completion="é" * 10_000_000)], 1)
    assert read_store(tmp_path)[0]["completion"] == "é" * 10_000_000


def test_a_full_disk_costs_rows_and_not_the_run(tmp_path, monkeypatch, caplog):
    store = RunStore(tmp_path)
    written(store, 1)
    part_open = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            self.file.close()

        def write(self, data):
            self.file.write(data[:10])  # half a line gets there
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(
        Path, "open", lambda p, mode="r", **k: Full(part_open(p, mode, **k)) if "a" in mode else part_open(p, mode, **k)
    )
    written(store, 2)
    monkeypatch.undo()
    assert "2 completions of step 2 could not be written down" in caplog.text
    written(store, 3)
    assert steps(tmp_path) == [1, 1, 3, 3]


def test_every_line_is_json_for_others_too(tmp_path):
    nan, inf = float("nan"), float("inf")
    store = RunStore(tmp_path)
    changes = {"prompt": [{"content": inf}], "extra": {"x": nan, "y": (1.0, [-inf]), "z": 1e300, "o": Path("a")}}
    store.write([row(1, scores={"f": nan, "g": 1e300, "h": -inf, "i": 0.5}, **changes), row(2, extra={nan: 1})], 1)

    def refuse(name):
        raise AssertionError(name)

    first, second = (json.loads(line, parse_constant=refuse) for line in only_part(tmp_path).read_text().splitlines())
    assert first["scores"] == {"f": None, "g": None, "h": None, "i": 0.5}
    assert first["prompt"] == [{"content": None}]
    assert first["extra"] == {"x": None, "y": [1.0, [None]], "z": 1e300, "o": "a"}
    assert second["extra"] == "{nan: 1}"


def test_no_run_no_rows(tmp_path):
    with pytest.raises(FileNotFoundError, match="output folder of a run"):
        read_store(tmp_path)
