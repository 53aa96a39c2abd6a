"""Whether a completion has the form that was asked for: a regular expression, think tags, a JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from rloom.errors import RewardError, checks_options
from rloom.rewards.calling.call_options import named_reward, reward
from rloom.rewards.completion_text import text_of
from rloom.rewards.library.inputs import column_of, optional_package

JSON_FENCE = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


@checks_options
def format(pattern: str, *, flags: int = re.DOTALL, search: bool = False) -> Callable[..., list[float]]:
    r"""Make a reward that is 1.0 where the whole completion (with `search`: a part of it) matches an expression.

    It runs in worker processes: an expression that never comes to an end on some text costs that sample its score
    alone.

    >>> format(r"<answer>\d+</answer>")(["<answer>12</answer>", "12"])
    [1.0, 0.0]
    """
    try:
        compiled = re.compile(pattern, flags)
    except re.error as error:
        raise RewardError(f"format: {pattern!r} is no regular expression: {error}") from None

    def format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
        match = compiled.search if search else compiled.fullmatch
        return [float(match(text_of(c)) is not None) for c in completions]

    return named_reward(format_reward, "format", streaming=True, isolated=True)


@reward(streaming=True)
def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """TRL's: 1.0 where the completion begins with one `<think>`, which is closed, else 0.0.

    >>> think_format_reward(["<think>\\nso\\n</think>\\n4", "<think>so 4", "<think>a<think>b</think>"])
    [1.0, 0.0, 0.0]
    """
    return [
        float(t.startswith("<think>") and t.count("<think>") == 1 and "</think>" in t)
        for t in map(text_of, completions)
    ]


@checks_options
def json_schema(schema: dict[str, Any] | None = None, *, column: str = "schema") -> Callable[..., list[float | None]]:
    """Make a reward that is 1.0 where the completion is JSON that fits a schema, else 0.0.

    The JSON is the last fenced block of the completion, or all of it. Without `schema`, each row brings its own in a
    column.

    >>> json_schema({"type": "object", "required": ["name"]})(['{"name": "Ada"}', "[]", "no"])
    [1.0, 0.0, 0.0]
    """
    jsonschema = optional_package("jsonschema", what="json_schema", package="jsonschema", extra="json")
    if schema is not None:
        _checked_schema(schema)

    def json_schema_reward(completions: list[Any], **columns: Any) -> list[float | None]:
        needed = f"json_schema needs a schema, or a column '{column}' with one for each row"
        schemas = [schema] * len(completions) if schema is not None else column_of(columns, column, needed=needed)
        return [_fits(text_of(c), s, jsonschema) for c, s in zip(completions, schemas, strict=True)]

    return named_reward(json_schema_reward, "json_schema", streaming=True, isolated=True)


def _checked_schema(schema: Any) -> Any:
    import jsonschema

    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        raise RewardError(f"json_schema: this is no JSON schema: {error.message}") from None
    return schema


def _fits(text: str, schema: Any, jsonschema: Any) -> float | None:
    if schema is None:
        return None
    schema = _checked_schema(json.loads(schema) if isinstance(schema, str) else schema)
    blocks = JSON_FENCE.findall(text)
    try:
        jsonschema.validate(json.loads(blocks[-1] if blocks else text, parse_constant=_no_constant), schema)
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return 0.0
    return 1.0


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
