"""What a run has stored is read back, by an index that agrees with the lines whatever has happened to either."""

from __future__ import annotations

import json
import math
import os
import random

import numpy as np
import pytest

from rloom.errors import DataError
from rloom.observe import RunReader, read_store, row_table
from rloom.observe.row_index import NAMES, RECORDS, IndexBuilder, IndexNames, joined, tail_of
from rloom.observe.row_table import RowTable
from rloom.observe.runs import packed, unpacked
from rloom.observe.store import FOLDER, RunStore


def rows_of(step: int, groups: int = 2, k: int = 3, *, names=("right", "short")):
    draw = random.Random(step)
    return [
        {
            "group": group,
            "prompt": f"prompt {group}",
            "completion": f'step {step} "quoted"\nline é {draw.random()}',
            "scores": {name: draw.choice([0.0, 1.0, None]) for name in names},
            "failures": {},
            "reward": draw.choice([draw.gauss(0, 1), None]),
            "advantage": draw.gauss(0, 1),
            "stop_reason": draw.choice(["eos", "length"]),
            "num_tokens": draw.randrange(1, 99),
            "extra": {},
        }
        for group in range(groups)
        for _ in range(k)
    ]


def write(store: RunStore, *steps: int, mode: str = "train", **options) -> None:
    for step in steps:
        store.write(rows_of(step, **options), step, mode)
        store.log({"reward": step / 10, "loss": 0.0}, step)


def check(folder) -> RunReader:
    """The table's numbers are those of the rows that a plain reading of all lines gives."""
    reader, rows = RunReader(folder), read_store(folder)
    reader.table.read_all()
    table, names = reader.table.records, reader.table.names
    assert len(table) == len(rows)
    for record, row in zip(table, rows, strict=True):
        assert reader.row(record) == row
        assert (int(record["step"]), names.modes[record["mode"]]) == (row["step"], row["mode"])
        assert int(record["group"]) == row["group"]
        assert names.stop_reasons[record["stop_reason"]] == row["stop_reason"]
        assert int(record["num_tokens"]) == row["num_tokens"]
        for name in ("reward", "advantage"):
            assert _same(record[name], row[name])
        assert all(_same(record["scores"][i], row["scores"].get(name)) for i, name in enumerate(names.scores))
        line = json.dumps(row["completion"])[1:-1]
        assert int(record["text_size"]) == len(line)
        with (reader.store / f"{record['part']:09d}.jsonl").open("rb") as file:
            file.seek(int(record["offset"] + record["text_at"]))
            assert file.read(len(line)).decode() == line
    return reader


def _same(value, wanted) -> bool:
    return math.isnan(value) if wanted is None else bool(np.float32(wanted) == value)


@pytest.mark.parametrize("part_bytes", [1, 3000, 10**6])
def test_the_index_agrees_with_the_lines(tmp_path, part_bytes):
    store = RunStore(tmp_path, part_bytes=part_bytes)
    store.begin()
    write(store, 1, 2)
    write(store, 2, mode="eval_hard")
    write(store, 3, 4, names=("right", "short", "later"))  # a name that comes late changes the size of records
    reader = check(tmp_path)
    assert reader.table.names.scores == ["right", "short", "later"]
    assert (tmp_path / FOLDER / RECORDS).stat().st_size == len(reader.table) * reader.table.names.dtype().itemsize
    assert [row["step"] for row in reader.completions(mode="eval_hard")] == [2] * 6
    assert reader.group(3, 1) == [r for r in read_store(tmp_path) if r["step"] == 3 and r["group"] == 1]
    assert reader.completions(mode="no such") == reader.completions(step=99) == []


@pytest.mark.parametrize("part_bytes", [1, 10**6])
@pytest.mark.parametrize("lost", ["nothing", "index", "records", "names", "half a record"])
def test_a_resumed_run_has_each_row_once_in_the_index_too(tmp_path, part_bytes, lost):
    write(RunStore(tmp_path, part_bytes=part_bytes), 1, 2, 3, 4)
    folder = tmp_path / FOLDER
    for name in {"index": (RECORDS, NAMES), "records": (RECORDS,), "names": (NAMES,)}.get(lost, ()):
        (folder / name).unlink()
    if lost == "half a record":
        os.truncate(folder / RECORDS, (folder / RECORDS).stat().st_size - 7)
    again = RunStore(tmp_path, part_bytes=part_bytes)
    again.resume(2)
    write(again, 3, 4, 5)
    reader = check(tmp_path)
    assert [entry["step"] for entry in reader.metrics()] == [1, 2, 3, 4, 5]
    assert (folder / RECORDS).stat().st_size == len(reader.table) * reader.table.names.dtype().itemsize


@pytest.mark.parametrize("part_bytes", [1, 10**6])
@pytest.mark.parametrize("lost", ["the end", "the end but one", "the end, as zeros", "the middle, as zeros"])
def test_lines_that_a_crash_has_cost_are_not_in_the_index_of_a_resumed_run(tmp_path, part_bytes, lost):
    """The disk has kept the newest records of the index, and not the lines that they are of."""
    write(RunStore(tmp_path, part_bytes=part_bytes), 1, 2, 3, 4)
    parts = sorted((tmp_path / FOLDER).glob("0*.jsonl"))
    part = parts[-2:][0] if lost == "the end but one" else parts[-1]
    size = part.stat().st_size
    start = {"the middle, as zeros": size // 2}.get(lost, size // 3)
    os.truncate(part, start)
    if lost.endswith("zeros"):
        os.truncate(part, size - size // 4 if lost.startswith("the middle") else size)
    if lost.startswith("the middle"):
        with part.open("ab") as file:
            file.write(b"\n" + json.dumps({**rows_of(4)[0], "step": 4, "mode": "train"}).encode() + b"\n")
    again = RunStore(tmp_path, part_bytes=part_bytes)
    again.resume(4)
    write(again, 5, k=4)
    reader = check(tmp_path)
    assert (tmp_path / FOLDER / RECORDS).stat().st_size == len(reader.table) * reader.table.names.dtype().itemsize


def test_rows_that_the_index_lacks_are_read_from_their_lines(tmp_path):
    store = RunStore(tmp_path)
    write(store, 1, 2, 3)
    path = tmp_path / FOLDER / RECORDS
    os.truncate(path, path.stat().st_size // 2)
    check(tmp_path)
    # As after a kill in the middle of a line.
    with (tmp_path / FOLDER / "000000001.jsonl").open("a") as file:
        file.write('{"step": 4, "mo')
    check(tmp_path)


def test_an_older_store_is_read_newest_first_and_gets_an_index(tmp_path, monkeypatch):
    store = RunStore(tmp_path, part_bytes=1)
    write(store, 1, 2, 3)
    for name in (RECORDS, NAMES):
        (tmp_path / FOLDER / name).unlink()
    table = RunReader(tmp_path).table
    table.refresh(at_once=1)
    assert set(table.records["step"]) == {3}
    assert not table.complete
    assert 0 < table.share < 1
    table.read_all()
    assert not table.save(), "a run may be writing there"
    monkeypatch.setattr("rloom.observe.row_table.QUIET_SECONDS", -1.0)
    assert table.save()
    assert (tmp_path / FOLDER / RECORDS).stat().st_size == len(table) * table.names.dtype().itemsize
    check(tmp_path)


def test_an_index_of_other_lines_is_not_believed(tmp_path):
    write(RunStore(tmp_path), 1, 2)
    kept = {name: (tmp_path / FOLDER / name).read_bytes() for name in (RECORDS, NAMES)}
    for path in (tmp_path / FOLDER).iterdir():
        path.unlink()
    write(RunStore(tmp_path), 5)
    for name, data in kept.items():
        (tmp_path / FOLDER / name).write_bytes(data)
    check(tmp_path)


def test_a_reader_follows_a_run_through_its_resume(tmp_path):
    store = RunStore(tmp_path)
    store.begin()
    write(store, 1, 2, 3)
    reader = check(tmp_path)
    for step in (4, 5):
        write(store, step)
        reader.table.refresh()
        assert reader.table.records["step"].max() == step
    again = RunStore(tmp_path)
    again.resume(2)
    reader.table.refresh()
    assert reader.table.records["step"].max() == 2
    write(again, 3)
    assert [row["step"] for row in reader.completions()] == [row["step"] for row in read_store(tmp_path)]


def test_an_index_that_has_not_grown_is_mapped_once(tmp_path):
    """A page looks every second, and what is found in a map keeps it."""
    store = RunStore(tmp_path)
    write(store, 1, 2)
    reader = RunReader(tmp_path)
    reader.table.refresh()
    before = reader.table.records
    reader.table.refresh()
    assert reader.table.records is before
    write(store, 3)
    reader.table.refresh()
    assert len(reader.table.records) == len(before) + 6


def test_the_rows_of_a_step_are_found_among_others(tmp_path):
    store = RunStore(tmp_path)
    write(store, 2, 3, 7)
    write(store, 7, mode="eval")
    reader = RunReader(tmp_path)
    for step, count in [(1, 0), (2, 6), (3, 6), (5, 0), (7, 12), (8, 0)]:
        found = reader.completions(step=step)
        assert [row["step"] for row in found] == [step] * count
    assert len(reader.completions(step=7, mode="eval", group=1)) == 3


def test_an_index_that_cannot_be_written_costs_no_row(tmp_path, monkeypatch, caplog):
    store = RunStore(tmp_path)
    write(store, 1)
    monkeypatch.setattr("rloom.observe.row_index.append_whole", lambda *a: (_ for _ in ()).throw(OSError("full")))
    write(store, 2)
    monkeypatch.undo()
    write(store, 3)
    assert "the index" in caplog.text
    assert [row["step"] for row in check(tmp_path).completions()] == [1] * 6 + [2] * 6 + [3] * 6


def test_lines_beyond_an_index_that_was_given_up_are_read_once(tmp_path, monkeypatch):
    """They may hold a name that the index has not: a score, a mode, a stop reason."""
    store = RunStore(tmp_path)
    write(store, 1)
    store._give_up_index(OSError("no space left on device"))
    write(store, 2, names=("right", "short", "late"))
    store.write([{**row, "stop_reason": "stopped"} for row in rows_of(3)], 3, "eval")
    read, part_records = [], row_table.part_records

    def counted(*given, **options):
        read.append(part_records(*given, **options))
        return read[-1]

    monkeypatch.setattr(row_table, "part_records", counted)
    table = RowTable(store.folder)
    for _ in range(3):
        table.refresh()
    assert [len(records) for records in read] == [12]
    write(store, 4)
    table.refresh()
    assert [len(records) for records in read] == [12, 6]
    assert (len(table), table.names.scores) == (24, ["right", "short", "late"])
    assert table.names.stop_reasons[table.records["stop_reason"][12]] == "stopped"
    check(tmp_path)


def test_damaged_and_odd_lines_do_not_stop_a_reader(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir()
    odd = [
        {"step": 1, "group": "x", "num_tokens": 10**30, "scores": [1], "reward": "much", "completion": ["a"]},
        {"step": 1, "group": -4, "num_tokens": None, "scores": {"f": True}, "reward": 10**400, "prompt": [1, {"a": 2}]},
    ]
    lines = [*map(json.dumps, odd), "{half", "[" * 10**5, '{"no": 1}', json.dumps({"step": 2, "completion": "é"})]
    (folder / "000000001.jsonl").write_text("\n".join(lines) + "\n")
    reader = RunReader(tmp_path)
    assert [row["step"] for row in reader.completions()] == [1, 1, 2]
    assert [int(g) for g in reader.table.records["group"]] == [-1, -1, -1]
    assert np.isnan(reader.table.records["reward"]).all()


def test_what_trl_leaves_is_a_run_too(tmp_path):
    history = [{"loss": 0.1, "reward": 0.5, "step": 10}, {"eval_loss": 0.2, "step": 10}, {"no": "step"}]
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": history[:1], "max_steps": 20}))
    assert RunReader(tmp_path).metrics() == history[:1]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 20}))
    for name in (tmp_path, tmp_path / "trainer_state.json"):
        reader = RunReader(name)
        assert reader.metrics() == history[:2]
        assert (reader.max_steps(), reader.completions(), reader.diagnoses(), reader.facts()) == (20, [], [], {})


def test_logs_of_an_older_version_come_first(tmp_path):
    (tmp_path / "trainer_state.json").write_text(
        json.dumps({"log_history": [{"reward": s, "step": s} for s in (1, 2)]})
    )
    store = RunStore(tmp_path)
    store.log({"reward": 9.0, "bad": float("nan"), "array": np.float32(0.5)}, 2)
    assert RunReader(tmp_path).metrics() == [
        {"reward": 1, "step": 1},
        {"reward": 9.0, "bad": None, "array": 0.5, "step": 2},
    ]


def test_no_run_is_an_error_that_says_so(tmp_path):
    for path, message in [(tmp_path, "holds no run"), (tmp_path / "none", "is no folder")]:
        with pytest.raises(DataError, match=message):
            RunReader(path)


def test_a_new_run_begins_with_empty_logs(tmp_path):
    first = RunStore(tmp_path)
    first.begin()
    first.log({"reward": 1.0}, 1)
    first.describe({"options": {"seed": 1}})
    second = RunStore(tmp_path)
    second.begin()
    second.describe({"options": {"seed": 2}})
    assert RunReader(tmp_path).metrics() == []
    assert RunReader(tmp_path).facts() == {"options": {"seed": 2}}


def test_values_of_tokens_keep_all_bits():
    values = np.random.default_rng(0).normal(size=100).astype("<f4")
    assert unpacked({"kl": packed(values)})["kl"] == values.tolist()
    assert unpacked({"kl": "no base64!"}) == {"kl": []}
    assert unpacked({"kl": packed([math.inf, 1.0, -math.inf, math.nan])}) == {"kl": [None, 1.0, None, None]}


def test_records_made_from_lines_are_those_that_were_written(tmp_path):
    write(RunStore(tmp_path, part_bytes=3000), *range(1, 20))
    builder = IndexBuilder(IndexNames())
    made = joined(tail_of(tmp_path / FOLDER, builder), builder.names)
    table = RunReader(tmp_path).table
    table.read_all()
    assert made.tobytes() == table.records.tobytes()
