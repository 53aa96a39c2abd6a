"""Chooses the opponent and the judge of a win rate.

The opponent is a column of the data set or another model. `rloom eval` and evaluation in training use both.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rloom.config import RLOOConfig
from rloom.data.images import ImageSources, without_images
from rloom.data.prompts import as_reply
from rloom.errors import ConfigError, DataError, did_you_mean
from rloom.evaluation.measured import WinRate
from rloom.evaluation.win_rate import OPENAI, wins, wins_by_score
from rloom.evaluation.writer import Writer
from rloom.types import Prompt

Compare = Callable[[list[Any], list[Any], list[Any]], list[float]]


def texts_of_column(column: str) -> Callable[[Sequence[Prompt]], list[Any]]:
    """An opponent whose replies are a column of the data set."""

    def replies(prompts: Sequence[Prompt]) -> list[Any]:
        for prompt in prompts:
            if column not in prompt.columns:
                known = did_you_mean(column, prompt.columns)
                raise DataError(f"the evaluation set has no column {column!r} to compare with{known}")
        return [as_reply(prompt.columns[column], conversational=prompt.conversational) for prompt in prompts]

    return replies


class OtherModel:
    """An opponent that is another model. It completes each prompt once, and is unloaded afterwards."""

    def __init__(self, name: str, *, seed: int = 0, **options: Any) -> None:
        self.name, self.seed, self.options = name, seed, options
        self.known: dict[str, str] = {}

    def __call__(self, prompts: Sequence[Prompt]) -> list[Any]:
        """The model's completions of these prompts."""
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
        """Generate the missing completions, and remember them."""
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
    """A judge: a language model behind an address, asked in both orders, or a reward model, whose higher score wins."""
    from rloom.rewards.library.judging.judge import RUBRIC, judge

    if reward_model is not None:
        scorer = judge(reward_model=reward_model)
        return lambda prompts, ours, theirs: wins_by_score(scorer, prompts, ours, theirs)
    base_url = url or os.environ.get("OPENAI_BASE_URL") or OPENAI
    return pairwise(judge(model, base_url=base_url, mode="pairwise", rubric=rubric or RUBRIC, cache=cache))


def pairwise(function: Callable[..., list[float | None]]) -> Compare:
    """A judge from a function that compares a group of two: a pairwise `rloom.rewards.judge`, or one of your own.

    >>> longer = lambda prompts, completions, **_: [float(len(completions[0]) > len(completions[1])), None]
    >>> pairwise(longer)(["q"], ["long"], ["no"])
    [1.0]
    """
    from rloom.rewards.calling.call_options import call_options_of

    threads = 8 if call_options_of(function).threads else 1
    return lambda prompts, ours, theirs: wins(function, prompts, ours, theirs, threads)


def choose_win_rate(args: RLOOConfig, judge: Any) -> WinRate | None:
    """The opponent and the judge that the options name; None if no win rate was asked for."""
    judges = [judge, args.eval_judge_model, args.eval_judge_reward_model]
    opponents = [args.eval_reference_column, args.eval_against]
    if judge is not None and (args.eval_judge_model or args.eval_judge_reward_model):
        raise ConfigError("the judge is given twice, as `eval_judge` and by name in the options: give one of them")
    if any(judges) != any(opponents):
        raise ConfigError(
            "a win rate in evaluation needs an opponent (eval_reference_column, eval_against) and a judge "
            "(eval_judge_model, eval_judge_reward_model, or the trainer's argument `eval_judge`)"
        )
    if not any(opponents):
        return None
    for option in ("eval_against", "eval_judge_reward_model"):
        _check_there(args, option)
    replies = texts_of_column(args.eval_reference_column) if args.eval_reference_column else _other_model(args)
    compare = (
        pairwise(judge)
        if judge is not None
        else judge_of(
            model=args.eval_judge_model,
            url=args.eval_judge_url,
            reward_model=args.eval_judge_reward_model,
            rubric=args.eval_judge_rubric,
            cache=args.eval_judge_cache,
        )
    )
    return WinRate(replies=replies, compare=compare)


def _check_there(args: RLOOConfig, option: str) -> None:
    """Refuse a model that cannot be loaded now, and not at the first evaluation."""
    name = getattr(args, option)
    if not name or (Path(name) / "adapter_config.json").exists():
        return
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: the model {name!r} cannot be loaded: {error}") from None


def _other_model(args: RLOOConfig) -> OtherModel:
    """Another model with the sampling options of ours."""
    assert args.eval_against is not None
    return OtherModel(
        args.eval_against,
        seed=args.seed,
        max_completion_length=args.max_completion_length,
        trust_remote_code=args.trust_remote_code,
        images=ImageSources(args.fetch_images, args.image_folder),
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
