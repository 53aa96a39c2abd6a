"""The flags of a verb as plain data in a file, so that `--help`, a typo and completion wait for no import.

The flags of `rloom train` are the fields of classes that stand on torch, which takes seconds to import. They are
collected once, and again when a version or a file of rloom changes. Without a place to write they are collected anew.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rloom
from rloom.cli.flags import HelpAll, Recipe, debug_option, parallelism, yes_or_no
from rloom.cli.parser import Parser

PACKAGES = ("rloom", "transformers", "torch", "accelerate", "trl")
"""Whose versions decide which flags there are, and what their help says."""

TYPES: dict[str, Any] = {
    "none": None,
    "text": str,
    "whole": int,
    "number": float,
    "yes_or_no": yes_or_no,
    "json": json.loads,
    "parallelism": parallelism,
    "debug_option": debug_option,
}
ACTIONS: dict[str, Any] = {
    "help": argparse._HelpAction,
    "store": argparse._StoreAction,
    "store_false": argparse._StoreFalseAction,
    "help_all": HelpAll,
    "recipe": Recipe,
}
FIELDS = ("option_strings", "dest", "nargs", "const", "default", "required", "choices", "help", "metavar")
"""What makes an action, beside its class and its type."""


def with_flags(parser: Parser, verb: str, collect: Callable[[Parser], None]) -> Parser:
    """The parser with the verb's flags: those in the cache where they are of today, or what `collect` adds."""
    path, key = cache_file(verb), fingerprint()
    if path is not None and fill(parser, path, key):
        return parser
    _say_once()
    collect(parser)
    if path is not None:
        # It works without, only slower: a full disk, a folder of somebody else, a type that is not in the table.
        with contextlib.suppress(OSError, KeyError, TypeError):
            _write(path, {"key": key, **as_table(parser)})
    return parser


def cache_folder() -> Path | None:
    """`RLOOM_CACHE`, or a folder where the system keeps caches; None for a user without a home."""
    own = os.environ.get("RLOOM_CACHE")
    place = own or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "rloom")
    return None if place.startswith("~") else Path(place)


def cache_file(verb: str) -> Path | None:
    """Where a verb's flags are kept. Each installation has its own."""
    folder = cache_folder()
    installed = hashlib.sha256(f"{sys.prefix}\n{rloom.__file__}".encode()).hexdigest()[:12]
    return None if folder is None else folder / "flags" / f"{verb}-{installed}.json"


def fingerprint() -> str:
    """What the flags depend on: versions, and the times and sizes of rloom's files, which change under an editor."""
    parts = [sys.version, *(f"{name} {_version(name)}" for name in PACKAGES)]
    root = os.path.dirname(rloom.__file__)
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                found = os.stat(os.path.join(folder, name))
                parts.append(f"{folder}/{name} {found.st_mtime_ns} {found.st_size}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def as_table(parser: Parser) -> dict[str, Any]:
    """A parser as plain data. KeyError or TypeError where it has what the table has no name for."""
    types = {kind: name for name, kind in TYPES.items()}
    actions = {kind: name for name, kind in ACTIONS.items()}
    rows = [
        {
            "action": actions[type(action)],
            "type": types[action.type],
            **{name: getattr(action, name) for name in FIELDS},
        }
        for action in parser._actions
    ]
    head = {name: getattr(parser, name) for name in ("description", "usage", "shown", "footer")}
    return {**head, "actions": rows}


def from_table(parser: Parser, table: dict[str, Any]) -> None:
    """Give a new parser what `as_table` wrote down."""
    for name in ("description", "usage", "shown", "footer"):
        setattr(parser, name, table[name])
    for row in table["actions"]:
        if row["action"] == "help":
            parser._option_string_actions["--help"].help = row["help"]
            continue
        action = ACTIONS[row["action"]](option_strings=row["option_strings"], dest=row["dest"])
        for name in FIELDS:
            # argparse knows this text by its identity.
            setattr(action, name, argparse.SUPPRESS if row[name] == argparse.SUPPRESS else row[name])
        action.type = TYPES[row["type"]]
        parser._add_action(action)


def fill(parser: Parser, path: Path, key: str) -> bool:
    """Whether the file had the flags of this key; then the parser has them."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        if table["key"] != key:
            return False
        # Into a parser of its own first: half a table shall leave nothing behind.
        from_table(Parser(prog=parser.prog), table)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, argparse.ArgumentError):
        return False
    from_table(parser, table)
    return True


def _write(path: Path, table: dict[str, Any]) -> None:
    """Whole or not at all: another shell may read it at this moment."""
    content = json.dumps(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        try:
            file.write(content)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            # Half a file, on a full disk, would only take up space.
            os.unlink(file.name)
            raise


def _say_once() -> None:
    """To a person who waits; a script has no use for it."""
    if not _said and sys.stderr.isatty():
        _said.append(True)
        print("rloom: the options of these versions are collected once, which takes seconds", file=sys.stderr)


_said: list[bool] = []
