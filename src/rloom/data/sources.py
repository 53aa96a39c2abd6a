"""Loads data sets from the hub, a folder or a file.

Columns can be renamed, and a missing `prompt` is made from other columns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloom.errors import DataError, did_you_mean

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}


def load_rows(
    source: str,
    *,
    split: str = "train",
    config: str | None = None,
    streaming: bool = False,
    columns: Sequence[str] | None = None,
    prompts: bool = True,
) -> Any:
    """Load a data set with a column `prompt`. If it has none, it is made from `messages`, or `chosen` and `rejected`.

    With `prompts=False` no prompt is made. `columns` are renames as `new=old`. A `split` may be a part of one:
    `train[:100]`.
    """
    dataset = _load(source, split, config, streaming)
    dataset = renamed(dataset, columns or ())
    return with_prompt(dataset) if prompts else dataset


def _load(source: str, split: str, config: str | None, streaming: bool) -> Any:
    check_source(source)
    path = Path(source)
    if path.suffix.lower() in KINDS:
        return _from_file(path, split, config, streaming)
    if path.is_dir() and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
        return _from_disk(path, split, config, streaming)
    from datasets import load_dataset

    try:
        return load_dataset(str(path) if path.is_dir() else source, config, split=split, streaming=streaming)
    except Exception as error:
        # The library raises errors of many kinds.
        raise DataError(f"the data set {source} (split {split!r}) cannot be loaded: {error}") from error


def check_source(source: str) -> None:
    """Refuse a file or a folder that is not there. This imports nothing, so that a command answers at once."""
    path = Path(source)
    if path.suffix.lower() not in KINDS:
        if not path.is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
            raise DataError(f"there is no data at {source}: no such folder")
        return
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    if os.path.getsize(path) == 0:
        raise DataError(f"{path} is empty")


def check_splits(source: str, train: str, test: str) -> None:
    """Refuse a test split of a single file. A file has no splits, so its rows would be those that are trained on."""
    if Path(source).suffix.lower() in KINDS and "[" not in train + test:
        raise DataError(
            f"{source} is one file without splits, so {test!r} would be what is trained on: give --eval_data, or cut "
            "it: --dataset_train_split 'train[10%:]' --dataset_test_split 'train[:10%]'"
        )


def _from_file(path: Path, split: str, config: str | None, streaming: bool) -> Any:
    """One file is one split of any name. A range like `[:100]` is applied."""
    from datasets import load_dataset

    if config is not None:
        raise DataError(f"dataset_config={config!r}: a file has no configurations")
    cut = split[split.index("[") :] if "[" in split else ""
    options = {"sep": "\t"} if path.suffix.lower() == ".tsv" else {}
    kind = KINDS[path.suffix.lower()]
    if kind != "parquet" and not streaming:
        _check_text(path)
    try:
        return load_dataset(kind, data_files={"train": str(path)}, split="train" + cut, streaming=streaming, **options)
    except Exception as error:
        raise DataError(f"{path} cannot be read as {kind}: {error.__cause__ or error}") from error


def _check_text(path: Path) -> None:
    """Refuse text that is not UTF-8. The library would pass it on unreadable."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    raise DataError(f"{path}, line {number} is not UTF-8: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _from_disk(path: Path, split: str, config: str | None, streaming: bool) -> Any:
    from datasets import DatasetDict, load_from_disk

    if config is not None or "[" in split:
        raise DataError(f"{path} was saved by save_to_disk: it has no configurations, and its splits cannot be cut")
    dataset = load_from_disk(str(path))
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise DataError(f"{path} has no split {split!r}{did_you_mean(split, dataset)}; it has {', '.join(dataset)}")
        dataset = dataset[split]
    return dataset.to_iterable_dataset() if streaming else dataset


def renamed(dataset: Any, columns: Sequence[str]) -> Any:
    """The data set with its columns under other names, given as `new=old`."""
    for new, old in rename_pairs(columns):
        known = _columns(dataset)
        if known and old not in known:
            hint = did_you_mean(old, known)
            raise DataError(f"columns: there is no column {old!r}{hint}; there are {', '.join(known)}")
        if new != old:
            if new in known:
                dataset = dataset.remove_columns(new)
            dataset = dataset.rename_column(old, new)
    return dataset


def rename_pairs(columns: Sequence[str]) -> list[tuple[str, str]]:
    """Renames, given as `new=old`, as pairs of a new and an old name.

    >>> rename_pairs(["prompt=question"])
    [('prompt', 'question')]
    """
    pairs = []
    for pair in columns:
        new, equals, old = pair.partition("=")
        if not equals or not new or not old:
            raise DataError(f"columns: {pair!r} is not of the form new=old")
        pairs.append((new, old))
    return pairs


def with_prompt(dataset: Any) -> Any:
    """The data set with a column `prompt`: its own, a conversation without its last reply, or the common start of two
    answers."""
    known = _columns(dataset)
    if not known or "prompt" in known:
        return dataset
    if "messages" in known or {"chosen", "rejected"} <= set(known):
        return dataset.map(lambda row: {"prompt": prompt_of(row)})
    # The trainer raises an error that names the missing column.
    return dataset


def prompt_of(row: Mapping[str, Any]) -> Any:
    """The prompt that other columns of a row hold; None where they hold none.

    >>> prompt_of({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    [{'role': 'user', 'content': 'a'}]
    """
    if "messages" in row:
        return before_reply(row["messages"])
    if "chosen" in row and "rejected" in row:
        return shared_start(row["chosen"], row["rejected"])
    return None


def before_reply(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation up to its last turn that is not the assistant's.

    >>> before_reply([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    [{'role': 'user', 'content': 'a'}]
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end]


def shared_start(chosen: Any, rejected: Any) -> Any:
    """The common start of two answers: messages, or text up to the end of a word.

    >>> shared_start("Say hi. Hello!", "Say hi. Help.")
    'Say hi. '
    """
    length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    if length is None:
        length = min(len(chosen), len(rejected))
    start = chosen[:length]
    if isinstance(start, str) and length < len(chosen):
        return start[: start.rfind(" ") + 1] if " " in start else start
    return start


def _columns(dataset: Any) -> list[str]:
    return list(getattr(dataset, "column_names", None) or [])
