"""Right programs score 1, in all the styles that models write them in, and plain wrong ones 0.

The programs are in tests/programs: functions with asserts, beginnings that are gone on with, scripts that read standard
input, whole completions. Those that are programs alone are dressed as completions here, each in another way.
"""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import pytest

from rloom.errors import SandboxError
from rloom.rewards import code_execution
from rloom.rewards.sandbox import bubblewrap, fork_server

FOLDER = Path(__file__).parent.parent / "programs"
FILES = ("functions", "continued", "scripts", "completions")

try:
    bubblewrap.check_sandbox()
    MISSING = ""
except SandboxError as error:
    MISSING = str(error)
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def tasks(name: str) -> list[dict]:
    """The tasks of a file: their names, and the sections that each has."""
    found = []
    for part in (FOLDER / f"{name}.txt").read_text(encoding="utf-8").split("\n#### task ")[1:]:
        title, *sections = re.split(r"^## (\w+)\n", part, flags=re.MULTILINE)
        task = {"name": title.strip(), "program": [], "wrong": [], "prompt": [], "tests": []}
        for kind, text in zip(sections[::2], sections[1::2], strict=True):
            task[kind].append(text.rstrip("\n") + "\n")
        found.append(task)
    return found


def row(file: str, task: dict) -> dict:
    """The columns of a task."""
    (tests,) = task["tests"]
    if file == "scripts":
        cases = [case.partition("<<<\n")[::2] for case in tests.split(">>>\n")[1:]]
        return {"tests": [{"input": given, "output": printed} for given, printed in cases]}
    if file == "continued":
        return {"test": tests, "entry_point": task["name"]}
    return {"tests": tests.splitlines()}


def in_list(program: str) -> str:
    lines = f"```python\n{program}```".splitlines()
    return "Steps:\n\n1. Think.\n2. Write:\n\n" + "\n".join(f"   {line}".rstrip() for line in lines) + "\n\n3. Done.\n"


def quoted(program: str) -> str:
    return "I would write:\n\n" + "\n".join(f"> {line}" for line in f"```python\n{program}```".splitlines())


DRESSES = (
    lambda program: program,
    lambda program: f"Here is the solution:\n\n```python\n{program}```\n\nIt runs in `O(n)`.",
    lambda program: f"```\n{program}```",
    in_list,
    lambda program: f"Sure!\n\n```python\n{program}```\n".replace("\n", "\r\n"),
    lambda program: f"```python\n{program}```\n\nTo run it:\n\n```bash\npython main.py < input.txt\n```\n",
    lambda program: f"A first draft:\n```python\npass  # later\n```\nNow in full:\n```python\n{program}```",
    lambda program: f"<think>Let me see. `x`?</think>\n```Python\n{program}",
    lambda program: f"~~~python\n{program}~~~",
    quoted,
    lambda program: program.replace("\n", "\r\n"),
)


def completions(file: str, kind: str) -> tuple[list[str], list[str], dict[str, list], list[str]]:
    """All programs of a kind as completions; with their names, columns and prompts."""
    numbers = count()
    names, texts, rows, prompts = [], [], [], []
    for task in tasks(file):
        for place, program in enumerate(task[kind]):
            dress = DRESSES[0] if file == "completions" else DRESSES[next(numbers) % len(DRESSES)]
            names.append(f"{task['name']} {place}")
            texts.append(dress(program))
            rows.append(row(file, task))
            prompts.append("".join(task["prompt"]))
    columns = {column: [r[column] for r in rows] for column in rows[0]}
    return names, texts, columns, prompts


def scored(file: str, kind: str) -> dict[str, tuple[float, str]]:
    names, texts, columns, prompts = completions(file, kind)
    why = {}
    scores = code_execution()(texts, prompts, log_extra=why.__setitem__, **columns)
    return {name: (score, reason) for name, score, reason in zip(names, scores, why["tests"], strict=True)}


def test_there_are_enough_of_them():
    assert sum(len(task["program"]) for file in FILES for task in tasks(file)) >= 200
    assert all(task["wrong"] for file in FILES for task in tasks(file))


@needs_sandbox
@pytest.mark.parametrize("file", FILES)
def test_right_programs_score(file):
    assert {name: why for name, (score, why) in scored(file, "program").items() if score != 1.0} == {}


@needs_sandbox
@pytest.mark.parametrize("file", FILES)
def test_plain_wrong_programs_do_not_score(file):
    assert [name for name, (score, _) in scored(file, "wrong").items() if score != 0.0] == []


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_right_programs_score_with_bubblewrap_alone(file, monkeypatch):
    monkeypatch.setattr(fork_server, "works", lambda: False)
    assert {name: why for name, (score, why) in scored(file, "program").items() if score != 1.0} == {}
