"""`rloom generate --model M --prompt "text" --n 8`: completions for people; with log-probabilities as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO

from rloom.cli.messages import show_messages
from rloom.cli.parser import Parser, as_usage, count
from rloom.cli.prompt_rows import add_prompt_arguments, check_prompt_arguments, prompt_rows
from rloom.errors import DataError
from rloom.printable import get_logger, printable
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
    add("--model", "--model-name-or-path", dest="model", required=True, metavar="MODEL", help="a name or path")
    add_prompt_arguments(parser, "--prompts")
    add("--num-examples", type=count, metavar="N", help="prompts to take, from the start (default: all)")
    add("--n", "--num-generations", type=count, default=1, metavar="N", help="completions per prompt (default 1)")
    add("--json", action="store_true", help="print JSON lines, with token ids and log-probabilities")
    add("--output", metavar="FILE", help="write the JSON lines to a file")
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
    with as_usage():
        check_prompt_arguments(options)
    rows = read_prompts(options)
    writer = _writer(options, chat=not isinstance(rows[0]["prompt"], str))
    show = _as_json if options.json or options.output else _as_text
    start, tokens, missing = time.perf_counter(), 0, list[str]()
    with _opened(options.output) as file:
        for first in range(0, len(rows), PROMPTS_AT_ONCE):
            some = rows[first : first + PROMPTS_AT_ONCE]
            for index, group in writer.write(some, options.n, seed=derive_seed(options.seed, first)):
                # Groups come as they finish: the index says which prompt it was.
                file.write(show(first + index, some[index], group, file))
                tokens += sum(len(c.token_ids) for c in group.completions)
                missing = missing or (_tell_missing(group) if show is _as_json else [])
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
        images=ImageSources(options.fetch_images, options.image_folder or folder_of(options.data)),
        stop_token_ids=options.stop_token_ids,
        extra={"stop_strings": options.stop} if options.stop else {},
        **{name: getattr(options, name) for name in RULES},
    )


def read_prompts(options: Namespace) -> list[dict[str, Any]]:
    """Rows with a "prompt", text or messages; other columns are passed through."""
    rows = []
    for where, row in islice(prompt_rows(options), options.num_examples):
        if not row["prompt"]:
            raise DataError(f"{where}: the prompt is empty; there is nothing to continue from")
        for name in WRITTEN:
            if name in row:
                raise DataError(f'{where} has a column "{name}", which is what the verb writes itself: rename it')
        rows.append(row)
    if not rows:
        raise DataError(f"{options.data} has no prompts")
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


def _as_json(index: int, row: dict[str, Any], group: Group, file: TextIO) -> str:
    """A line of all that is known."""
    line = {"index": index, **row, "completions": [_written(completion) for completion in group.completions]}
    # A terminal obeys some characters.
    return json.dumps(line, ensure_ascii=file.isatty(), default=str) + "\n"


def _as_text(index: int, row: dict[str, Any], group: Group, file: TextIO) -> str:
    """For people: a prompt and what was written to it."""
    from rloom.rewards.completion_text import text_of

    prompt = row["prompt"]
    turns = [prompt] if isinstance(prompt, str) else [f"{turn['role']}: {text_of([turn])}" for turn in prompt]
    blocks = [f"── prompt {index}", *turns]
    for number, completion in enumerate(group.completions, 1):
        size = len(completion.token_ids)
        words = f"{size} token{'s' * (size != 1)}, ended by {completion.stop_reason}"
        blocks += [f"── completion {number} of {len(group.completions)}: {words}", completion.text]
    return printable("\n".join(blocks)) + "\n\n"


def _written(completion: Completion) -> dict[str, Any]:
    found = {"text": completion.text, "token_ids": completion.token_ids, "stop_reason": completion.stop_reason}
    for name in ("logprobs", "drawn_logprobs", "entropies"):
        values = getattr(completion, name)
        if values is not None:
            found[name] = [round(value, 6) for value in values]
    return found
