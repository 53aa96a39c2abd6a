"""`rloom generate --model M --prompts file.jsonl --n 8`: completions with their log-probabilities, as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TextIO

from rloom.cli.json_lines import read_rows
from rloom.cli.messages import show_messages
from rloom.cli.parser import Parser, count
from rloom.errors import DataError
from rloom.printable import get_logger
from rloom.sampling_rules import ENGINES, RULES
from rloom.seeds import derive_seed

if TYPE_CHECKING:
    from rloom.evaluation.writer import Writer
    from rloom.types import Completion, Group

logger = get_logger(__name__)

PROMPTS_AT_ONCE = 512

WRITTEN = ("index", "completions")
"""Columns of the output that are not the input's."""


SUMMARY = "write completions of prompts, with their log-probabilities"


def add_arguments(parser: Parser) -> None:
    """The verb's flags."""
    add = parser.add_argument
    add("--model", required=True, help="a name or path")
    file_help = 'JSON lines with a "prompt" each: text or messages'
    add("--prompts", "--data", required=True, metavar="FILE", help=file_help)
    add("--n", "--num-generations", type=count, default=1, metavar="N", help="completions per prompt (default 1)")
    add("--output", metavar="FILE", help="where the JSON lines go (default: standard output)")
    add("--max-completion-length", type=count, default=512, help="tokens (default 512)")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default 1)")
    add("--top-p", type=float, default=1.0, help="keep the smallest set of tokens with this probability")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0: all")
    add("--min-p", type=float, help="keep tokens at least this likely, relative to the likeliest")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: discourage tokens seen before")
    add("--stop", action="append", metavar="TEXT", help="end at this text; may be given several times")
    stop_ids_help = "tokens that end a completion, beside the model's own"
    add("--stop-token-ids", type=int, nargs="+", default=[], metavar="ID", help=stop_ids_help)
    add("--seed", type=int, default=0, help="of the sampling (default 0)")
    add("--engine", choices=ENGINES, help="default: the fastest of our own that fits the model")
    add("--dtype", help="of the weights: float32, bfloat16, … (default: as saved; float32 on a CPU)")
    add("--trust-remote-code", action="store_true", help="allow models that bring their own Python code")
    add("--fetch-images", action="store_true", help="fetch images that prompts name by address")
    folder_help = "where images named by paths are (default: the file's own folder, or the working folder)"
    add("--image-folder", metavar="FOLDER", help=folder_help)


def run(options: Namespace) -> int:
    """Write each group as it finishes; a line says how fast it went."""
    show_messages()
    rows = read_prompts(options.prompts)
    writer = _writer(options, chat=not isinstance(rows[0]["prompt"], str))
    start, tokens, missing = time.perf_counter(), 0, list[str]()
    with _opened(options.output) as file:
        for first in range(0, len(rows), PROMPTS_AT_ONCE):
            some = rows[first : first + PROMPTS_AT_ONCE]
            for index, group in writer.write(some, options.n, seed=derive_seed(options.seed, first)):
                completions = [_written(completion) for completion in group.completions]
                # Groups come as they finish: the index says which prompt it was.
                line = {"index": first + index, **some[index], "completions": completions}
                # A terminal obeys some characters.
                file.write(json.dumps(line, ensure_ascii=file.isatty()) + "\n")
                tokens += sum(len(c.token_ids) for c in group.completions)
                missing = missing or _tell_missing(group)
    seconds = time.perf_counter() - start
    print(
        f"{len(rows) * options.n} completions, {tokens} tokens in {seconds:.1f} s ({tokens / seconds:.0f} per second), "
        f"{type(writer.engine).__name__}",
        file=sys.stderr,
    )
    return 0


def _writer(options: Namespace, *, chat: bool) -> Writer:
    from rloom.data.images import ImageSources, folder_of
    from rloom.evaluation.writer import Writer

    return Writer(
        options.model,
        chat=chat,
        engine=options.engine,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        images=ImageSources(options.fetch_images, options.image_folder or folder_of(options.prompts)),
        stop_token_ids=options.stop_token_ids,
        extra={"stop_strings": options.stop} if options.stop else {},
        **{name: getattr(options, name) for name in RULES},
    )


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


def _opened(path: str | None) -> AbstractContextManager[TextIO]:
    return nullcontext(sys.stdout) if path is None else open(path, "w", encoding="utf-8")


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
