"""The filter of texts loses no match, whatever has happened to it or to the store; a search by it is a plain scan's."""

from __future__ import annotations

import json
import os
import random
import threading

import numpy as np
import pytest

from rloom.observe import filter_writer, read_store, row_table, text_filter
from rloom.observe.filter_writer import ASIDE, make_filter, remove_filter
from rloom.observe.page import answers, live, needle, text_search
from rloom.observe.page.live import LiveRun
from rloom.observe.page.query import Query
from rloom.observe.page.text_search import TextSearch
from rloom.observe.row_index import read_index, remove_index
from rloom.observe.store import FOLDER, RunStore
from rloom.observe.text_filter import (
    BLOCKS,
    FILTER,
    HEADER,
    STRETCH,
    TextFilter,
    begins,
    looked_up,
    rows_in,
    stretch_of,
)

PIECES = [
    "the ", "answer ", "is ", "nn", "n", "\\n", "\n", "\t", '"', "\\", "u00e9", "é", "日本", "\U0001f600",
    "\ud83d", "\ude00", "\x00", "0", "17", "</script>", "\u2028", "needle",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Stretches of 1 KB of text, blocks of 16 bytes, and few lines at a time."""
    monkeypatch.setattr(text_filter, "WIDTH", 16)
    monkeypatch.setattr("rloom.observe.filter_writer.WIDTH", 16)
    monkeypatch.setattr("rloom.observe.filter_writer.FEW", 1)
    monkeypatch.setattr(text_filter, "AT_ONCE", 3)
    monkeypatch.setattr(text_search, "BLOCK", 3000)
    monkeypatch.setattr(text_search, "MANY_ROWS", 20)
    monkeypatch.setattr(live, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 20.0)


def drawn(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.choice([0, 1, 5, 20, 60, 60])))


def rows_of(texts, **more):
    return [{"group": 0, "prompt": "a needle: the ", "completion": text, "reward": float(i), **more}
            for i, text in enumerate(texts)]  # fmt: skip


def write(folder, texts, *, per_step: int = 10, part_bytes: int = 20_000, first: int = 1) -> RunStore:
    store = RunStore(folder, part_bytes=part_bytes)
    if first == 1:
        store.begin()
    for step, start in enumerate(range(0, len(texts), per_step), first):
        store.write(rows_of(texts[start : start + per_step]), step)
    return store


def plain_texts(folder) -> list[str]:
    return [row["completion"] for row in read_store(folder)]


def filter_of(folder) -> TextFilter:
    found = read_index(folder / FOLDER)
    assert found is not None
    return TextFilter(folder / FOLDER, found[0].id, len(found[1]))


def covered(folder) -> int:
    return sum(int(found["rows"][chosen].sum()) for found, chosen in filter_of(folder).stretches())


def found_by_search(folder, text: str) -> list[bool]:
    found = read_index(folder / FOLDER)
    assert found is not None
    search = TextSearch(folder / FOLDER, found[1], text, None, filter_of(folder)).start()
    assert search.wait(20)
    return search.matches.tolist()


def check(folder, texts: list[str], draw: random.Random, count: int = 40) -> None:
    """Searches for parts of the texts, of how JSON writes them, and for others, find what a plain scan finds."""
    for _ in range(count):
        one = draw.choice(texts) or "x"
        one = draw.choice([one, one, json.dumps(one)[1:-1]])
        start = draw.randrange(len(one))
        text = draw.choice([one[start : start + draw.choice([1, 2, 3, 4, 6, 12, 60, 400])], drawn(draw)[:9] or "none"])
        assert found_by_search(folder, text) == [text in other for other in texts], text


# -- the filter itself


@pytest.mark.parametrize("seed", range(5))
def test_a_word_has_a_bit_wherever_a_text_begins(seed):
    draw = random.Random(seed)
    text = json.dumps("".join(draw.choices(PIECES, k=draw.choice([30, 150, 3000]))))[1:-1].encode()
    stretch = stretch_of(7, 1, text)[0]
    shift = int(stretch["shift"])
    assert (len(text) - 1) >> shift < BLOCKS
    for _ in range(300):
        start = draw.randrange(len(text))
        part = text[start : start + draw.choice([4, 5, 8, 9, 30, 300])]
        if len(part) >= 4:
            word = int(begins(stretch["table"][None], looked_up(part))[0])
            places = [place for place in range(len(text)) if text.startswith(part, place)]
            assert all(word >> (place >> shift) & 1 for place in places), part


def test_a_word_has_few_bits_for_a_text_that_is_not_there():
    draw = random.Random(0)
    text = "".join(draw.choices("abcdefghij", k=BLOCKS * 16)).encode()
    stretch = stretch_of(0, 1, text)
    for part in (b"needle", b"klmnop", b"abcdefghijabcdefghij"):
        assert int(begins(stretch["table"], looked_up(part))[0]).bit_count() <= 2
    # Its 4-grams are there, in the order of other blocks.
    assert int(begins(stretch["table"], looked_up(text[500:520] + text[100:120]))[0]).bit_count() <= 2


def test_the_rows_of_a_block_are_those_with_a_byte_in_it():
    draw = random.Random(0)
    sizes = np.array([draw.choice([1, 5, 16, 17, 40]) for _ in range(40)], "<u4")
    owners = np.repeat(np.arange(40), sizes)
    stretch = stretch_of(0, 40, b"x" * len(owners))[0]
    for block in range(BLOCKS):
        expected = np.unique(owners[block << int(stretch["shift"]) : (block + 1) << int(stretch["shift"])])
        assert rows_in(stretch, 1 << block, sizes).tolist() == expected.tolist()


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("memmem", [True, False])
def test_a_search_finds_what_a_plain_scan_finds(tmp_path, monkeypatch, seed, memmem):
    if not memmem:
        monkeypatch.setattr(needle, "_search", None)
    draw = random.Random(seed)
    monkeypatch.setattr(text_search, "FEW_BLOCKS", draw.choice([0, 8, 64]))
    monkeypatch.setattr(text_search, "SEVERAL", draw.choice([1, 3, 1000]))
    monkeypatch.setattr(text_search, "BLOCK", draw.choice([1, 3000, 10**6]))
    monkeypatch.setattr(needle, "FEW", draw.choice([1, 3, 1000]))
    monkeypatch.setattr(needle, "OPEN_FILES", draw.choice([1, 4]))
    write(tmp_path, [drawn(draw) for _ in range(200)], part_bytes=draw.choice([1, 20_000, 10**7]))
    texts = plain_texts(tmp_path)
    assert 100 < covered(tmp_path) < 200
    check(tmp_path, texts, draw)


def test_a_text_longer_than_a_stretch_is_a_stretch_of_its_own(tmp_path):
    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.choice([5, 5, 2000]))) for _ in range(40)]
    write(tmp_path, texts)
    check(tmp_path, plain_texts(tmp_path), draw, count=100)


def test_rows_without_a_text_are_no_match_and_do_not_shift_others(tmp_path):
    store = RunStore(tmp_path)
    texts = ["", "a needle and more words of it", ["a needle in a list"], None, "word " * 9] * 40
    store.write(rows_of(texts), 1)
    assert covered(tmp_path) > 100
    assert found_by_search(tmp_path, "needle") == [isinstance(text, str) and "needle" in text for text in texts]


@pytest.mark.parametrize(
    "text", ["u00e9", "00e9", "0e9", "e9", "9", "é", "n", "t", '"', "\\", "/", "u", "b", "\n", "f x"]
)
def test_what_begins_within_an_escape_is_no_match(tmp_path, text):
    """Where other rows hold the same letters plainly, at the borders of blocks too."""
    texts = [
        "a é x",
        "a \n x",
        'a \t" x',
        "C:\\new",
        "\x08",
        "\x0c x",
        "\\u00e9",
        "u00e9 9 / n",
        "\u2028f x",
        "é" * 99,
        "\\",
    ]
    write(tmp_path, texts * 20)
    assert found_by_search(tmp_path, text) == [text in one for one in texts * 20]


def test_half_of_a_pair_is_not_found_in_a_whole_one(tmp_path):
    """JSON writes a letter beyond 16 bits as two halves, which may also stand alone."""
    texts = ["a \U0001f600 b", "a \ud83d b", "a \ude00 b", "nothing"] * 30
    write(tmp_path, texts)
    for text in ("\ud83d", "\ude00", "\U0001f600", "\ud83d b"):
        assert found_by_search(tmp_path, text) == [text in one for one in texts]


# -- what is read


def test_a_text_that_is_not_there_costs_no_reading_of_lines(tmp_path, monkeypatch):
    draw = random.Random(0)
    texts = [" ".join(draw.choices(["lorem", "ipsum", "dolor"], k=12)) for _ in range(300)]
    texts[33] = f"a haystack {texts[33]}"
    write(tmp_path, texts)
    read, lines, bytes_at = [], needle.LineReader.lines, needle.LineReader.bytes_at
    monkeypatch.setattr(needle.LineReader, "lines", lambda self, rows: (read.extend(rows), lines(self, rows))[1])
    monkeypatch.setattr(needle.LineReader, "bytes_at", lambda self, *at: (read.append(at), bytes_at(self, *at))[1])
    left = 300 - covered(tmp_path)
    assert left < 20
    assert not any(found_by_search(tmp_path, "needle"))
    assert len(read) == left
    read.clear()
    assert np.flatnonzero(found_by_search(tmp_path, "haystack")).tolist() == [33]
    assert len(read) <= left + 3


@pytest.mark.parametrize(("letters", "free"), [(20_000, True), (10, False)])
def test_long_texts_are_searched_without_pythons_lock(monkeypatch, letters, free):
    """NumPy lets go of it in a call for more than 500 elements, however long they are."""
    calls, find = [], np.strings.find
    monkeypatch.setattr(np.strings, "find", lambda *given: (calls.append(len(given[2])), find(*given))[1])
    data = np.frombuffer(b"".join(b"x" * letters + b"needle"[: 3 + row] for row in range(5)), np.uint8)
    end = np.cumsum([letters + 3 + min(row, 3) for row in range(5)])
    begin = np.concatenate([[0], end[:-1]])
    assert needle.Needle("needle").row_by_row(data, begin, end).tolist() == [False, False, False, True, True]
    assert (calls[0] > 500) == free


# -- what may happen to a store


def opened(folder) -> LiveRun:
    run = LiveRun(folder)
    run.catch_up()
    return run


def test_rows_that_come_while_a_run_goes_on_are_found(tmp_path):
    draw, store = random.Random(3), RunStore(tmp_path)
    store.begin()
    run = None
    for step in range(1, 30):
        store.write(rows_of([drawn(draw) for _ in range(6)]), step)
        run = run or opened(tmp_path)
        texts = plain_texts(tmp_path)
        for text in ("needle", "answer is", "é", "n", draw.choice([t for t in texts if t])[:7]):
            found = answers.rows(run, Query(text=text))
            assert (found["count"], found["searched"], found["final"]) == (sum(text in t for t in texts), 1.0, True)
    assert covered(tmp_path) > 100


def texts_with(word: str) -> list[str]:
    """Texts of equal length, whatever the word of five letters is."""
    return [f"{number:04d} some words, and {word} among them" for number in range(200)]


@pytest.mark.parametrize("part_bytes", [2000, 10**7])
@pytest.mark.parametrize("step", [0, 7, 20])
def test_a_resumed_run_has_no_filter_of_what_it_dropped(tmp_path, part_bytes, step):
    """The new rows stand at the places of the old ones."""
    write(tmp_path, texts_with("older"), part_bytes=part_bytes)
    assert covered(tmp_path) > 150
    again = RunStore(tmp_path, part_bytes=part_bytes)
    again.resume(step)
    for row in range(step * 10, 200, 5):
        again.write(rows_of(texts_with("newer")[row : row + 5]), row // 10 + 1)
        # Also while new rows do not yet fill a stretch.
        assert sum(found_by_search(tmp_path, "newer")) == row + 5 - 10 * step
    assert covered(tmp_path) > 150
    assert not (tmp_path / FOLDER / ASIDE).exists()
    wanted = [row >= 10 * step for row in range(200)]
    assert found_by_search(tmp_path, "newer") == wanted
    assert found_by_search(tmp_path, "older") == [not new for new in wanted]


def test_what_a_resumed_run_keeps_stays_filtered(tmp_path):
    """Also the newest file's rows, whose records are made anew."""
    write(tmp_path, texts_with("older"), part_bytes=4000)
    before = covered(tmp_path)
    RunStore(tmp_path, part_bytes=4000).resume(20)
    assert covered(tmp_path) >= before - 60
    assert all(found_by_search(tmp_path, "older"))


def test_a_filter_that_an_older_version_left_beside_a_resumed_run_is_not_used(tmp_path):
    """It resumes without knowing of the filter: the id of the index tells."""
    write(tmp_path, texts_with("older"))
    kept = (tmp_path / FOLDER / FILTER).read_bytes()
    again = RunStore(tmp_path)
    again.resume(0)
    for number in range(20):
        again.write(rows_of(texts_with("newer")[number * 10 : number * 10 + 10]), number + 1)
    (tmp_path / FOLDER / FILTER).write_bytes(kept)
    assert covered(tmp_path) == 0
    assert all(found_by_search(tmp_path, "newer"))


def test_a_resume_that_fails_leaves_no_filter(tmp_path, monkeypatch):
    """As when it is killed after the lines were cut, and other lines come there without an index."""
    write(tmp_path, texts_with("older"), part_bytes=10**7)
    monkeypatch.setattr("rloom.observe.row_index.write_index", lambda *a: (_ for _ in ()).throw(OSError("full")))
    again = RunStore(tmp_path, part_bytes=10**7)
    again.resume(0)
    monkeypatch.undo()
    assert not (tmp_path / FOLDER / FILTER).exists()
    for number in range(20):
        again.write(rows_of(texts_with("newer")[number * 10 : number * 10 + 10]), number + 1)
    assert all(found_by_search(tmp_path, "newer"))


def test_a_score_that_comes_late_keeps_the_filter(tmp_path):
    store = write(tmp_path, texts_with("first"))
    before = covered(tmp_path)
    for step in range(21, 41):
        store.write(rows_of(texts_with("later")[:10], scores={"new": 1.0}), step)
    assert covered(tmp_path) > before + 150
    assert found_by_search(tmp_path, "later") == [False] * 200 + [True] * 200


def test_a_new_run_begins_a_new_filter(tmp_path):
    write(tmp_path, texts_with("older"))
    write(tmp_path, texts_with("newer"))
    assert all(found_by_search(tmp_path, "newer"))
    assert covered(tmp_path) > 150


DAMAGE = {
    "gone": lambda data: None,
    "empty": lambda data: b"",
    "half a header": lambda data: data[:20],
    "half a stretch": lambda data: data[: len(data) - STRETCH.itemsize // 2],
    "half a stretch, and then more": lambda data: data[: HEADER + 1000] + data[HEADER:],
    "zeros in a table": lambda data: data[: HEADER + 4096] + bytes(4096) + data[HEADER + 8192 :],
    "zeros at the end": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "a stretch of zeros": lambda data: data[:HEADER] + bytes(STRETCH.itemsize) + data[HEADER + STRETCH.itemsize :],
    "one bit": lambda data: data[:-9] + bytes([data[-9] ^ 16]) + data[-8:],
    "stretches twice": lambda data: data + data[HEADER:],
    "another version": lambda data: b"rloom text filter, version 9\n".ljust(32) + data[32:],
    "noise": lambda data: data[:HEADER] + random.Random(0).randbytes(len(data) - HEADER),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_filter_loses_nothing(tmp_path, damage):
    draw = random.Random(1)
    write(tmp_path, [drawn(draw) for _ in range(200)])
    path = tmp_path / FOLDER / FILTER
    damaged = DAMAGE[damage](path.read_bytes())
    path.unlink() if damaged is None else path.write_bytes(damaged)
    check(tmp_path, plain_texts(tmp_path), draw, count=60)


def test_an_older_store_gets_a_filter_when_nobody_writes_there(tmp_path, monkeypatch):
    write(tmp_path, texts_with("older"))
    whole = covered(tmp_path)
    remove_filter(tmp_path / FOLDER)
    assert not LiveRun(tmp_path).prepare()
    assert not (tmp_path / FOLDER / FILTER).exists(), "a run may be writing there"
    monkeypatch.setattr(row_table, "QUIET_SECONDS", -1.0)
    run = LiveRun(tmp_path)
    assert run.prepare()
    assert covered(tmp_path) == whole
    assert answers.rows(run, Query(text="0017 some"))["count"] == 1
    # One that is there already is not made again, and one of which much is missing is.
    written = (tmp_path / FOLDER / FILTER).stat().st_mtime_ns
    LiveRun(tmp_path).prepare()
    assert (tmp_path / FOLDER / FILTER).stat().st_mtime_ns == written
    os.truncate(tmp_path / FOLDER / FILTER, HEADER)
    LiveRun(tmp_path).prepare()
    assert covered(tmp_path) == whole


@pytest.mark.parametrize("index", [True, False])
def test_a_store_that_an_older_version_writes_to_gets_a_filter_later_and_says_so(tmp_path, monkeypatch, caplog, index):
    write(tmp_path, texts_with("older"))
    whole = covered(tmp_path)
    remove_filter(tmp_path / FOLDER) if index else remove_index(tmp_path / FOLDER)
    waits = []

    def wait(seconds):
        if seconds == live.AGAIN_SECONDS:
            waits.append(seconds)
            monkeypatch.setattr(row_table, "QUIET_SECONDS", -1.0)

    monkeypatch.setattr(live.time, "sleep", wait)
    with caplog.at_level("INFO", logger="rloom"):
        LiveRun(tmp_path).keep_preparing()
    assert len(waits) == 1
    assert [record.message for record in caplog.records if "searches read all lines" in record.message]
    assert covered(tmp_path) == whole


def test_a_run_of_this_version_that_is_going_on_needs_nothing(tmp_path, monkeypatch, caplog):
    write(tmp_path, texts_with("newer"))
    monkeypatch.setattr(live, "AGAIN_SECONDS", None)
    with caplog.at_level("INFO", logger="rloom"):
        LiveRun(tmp_path).keep_preparing()
    assert not caplog.records


def test_two_readers_make_the_filter_at_the_same_time(tmp_path, monkeypatch):
    """One begins while the other is in the middle, and both come to their ends."""
    write(tmp_path, texts_with("older"))
    whole, (names, records) = (tmp_path / FOLDER / FILTER).read_bytes(), read_index(tmp_path / FOLDER)
    remove_filter(tmp_path / FOLDER)
    monkeypatch.setattr(filter_writer, "ROWS", 50)
    asked = []

    def other() -> bool:
        asked.append(0)
        if len(asked) == 2:
            assert make_filter(tmp_path / FOLDER, names.id, records)
        return True

    assert make_filter(tmp_path / FOLDER, names.id, records, other)
    assert (tmp_path / FOLDER / FILTER).read_bytes() == whole
    assert [path.name for path in (tmp_path / FOLDER).glob(f"{FILTER}*")] == [FILTER]


def test_what_a_killed_reader_has_left_of_a_filter_is_removed(tmp_path):
    write(tmp_path, texts_with("older"))
    names, records = read_index(tmp_path / FOLDER)
    left, fresh = (tmp_path / FOLDER / f"{filter_writer.MADE}-{name}" for name in ("left", "fresh"))
    for path in (left, fresh):
        path.write_bytes(b"")
    os.utime(left, (0, 0))
    make_filter(tmp_path / FOLDER, names.id, records)
    assert (left.exists(), fresh.exists()) == (False, True)


@pytest.mark.parametrize("failing", ["append_whole", "_write"])
def test_a_disk_that_is_full_for_the_filter_costs_neither_rows_nor_the_index(tmp_path, monkeypatch, caplog, failing):
    real = getattr(filter_writer, failing)
    full = [failing == "_write"]

    def fails(path, *given):
        if full[0]:
            path.with_name(path.name + ".new").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return real(path, *given)

    store = RunStore(tmp_path)
    monkeypatch.setattr(filter_writer, failing, fails)
    for step in range(1, 21):
        full[0] = full[0] or step > 10
        store.write(rows_of(texts_with("first")[step * 10 - 10 : step * 10]), step)
    assert len(read_index(tmp_path / FOLDER)[1]) == 200
    assert len([record for record in caplog.records if "No space" in record.message]) == 1
    assert found_by_search(tmp_path, "first") == [True] * 200
    # A resumed run goes on with both.
    full[0] = False
    again = RunStore(tmp_path)
    again.resume(20)
    again.write(rows_of(texts_with("later")), 21)
    assert covered(tmp_path) > 250
    assert found_by_search(tmp_path, "later") == [False] * 200 + [True] * 200


def test_half_a_copy_of_a_filter_does_not_stay_on_a_full_disk(tmp_path, monkeypatch):
    write(tmp_path, texts_with("first"))
    monkeypatch.setattr(filter_writer, "header_of", lambda name: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        filter_writer.FilterWriter(tmp_path / FOLDER).rename("0" * 32)
    assert [path.name for path in (tmp_path / FOLDER).glob(f"{FILTER}*")] == [FILTER]


def test_a_filter_that_is_longer_than_the_index_loses_nothing(tmp_path):
    """A crash of the machine can cost records whose part of the filter is there."""
    write(tmp_path, texts_with("first"))
    size = read_index(tmp_path / FOLDER)[1].itemsize
    os.truncate(tmp_path / FOLDER / "index.bin", 90 * size + 3)
    run = opened(tmp_path)
    for text, count in (("first", 200), ("0150 some", 1), ("0020 some", 1), ("nowhere", 0)):
        assert answers.rows(run, Query(text=text))["count"] == count


def test_a_store_without_an_index_gets_both(tmp_path, monkeypatch):
    write(tmp_path, texts_with("older"))
    whole = covered(tmp_path)
    for path in (tmp_path / FOLDER).iterdir():
        if path.name.startswith(("index", "texts")):
            path.unlink()
    monkeypatch.setattr(row_table, "QUIET_SECONDS", -1.0)
    run = LiveRun(tmp_path)
    run.prepare()
    assert covered(tmp_path) == whole
    assert answers.rows(run, Query(text="older"))["count"] == 200


def test_a_folder_that_may_only_be_read_is_searched_all_the_same(tmp_path, monkeypatch, caplog):
    write(tmp_path, texts_with("older"))
    remove_filter(tmp_path / FOLDER)
    monkeypatch.setattr(row_table, "QUIET_SECONDS", -1.0)
    monkeypatch.setattr("rloom.observe.row_table.make_filter", lambda *a: (_ for _ in ()).throw(OSError("read-only")))
    run = LiveRun(tmp_path)
    with caplog.at_level("INFO", logger="rloom"):
        run.prepare()
    assert answers.rows(run, Query(text="older"))["count"] == 200


# -- the rows of a page, before all is searched


@pytest.fixture
def held(monkeypatch):
    """Searches begin, and look at nothing until they may."""
    go = threading.Event()
    run = TextSearch._run
    monkeypatch.setattr(TextSearch, "_run", lambda self: (go.wait(20), run(self)))
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.0)
    yield go
    go.set()


@pytest.mark.parametrize("sort", ["-step", "step", "reward", "-reward"])
@pytest.mark.parametrize("offset", [0, 10])
def test_the_rows_of_a_page_are_final_before_all_are_counted(tmp_path, held, monkeypatch, sort, offset):
    draw = random.Random(4)
    write(tmp_path, [drawn(draw) for _ in range(300)], per_step=100)
    run = opened(tmp_path)
    asked = Query(text="the ", sort=sort, offset=offset, limit=5)
    asked.ranges["reward"] = (20.0, 90.0)
    early = answers.rows(run, asked)
    assert early["final"]
    assert early["searched"] < 1
    held.set()
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 20.0)
    late = answers.rows(run, asked)
    assert late["searched"] == 1.0
    assert early["count"] < late["count"]
    assert early["rows"] == late["rows"]
    assert len(late["rows"]) == 5


def test_a_page_that_only_counts_reads_no_rows(tmp_path, held, monkeypatch):
    write(tmp_path, texts_with("every"))
    run = opened(tmp_path)
    early = answers.rows(run, Query(text="every", limit=5))
    assert early["final"]
    monkeypatch.setattr(run.reader.table, "line_of", None)
    monkeypatch.setattr(TextSearch, "settle", None)
    monkeypatch.setattr(live, "COUNT_SECONDS", 0.0)
    counted = answers.rows(run, Query(text="every", limit=0))
    assert (counted["rows"], counted["final"]) == ([], False)
    assert counted["searched"] == early["searched"] < 1
    held.set()
    monkeypatch.setattr(live, "COUNT_SECONDS", 20.0)
    counted = answers.rows(run, Query(text="every", limit=0))
    assert (counted["rows"], counted["count"], counted["final"], counted["searched"]) == ([], 200, True, 1.0)


def test_rows_that_are_rare_by_what_is_known_are_left_to_the_search(tmp_path, held, monkeypatch):
    """Looking for them one by one would only put off its end."""
    write(tmp_path, [f"{'needle' if i == 7 else 'nothing'} {i}" for i in range(300)])
    monkeypatch.setattr(live, "SETTLE_ROWS", 50)
    run = opened(tmp_path)
    answers.rows(run, Query(text="needle", limit=5))
    monkeypatch.setattr(TextSearch, "settle", None)
    assert not answers.rows(run, Query(text="needle", limit=5))["final"]


def test_a_search_waits_while_the_rows_of_a_page_are_looked_for(tmp_path):
    write(tmp_path, texts_with("every"))
    found = read_index(tmp_path / FOLDER)
    search = TextSearch(tmp_path / FOLDER, found[1], "every")
    with search.held():
        search.start()
        assert not search.wait(0.2)
        assert search.looked == 0
    assert search.wait(20)


def test_rows_that_may_still_change_are_not_called_final(tmp_path, held, monkeypatch):
    write(tmp_path, [f"{'needle' if i < 100 else 'nothing'} {i}" for i in range(300)])
    monkeypatch.setattr(live, "SETTLE_ROWS", 150)
    run = opened(tmp_path)
    early = answers.rows(run, Query(text="needle", limit=5))
    assert (early["final"], early["count"]) == (False, 0)
    assert early["searched"] == 0.5
    # From the other end they are there at once.
    assert answers.rows(run, Query(text="needle", limit=5, sort="step"))["final"]


def test_fewer_rows_than_a_page_are_final_once_all_were_looked_at(tmp_path, held):
    write(tmp_path, [f"{'needle' if i < 3 else 'nothing'} {i}" for i in range(100)])
    asked = Query(text="needle", limit=50)
    asked.ranges["reward"] = (0.0, 1.0)
    early = answers.rows(opened(tmp_path), asked)
    assert (early["final"], early["count"]) == (True, 2)
    assert early["searched"] < 1
