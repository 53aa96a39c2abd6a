"""`rloom diff RUN_A RUN_B`: the first update at which two runs part, and what differs there."""

from __future__ import annotations

import dataclasses
import json
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from rloom.cli.parser import Parser
from rloom.printable import printable

if TYPE_CHECKING:
    from rloom.observe.compare import Comparison, Difference

SUMMARY = "where two runs part, and what differs there"

LONGEST = 160
"""Characters of a value that are shown."""


def add_arguments(parser: Parser) -> None:
    """All flags of the verb."""
    parser.description = "Compare the stored completions, scores and logs of two runs, update by update."
    parser.add_argument("one", metavar="RUN_A", help="The output folder of a run.")
    parser.add_argument("other", metavar="RUN_B", help="The output folder of another.")
    parser.add_argument("--json", action="store_true", help="Print what was found as JSON.")


def run(options: Namespace) -> int:
    """0 when the runs are the same as far as both go, 1 when they part."""
    from rloom.observe.compare import compare_runs

    found = compare_runs(options.one, options.other)
    if options.json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _show(found, options)
    return 0 if found.step is None else 1


def _show(found: Comparison, options: Namespace) -> None:
    if found.step is None:
        print(f"the same: {found.compared} update{'s' * (found.compared != 1)} with completions, to the last digit")
        if found.ends[0] != found.ends[1]:
            print(f"  RUN_A goes to update {found.ends[0]}, RUN_B to {found.ends[1]}")
    else:
        assert found.first is not None
        print(f"they part at update {found.step}, in {_called(found.first.what)}; {_before(found.compared - 1)}")
        _show_values(found.first, options)
        if found.others:
            print(f"  also different at that update: {', '.join(map(_called, found.others))}")
    for difference in found.options:
        print(f"{difference.where}")
        _show_values(difference, options, named=False)


def _called(what: str) -> str:
    return "the log" if what == "log" else what


def _before(same: int) -> str:
    """
    >>> _before(0), _before(1), _before(2)
    ('it is their first', 'the update before it is the same', 'the 2 updates before it are the same')
    """
    if same < 2:
        return "the update before it is the same" if same else "it is their first"
    return f"the {same} updates before it are the same"


def _show_values(difference: Difference, options: Namespace, *, named: bool = True) -> None:
    if named:
        print(f"  {difference.where}")
    for folder, value in zip((options.one, options.other), difference.values, strict=True):
        print(f"    {printable(folder)}: {_shortened(value)}")


def _shortened(value: Any) -> str:
    text = printable(json.dumps(value, default=str))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
