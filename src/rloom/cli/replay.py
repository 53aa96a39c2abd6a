"""`rloom replay RUN --step N [--sample I]`: an update of a run of `rloom train`, from its nearest checkpoint."""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloom.cli.messages import show_messages
from rloom.cli.parser import Parser, as_usage, count
from rloom.errors import DataError
from rloom.printable import printable

if TYPE_CHECKING:
    from rloom.training.replay import Replay, ReplayedSample

SUMMARY = "an update of a run again, and a sample's gradient"

COMMAND_FILE = "_rloom_command.json"
"""What `rloom train` was given, in the run's folder. The underscore keeps transformers from uploading it."""

FEW = 8
"""Samples that differ, of which the numbers are shown in one line."""

ABOUT_THAT_CALL = ("output_dir", "resume_from_checkpoint", "overwrite_output_dir", "report_to", "config")


def add_arguments(parser: Parser) -> None:
    """All flags of the verb."""
    parser.description = (
        "Re-create an update of a run of `rloom train`, in the folder from which that was started: from the nearest "
        "earlier checkpoint, on the stored completions and scores. The run's folder is only read."
    )
    parser.add_argument("run", metavar="RUN", help="The output folder of the run.")
    parser.add_argument("--step", type=count, required=True, help="The update, counted from 1.")
    parser.add_argument(
        "--sample",
        type=int,
        nargs="+",
        help="Show these completions of it, by their place among the stored ones; unset: those that differ.",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FOLDER",
        help="Where to begin; of a run that was begun from another folder's checkpoint: that one.",
    )
    parser.add_argument("--no-new-scores", action="store_true", help="Do not call the rewards anew.")
    parser.add_argument(
        "--given",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="An option of the run that was not noted, since it may hold a password; once for each of several values.",
    )
    parser.add_argument("--json", action="store_true", help="Print what was found as JSON.")


def run(options: Namespace) -> int:
    """0 when all comes out as it was stored, 1 when something does not."""
    show_messages()
    values = read_command(options.run, options.given)
    from rloom.cli.train import make_plan, make_trainer
    from rloom.observe.runs import RunReader
    from rloom.training.replay import check_asked, replay

    with tempfile.TemporaryDirectory() as scratch:
        with as_usage():
            plan = make_plan({**_not_public(values), "output_dir": scratch})
        # A model takes long to load.
        check_asked(RunReader(options.run), options.step, options.sample)
        found = replay(
            make_trainer(plan),
            options.step,
            options.sample,
            run=options.run,
            call_rewards=not options.no_new_scores,
            checkpoint=options.checkpoint,
        )
    if options.json:
        print(json.dumps({**dataclasses.asdict(found), "same": _is_same(found)}))
    else:
        _show(found, chosen=options.sample is not None)
    return 0 if _is_same(found) else 1


def _not_public(values: dict[str, Any]) -> dict[str, Any]:
    """What a run was made from, without what tells others of it: a trainer that pushes makes a repository at once."""
    kept = {name: value for name, value in values.items() if not name.startswith("hub_")}
    return {**kept, "report_to": "none", "push_to_hub": False}


def write_command(folder: str | Path, values: dict[str, Any]) -> None:
    """Note what a run was made from. Secrets are left out. Options whose value may hold one are left out by name, and
    whether they are lists."""
    from rloom.rewards.calling.addresses import may_hold_secret
    from rloom.training.identity import without_secrets

    kept = {name: value for name, value in without_secrets(values).items() if name not in ABOUT_THAT_CALL}
    left_out = {name: isinstance(value, list | tuple) for name, value in kept.items() if may_hold_secret(value)}
    note = {"train": {name: value for name, value in kept.items() if name not in left_out}, "left_out": left_out}
    (Path(folder) / COMMAND_FILE).write_text(json.dumps(note, indent=1, default=str))


def read_command(folder: str | Path, given: Sequence[str] = ()) -> dict[str, Any]:
    """What a run was made from. `given`: NAME=VALUE for each option that the note leaves out."""
    try:
        note = json.loads((Path(folder) / COMMAND_FILE).read_text())
        values, left_out = dict(note["train"]), dict(note.get("left_out", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _no_command(Path(folder)) from error
    again: dict[str, list[str]] = {}
    for name, _, value in (text.partition("=") for text in given):
        again.setdefault(name, []).append(value)
    if other := [name for name in again if name not in left_out]:
        raise DataError(f"--given {other[0]}: the run's own value is known; left out are {sorted(left_out) or 'none'}")
    if missing := [name for name in left_out if name not in again]:
        raise DataError(
            f"{COMMAND_FILE} leaves out {missing[0]}, since its value may hold a password or a key: give it again as "
            f"--given {missing[0]}=VALUE, once for each of several"
        )
    return {**values, **{name: texts if left_out[name] else texts[-1] for name, texts in again.items()}}


def _no_command(folder: Path) -> DataError:
    """The error for a folder without what `rloom train` was given."""
    from rloom.observe.runs import RunReader

    if re.fullmatch(r"checkpoint-\d+", folder.name) and (folder.parent / COMMAND_FILE).exists():
        return DataError(f"{folder} is a checkpoint: name the folder of its run, {folder.parent}")
    try:
        RunReader(folder)
    except DataError as error:
        return error
    return DataError(
        f"{folder} has no {COMMAND_FILE} that can be read, which `rloom train` writes: for a run of a script, call "
        "rloom.replay(trainer, step) with its trainer"
    )


def _is_same(found: Replay) -> bool:
    return not found.differences and not any(one.differences for one in found.samples)


def _show(found: Replay, *, chosen: bool) -> None:
    """What is to be known of the whole, and then the samples that were asked for; else some of those that differ."""
    begin = f"checkpoint-{found.resumed_from}" if found.resumed_from else "the run's start"
    print(f"update {found.step}, from {begin}: gradient norm {found.gradient_norm:.6g} before clipping")
    count, differ = len(found.samples), [one.sample for one in found.samples if one.differences]
    as_stored = "1 sample comes out as it was stored" if count == 1 else f"{count} samples come out as they were stored"
    many = ", …" if len(differ) > FEW else ""
    others = f"of {count} looked at, {len(differ)} DIFFER: {', '.join(map(str, differ[:FEW]))}{many}"
    print(f"  weights before it {found.weights}; {others if differ else as_stored}")
    for line in found.differences:
        print(f"  DIFFERS: {printable(line)}")
    for one in found.samples if chosen else [one for one in found.samples if one.differences][:FEW]:
        _show_sample(one)


def _show_sample(one: ReplayedSample) -> None:
    print(f"sample {one.sample}")
    print(f"  prompt      {printable(json.dumps(one.stored.get('prompt')))}")
    print(f"  completion  {printable(json.dumps(one.stored.get('completion')))}")
    print(f"  scores      {one.stored.get('scores')}; called anew: {printable(str(one.new_scores))}")
    print(f"  reward {one.replayed.get('reward')}, advantage {one.replayed.get('advantage')}")
    for name in one.differences:
        print(f"  DIFFERS: {name} was {one.stored.get(name)!r}, and is {one.replayed.get(name)!r}")
    if not one.in_update:
        print("  gradient    none here: a later update trains on it")
    elif one.largest:
        print(f"  gradient    norm {one.gradient_norm:.6g}; largest: ", end="")
        print(", ".join(f"{name} {norm:.3g}" for name, norm in one.largest))
