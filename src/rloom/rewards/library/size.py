"""How long a completion is, and how much of it is repeated; in tokens, as they were sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rloom.errors import RewardError, checks_options
from rloom.rewards.calling.call_options import named_reward, set_call_options


@checks_options
def length(*, minimum: int = 0, maximum: int | None = None, margin: int = 1) -> Callable[..., list[float]]:
    """Make a reward: 1.0 for a length (in tokens) from `minimum` to `maximum`, falling to 0.0 over `margin` tokens.

    >>> length(minimum=2, maximum=3, margin=2)(completion_ids=[[1], [1, 2], [1] * 4, [1] * 9])
    [0.5, 1.0, 0.5, 0.0]
    """
    if margin < 1 or minimum < 0 or (maximum is not None and maximum < minimum):
        raise RewardError(f"length: 0 ≤ minimum ({minimum}) ≤ maximum ({maximum}) and margin ({margin}) ≥ 1 must hold")

    def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        outside = [max(minimum - n, n - maximum if maximum is not None else 0, 0) for n in map(len, completion_ids)]
        return [max(0.0, 1.0 - distance / margin) for distance in outside]

    return named_reward(length_reward, "length", streaming=True)


@checks_options
def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float]]:
    """TRL's: 0 up to `max_completion_len − soft_punish_cache` tokens, falling to −1 at the limit and staying there.

    DAPO, Yu et al. 2025, arXiv 2503.14476, equation 13.

    >>> get_soft_overlong_punishment(100, 20)(completion_ids=[[1] * 80, [1] * 90, [1] * 120])
    [0.0, -0.5, -1.0]
    """

    def soft_overlong_punishment_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        free = max_completion_len - soft_punish_cache
        return [
            0.0 if n <= free else -1.0 if n > max_completion_len else (free - n) / soft_punish_cache
            for n in map(len, completion_ids)
        ]

    return set_call_options(soft_overlong_punishment_reward, streaming=True)


@checks_options
def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float]]:
    """TRL's: `max_penalty` times the share of token n-grams that have appeared before; 0 for shorter completions.

    Yeo et al. 2025, arXiv 2502.03373, appendix C.2.

    >>> get_repetition_penalty_reward(ngram_size=2)(completion_ids=[[1, 2, 3, 4], [5, 5, 5, 5, 5]])
    [0.0, -0.75]
    """
    if max_penalty > 0:
        raise ValueError(f"max_penalty {max_penalty} should not be positive")
    if ngram_size < 1:
        raise ValueError(f"ngram_size must be at least 1, not {ngram_size}")

    def repetition_penalty_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [repeated_share(ids, ngram_size) * max_penalty or 0.0 for ids in completion_ids]

    return set_call_options(repetition_penalty_reward, streaming=True)


def repeated_share(ids: list[int], size: int) -> float:
    """The share of n-grams that are not the first of their kind.

    >>> repeated_share([5, 5, 5], 1)
    0.6666666666666667
    """
    total = len(ids) - size + 1
    return 1.0 - len(set(zip(*(ids[i:] for i in range(size)), strict=False))) / total if total > 0 else 0.0
