"""Checks data sets before any model is loaded.

The package `datasets` is used when installed, never required.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch.utils.data import IterableDataset as TorchIterableDataset

from rloom.data.images import IMAGE_COLUMNS
from rloom.errors import DataError

RESERVED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
"""Arguments of reward functions. A data set must not have columns with these names."""


class RowList(list):
    """A list of rows with `column_names`, so that it can be used as a map-style data set."""

    @property
    def column_names(self) -> list[str]:
        """The columns of all rows, in order of appearance."""
        return list(dict.fromkeys(name for row in self for name in row))


def is_iterable(dataset: Any) -> bool:
    """Whether `dataset` is a stream: no length, no index."""
    return isinstance(dataset, TorchIterableDataset) or not hasattr(dataset, "__getitem__")


def check_train_dataset(dataset: Any, max_steps: int) -> Any:
    """Check the training set, and return it. A plain list of rows is accepted too."""
    if dataset is None:
        raise DataError("`train_dataset` is required: a data set with a column 'prompt'")
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"`train_dataset` must be a `Dataset` or `IterableDataset`, got `{type(dataset).__name__}` with the splits "
            f"{', '.join(map(repr, dataset))}: pass one of them"
        )
    dataset = check_dataset(dataset, "train_dataset")
    if is_iterable(dataset) and max_steps <= 0:
        raise DataError(
            "an iterable `train_dataset` has no length: set `max_steps` (args.max_steps must be set to a positive "
            "value)"
        )
    return dataset


def check_eval_dataset(dataset: Any) -> Any:
    """Check the evaluation set, or a dict of several, and return it. None stays None."""
    if dataset is None:
        return None
    if isinstance(dataset, Mapping):
        for name, part in dataset.items():
            check_dataset(part, f"eval_dataset[{name!r}]")
        return dataset
    return check_dataset(dataset, "eval_dataset")


def check_dataset(dataset: Any, name: str) -> Any:
    """Check one data set: it is of a known kind, not empty, and has a 'prompt' column of one format."""
    if isinstance(dataset, list) and not isinstance(dataset, RowList):
        dataset = RowList(dataset)
    if isinstance(dataset, (str, bytes)) or not (hasattr(dataset, "__getitem__") or isinstance(dataset, Iterable)):
        raise TypeError(
            f"`{name}` must be a `Dataset` or `IterableDataset`, or a list of rows, got `{type(dataset).__name__}`."
        )
    if not is_iterable(dataset) and len(dataset) == 0:
        raise DataError(f"`{name}` is empty: it has no rows to take prompts from")
    _check_columns(dataset, name)
    if isinstance(dataset, RowList):
        _check_formats(dataset, name)
    elif not is_iterable(dataset):
        # The first prompt is checked before a model is loaded, the others when they are encoded.
        prompt_format(dataset[0]["prompt"], f"`{name}`[0]")
    return dataset


def _check_columns(dataset: Any, name: str) -> None:
    columns = getattr(dataset, "column_names", None)
    if columns is None and not is_iterable(dataset):
        columns = list(dataset[0])
    if columns is not None and "prompt" not in columns:
        near = get_close_matches("prompt", list(columns), n=1, cutoff=0.7)
        old, quoted = (near[0], repr(near[0])) if near else ("old", "old")
        raise DataError(
            f"`{name}` has no column 'prompt'; its columns are {', '.join(map(repr, columns))}. Rename one: "
            f"dataset.rename_column({quoted}, 'prompt'), or --columns prompt={old} on the command line"
        )
    taken = sorted(RESERVED & set(columns or ()))
    if taken:
        raise DataError(
            f"`{name}` has columns that reward functions get under the same name from the trainer: "
            f"{', '.join(map(repr, taken))}. Rename or remove them"
        )
    if set(IMAGE_COLUMNS) <= set(columns or ()):
        raise DataError(f"`{name}` has a column 'image' and a column 'images': put all images, in order, into 'images'")


def prompt_format(prompt: Any, where: str) -> str:
    """The format of a prompt, `"text"` or `"messages"`. Anything else is an error."""
    if isinstance(prompt, str):
        return "text"
    if isinstance(prompt, Sequence) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt):
        return "messages"
    raise DataError(
        f"{where}: a prompt is text, or a list of messages with 'role' and 'content'; got {type(prompt).__name__}: "
        f"{str(prompt)[:80]!r}"
    )


def image_column(*given: Any) -> str | None:
    """The name of the image column in these data sets, or dicts of them; None if there is none, or if a stream does not
    know its columns."""
    for one in given:
        for dataset in one.values() if isinstance(one, Mapping) else [one]:
            names = getattr(dataset, "column_names", None) or ()
            for name in IMAGE_COLUMNS:
                if name in names:
                    return name
    return None


def known_columns(dataset: Any) -> set[str]:
    """The columns that rows have, for all that can be known without reading all of them; empty where nothing can.

    >>> sorted(known_columns([{"prompt": "a"}, {"prompt": "b", "answer": "c"}]))
    ['answer', 'prompt']
    """
    if isinstance(dataset, list):
        return {name for row in dataset for name in row}
    names = set(getattr(dataset, "column_names", None) or ())
    # A transform of the data set may add some to what is stored.
    return names | set(dataset[0]) if names and not is_iterable(dataset) else names


def is_chat(dataset: Any) -> bool:
    """Whether the prompts are lists of messages, by the first row."""
    first = first_row(dataset)
    return first is not None and not isinstance(first.get("prompt"), str)


def first_row(dataset: Any) -> Any:
    """The first row of a data set. None if it is empty, or a stream that can be read only once."""
    if not is_iterable(dataset):
        return dataset[0] if len(dataset) else None
    return None if iter(dataset) is dataset else next(iter(dataset), None)


def _check_formats(rows: RowList, name: str) -> None:
    first = None
    for index, row in enumerate(rows):
        if "prompt" not in row:
            raise DataError(f"`{name}`[{index}] has no 'prompt'")
        kind = prompt_format(row["prompt"], f"`{name}`[{index}]")
        first = first or kind
        if kind != first:
            raise DataError(
                f"`{name}` mixes prompt formats: row 0 is {first}, row {index} is {kind}; use one of them throughout"
            )


def check_same_format(train: Any, evaluation: Any) -> None:
    """Refuse training and evaluation prompts of different formats: that is almost surely a mistake."""
    parts = evaluation.values() if isinstance(evaluation, Mapping) else [evaluation]
    for part in parts:
        if part is None or is_iterable(part) or is_iterable(train):
            continue
        kinds = [prompt_format(d[0]["prompt"], "the first prompt") for d in (train, part)]
        if kinds[0] != kinds[1]:
            raise DataError(
                f"mixed prompt formats: the training prompts are {kinds[0]}, the evaluation prompts {kinds[1]}"
            )
