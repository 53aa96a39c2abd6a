"""The prompts of `rloom generate` and `rloom check-reward`: typed, from JSON lines, or from a data set."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloom.cli.json_lines import read_rows
from rloom.cli.parser import Parser
from rloom.data.sources import KINDS, load_rows, prompt_of, rename_pairs
from rloom.errors import ConfigError, DataError, did_you_mean


def add_prompt_arguments(parser: Parser, *names: str) -> None:
    """The flags that name prompts; `names` are further ones for the data."""
    add = parser.add_argument
    data_help = "prompts: a file (.jsonl, .json, .parquet, .csv), a hub id or a folder; with prompt or messages"
    add("--data", *names, "--dataset-name", dest="data", metavar="DATA", help=data_help)
    add("--prompt", action="append", metavar="TEXT", help="a prompt, typed here; may be given several times")
    add("--chat", action="store_true", help="prompts that are texts are a user's messages, for the chat template")
    add("--columns", nargs="+", metavar="NEW=OLD", help="columns under other names: prompt=question answer=solution")
    add("--split", "--dataset-train-split", default="train", help="of the data set, `train[:100]` too (default train)")
    add("--dataset-config", metavar="NAME", help="configuration of the data set, where it has several")


def check_prompt_arguments(options: Namespace) -> None:
    """Refuse flags that do not go together."""
    if not options.data and not options.prompt:
        raise ConfigError('no prompts: --data takes a file, a hub id or a folder, --prompt "text" is one')
    if options.data and options.prompt:
        raise ConfigError("prompts are given twice, by --data and by --prompt: give one of them")
    if options.prompt and options.columns:
        raise ConfigError("--columns renames columns of --data, and --prompt has none")


def prompt_rows(options: Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row, which has a "prompt", and where it stands ("prompts.jsonl, line 3")."""
    for where, row in _rows(options):
        if "prompt" not in row:
            hint = did_you_mean("prompt", row) or "; its columns are " + ", ".join(map(repr, row))
            raise DataError(f'{where} has no "prompt"{hint}. Name one: --columns prompt=OLD')
        if options.chat and isinstance(row["prompt"], str):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        yield where, row


def _rows(options: Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    if options.prompt:
        for number, text in enumerate(options.prompt, 1):
            yield f"--prompt {number}", {"prompt": text}
    elif _is_json_lines(options.data) and "[" not in options.split:
        for where, row in read_rows(options.data):
            yield where, _as_loaded(row, where, options.columns or [])
    else:
        columns, config = options.columns, options.dataset_config
        rows = load_rows(options.data, split=options.split, config=config, columns=columns)
        for number, row in enumerate(rows):
            yield f"{options.data}, row {number}", dict(row)


def _is_json_lines(data: str) -> bool:
    """Whether it is read line by line: mistakes have line numbers, rows may differ in columns, and a pipe will do."""
    kind = Path(data).suffix.lower()
    return kind == ".jsonl" or (kind not in KINDS and Path(data).exists() and not Path(data).is_dir())


def _as_loaded(row: dict[str, Any], where: str, columns: list[str]) -> dict[str, Any]:
    """A row as `load_rows` would give it: renamed, and with a prompt made of a conversation."""
    for new, old in rename_pairs(columns):
        if old not in row:
            raise DataError(f"{where}: there is no column {old!r}{did_you_mean(old, row)}")
        row[new] = row.pop(old)
    if "prompt" in row:
        return row
    try:
        made = prompt_of(row)
    except (TypeError, KeyError, IndexError):
        raise DataError(f"{where}: no prompt can be made of its messages: a list with role and content each") from None
    return row if made is None else {"prompt": made, **row}
