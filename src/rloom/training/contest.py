"""Win rates in evaluation: whether what was asked for can be had, and who takes part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rloom.data import datasets
from rloom.data.images import ImageSources
from rloom.errors import ConfigError, DataError, did_you_mean
from rloom.evaluation.measured import Contest
from rloom.evaluation.opponents import OtherModel, judge_of, pairwise, texts_of_column
from rloom.printable import get_logger

logger = get_logger(__name__)


def choose_contest(args: Any, judge: Any) -> Contest | None:
    """Who evaluation compares completions with, and who compares; None where no win rate was asked for."""
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
    return Contest(replies=replies, compare=compare)


def _check_there(args: Any, option: str) -> None:
    """Whether there is such a model is asked now, and not at the first evaluation."""
    name = getattr(args, option)
    if not name or (Path(name) / "adapter_config.json").exists():
        return
    try:
        AutoConfig.from_pretrained(name, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: the model {name!r} cannot be loaded: {error}") from None


def _other_model(args: Any) -> OtherModel:
    """Another model, sampled as ours is."""
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


def check_evaluation(evaluation: Any, args: Any) -> None:
    """Evaluation that was asked for has something to work on."""
    if evaluation is not None:
        _check_reference_column(evaluation, args.eval_reference_column)
        return
    if args.eval_strategy != "no":
        raise ConfigError(
            "eval_strategy asks for evaluation, and there are no prompts for it: give `eval_dataset` (--eval_data, "
            "--dataset_test_split), or leave eval_strategy out"
        )
    if args.eval_reference_column or args.eval_against:
        logger.warning(
            "a win rate is asked for and there is no evaluation set: only evaluate(eval_dataset=…) reports it"
        )


def _check_reference_column(evaluation: Any, column: str | None) -> None:
    """Known before a model is loaded; of a stream, when it has been generated for."""
    for data in evaluation.values() if isinstance(evaluation, dict) else [evaluation]:
        if column and data is not None and not datasets.is_iterable(data) and column not in data[0]:
            raise DataError(
                f"the evaluation set has no column {column!r} to compare with{did_you_mean(column, data[0])}"
            )
