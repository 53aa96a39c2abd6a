"""`rloom doctor RUN`: what has gone wrong in a run, from its logs, and what to change."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace

from rloom.cli.parser import Parser
from rloom.errors import DataError
from rloom.printable import printable

SUMMARY = "say what went wrong in a run, and what to change"


def add_arguments(parser: Parser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help="the output folder of a run (of rloom or TRL, ended or running), a trainer_state.json, or a file of JSON "
        "lines with metrics",
    )
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")


def run(options: Namespace) -> int:
    """0, whatever was found; 1 where there is nothing to read."""
    from rloom.observe.doctor import examine, is_update
    from rloom.observe.history import read_history

    try:
        history = read_history(options.run)
    except DataError as error:
        print(f"rloom: {error}", file=sys.stderr)
        return 1
    findings = examine(history.entries, history.options)  # type: ignore[arg-type]
    logs = [entry for entry in history.entries if is_update(entry)]
    if options.json:
        found = {
            "source": str(history.source),
            "logs": len(logs),
            "diagnoses": [dataclasses.asdict(finding) for finding in findings],
        }
        print(json.dumps(found, indent=1))
        return 0
    print(printable(f"{len(logs)} logs in {history.source}"))
    for finding in findings:
        until = "and still so at the end" if finding.lasts else f"last at step {finding.last}"
        print(printable(f"step {finding.first} ({until}), {finding.name}:\n  {finding.line}"))
    if not findings:
        print("No diagnosis: what the rules know of did not happen, or was not logged.")
    return 0
