"""The page in a real browser: what it shows, hostile completions, keys, a phone's width, light and dark, no network."""

from __future__ import annotations

import json
import threading
import unicodedata

import numpy as np
import pytest

from rloom.observe import read_store
from rloom.observe.page.export import export
from rloom.observe.page.server import PageServer
from rloom.observe.store import RunStore
from rloom.printable import printable
from tests.browser import CHROMIUM, Browser
from tests.unit.test_page import make_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

IDS = "[...document.querySelectorAll('#rows .row')].map((row) => row.dataset.id)"
TITLE = "document.title"
RANGES = "(all, code) => all.at(-1)?.[1] === code - 1 ? (all.at(-1)[1] = code, all) : [...all, [code, code]]"
FIELDS = ("reward_min", "text", "step_max", "stop_reason", "num_tokens_max", "score:right_min", "advantage_max")


@pytest.fixture(scope="module")
def browser():
    with Browser() as made:
        yield made


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = [tmp_path_factory.mktemp("runs") / name for name in ("one", "two")]
    make_run(found[0], steps=40, part_bytes=10**6)
    make_run(found[1], steps=20, name="else", part_bytes=10**6)
    return found


@pytest.fixture(scope="module")
def server(folders):
    made = PageServer([str(folder) for folder in folders])
    made.begin()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def opened(browser, url: str, view: str) -> None:
    browser.resize(1280, 900)
    browser.prefer("light")
    browser.open("about:blank")
    browser.open(f"{url}#{view}")
    browser.wait(f"document.getElementById('main')?.dataset.ready === '{view}'")


def fill(browser, **values) -> None:
    """Set fields of the filters, as a person would, and wait for the answer."""
    before = browser.run("document.getElementById('found').dataset.asked")
    browser.run(
        f"""(() => {{
          const form = document.getElementById('filters');
          for (const [name, value] of Object.entries({json.dumps(values)})) form.elements[name].value = value;
          form.dispatchEvent(new Event('change', {{ bubbles: true }}));
        }})()"""
    )
    browser.wait(f"document.getElementById('found').dataset.asked !== '{before}'")
    browser.wait("document.getElementById('found').dataset.searched === '1'")


def test_curves_of_both_runs_are_drawn(browser, server):
    opened(browser, server.url, "curves")
    browser.wait("document.querySelectorAll('.plot[data-drawn] canvas').length >= 3")
    shown = browser.run("[...document.querySelectorAll('[data-metric]')].map((card) => card.dataset.metric)")
    assert shown[:2] == ["reward", "eval_reward"]
    legend = browser.run("document.querySelector('[data-metric=reward] .u-legend').innerText")
    assert "one" in legend
    assert "two" in legend
    assert "the reward fell: <b>lower</b>" in browser.run("document.querySelector('.diagnoses').innerText")
    # Something other than the background was painted.
    painted = """(() => { const c = document.querySelector('[data-metric=reward] canvas');
      const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const seen = new Set();
      for (let i = 0; i < d.length; i += 4) if (d[i + 3]) seen.add(d[i] + ' ' + d[i + 1] + ' ' + d[i + 2]);
      return seen.size; })()"""
    assert browser.run(painted) > 10
    assert browser.complaints() == []


def test_no_number_beside_a_curve_is_cut_off(browser, tmp_path):
    """A loss of −2.5e-8 to 2.5e-8 had two marks that read 2.00e-8: there was no room for the sign."""
    store = RunStore(tmp_path / "run")
    store.begin()
    for step in range(1, 9):
        store.log({"loss": 2.5e-8 * (-1) ** step, "reward": -123456.7 * step}, step)
    export([str(tmp_path / "run")], tmp_path / "page.html")
    opened(browser, f"file://{tmp_path}/page.html", "curves")
    browser.wait("document.querySelector('[data-metric=loss] .plot[data-drawn] canvas')")
    browser.run("""(() => { window.texts = []; const p = CanvasRenderingContext2D.prototype, before = p.fillText;
      p.fillText = function (text, x, ...rest) {
        if (this.textAlign === 'right') texts.push([text, x - this.measureText(text).width]);
        return before.call(this, text, x, ...rest); }; })()""")
    browser.prefer("dark")
    browser.wait("texts.length >= 6")
    texts = browser.run("texts")
    assert {"-2e-8", "2e-8"} <= {text for text, _ in texts}
    assert min(left for _, left in texts) >= 0, texts


def test_numbers_beside_a_curve_differ_and_constants_have_a_small_range(browser, tmp_path):
    """An entropy had the marks 3.86, 3.85, 3.85 and 3.85, and a share that is always 0 was drawn from 0 to 100."""
    store = RunStore(tmp_path / "run")
    store.begin()
    for step in range(1, 13):
        still = {"frac_reward_zero_std": 0.0, "kl": 0.02, "grad_norm": 0.0}
        store.log({"entropy": 3.858 - 0.0025 * step, **still}, step)
    export([str(tmp_path / "run")], tmp_path / "page.html")
    opened(browser, f"file://{tmp_path}/page.html", "curves")
    browser.wait("document.querySelectorAll('.plot[data-drawn] canvas').length >= 4")
    browser.run("""(() => { window.marks = {}; const p = CanvasRenderingContext2D.prototype, before = p.fillText;
      p.fillText = function (text, x, y, ...rest) {
        const name = this.canvas.closest('[data-metric]').dataset.metric;
        if (this.textAlign === 'right') ((marks[name] ||= {})[Math.round(y)] = text);
        return before.call(this, text, x, y, ...rest); }; })()""")
    browser.prefer("dark")
    browser.wait("Object.keys(marks).length >= 4")
    marks = {name: list(texts.values()) for name, texts in browser.run("marks").items()}
    assert all(len(set(texts)) == len(texts) >= 3 for texts in marks.values()), marks
    assert {float(text) for text in marks["frac_reward_zero_std"]} >= {0.0, 1.0}
    assert max(map(float, marks["frac_reward_zero_std"])) == 1.0
    assert all(0.017 <= float(text) <= 0.023 for text in marks["kl"]), marks
    assert all(abs(float(text)) <= 0.1 for text in marks["grad_norm"])


def test_a_filter_gives_exactly_the_rows_of_a_plain_one(browser, server, folders):
    opened(browser, server.url, "completions")
    browser.wait("document.querySelectorAll('#rows .row').length === 50")
    rows = read_store(folders[0])
    for given, test in [
        ({"reward_min": "0.9"}, lambda r: r["reward"] is not None and np.float32(r["reward"]) >= 0.9),
        ({"text": "owned", "step_max": "12"}, lambda r: "owned" in r["completion"] and r["step"] <= 12),
        (
            {"stop_reason": "length", "num_tokens_max": "5"},
            lambda r: r["stop_reason"] == "length" and r["num_tokens"] <= 5,
        ),
        ({"score:right_min": "1", "advantage_max": "-1"}, lambda r: r["scores"]["right"] == 1 and r["advantage"] <= -1),
    ]:
        empty = dict.fromkeys(FIELDS, "")
        fill(browser, **(empty | given | {"sort": "-advantage"}))
        expected = sorted((r for r in rows if test(r)), key=lambda r: -r["advantage"])
        assert expected
        assert int(browser.run("document.getElementById('found').dataset.count")) == len(expected)
        seen = browser.run("[...document.querySelectorAll('#rows .cell.step')].map((c) => Number(c.innerText))")
        assert seen == [row["step"] for row in expected[:50]], given
    assert browser.complaints() == []


def test_a_long_search_is_asked_about_until_it_is_done(browser, server, folders, monkeypatch):
    monkeypatch.setattr("rloom.observe.page.live.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("rloom.observe.page.text_search.BLOCK", 1)
    opened(browser, server.url, "completions")
    browser.wait("document.querySelectorAll('#rows .row').length === 50")
    for text in ("0.", "nice"):
        fill(browser, text=text)
        expected = [row for row in read_store(folders[0]) if text in row["completion"]]
        assert int(browser.run("document.getElementById('found').dataset.count")) == len(expected)


def test_hostile_completions_are_text_and_nothing_else(browser, server):
    opened(browser, server.url, "completions")
    browser.wait("document.querySelectorAll('#rows .row').length === 50")
    title = browser.run(TITLE)
    browser.run("document.querySelectorAll('#rows .row')[3].click()")
    browser.wait("document.querySelectorAll('#group .one').length === 4")
    for tag in ("img", "iframe", "svg", "object"):
        assert browser.run(f"document.querySelectorAll('#main {tag}, #rows {tag}').length") == 0
    assert browser.run("document.querySelectorAll('#main script').length") == 0
    text = browser.run("document.getElementById('group').innerText + document.getElementById('rows').innerText")
    assert "</script><script>" in text
    assert 'onerror="' in text
    assert "<b>" in text
    for hidden in ("\x1b", "\u202e", "\u2028", "\x00"):
        assert hidden not in text
    assert "\\u202e" in text
    assert browser.run(TITLE) == title
    assert browser.complaints() == []


def test_what_is_not_printable_is_spelt_out_as_in_a_terminal(browser, server):
    """All characters that Unicode 3.2 had (later ones are known to some versions): tags, soft hyphens, directions."""
    opened(browser, server.url, "curves")
    assigned = [code for code in range(0x110000) if unicodedata.ucd_3_2_0.category(chr(code)) != "Cn"]
    spelt = "(code) => Rloom.visible(String.fromCodePoint(code)) !== String.fromCodePoint(code)"
    found = browser.run(f"[...Array(0x110000).keys()].filter({spelt}).reduce({RANGES}, [])")
    codes = {code for first, last in found for code in range(first, last + 1)}
    assert [code for code in assigned if (code in codes) != (printable(chr(code)) != chr(code))] == []
    text = "ok\U000e0069\u00ad\u180e\u200b\xa0\x1b\r\n\t \U0001f600é"
    assert browser.run(f"Rloom.visible({json.dumps(text)})") == printable(text)


def test_keys_alone_lead_to_the_values_of_a_token(browser, server):
    opened(browser, server.url, "curves")
    browser.press("2")
    browser.wait("document.querySelectorAll('#rows .row').length === 50")
    fill(browser, sort="step")
    browser.run("document.activeElement.blur()")
    browser.press("j")
    browser.press("j")
    browser.press("k")
    rows = "[...document.querySelectorAll('#rows .row')]"
    assert browser.run(f"{rows}.findIndex((row) => row.getAttribute('aria-selected') === 'true')") == 0
    browser.press("Enter")
    browser.wait("document.querySelector('#group .tokens')")
    assert browser.run("[...document.getElementById('color').options].map((o) => o.value)") == ["entropy", "advantage"]
    browser.run("document.querySelector('#group .tokens').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    tip = browser.run("document.getElementById('tip').innerText")
    assert "-1.25" in tip
    assert "0.200000003" in tip, "the float32 that is nearest to 0.2"
    assert browser.run("getComputedStyle(document.querySelector('.token')).backgroundColor") != "rgba(0, 0, 0, 0)"
    browser.press("Escape")
    browser.wait("!document.querySelector('#group .one')")
    first = browser.run(IDS)
    browser.press("n")
    browser.wait(f"JSON.stringify({IDS}) !== {json.dumps(json.dumps(first, separators=(',', ':')))}")
    browser.press("p")
    browser.wait(f"JSON.stringify({IDS}) === {json.dumps(json.dumps(first, separators=(',', ':')))}")
    browser.press("?")
    browser.wait("document.getElementById('keys').open")
    browser.press("Escape")
    browser.wait("!document.getElementById('keys').open")
    assert browser.complaints() == []


def test_one_prompt_through_training(browser, server):
    opened(browser, server.url, "completions")
    browser.wait("document.querySelectorAll('#rows .row').length === 50")
    browser.run("document.querySelectorAll('#rows .row')[0].click()")
    browser.wait("document.getElementById('through')")
    browser.run("document.getElementById('through').click()")
    browser.wait("document.querySelector('#course .u-wrap')")
    assert "40 groups" in browser.run("document.getElementById('course').innerText")
    browser.run("document.querySelector('#course button').click()")
    browser.wait("document.getElementById('found')?.dataset.count === '160'")


@pytest.mark.parametrize("view", ["curves", "completions", "distributions", "time", "config"])
def test_a_phone_needs_no_sideways_scrolling(browser, server, view):
    opened(browser, server.url, view)
    browser.resize(390, 844, mobile=True)
    browser.wait("innerWidth === 390")
    if view == "completions":
        browser.wait("document.querySelectorAll('#rows .row').length === 50")
        browser.run("document.querySelectorAll('#rows .row')[0].click()")
        browser.wait("document.querySelector('#group .one')")
    browser.wait("document.documentElement.scrollWidth <= 390", 5)
    assert browser.complaints() == []


def test_names_of_options_are_whole_on_a_phone(browser, server):
    """They were broken into "rl", "oo", "m": values took all of the width."""
    opened(browser, server.url, "config")
    browser.resize(390, 844, mobile=True)
    browser.wait("innerWidth === 390")
    browser.wait("document.querySelector('.facts')")
    lines = """[...document.querySelectorAll('.facts tbody th')].map((cell) => {
      const range = document.createRange(); range.selectNodeContents(cell);
      return [cell.innerText, range.getClientRects().length]; })"""
    assert ["learning_rate", 1] in browser.run(lines)


def test_light_and_dark(browser, server):
    opened(browser, server.url, "curves")
    back = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(back)
    browser.prefer("dark")
    browser.wait(f"{back} !== '{light}'")
    dark = browser.run(back)
    browser.press("t")
    browser.wait(f"{back} === '{light}'")
    browser.press("t")
    browser.wait(f"{back} === '{dark}'")
    browser.run("localStorage.clear()")


def test_differences_between_runs(browser, server):
    opened(browser, server.url, "config")
    browser.wait("document.querySelector('.facts')")
    text = browser.run("document.getElementById('main').innerText")
    assert "learning_rate" in text
    assert "same" not in text
    browser.run("document.getElementById('differences').click()")
    browser.wait("document.getElementById('main').innerText.includes('same')")


def test_a_run_that_goes_on_is_followed(browser, tmp_path):
    make_run(tmp_path / "live", steps=3)
    server = PageServer([str(tmp_path / "live")])
    server.begin()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    opened(browser, server.url, "completions")
    browser.wait("document.querySelectorAll('#rows .row').length === 36")
    store = RunStore(tmp_path / "live")
    store.resume(3)
    store.write([{"group": 0, "prompt": "p", "completion": "fresh", "reward": 1.0, "advantage": 0.0}], 4)
    store.log({"reward": 0.9, "loss": 0.0}, 4)
    browser.wait("document.querySelectorAll('#rows .row').length === 37")
    assert "fresh" in browser.run("document.querySelector('#rows .row').innerText")
    browser.press("1")
    browser.wait("document.querySelector('[data-metric=reward] .last')?.innerText === '0.9'")
    server.shutdown()
    server.server_close()


def test_nothing_is_asked_of_others(browser, server):
    for view in ("curves", "completions", "distributions", "time", "config"):
        opened(browser, server.url, view)
        asked = [url for url in browser.requests() if not url.startswith(("data:", "about:"))]
        assert asked
        assert all(url.startswith(server.url) for url in asked), asked


def test_an_export_works_without_a_server(browser, folders, tmp_path):
    path = tmp_path / "report.html"
    export([str(folder) for folder in folders], path, sample=60)
    opened(browser, f"file://{path}", "curves")
    browser.wait("document.querySelectorAll('.plot[data-drawn] canvas').length >= 3")
    browser.press("2")
    browser.wait("document.querySelectorAll('#rows .row').length === 50")
    assert "a sample of the run's 480" in browser.run("document.getElementById('found').textContent")
    fill(browser, text="owned", sort="-reward")
    rewards = browser.run("[...document.querySelectorAll('#rows .cell.reward')].map((c) => c.innerText)")
    known = [float(r) for r in rewards if r != "–"]
    assert known == sorted(known, reverse=True)
    assert known
    browser.run("document.querySelectorAll('#rows .row')[0].click()")
    browser.wait("document.querySelectorAll('#group .one').length === 4")
    browser.press("3")
    browser.wait("document.querySelectorAll('.card .u-wrap').length >= 2")
    assert browser.run(TITLE) == "rloom show"
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith(("file:", "data:", "about:"))] == []
