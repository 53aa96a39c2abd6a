"""Who a model's completions are compared with, and who compares: for win rates, in `rloom eval` and in training."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from rloom.data.images import without_images
from rloom.errors import DataError, did_you_mean
from rloom.evaluation.win_rate import OPENAI, wins, wins_by_score
from rloom.evaluation.writer import Writer
from rloom.types import Prompt

Compare = Callable[[list[Any], list[Any], list[Any]], list[float]]


def as_reply(text: Any, *, conversational: bool) -> Any:
    """A text as a completion: messages for prompts that are messages.

    >>> as_reply("Yes.", conversational=True)
    [{'role': 'assistant', 'content': 'Yes.'}]
    """
    if not conversational or not isinstance(text, str):
        return text
    return [{"role": "assistant", "content": text}]


def texts_of_column(column: str) -> Callable[[Sequence[Prompt]], list[Any]]:
    """The opponent is a column of the data set."""

    def replies(prompts: Sequence[Prompt]) -> list[Any]:
        for prompt in prompts:
            if column not in prompt.columns:
                known = did_you_mean(column, prompt.columns)
                raise DataError(f"the evaluation set has no column {column!r} to compare with{known}")
        return [as_reply(prompt.columns[column], conversational=prompt.conversational) for prompt in prompts]

    return replies


class OtherModel:
    """The opponent is another model. It is asked once for each prompt, and let go when it has answered."""

    def __init__(self, name: str, *, seed: int = 0, **options: Any) -> None:
        self.name, self.seed, self.options = name, seed, options
        self.known: dict[str, str] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> list[Any]:
        """Its completions of these prompts."""
        keys = [str(without_images(prompt.content)) for prompt in prompts]
        if any(prompt.inputs for prompt in prompts):
            raise DataError("another model's completions of prompts with images: put them into a column instead")
        missing = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.known}
        if missing:
            self._ask(missing)
        return [
            as_reply(self.known[key], conversational=prompt.conversational)
            for key, prompt in zip(keys, prompts, strict=True)
        ]

    def _ask(self, missing: dict[str, Prompt]) -> None:
        rows = [{"prompt": prompt.content} for prompt in missing.values()]
        writer = Writer(self.name, chat=not isinstance(rows[0]["prompt"], str), **self.options)
        keys = list(missing)
        for index, group in writer.write(rows, 1, seed=self.seed):
            self.known[keys[index]] = group.completions[0].text
        if any(key not in self.known for key in keys):
            raise DataError(f"{self.name} did not complete all {len(keys)} prompts")


def judge_of(
    *,
    model: str | None = None,
    url: str | None = None,
    reward_model: str | None = None,
    rubric: str | None = None,
    cache: str | None = None,
) -> Compare:
    """A language model behind an address, asked in both orders, or a reward model, whose higher score wins."""
    from rloom.rewards.library.judging.judge import RUBRIC, judge

    if reward_model is not None:
        scorer = judge(reward_model=reward_model)
        return lambda prompts, ours, theirs: wins_by_score(scorer, prompts, ours, theirs)
    base_url = url or os.environ.get("OPENAI_BASE_URL") or OPENAI
    return pairwise(judge(model, base_url=base_url, mode="pairwise", rubric=rubric or RUBRIC, cache=cache))


def pairwise(function: Callable[..., list[float | None]]) -> Compare:
    """A function that compares a group of two: a pairwise `rloom.rewards.judge`, or one of your own.

    >>> longer = lambda prompts, completions, **_: [float(len(completions[0]) > len(completions[1])), None]
    >>> pairwise(longer)(["q"], ["long"], ["no"])
    [1.0]
    """
    from rloom.rewards.calling.call_options import call_options_of

    threads = 8 if call_options_of(function).threads else 1
    return lambda prompts, ours, theirs: wins(function, prompts, ours, theirs, threads)
