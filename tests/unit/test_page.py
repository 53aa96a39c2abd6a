"""The page's server, export and terminal form: what they answer, and whom; hostile completions stay data."""

from __future__ import annotations

import http.client
import io
import json
import math
import random
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from rloom.cli.main import main
from rloom.errors import DataError
from rloom.observe import read_store, row_table
from rloom.observe.page import answers, live, query, text_search
from rloom.observe.page.export import document, export, sampled_rows
from rloom.observe.page.live import LiveRun
from rloom.observe.page.query import Query
from rloom.observe.page.server import ANSWERS, SCRIPTS, STATIC, PageServer
from rloom.observe.page.terminal import show_text
from rloom.observe.page.text_search import TextSearch
from rloom.observe.row_index import IndexNames, remove_index
from rloom.observe.row_json import packed_ids
from rloom.observe.runs import RunReader, packed
from rloom.observe.store import FOLDER, RunStore

HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!-- <script> --> & &lt;b&gt; \"quotes\" 'single'",
    "\x1b[2J\x1b]0;owned\x07 \u202eright to left \u2028 \x00 \ud800",
    "a newline:\nnice {{braces}} ${dollar} `tick` \\ \\n backslashes",
]


def make_run(folder, steps: int = 6, k: int = 4, groups: int = 3, name: str = "right", part_bytes: int = 4000) -> None:
    store = RunStore(folder, part_bytes=part_bytes)
    store.begin()
    store.describe({"about": {"model": name}, "options": {"learning_rate": len(name), "same": 1}, "max_steps": steps})
    draw = random.Random(name)
    for step in range(1, steps + 1):
        rows = [
            {
                "group": group,
                "prompt": [{"role": "user", "content": f"<b>{group}</b>"}],
                "completion": f"{HOSTILE[(step + group + i) % len(HOSTILE)]} {draw.random()}",
                "scores": {name: float(draw.random() > 0.5), "other": draw.choice([None, draw.gauss(0, 1)])},
                "failures": {},
                "reward": draw.choice([None, draw.gauss(0, 1), draw.gauss(0, 1)]),
                "advantage": draw.gauss(0, 1),
                "stop_reason": draw.choice(["eos", "length"]),
                "num_tokens": draw.randrange(1, 60),
                "extra": {},
            }
            for group in range(groups)
            for i in range(k)
        ]
        for row in rows[:k]:
            row["tokens"] = {
                "ids": [1, 2],
                "texts": ["<i>", "\x1b"],
                "policy": packed([-0.5, -1.25]),
                "entropy": packed([0.1, 0.2]),
            }
        store.write(rows, step)
        store.log({"loss": 0.0, "reward": step / 10, "kl": None, "time/update": 0.5, "time/rewards": 0.25}, step)
    store.log({"eval_reward": 0.5, "eval_reward_low": 0.25, "eval_reward_high": 0.75}, steps)
    store.diagnose("reward_falls", "the reward fell: <b>lower</b> learning_rate", 3)


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def server(folder):
    yield from serving([str(folder)])


def serving(folders, **options):
    server = PageServer(folders, **options)
    for run in server.runs:
        run.catch_up()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def ask(server, path: str, method: str = "GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def get(server, path: str):
    answer, body = ask(server, path)
    assert answer.status == 200, body
    return json.loads(body)


# -- answers


def test_rows_are_those_of_a_plain_filter(folder):
    rows, run = read_store(folder), LiveRun(folder)
    run.catch_up()
    draw = random.Random(1)
    for _ in range(200):
        given, keep = {}, []
        if draw.random() < 0.6:
            low = draw.gauss(-0.5, 1)
            given["reward_min"] = str(low)
            keep.append(lambda r, low=low: r["reward"] is not None and np.float32(r["reward"]) >= low)
        if draw.random() < 0.4:
            high = draw.randrange(60)
            given["num_tokens_max"] = str(high)
            keep.append(lambda r, high=high: r["num_tokens"] <= high)
        if draw.random() < 0.4:
            given["score:other_max"] = "0.3"
            keep.append(lambda r: r["scores"]["other"] is not None and np.float32(r["scores"]["other"]) <= 0.3)
        if draw.random() < 0.4:
            given["stop_reason"] = stop = draw.choice(["eos", "length", "none such"])
            keep.append(lambda r, stop=stop: r["stop_reason"] == stop)
        if draw.random() < 0.4:
            given["step_min"], given["step_max"] = "2", "4"
            keep.append(lambda r: 2 <= r["step"] <= 4)
        if draw.random() < 0.4:
            given["text"] = text = draw.choice(
                ["owned", "nice", "n", "\\n", "\n", '"', "nnice", "u202e", "\u202e", "x1b", "0.1"]
            )
            keep.append(lambda r, text=text: text in r["completion"])
        name, falling = draw.choice(["step", "reward", "advantage", "num_tokens", "score:other"]), draw.random() < 0.5
        given |= {"sort": ("-" if falling else "") + name, "limit": "1000"}
        expected = [row for row in rows if all(test(row) for test in keep)]
        found = answers.rows(run, Query.of(given))
        assert found["searched"] == 1.0
        assert found["count"] == len(expected)
        assert [row["step"] for row in found["rows"]] == [r["step"] for r in in_order(expected, name, falling)], given
        assert [row["reward"] for row in found["rows"]] == [r["reward"] for r in in_order(expected, name, falling)]


@pytest.mark.parametrize("sort", ["reward", "-reward", "num_tokens", "-num_tokens", "step", "-step"])
def test_a_page_of_rows_is_a_stretch_of_all_in_order(folder, sort):
    """Also where a page ends among equal numbers, and where rows have none."""
    run = LiveRun(folder)
    run.catch_up()
    records, names = run.snapshot()
    records = np.array(records)
    records["num_tokens"] %= 3
    places = np.arange(0, len(records), 2)
    rows = [{"place": place, "step": 0} | {n: records[n][place] for n in ("reward", "num_tokens")} for place in places]
    rows = [row | {"reward": None if np.isnan(row["reward"]) else row["reward"]} for row in rows]
    expected = [row["place"] for row in in_order(rows, sort.removeprefix("-"), sort.startswith("-"))]
    for offset in range(0, 40, 3):
        found = query.in_order(records, names, places, sort, offset, 7)
        assert found.tolist() == expected[offset : offset + 7]


def in_order(rows, name: str, falling: bool):
    if name == "step":
        return rows[::-1] if falling else rows

    def key(row):
        value = row["scores"]["other"] if name == "score:other" else row[name]
        return float("inf") if value is None else (-1 if falling else 1) * np.float32(value)

    return sorted(rows, key=key)


@pytest.mark.parametrize("block", [1, 700, 10**7])
def test_a_text_is_found_wherever_blocks_end(folder, monkeypatch, block):
    monkeypatch.setattr("rloom.observe.page.text_search.BLOCK", block)
    rows, run = read_store(folder), LiveRun(folder)
    run.catch_up()
    records, _ = run.snapshot()
    for text in ("owned", "user", "completion", "n", "nice", "\nnice", "\\", "\\n", "\ud800", "é", "no such text"):
        search = TextSearch(folder / "_rollouts", records, text).start()
        assert search.wait(20)
        assert search.matches.tolist() == [text in row["completion"] for row in rows], text


def test_what_only_json_writes_is_not_found(tmp_path):
    """The n of \\n, and the digits of \\u00e9, are not in the text."""
    texts = ["two\nlines", "caf\u00e9 9", "tab\t", "a \\n that is there"]
    RunStore(tmp_path).write([{"group": 0, "completion": text} for text in texts], 1)
    run = LiveRun(tmp_path)
    run.catch_up()
    for text in ("n", "nl", "00e9", "9", "t", "\\n", "\n"):
        search = TextSearch(tmp_path / "_rollouts", run.snapshot()[0], text).start()
        assert search.wait(20)
        assert search.matches.tolist() == [text in one for one in texts], text


def test_a_search_without_a_c_library_finds_the_same(folder, monkeypatch):
    monkeypatch.setattr("rloom.observe.page.needle._search", None)
    run = LiveRun(folder)
    run.catch_up()
    search = TextSearch(folder / "_rollouts", run.snapshot()[0], "nice").start()
    assert search.wait(20)
    assert search.matches.tolist() == ["nice" in row["completion"] for row in read_store(folder)]


def test_of_a_run_that_goes_on_only_new_rows_are_searched(folder, monkeypatch):
    monkeypatch.setattr(live, "FRESH_SECONDS", 0.0)
    run, looked_at = LiveRun(folder), []
    search_rows = TextSearch._search_rows
    monkeypatch.setattr(
        TextSearch, "_search_rows", lambda self, data, rows: (looked_at.append(rows), search_rows(self, data, rows))
    )
    run.catch_up()
    before = answers.rows(run, Query(text="owned"))["count"]
    looked_at.clear()
    store = RunStore(folder)
    store.resume(6)
    run.catch_up()
    assert answers.rows(run, Query(text="owned"))["count"] == before
    # Resuming makes the index anew, and may have dropped rows.
    assert looked_at
    looked_at.clear()
    store.write([{"group": 0, "completion": text, "reward": 1.0} for text in ("owned again", "other")], 7)
    found = answers.rows(run, Query(text="owned"))
    assert (found["count"], found["searched"], looked_at) == (before + 1, 1.0, [slice(72, 74)])


def test_a_search_does_not_go_on_in_rows_that_are_others(folder):
    run = LiveRun(folder)
    run.catch_up()
    records = run.snapshot()[0]
    search = TextSearch(folder / "_rollouts", records[20:60], "owned").start()
    assert search.wait(20)
    assert search.is_of(records[20:])
    assert not search.is_of(records[20:50])
    # An older store is read from its end: rows come at the front.
    assert not search.is_of(records)


@pytest.fixture
def slow_search(monkeypatch):
    """Searches look at a few rows, and go on when they are allowed to."""
    go, began = threading.Event(), threading.Event()
    search_rows = TextSearch._search_rows

    def slowly(self, *given):
        search_rows(self, *given)
        began.set()
        assert go.wait(20)

    monkeypatch.setattr("rloom.observe.page.text_search.BLOCK", 700)
    monkeypatch.setattr(TextSearch, "_search_rows", slowly)
    yield began, go
    go.set()


def test_a_search_that_was_stopped_does_not_say_that_it_is_done(folder, slow_search):
    began, go = slow_search
    run = LiveRun(folder)
    run.catch_up()
    search = TextSearch(folder / "_rollouts", run.snapshot()[0], "owned").start()
    assert began.wait(20)
    search.stop()
    go.set()
    assert not search.wait(20)
    assert search.ended
    assert not search.done


CUT = """
import sys
from pathlib import Path
from rloom.observe.page import text_search
from rloom.observe.row_table import RowTable
from rloom.observe.store import FOLDER, RunStore

output, text_search.BLOCK, text_search.THREADS = Path(sys.argv[1]), 2**18, 1
store = RunStore(output)
store.begin()
for step in range(1, 11):
    store.write([{"group": 0, "completion": "x" * 200_000}], step)
table = RowTable(output / FOLDER)
table.read_all()
search_rows, blocks = text_search.TextSearch._search_rows, []

def cut_meanwhile(self, *given):
    blocks.append(given)
    if len(blocks) == 3:
        RunStore(output).resume(2)
    search_rows(self, *given)

text_search.TextSearch._search_rows = cut_meanwhile
search = text_search.TextSearch(output / FOLDER, table.records, "needle").start()
search.wait(60)
print("ended" if search.ended else "going on", "done" if search.done else "not done", len(blocks))
"""


def test_a_run_that_is_resumed_during_a_search_does_not_kill_the_server(tmp_path):
    """In a process of its own: touching a file's map beyond its end cannot be caught."""
    ran = subprocess.run([sys.executable, "-c", CUT, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "ended not done 3\n"), ran.stderr


def test_a_file_that_is_gone_is_named(tmp_path):
    """Not at once, since a run that is resumed drops files too; and a page that asks again has it tried again."""
    make_run(tmp_path)
    run, query = LiveRun(tmp_path), Query(text="0.")
    run.catch_up()
    assert len(run.find(Query()).records) == 72
    lost = sorted((tmp_path / FOLDER).glob("0*.jsonl"))[1]
    content = lost.read_bytes()
    lost.unlink()
    assert not run.find(query).final
    with pytest.raises(FileNotFoundError, match=lost.name):
        run.find(query)
    lost.write_bytes(content)
    assert len(run.find(query).places) == 72


def test_two_tabs_search_for_two_texts(folder, slow_search, monkeypatch):
    began, go = slow_search
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 20.0)
    run = LiveRun(folder)
    run.catch_up()
    with ThreadPoolExecutor() as pool:
        asked = {}
        for text in ("owned", "nice"):
            began.clear()
            asked[text] = pool.submit(answers.rows, run, Query(text=text))
            assert began.wait(20)
        go.set()
        for text, answer in asked.items():
            wanted = sum(text in row["completion"] for row in read_store(folder))
            assert (answer.result()["searched"], answer.result()["count"]) == (1.0, wanted)


def test_what_was_typed_last_is_searched_first(folder, slow_search, monkeypatch):
    """What was searched for before, such as its first letters, waits."""
    began, go = slow_search
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(live, "SETTLE_ROWS", 0)
    order, search_rows = [], TextSearch._search_rows
    monkeypatch.setattr(
        TextSearch, "_search_rows", lambda self, *given: (order.append(self.text), search_rows(self, *given))
    )
    run = LiveRun(folder)
    run.catch_up()
    for text in ("own", "owned"):
        began.clear()
        answers.rows(run, Query(text=text))
        assert began.wait(20)
    before = order.count("own")
    go.set()
    for text in ("own", "owned"):
        assert run._searches[text][1].wait(20)
    assert order.count("own") > before + 2
    # Threads that were in the middle of some rows end these.
    last = len(order) - 1 - order[::-1].index("owned")
    assert order[:last].count("own") <= before + text_search.THREADS


def test_of_too_many_searches_the_oldest_is_given_up_and_begins_anew(folder, slow_search, monkeypatch):
    _, go = slow_search
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(live, "SETTLE_ROWS", 0)
    run = LiveRun(folder)
    run.catch_up()
    assert answers.rows(run, Query(text="owned"))["searched"] < 1
    first = run._searches["owned"][1]
    for number in range(live.SEARCHES):
        answers.rows(run, Query(text=f"other {number}"))
    assert len(run._searches) == live.SEARCHES
    go.set()
    assert not first.wait(20)
    assert first.ended
    monkeypatch.setattr(live, "PATIENCE_SECONDS", 20.0)
    found = answers.rows(run, Query(text="owned"))
    assert found["count"] == sum("owned" in row["completion"] for row in read_store(folder))
    assert found["searched"] == 1.0


def test_pages_of_rows_join_to_all_of_them(server):
    whole = get(server, "/api/rows?sort=-reward&limit=1000")["rows"]
    parts = [get(server, f"/api/rows?sort=-reward&limit=7&offset={offset}")["rows"] for offset in range(0, 72, 7)]
    assert [row for part in parts for row in part] == whole
    assert len(whole) == 72


def test_a_group_has_the_mean_of_the_others_as_baseline(server):
    found = get(server, "/api/group?step=2&group=1&mode=train")["rows"]
    assert len(found) == 4
    for place, row in enumerate(found):
        others = [r["reward"] for i, r in enumerate(found) if i != place and r["reward"] is not None]
        assert row["baseline"] == (pytest.approx(sum(others) / len(others)) if others else None)
    told = get(server, "/api/group?step=2&group=0&mode=train")["rows"]
    assert told[0]["tokens"]["policy"] == [-0.5, -1.25]


def test_metrics_runs_and_facts(server):
    (info,) = get(server, "/api/runs")["runs"]
    assert (info["rows"], info["step"], info["max_steps"], info["complete"]) == (72, 6, 6, True)
    assert [one["step"] for one in info["diagnoses"]] == [3]
    found = get(server, "/api/metrics?run=0")
    assert found["series"]["reward"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, None]
    assert "mean over completions" in found["meanings"]["reward"]
    assert get(server, "/api/metrics?run=0&after=6")["steps"] == [6]
    assert get(server, "/api/facts")["about"] == {"model": "right"}


def test_one_prompt_through_training_and_distributions(server, folder):
    rows = [r for r in read_store(folder) if r["group"] == 1]
    prompt = next(r["prompt_id"] for r in get(server, "/api/rows?limit=1000")["rows"] if r["group"] == 1)
    course = get(server, f"/api/prompt?prompt={prompt}&mode=train")["groups"]
    assert [one["step"] for one in course] == [1, 2, 3, 4, 5, 6]
    rewards = [r["reward"] for r in rows if r["step"] == 4 and r["reward"] is not None]
    assert course[3]["mean"] == pytest.approx(np.mean(rewards), rel=1e-6)
    found = get(server, "/api/distribution?column=num_tokens&mode=train")
    assert (sum(found["counts"]), found["count"]) == (72, 72)
    values = np.array([r["num_tokens"] for r in read_store(folder)])
    assert found["mean"] == pytest.approx(values.mean())
    assert found["counts"] == np.histogram(values, 40)[0].tolist()
    assert get(server, "/api/distribution?column=reward&step_min=99")["count"] == 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rows?rewrd_min=1", "did you mean 'reward_min'?"),
        ("rows?reward_min=much", "reward_min is a number"),
        ("rows?reward_min=nan", "reward_min is a number"),
        ("rows?sort=lenght", "no column"),
        ("rows?score:none_min=1", "no reward is called"),
        ("rows?limit=-1", "whole number"),
        ("rows?prompt=xyz", "hexadecimal"),
        ("rows?run=7", "there is no run"),
        ("group?step=x&group=1", "whole number"),
        ("group?step=1&group=1&mode=none", "no rows"),
    ],
)
def test_a_wrong_question_gets_a_clear_answer(server, path, message):
    answer, body = ask(server, f"/api/{path}")
    assert answer.status == 400
    assert message in json.loads(body)["error"]


def test_a_run_that_goes_on_is_followed(folder):
    run = LiveRun(folder)
    run.catch_up()
    assert answers.run_info(run, 0)["rows"] == 72
    store = RunStore(folder)
    store.resume(6)
    store.write([{"group": 0, "completion": "fresh", "reward": 1.0, "advantage": 0.0}], 7)
    store.log({"reward": 9.0}, 7)
    run._read_at = -live.FRESH_SECONDS
    assert answers.rows(run, Query(text="fresh"))["count"] == 1
    assert answers.metrics(run)["series"]["reward"][-1] == 9.0
    generation = run.generation
    RunStore(folder).resume(2)
    run._read_at = -live.FRESH_SECONDS
    assert answers.metrics(run)["steps"] == [1, 2]
    assert run.generation != generation
    assert answers.rows(run, Query())["count"] == 24


def test_a_page_whose_store_loses_files_while_it_is_read_goes_on(tmp_path, monkeypatch):
    make_run(tmp_path, part_bytes=1)
    remove_index(tmp_path / "_rollouts")
    read_part, read = row_table.part_records, []

    def resumed_meanwhile(part, *given, **options):
        read.append(part)
        if len(read) == 2:
            RunStore(tmp_path).resume(3)
        return read_part(part, *given, **options)

    monkeypatch.setattr(row_table, "part_records", resumed_meanwhile)
    monkeypatch.setattr(live, "FRESH_SECONDS", 0.01)
    with PageServer([str(tmp_path)]) as server:
        server.begin()
        (run,) = server.runs
        for _ in range(2000):
            if run.reader.table.complete:
                break
            time.sleep(0.01)
        assert answers.run_info(run, 0)["complete"]
        assert answers.rows(run, Query())["count"] == 36
    monkeypatch.setattr(run.reader.table, "refresh", lambda: (_ for _ in ()).throw(OSError("gone")))
    with pytest.raises(OSError, match="gone"):
        run.catch_up()


def test_the_course_of_a_prompt_is_that_of_its_groups_one_by_one(monkeypatch):
    """In whatever order rows are, also of rows without a reward or a group; and rewards are looked at once for all."""
    names, draw = IndexNames(modes=["train"], scores=["f"]), np.random.default_rng(0)
    records = np.zeros(400, names.dtype())
    records["prompt"], records["step"] = draw.integers(7, 9, 400), np.sort(draw.integers(0, 9, 400))
    records["group"] = draw.integers(-1, 6, 400)
    records["reward"] = draw.choice([np.nan, np.inf, -1.0, 0.5, 2.0], 400, p=[0.4, 0.3, 0.1, 0.1, 0.1])
    wanted, looked, isfinite = [], [], np.isfinite
    for step, group in sorted({(int(r["step"]), int(r["group"])) for r in records if r["prompt"] == 7}):
        same = [r for r in records if (r["prompt"], r["step"], r["group"]) == (7, step, group)]
        known = [float(r["reward"]) for r in same if math.isfinite(r["reward"])]
        ends = (min(known), pytest.approx(sum(known) / len(known)), max(known)) if known else (None,) * 3
        one = {"step": step, "group": group, "count": len(same)}
        wanted.append(one | dict(zip(("min", "mean", "max"), ends, strict=True)))
    monkeypatch.setattr(answers.np, "isfinite", lambda values: looked.append(1) or isfinite(values))
    run = SimpleNamespace(snapshot=lambda: (records, names))
    assert answers.prompt_course(run, Query(prompt=7))["groups"] == wanted
    assert len(looked) == 1
    assert any(one["min"] is None for one in wanted)
    assert answers.prompt_course(run, Query(prompt=1)) == {"groups": []}


def test_a_run_of_trl_that_goes_on_is_read_again(tmp_path, monkeypatch):
    """Its logs are in its checkpoints alone."""

    def save(step: int, **changes) -> None:
        logs = [{"step": s, "loss": 0.1, "reward": s / 10, **changes} for s in range(1, step + 1)]
        (tmp_path / f"checkpoint-{step}").mkdir(exist_ok=True)
        state = tmp_path / f"checkpoint-{step}" / "trainer_state.json"
        state.write_text(json.dumps({"global_step": step, "max_steps": 100, "log_history": logs}))

    monkeypatch.setattr(live, "FRESH_SECONDS", 0.0)
    save(9)
    run, read = LiveRun(tmp_path), RunReader.metrics
    assert answers.metrics(run)["logs"] == 9
    monkeypatch.setattr(RunReader, "metrics", lambda reader: pytest.fail("nothing is new"))
    info = answers.run_info(run, 0)
    assert (info["logs"], info["live"], info["step"], info["generation"]) == (9, True, 9, 0)
    monkeypatch.setattr(RunReader, "metrics", read)
    (tmp_path / "checkpoint-20").mkdir()
    (tmp_path / "checkpoint-20" / "trainer_state.json").write_text("{half")
    assert answers.metrics(run)["logs"] == 9
    save(20)
    assert answers.metrics(run, after=9)["steps"] == list(range(10, 21))
    assert answers.run_info(run, 0)["generation"] == 0
    save(20, entropy=1.0)
    assert answers.run_info(run, 0)["generation"] == 1


def test_of_many_logs_some_are_sent_and_all_evaluations(tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "MOST_LOGS", 10)
    store = RunStore(tmp_path)
    for step in range(1, 41):
        store.log({"loss": 0.0, "reward": float(step)}, step)
        if step % 20 == 0:
            store.log({"eval_reward": 1.0}, step)
    found = answers.metrics(LiveRun(tmp_path))
    assert found["every"] == 5
    assert [s for s, v in zip(found["steps"], found["series"]["eval_reward"], strict=True) if v] == [20, 40]
    assert found["steps"][-2:] == [40, 40]
    assert len(found["steps"]) <= 12


# -- whom the server answers


def test_every_answer_forbids_scripts_of_others(server):
    for path in ("/", "/page.js", "/page.css", "/api/runs", "/api/rows?text=owned", "/none", "/api/none"):
        answer, _ = ask(server, path)
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    answer, body = ask(server, "/")
    assert b"<script>" not in body
    assert b"style=" not in body


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:80", "", ":80", "localhost:80:80", "localhost.", "[::1]evil:80"]
)
def test_another_name_for_this_machine_is_refused(server, host):
    answer, body = ask(server, "/api/rows", Host=host)
    assert answer.status == 403
    assert b"owned" not in body


def test_a_server_answers_to_the_address_that_it_prints(folder):
    for server in serving([str(folder)], host="127.0.0.2"):
        assert server.url == f"http://127.0.0.2:{server.server_address[1]}/"
        with urllib.request.urlopen(server.url, timeout=20) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(server.url, headers={"Host": "evil.example"}), timeout=20)
        with refused.value:
            assert refused.value.code == 403


def test_a_row_that_is_nested_too_deeply_is_an_answer_too(server, monkeypatch):
    """The store of an older version may hold one, which JSON's reader refuses, or its writer."""
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for answer in (lambda *given: json.loads("[" * 5000), lambda *given: deep):
        monkeypatch.setitem(ANSWERS, "facts", answer)
        status, body = ask(server, "/api/facts")
        assert (status.status, json.loads(body)["error"]) == (400, "a row here is nested too deeply to be shown")


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1:8080", "[::1]:8080", "localhost", "[::1]"])
def test_a_tunnel_has_a_port_of_its_own(server, host):
    """`ssh -L 8080:127.0.0.1:PORT`, as docs/page.md has it. Browsers leave out port 80."""
    assert ask(server, "/api/rows", Host=host)[0].status == 200


def test_requests_of_other_sites_are_refused(server):
    assert ask(server, "/api/runs", Sec_Fetch_Site="cross-site")[0].status == 403
    assert ask(server, "/api/runs", Sec_Fetch_Site="same-origin")[0].status == 200


@pytest.mark.parametrize(
    "path",
    ["/../../../etc/passwd", "/static/page.js", "/%2e%2e/page.html", "//etc/passwd", "/uplot.LICENSE", "/\\..\\x"],
)
def test_only_its_own_files_are_served(server, path):
    assert ask(server, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_reads(server, method):
    assert ask(server, "/api/runs", method)[0].status == 501


def test_beyond_this_machine_a_token_is_asked_for(folder):
    for server in serving([str(folder)], host="0.0.0.0"):
        token = server.token
        assert len(token) >= 24
        assert server.url.endswith(f"?token={token}")
        for path in ("/", "/api/rows", "/page.js", "/?token=", "/?token=wrong", f"/?token={token[:-1]}"):
            assert ask(server, path)[0].status == 403
        assert ask(server, "/", Cookie=f"{server.cookie}=wrong")[0].status == 403
        assert ask(server, "/", Cookie="=;;=[")[0].status == 403
        answer, _ = ask(server, f"/?token={token}")
        assert answer.status == 303
        assert answer.headers["Location"] == "/"
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert ask(server, "/api/runs", Cookie=cookie.split(";")[0])[0].status == 200


def test_scripts_never_make_html_of_text():
    for name in SCRIPTS:
        if name != "uplot.js":
            text = (STATIC / name).read_text()
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc", text
            ), name
            assert "http:" not in text
            assert "https:" not in text


# -- export


class Seen(HTMLParser):
    """The elements of a document, and what scripts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.scripts = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data


def test_an_export_is_one_file_whose_data_stays_data(folder, tmp_path):
    other = tmp_path / "other"
    make_run(other, name="else")
    path = tmp_path / "report.html"
    export([str(folder), str(other)], path, sample=40)
    seen = Seen()
    seen.feed(path.read_text("utf-8", "surrogatepass"))
    assert [tag for tag, _ in seen.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in seen.tags]
    assert not [a for _, a in seen.tags if str(a.get("src", a.get("href", ""))).startswith(("http", "//"))]
    data = json.loads(seen.scripts[0])
    assert "</script><script>" in json.dumps(data)
    assert [run["info"]["name"] for run in data["runs"]] == ["run", "other"]
    for run, where in zip(data["runs"], (folder, other), strict=True):
        assert 30 <= len(run["rows"]) <= 40
        assert run["info"]["rows"] == 72
        stored = [json.dumps(row["completion"]) for row in read_store(where)]
        assert {json.dumps(row["completion"]) for row in run["rows"]} <= set(stored)
        assert run["metrics"]["series"]["reward"][:6] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
        assert any(row["has_tokens"] for row in run["rows"])
        rewards = [row["reward"] for row in read_store(where) if row["reward"] is not None]
        assert {min(rewards), max(rewards)} <= {row["reward"] for row in run["rows"]}


def test_what_only_training_needs_is_not_sent(tmp_path):
    row = {"group": 0, "completion": "a", "reward": 1.0, "advantage": 0.0, "token_ids": packed_ids([7, 8])}
    RunStore(tmp_path).write([{**row, "mask": [True, False]}, row], 1)
    run = LiveRun(tmp_path)
    run.catch_up()
    for rows in (answers.group(run, 1, 0, "train")["rows"], sampled_rows(run, 10)):
        assert [row["completion"] for row in rows] == ["a", "a"]
        assert not {"token_ids", "mask"} & {name for row in rows for name in row}
    assert [row["token_ids"] for row in RunReader(tmp_path).completions()] == [[7, 8]] * 2


def test_long_texts_are_cut_in_an_export_wherever_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("rloom.observe.page.export.LONGEST", 100)
    messages = [{"role": "user", "content": letter * 70} for letter in "abc"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "d" * 150}]}]
    rows = [
        {"group": 0, "prompt": prompt, "completion": "e" * 101, "extra": {"source": "f" * 100}, "reward": 1.0}
        for prompt in (messages, parts)
    ]
    RunStore(tmp_path).write(rows, 1)
    run = LiveRun(tmp_path)
    run.catch_up()
    first, second = sampled_rows(run, 10)
    assert first["prompt"] == [
        messages[0],
        {"role": "user", "content": f"{'b' * 30} … (40 characters are not in this export)"},
        {"role": "user", "content": " … (70 characters are not in this export)"},
    ]
    assert second["prompt"][0]["content"][0]["text"] == f"{'d' * 100} … (50 characters are not in this export)"
    assert first["completion"] == f"{'e' * 100} … (1 characters are not in this export)"
    assert first["extra"] == {"source": "f" * 100}


def not_json(name: str):
    raise AssertionError(f"{name} is no JSON, and a browser refuses all of it")


def test_numbers_that_are_not_finite_are_sent_as_none(tmp_path):
    """As a store has them by whoever else wrote it, and logs and facts of another trainer."""
    row = {"step": 1, "mode": "train", "group": 0, "completion": "a", "num_tokens": 1, "advantage": math.nan}
    rows = [{**row, "reward": reward, "scores": {"f": -math.inf}} for reward in (math.inf, 0.5, 1.5)]
    rows[0]["tokens"] = {"ids": [1, 2], "texts": ["a", "b"], "kl": packed([math.inf, 0.5])}
    folder = tmp_path / "run"
    (folder / "_rollouts").mkdir(parents=True)
    (folder / "_rollouts" / "000000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "_rollouts" / "metrics.jsonl").write_text('{"step": 1, "reward": Infinity, "loss": NaN}\n')
    (folder / "_rollouts" / "run.json").write_text('{"options": {"max_grad_norm": Infinity}}')
    export([str(folder)], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text().split('id="data">')[1].split("</script>")[0]
    (run,) = json.loads(text, parse_constant=not_json)["runs"]
    assert run["rows"][0]["tokens"]["kl"] == [None, 0.5]
    assert run["distributions"]["reward"]["mean"] == 1.0
    assert run["facts"] == {"options": {"max_grad_norm": None}}
    for server in serving([str(folder)]):
        for path in ("group?step=1&group=0", "rows", "metrics", "facts", "runs", "prompt", "distribution"):
            answer, body = ask(server, f"/api/{path}")
            assert answer.status == 200, body
            json.loads(body, parse_constant=not_json)


def test_a_sample_has_whole_groups(folder):
    run = LiveRun(folder)
    run.catch_up()
    rows = sampled_rows(run, 20)
    sizes = {}
    for row in rows:
        sizes[row["step"], row["group"]] = sizes.get((row["step"], row["group"]), 0) + 1
    assert len(rows) == 20
    assert set(sizes.values()) == {4}


def test_marks_in_data_are_not_filled_in():
    made = document({"text": "<!-- scripts --> <!-- styles --></script>"})
    assert made.count("<script") == 2
    assert "</script>" not in made.split('id="data">')[1].split("</script>")[0]


# -- terminal


def test_text_form_says_what_matters_and_nothing_hostile(folder, capsys):
    console = Console(file=io.StringIO(), width=200)
    show_text([str(folder)], console)
    text = console.file.getvalue()
    for words in (
        "update 6 of 6",
        "72 completions",
        "diagnosis at update 3",
        "eval_reward",
        "[0.25, 0.75]",
        "best of",
        "worst of",
    ):
        assert words in text, words
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "▁" in text
    assert "update 0.5 s" in text


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path):
    """Everywhere, also without colours: on the page, in a file and in the terminal."""
    folders = [tmp_path / seed / "out" for seed in ("seed1", "seed2")]
    for folder in folders:
        make_run(folder, steps=1)
    names = ["seed1/out", "seed2/out"]
    for server in serving([*map(str, folders)]):
        assert [run["name"] for run in get(server, "/api/runs")["runs"]] == names
    export([*map(str, folders)], tmp_path / "page.html")
    console = Console(file=io.StringIO(), width=200)
    show_text([*map(str, folders)], console)
    for text in ((tmp_path / "page.html").read_text(), console.file.getvalue()):
        assert all(name in text for name in names)
    assert [run.name for run in live.live_runs([folders[0], folders[0]])] == ["out", "out"]


def test_no_name_of_a_metric_reaches_the_terminal_as_it_is(tmp_path):
    """A foreign log may have any."""
    bad = "\x1b]0;owned\x07\x1b[31m"
    logged = {"step": 1, "loss": 0.1, f"time/{bad}": 1.0, f"rewards/{bad}/mean": 1.0}
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [logged]}))
    console = Console(file=io.StringIO(), width=200)
    show_text([str(tmp_path)], console)
    assert "\x1b" not in console.file.getvalue()
    assert console.file.getvalue().count("\\x1b]0;owned") == 2


def test_courses_fit_the_terminal_and_have_the_newest_updates(tmp_path):
    history = [{"reward": float(s > 35), "kl": 1.0, "beta": 0.01 * s, "rewards/a_long_name_of_one/mean": s, "step": s}
               for s in range(1, 41)]  # fmt: skip
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 40}))
    for width in (80, 60, 200):
        console = Console(file=io.StringIO(), width=width)
        show_text([str(tmp_path)], console)
        lines = [line for line in console.file.getvalue().splitlines() if "▁" in line]
        assert "…" not in console.file.getvalue()
        assert lines[0].split()[-1].endswith("█")
        assert [line.split()[0] for line in lines] == ["reward", "kl", "beta", "rewards/a_long_name_of_one/mean"]
        assert max(map(len, lines)) == min(width, 86)


def test_what_trl_leaves_can_be_shown_too(tmp_path, capsys):
    history = [{"loss": 0.1, "reward": s / 10, "step": s} for s in range(1, 6)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_steps": 5}))
    assert main(["show", str(tmp_path), "--text"]) == 0
    assert "reward" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "trainer_state.json"), "--export", str(tmp_path / "r.html")]) == 0
    assert "all curves. No completions are stored in" in capsys.readouterr().out
    run = LiveRun(tmp_path)
    run.catch_up()
    assert answers.rows(run, Query())["count"] == 0
    assert answers.metrics(run)["series"]["reward"] == [0.1, 0.2, 0.3, 0.4, 0.5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text", "--export", "a.html"], "choose one"),
        (["--sample", "3"], "--sample is for --export"),
        (["--port", "99999999"], "from 0 to 65535"),
    ],
)
def test_wrong_usage_of_the_verb(folder, words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["show", str(folder), *words])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_no_run_is_one_line(tmp_path, capsys):
    assert main(["show", str(tmp_path / "none")]) == 1
    assert "is no folder" in capsys.readouterr().err
    with pytest.raises(DataError):
        PageServer([str(tmp_path)])
