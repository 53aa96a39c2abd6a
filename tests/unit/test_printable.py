"""No control character from outside reaches a terminal: not from rewards, services, data or names."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from rloom.cli import main as cli
from rloom.cli.check_reward import _table
from rloom.errors import RewardError, needs_extra
from rloom.observe.completions import render
from rloom.printable import get_logger, printable
from rloom.rewards import FunctionReward, RewardBatch, RewardSet
from rloom.rewards.check import Report

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\u202e\r"


def clean(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_control_characters_are_spelt_out():
    assert printable(EVIL) == SHOWN
    assert printable("naïve 漢字 😀\n\tx") == "naïve 漢字 😀\n\tx"


@pytest.mark.parametrize("kind", [RewardError, lambda text: needs_extra(text, "package", "extra")])
def test_errors_are_printable(kind):
    assert SHOWN in str(kind(f"the service said {EVIL}"))
    assert clean(str(kind(EVIL)))


def batch(size: int = 2) -> RewardBatch:
    return RewardBatch(prompts=["p"] * size, completions=["c"] * size, completion_ids=[[1]] * size, columns={})


def test_what_a_reward_raises_and_is_called(caplog):
    def bad(completions, **kwargs):
        raise OSError(EVIL)

    bad.__name__ = f"bad{EVIL}"
    rewards = RewardSet([FunctionReward(bad)], None, on_error="none")
    with caplog.at_level(logging.INFO):
        rewards.score(batch())
    rewards.close()
    assert rewards.names == [f"bad{SHOWN}"]
    assert SHOWN in caplog.text
    assert clean(caplog.text)


def test_columns_that_nobody_scored(caplog):
    def nothing(completions, **kwargs):
        return [None] * len(completions)

    class Odd:
        def __repr__(self):
            return EVIL

    rewards = RewardSet([FunctionReward(nothing)], None)
    odd = RewardBatch(prompts=["p"], completions=["c"], completion_ids=[[1]], columns={"odd": [Odd()]})
    rewards.score(odd)
    rewards.close()
    assert SHOWN in caplog.text
    assert clean(caplog.text)


def test_tracebacks_in_the_log(caplog):
    try:
        raise ValueError(EVIL)
    except ValueError:
        get_logger("rloom.some_module").exception("a request failed: %s", EVIL)
    assert caplog.text.count(SHOWN) == 2
    assert clean(caplog.text)


@pytest.mark.parametrize("error", [RewardError, OSError, ZeroDivisionError])
def test_what_ends_a_command(error, capsys):
    def run():
        raise error(EVIL)

    assert cli._guarded(run) == 1
    said = capsys.readouterr().err
    assert SHOWN in said
    assert clean(said)


def shown(*things) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=200, force_terminal=True, color_system=None)
    for thing in things:
        console.print(thing)
    return stream.getvalue()


def test_reports_on_rewards():
    words = "count low high mean std std_within share_within tied_groups ties none errors seconds_per_sample"
    numbers = dict.fromkeys([*words.split(), "length_correlation"], 0)
    said = shown(_table(Report(name=f"[b]x{EVIL}", degenerate={}, **numbers)))
    assert "\x1b[2J" not in said
    assert "[b]x" in said


def test_tables():
    table = {"step": [1], "prompt": [EVIL], "completion": [[{"role": EVIL, "content": EVIL}]], f"[b]x{EVIL}": ["[/b]"]}
    said = shown(render(table, [0], title="Step 1"))
    assert "\x1b]0" not in said
    assert "\x1b[2J" not in said
    assert "\x9b" not in said
    assert "[b]x" in said


def test_arguments_that_do_not_fit_do_not_reach_the_caller():
    record = logging.LogRecord("rloom", logging.WARNING, __file__, 1, "%d of %d", (1,), None)
    assert get_logger("rloom.test").filter(record)  # whoever shows it says what is wrong with it
    assert record.args == (1,)


def test_data_that_is_not_utf8_is_a_line(capsys):
    assert cli._guarded(lambda: b"\xff".decode()) == 1
    err = capsys.readouterr().err
    assert err.startswith("rloom: the data has text that is not UTF-8")
    assert "Traceback" not in err
