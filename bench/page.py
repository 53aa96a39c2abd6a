"""What the run's store and page cost: writing while training, opening and filtering in a browser.

python bench/page.py open                     2,000 updates × 256 completions: opening, filters, text search
python bench/page.py open --times 9           the same nine times over (10 GB, made in two minutes)
python bench/page.py demo                     the share of a demo step that writing takes
python bench/page.py write                    the host's seconds for writing 128 completions of 256 tokens
python bench/page.py filter                   how many rows the filter of texts leaves over, in natural text

Needs Chromium for `open` (apt-get install chromium). Times in the browser are from the press of a key, or the start of
the navigation, to what it asked for being painted.
"""

from __future__ import annotations

import argparse
import io
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from rloom.observe.page.needle import Needle
from rloom.observe.row_index import NAMES, RECORDS, read_index, write_index
from rloom.observe.row_json import packed_ids
from rloom.observe.runs import packed
from rloom.observe.store import FOLDER, METRICS, RunStore
from rloom.observe.text_filter import FILTER, HEADER, STRETCH, TextFilter, checks_of, rows_in

WORDS = [f"{a}{b}" for a in ("lo", "ren", "tas", "mi", "qu", "ver") for b in ("um", "ipsa", "do", "ne", "rex")]


def make_run(folder: Path, steps: int, completions: int, k: int = 8, tokens: int = 256) -> None:
    """A made-up run: 1 KB of text per completion, values of tokens for one group per update."""
    draw, store = random.Random(0), RunStore(folder)
    store.begin()
    store.describe({"about": {"model": "made up"}, "options": {}, "max_steps": steps})
    texts = [" ".join(draw.choices(WORDS, k=200)) for _ in range(500)]
    values = np.random.default_rng(0).normal(size=tokens)
    told = {"ids": list(range(tokens)), "texts": ["word "] * tokens}
    told |= {name: packed(values) for name in ("policy", "reference", "kl", "entropy", "sampling")}
    names = [f"rewards/r{i}/{end}" for i in range(5) for end in ("mean", "std", "time")]
    for step in range(1, steps + 1):
        rows = []
        for i in range(completions):
            row = {
                "group": i // k,
                "prompt": f"Prompt {draw.randrange(4000)}: {texts[i % 500][:300]}",
                "completion": f"{draw.choice(texts)} {step}-{i}" + (" needle" if draw.random() < 1e-4 else ""),
                "scores": {"right": float(draw.random() < step / steps), "form": draw.gauss(0, 1)},
                "failures": {},
                "reward": draw.gauss(step / steps, 1),
                "advantage": draw.gauss(0, 1),
                "stop_reason": "eos" if draw.random() < 0.9 else "length",
                "num_tokens": draw.randrange(8, tokens),
                "extra": {},
            }
            rows.append(row | {"tokens": told} if i < k else row)
        store.write(rows, step)
        logs = {name: draw.random() for name in names} | {f"time/{p}": draw.random() for p in ("generation", "update")}
        logs |= {"loss": 0.0, "reward": step / steps + draw.gauss(0, 0.1), "kl": draw.random(), "step_time": 1.0}
        store.log(logs, step)


def repeat_run(folder: Path, times: int) -> None:
    """Make a made-up run longer: its updates again and again, under later steps. Quicker than to make as many."""
    store = folder / FOLDER
    found = read_index(store)
    assert found is not None
    names, records = found[0], np.array(found[1])
    last, logs = int(records["step"][-1]), (store / METRICS).read_bytes()
    copies = [records]
    for shift in range(last, last * times, last):
        copy = records.copy()
        copy["step"] += shift
        wider = np.char.str_len(copy["step"].astype("U")) - np.char.str_len(records["step"].astype("U"))
        copy["size"] += wider.astype("u4")
        copy["text_at"] += wider.astype("u4")
        for part in np.unique(records["part"]):
            own = records["part"] == part
            copy["part"][own] = part + shift
            copy["offset"][own] = np.cumsum(copy["size"][own].astype("u8")) - copy["size"][own]
            lines = (store / f"{part:09d}.jsonl").read_bytes()
            (store / f"{part + shift:09d}.jsonl").write_bytes(later(lines, shift))
        copies.append(copy)
        with (store / METRICS).open("ab") as file:
            file.write(later(logs, shift))
    write_index(store, names, np.concatenate(copies))
    repeat_filter(store, len(records), times)


def repeat_filter(store: Path, rows: int, times: int) -> None:
    """The filter of a run that is repeated: the same texts at later places."""
    made = np.fromfile(store / FILTER, STRETCH, offset=HEADER)
    with (store / FILTER).open("ab") as file:
        for _ in range(1, times):
            made["first"] += rows
            made["check"] = checks_of(made)
            file.write(made.tobytes())


def later(lines: bytes, shift: int) -> bytes:
    """Lines of JSON with later steps."""
    return re.sub(rb'("step": )(\d+)', lambda found: found[1] + str(int(found[2]) + shift).encode(), lines)


def size_of(folder: Path) -> str:
    sizes = {path.name: path.stat().st_size / 1e6 for path in (folder / FOLDER).iterdir()}
    own = f"the index {sizes.get(RECORDS, 0):,.0f} MB, the filter of texts {sizes.get(FILTER, 0):,.0f} MB"
    return f"{sum(sizes.values()):,.0f} MB, of which {own}"


# -- in the browser


def served(folder: Path) -> tuple[subprocess.Popen[str], str, float]:
    """`rloom show` as people start it: the process, its address, and the seconds until it was printed."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "rloom", "show", str(folder)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line.split(" at ")[1].split(" ")[0], time.perf_counter() - began


def memory_of(process: subprocess.Popen[str]) -> str:
    """A process's own memory, and all that it holds, files that it maps included."""
    import psutil

    found = psutil.Process(process.pid).memory_info()
    return f"{(found.rss - found.shared) / 1e6:.0f}/{found.rss / 1e6:.0f}"


ROWS = "document.querySelectorAll('#rows .row').length"
ASK = """new Promise((done) => {{
  const form = document.getElementById('filters'), found = document.getElementById('found'), began = performance.now();
  form.reset = () => 0;
  for (const [name, value] of Object.entries({values})) form.elements[name].value = value;
  let first = null, final = null;
  const watch = new MutationObserver(() => {{
    if (first === null) first = performance.now() - began;
    if (final === null && found.dataset.final === 'true') final = performance.now() - began;
    if (found.dataset.searched === '1') {{
      watch.disconnect();
      const end = () => done([first, final, performance.now() - began, Number(found.dataset.count)]);
      requestAnimationFrame(() => requestAnimationFrame(end));
    }}
  }});
  watch.observe(found, {{ attributes: true, attributeFilter: ['data-asked', 'data-final', 'data-searched'] }});
  form.dispatchEvent(new Event('change', {{ bubbles: true }}));
}})"""
FILTERS = {
    "reward ≥ 2, by advantage": {"reward_min": "2", "sort": "-advantage"},
    "score right = 1, 40–60 tokens, by reward": {
        "score:right_min": "1",
        "num_tokens_min": "40",
        "num_tokens_max": "60",
        "sort": "reward",
    },
    "cut off, steps 500–900": {"stop_reason": "length", "step_min": "500", "step_max": "900", "sort": "-step"},
    "all, by length": {"sort": "-num_tokens"},
    "text of 1 in 10,000": {"text": "needle", "sort": "-step"},
    "text of every one": {"text": WORDS[3], "sort": "-step"},
    "text of every one, by reward": {"text": WORDS[4], "sort": "-reward"},
    "text of every one, two letters": {"text": "qu", "sort": "-step"},
    "text of 1 in 5, its parts everywhere": {"text": "tasne loum", "sort": "-step"},
    "text of 1 in 100, its parts everywhere, by reward": {"text": "tasne loum tasne", "sort": "-reward"},
    "text of none, by reward": {"text": "no such text", "sort": "-reward"},
}
FIELDS = (
    "text",
    "stop_reason",
    "reward_min",
    "num_tokens_min",
    "num_tokens_max",
    "score:right_min",
    "step_min",
    "step_max",
)


def opened(folder: Path, browser: object, label: str) -> None:
    """Start the server, open the page, and say how long curves and rows took."""
    import json

    process, url, started = served(folder)
    try:
        began = time.perf_counter()
        browser.open(url)  # type: ignore[attr-defined]
        browser.wait("document.querySelectorAll('.plot[data-drawn]').length >= 3", 120)  # type: ignore[attr-defined]
        curves = time.perf_counter() - began
        began = time.perf_counter()
        browser.press("2")  # type: ignore[attr-defined]
        browser.wait(f"{ROWS} === 50", 120)  # type: ignore[attr-defined]
        rows = time.perf_counter() - began
        print(f"{label}: server {started:.2f} s, curves after {curves:.2f} s, then rows after {rows:.2f} s")
        if label != "indexed":
            browser.wait("!document.getElementById('found').textContent.includes('being read')", 900)  # type: ignore[attr-defined]
            print(f"  all rows were read after {time.perf_counter() - began:.1f} s, in the background")
            return
        said = [f"opened {memory_of(process)}"]
        for name, values in FILTERS.items():
            times = []
            for _ in range(5):
                given = json.dumps(dict.fromkeys(FIELDS, "") | values)
                times.append(browser.run(ASK.format(values=given)))  # type: ignore[attr-defined]
                browser.run(ASK.format(values=json.dumps(dict.fromkeys(FIELDS, "") | {"sort": "-step"})))  # type: ignore[attr-defined]
            # A text that was just searched for is known: only the first search counts.
            counted = times[:1] if "text" in values else times
            first, final, done = (median(t[i] for t in counted) for i in range(3))
            said_of = f"first after {first:.0f} ms, final after {final:.0f} ms, all after {done:.0f} ms"
            print(f"  {name}: {times[0][3]:,} rows; {said_of}")
            said.append(f"{name} {memory_of(process)}")
        print(f"  memory of the server, its own and with what it maps, MB: {'; '.join(said)}")
    finally:
        process.terminate()
        process.wait()


def measure_opening(folder: Path, steps: int, completions: int, times: int) -> None:
    from tests.browser import Browser

    if not (folder / FOLDER).exists():
        began = time.perf_counter()
        make_run(folder, steps, completions)
        repeat_run(folder, times)
        print(f"made in {time.perf_counter() - began:.0f} s")
    print(f"{steps * times:,} updates × {completions} completions, {size_of(folder)}")
    with Browser() as browser:
        opened(folder, browser, "indexed")
        for name in (RECORDS, NAMES, FILTER):
            (folder / FOLDER / name).rename(folder / FOLDER / f"kept-{name}")
        opened(folder, browser, "an older store, without an index")
        for name in (RECORDS, NAMES, FILTER):
            (folder / FOLDER / f"kept-{name}").rename(folder / FOLDER / name)


# -- while training


def measure_writing() -> None:
    """The host's time for one step of the shape `small`."""
    with tempfile.TemporaryDirectory() as folder:
        draw, store = random.Random(0), RunStore(folder)
        store.begin()
        text = " ".join(draw.choices(WORDS, k=200))
        values = np.random.default_rng(0).normal(size=256)
        rows = [
            {
                "group": i // 8, "prompt": text[:1000], "completion": text, "scores": {"right": 1.0, "form": 0.123456},
                "failures": {}, "reward": draw.gauss(0, 1), "advantage": draw.gauss(0, 1), "stop_reason": "eos",
                "num_tokens": 256, "extra": {}, "ids": [draw.randrange(150_000) for _ in range(256)],
            }
            for i in range(128)
        ]  # fmt: skip
        times, busy, logs = [], [], []
        for step in range(1, 200):
            began, cpu = time.perf_counter(), time.process_time()
            for row in rows[:8]:
                names = ("policy", "reference", "kl", "entropy", "sampling")
                row["tokens"] = {"ids": list(range(256)), "texts": ["word "] * 256} | {n: packed(values) for n in names}
            store.write([{**row, "token_ids": packed_ids(row["ids"])} | {"ids": None} for row in rows], step)
            times.append(time.perf_counter() - began)
            busy.append(time.process_time() - cpu)
            began = time.perf_counter()
            store.log({f"rewards/{i}/mean": draw.random() for i in range(40)}, step)
            logs.append(time.perf_counter() - began)
        found = [f"{1e3 * median(several):.2f} ms" for several in (times, busy, logs)]
        # The filter of texts is made at about every second step: a median may lack it.
        means = f"mean {1e3 * mean(sorted(busy)[:-10]):.2f} ms of CPU without the ten longest"
        print(f"128 completions of 256 tokens: {found[0]} ({found[1]} of CPU; {means}); a log of 40 metrics {found[2]}")


def measure_filter() -> None:
    """What the filter leaves over in natural text, the project's own: the share of rows for parts of its texts."""
    root = Path(__file__).parents[1]
    pages = [p.read_text() for where in ("docs/*.md", "bench/*.md", "*.md", "src/**/*.py") for p in root.glob(where)]
    whole = "\n".join(pages)
    texts = [whole[start : start + 1000] for start in range(0, len(whole), 1000)]
    random.Random(0).shuffle(texts)
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(folder)
        store.write([{"group": 0, "completion": text} for text in texts], 1)
        found = read_index(Path(folder) / FOLDER)
        assert found is not None
        names, records = found
        draw = random.Random(1)
        print(f"{len(texts)} rows of 1,000 characters of the project's pages and sources")
        for length in (5, 6, 8, 12, 20, 40):
            left, right, rows = 0, 0, 0
            for _ in range(200):
                start = draw.randrange(len(whole) - length)
                text = whole[start : start + length]
                right += sum(text in one for one in texts)
                for stretch, word in TextFilter(store.folder, names.id, len(records)).candidates(encoded(text)):
                    first, last = int(stretch["first"]), int(stretch["first"] + stretch["rows"])
                    left += len(rows_in(stretch, word, records["text_size"][first:last]))
                    rows += last - first
            print(f"  texts of {length}: left {left / rows:.1%} of rows, {right / len(texts) / 200:.1%} hold it")


def encoded(text: str) -> bytes:
    return Needle(text).encoded


def measure_demo(steps: int) -> None:
    """The share of a demo step that the store takes, by timers around all of its calls."""
    import torch
    from rich.console import Console

    from rloom.demo import show, task

    torch.set_num_threads(1)
    tokenizer = task.make_tokenizer()
    model, rows = task.make_model(tokenizer, 0), task.make_prompts(4096, 0)
    with tempfile.TemporaryDirectory() as folder:
        quiet = Console(file=io.StringIO(), width=100)
        trainer = show.make_trainer(model, tokenizer, rows, seed=0, steps=steps, output=folder, console=quiet)
        spent = {"tokens": 0.0, "rows": 0.0, "logs": 0.0}
        for owner, name, label in (
            (trainer.journal.tokens, "add", "tokens"),
            (trainer.store, "write", "rows"),
            (trainer.store, "log", "logs"),
        ):
            setattr(owner, name, timed(getattr(owner, name), spent, label))
        began = time.perf_counter()
        trainer.train()
        whole = time.perf_counter() - began
    shares = ", ".join(f"{label} {1e3 * s / steps:.2f} ms ({s / whole:.2%})" for label, s in spent.items())
    print(f"demo, {steps} steps of {1e3 * whole / steps:.0f} ms: {shares}; in all {sum(spent.values()) / whole:.2%}")


def timed(function, spent: dict[str, float], label: str):
    def call(*args, **kwargs):
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[label] += time.perf_counter() - began

    return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("open", "demo", "write", "filter"))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--completions", type=int, default=256)
    parser.add_argument("--times", type=int, default=1, help="make the run longer by repeating it")
    parser.add_argument("--folder", help="where the made-up run is, or is made (default: a temporary folder)")
    options = parser.parse_args()
    if options.what == "write":
        measure_writing()
    elif options.what == "filter":
        measure_filter()
    elif options.what == "demo":
        measure_demo(min(options.steps, 100))
    elif options.folder:
        measure_opening(Path(options.folder), options.steps, options.completions, options.times)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure_opening(Path(folder), options.steps, options.completions, options.times)


if __name__ == "__main__":
    main()
