"""Decides whether a checkpoint belongs to this run.

`rloom_run.json` in each checkpoint holds what must not change when a run resumes (model, data, rewards, objective), and
the options, whose changes are listed. A checkpoint without that file, of an older version or of TRL, is accepted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from rloom.data import datasets
from rloom.data.images import IMAGE_COLUMNS, without_images
from rloom.errors import ConfigError
from rloom.models.load import base_of
from rloom.printable import get_logger
from rloom.version import __version__

logger = get_logger(__name__)

RUN_FILE = "rloom_run.json"
SOME_ROWS = 100
"""How many rows of a data set are compared, evenly spread. Reading all of a large one takes long."""
ABOUT_THIS_CALL = {
    "output_dir", "resume_from_checkpoint", "resume_changed_run", "overwrite_output_dir", "run_name", "logging_dir",
    "log_format", "disable_tqdm",
}  # fmt: skip
"""Options that describe this call of a script, and not the run."""
SECRET = re.compile(r"(?<!stop_)token$|url$|key$|password", re.IGNORECASE)
"""Names of options that may hold a secret. `stop_token` says where completions end."""


def facts_of(trainer: Any) -> dict[str, Any]:
    """What identifies a run, as plain JSON: `fixed` must not change, `options` and `versions` may."""
    args = trainer.args
    fixed = {
        "model": _model(trainer.model),
        "train_dataset": _data(trainer.train_dataset),
        "rewards": list(trainer.rewards.names),
        "num_generations": args.num_generations,
        "objective": dataclasses.asdict(args.choices),
    }
    options = {name: value for name, value in args.to_dict().items() if name not in ABOUT_THIS_CALL}
    facts = {"fixed": fixed, "options": without_secrets(options), "versions": _versions()}
    return json.loads(json.dumps(facts, default=str))


def _versions() -> dict[str, str]:
    """Versions of what may change a result."""
    return {
        "python": platform.python_version(),
        "rloom": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without tokens and addresses, since checkpoints are shared. Addresses may contain a password.

    >>> without_secrets({"hub_token": "a", "model_init_kwargs": {"token": "b", "revision": "main"}})
    {'model_init_kwargs': {'revision': 'main'}}
    >>> without_secrets({"servers": [{"token": "a"}], "stop_token": "eos"})
    {'servers': [{}], 'stop_token': 'eos'}
    >>> without_secrets({"model_init_kwargs": '{"token": "b", "revision": "main"}'})
    {'model_init_kwargs': '{"revision": "main"}'}
    >>> without_secrets({"model_init_kwargs": {"max_memory": {0: "20GiB"}}})
    {'model_init_kwargs': {'max_memory': {0: '20GiB'}}}
    """
    return {
        name: _cleaned(value)
        for name, value in options.items()
        if not isinstance(value, str) or not SECRET.search(str(name))
    }


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets(value)
    if isinstance(value, str):
        return _cleaned_text(value)
    return [_cleaned(item) for item in value] if isinstance(value, list | tuple) else value


def _cleaned_text(text: str) -> str:
    """A flag's value as it was typed: options within it are written as JSON."""
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else None
    except ValueError:
        return text
    return text if value is None or _cleaned(value) == value else json.dumps(_cleaned(value))


def _model(model: Any) -> dict[str, Any]:
    """The architecture, the shapes of the trained weights, and the name of a model."""
    config = base_of(model).config
    name = _short_name(str(getattr(config, "_name_or_path", "") or ""))
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    count = sum(math.prod(shape) for shape in trained.values())
    weights = f"{count:,} trained weights ({_digest(trained)})"
    return {"type": getattr(config, "model_type", ""), "weights": weights} | ({"name": name} if name else {})


def _short_name(path: str) -> str:
    """The last part of a model's path, since folders move. A snapshot of the hub gets its repository's name. A
    checkpoint gets no name, since its folder says nothing about the model.

    >>> _short_name("Qwen/Qwen3-4B"), _short_name("hub/models--Qwen--Qwen3-4B/snapshots/1a2b")
    ('Qwen3-4B', 'Qwen3-4B')
    >>> _short_name("out/checkpoint-20")
    ''
    """
    parts = path.rstrip("/").split("/")
    if len(parts) > 2 and parts[-2] == "snapshots":
        return parts[-3].split("--")[-1]
    return "" if re.fullmatch(r"checkpoint-\d+", parts[-1]) else parts[-1]


def _data(data: Any) -> dict[str, Any]:
    """A data set's length and a digest of some rows. Of a stream: its first row, where it can be read again."""
    if datasets.is_iterable(data):
        first = datasets.first_row(data)
        return {"first row": _digest(_row(first))} if first is not None else {}
    return {"rows": len(data), "content": _digest([_row(row) for row in some_rows(data)])}


def some_rows(data: Any) -> list[Mapping[str, Any]]:
    """Some rows of a data set that has a length, evenly spread, the first and the last among them."""
    images = [name for name in IMAGE_COLUMNS if name in (getattr(data, "column_names", None) or ())]
    if images and hasattr(data, "remove_columns"):
        # Decoding images takes time.
        data = data.remove_columns(images)
    places = {index * (len(data) - 1) // (SOME_ROWS - 1) for index in range(SOME_ROWS)} if len(data) else ()
    return [data[place] for place in sorted(places)]


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without images, in columns or in messages."""
    kept = {name: value for name, value in row.items() if name not in IMAGE_COLUMNS}
    return kept | {"prompt": without_images(kept["prompt"])}


def _digest(value: Any) -> str:
    """A short hash of plain data. Objects that JSON does not know count by type: their texts may hold addresses."""
    text = json.dumps(value, skipkeys=True, default=lambda other: type(other).__name__)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


# -- comparing


def write(folder: str | Path, facts: dict[str, Any]) -> None:
    """Write the facts into a checkpoint's folder."""
    (Path(folder) / RUN_FILE).write_text(json.dumps(facts, indent=1))


def read(folder: str | Path) -> dict[str, Any] | None:
    """The facts in a checkpoint's folder; None where they are missing or cannot be read."""
    try:
        facts = json.loads((Path(folder) / RUN_FILE).read_text())
        return facts if isinstance(facts["fixed"], dict) and isinstance(facts["options"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_same_run(folder: str | Path, now: dict[str, Any], *, anyway: bool = False) -> str:
    """Refuse a checkpoint of another run. Returns a text that lists changed options; it may be empty."""
    then = read(folder)
    if then is None:
        return ""
    changed = list(differences(then["fixed"], now["fixed"]))
    if changed and not anyway:
        raise ConfigError(
            f"{folder} is of another run: {'; '.join(changed)}. Give this run an output_dir of its own, or go on all "
            "the same with resume_changed_run=True"
        )
    if changed:
        logger.warning("%s is of another run, and is resumed as this one: %s", folder, "; ".join(changed))
    return ", ".join(differences(then["options"], now["options"]))


def differences(then: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """The names that both have with different values, as texts.

    >>> list(differences({"a": 1, "b": {"c": 2}, "d": 3}, {"a": 4, "b": {"c": 5}}))
    ['a was 1 and is 4', "b's c was 2 and is 5"]
    """
    for name in then:
        if name not in now or then[name] == now[name]:
            continue
        full = f"{where}'s {name}" if where else name
        if isinstance(then[name], dict) and isinstance(now[name], dict):
            yield from differences(then[name], now[name], full)
        else:
            yield f"{full} was {then[name]!r} and is {now[name]!r}"
