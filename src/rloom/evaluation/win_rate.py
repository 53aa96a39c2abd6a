"""Compares a model's completions with others, by a judge or by scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rloom.gpu_of_threads import on_this_gpu

OPENAI = "https://api.openai.com/v1"

Judge = Callable[..., list[float | None]]


def wins(
    judge: Judge, prompts: Sequence[Any], ours: Sequence[Any], theirs: Sequence[Any], threads: int = 8
) -> list[float]:
    """For each pair: 1 if ours is better, 0 if theirs is, 0.5 for a tie or a verdict that changes with the order, NaN
    if the judge gave no answer. `judge` compares a group of two in both orders: a pairwise `rloom.rewards.judge`."""

    def one(pair: tuple[Any, Any, Any]) -> float:
        prompt, our, their = pair
        score = judge([prompt, prompt], [our, their])[0]
        return math.nan if score is None else score

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(on_this_gpu(one), zip(prompts, ours, theirs, strict=True)))


def wins_by_score(judge: Judge, prompts: Sequence[Any], ours: Sequence[Any], theirs: Sequence[Any]) -> list[float]:
    """As `wins`, with a judge that scores each completion by itself, such as a reward model. The higher score wins."""
    count = len(prompts)
    scores = judge([*prompts, *prompts], [*ours, *theirs])
    return [_compared(a, b) for a, b in zip(scores[:count], scores[count:], strict=True)]


def _compared(our: float | None, their: float | None) -> float:
    if our is None or their is None:
        return math.nan
    return 0.5 if our == their else float(our > their)


def as_percent(value: float) -> str:
    """The line of older documents.

    >>> as_percent(0.512)
    'Model win rate: 51.20%'
    """
    return f"Model win rate: {100 * value:.2f}%"
