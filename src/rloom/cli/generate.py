"""`rloom generate --model M --prompts file.jsonl --n 8`: completions with their log-probabilities, as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rloom.cli.json_lines import read_rows
from rloom.cli.messages import show_messages
from rloom.data.images import ImageSources, folder_of
from rloom.errors import DataError
from rloom.evaluation.writer import Writer
from rloom.printable import get_logger
from rloom.seeds import derive_seed
from rloom.types import Completion, Group

logger = get_logger(__name__)

PROMPTS_AT_ONCE = 512

WRITTEN = ("index", "completions")
"""Columns of the output that are not the input's."""


def run(options: Any) -> int:
    """The verb. What is written is written as groups finish; a line says how fast it went."""
    show_messages()
    rows = read_prompts(options.prompts)
    writer = Writer(
        options.model,
        max_completion_length=options.max_completion_length,
        chat=not isinstance(rows[0]["prompt"], str),
        engine=options.engine,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        images=ImageSources(options.fetch_images, options.image_folder or folder_of(options.prompts)),
        stop_token_ids=options.stop_token_ids,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        extra={"stop_strings": options.stop} if options.stop else {},
    )
    start, tokens, missing = time.perf_counter(), 0, list[str]()
    with _opened(options.output) as file:
        for first in range(0, len(rows), PROMPTS_AT_ONCE):
            some = rows[first : first + PROMPTS_AT_ONCE]
            for index, group in writer.write(some, options.n, seed=derive_seed(options.seed, first)):
                line = {"index": first + index, **_line(some[index], group)}  # groups come as they finish
                file.write(json.dumps(line, ensure_ascii=file.isatty()) + "\n")  # a terminal obeys some characters
                tokens += sum(len(c.token_ids) for c in group.completions)
                missing = missing or _tell_missing(group)
    seconds = time.perf_counter() - start
    print(
        f"{len(rows) * options.n} completions, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} per second), "
        f"{type(writer.engine).__name__}",
        file=sys.stderr,
    )
    return 0


def read_prompts(path: str) -> list[dict[str, Any]]:
    """Rows with a "prompt", text or messages, from JSON lines; other columns are passed through."""
    rows = []
    for where, row in read_rows(path):
        if not row["prompt"]:
            raise DataError(f"{where}: the prompt is empty; there is nothing to continue from")
        for name in WRITTEN:
            if name in row:
                raise DataError(f'{where} has a column "{name}", which is what the verb writes itself: rename it')
        rows.append(row)
    if not rows:
        raise DataError(f"{path} has no prompts")
    return rows


@contextmanager
def _opened(path: str | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    with open(path, "w", encoding="utf-8") as file:
        yield file


def _line(row: dict[str, Any], group: Group) -> dict[str, Any]:
    return {**row, "completions": [_written(completion) for completion in group.completions]}


def _tell_missing(group: Group) -> list[str]:
    """Which numbers an engine does not give, such as `model.generate`; said, since the verb promises them."""
    found = [name for name in ("logprobs", "entropies") if any(getattr(c, name) is None for c in group.completions)]
    if found:
        logger.warning(
            "completions without %s: the engine that wrote them does not give them. --engine native and forked do, "
            "where they fit the model",
            " and ".join(found),
        )
    return found


def _written(completion: Completion) -> dict[str, Any]:
    found = {"text": completion.text, "token_ids": completion.token_ids, "stop_reason": completion.stop_reason}
    for name in ("logprobs", "drawn_logprobs", "entropies"):
        values = getattr(completion, name)
        if values is not None:
            found[name] = [round(value, 6) for value in values]
    return found
