"""Checks the trainer's constructor arguments before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rloom.config import RLOOConfig
from rloom.config.older_names import note_once
from rloom.data import datasets
from rloom.data.loader import make_schedule
from rloom.data.plan import PlanSampler
from rloom.errors import ConfigError, DataError, UnknownOptionError, did_you_mean
from rloom.observe.doctor import ALL, NAMES
from rloom.printable import get_logger
from rloom.rewards.build import as_list, check_rewards
from rloom.rewards.compose import Term, as_terms
from rloom.rewards.functions import FunctionReward
from rloom.rewards.functions import check_reward_columns as rewards_check

logger = get_logger(__name__)


def default_config(model: Any) -> RLOOConfig:
    """Options for a trainer that was given none: an output folder named after the model."""
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", "")
    return RLOOConfig(f"{(name or 'model').rstrip('/').split('/')[-1]}-RLOO")


RENAMED_ARGUMENTS = {
    "tokenizer": "it is called `processing_class=`",
    "ref_model": "there is none: the reference is a copy of the model as given, or `RLOOConfig(sft_model_path=…)`",
    "config": "it is called `args=`",
    "dataset": "it is called `train_dataset=`",
    "data_collator": "there is nothing to collate: rows go to the rewards as they are",
    "compute_metrics": "use reward functions, with weight 0 for those that shall only be logged",
}


def refuse_arguments(args: Any, unknown: dict[str, Any]) -> None:
    """Refuse arguments that the constructor does not have, and options that are not an RLOOConfig."""
    for name in unknown:
        known = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "callbacks",
                 "reward_processing_classes", "optimizers", "quantization_config", "peft_config", "engine",
                 "eval_judge")  # fmt: skip
        why = RENAMED_ARGUMENTS.get(name)
        hint = f": {why}" if why else did_you_mean(name, known)
        raise UnknownOptionError(f"RLOOTrainer has no argument `{name}`{hint}")
    if args is not None and not isinstance(args, RLOOConfig):
        raise TypeError(f"`args` must be an RLOOConfig, not {type(args).__name__}: RLOOConfig('output', …)")
    if args is not None:
        check_diagnoses(args.early_stop_on or [])


def check_diagnoses(names: Sequence[str]) -> None:
    """Refuse the name of a diagnosis that is never made."""
    for name in names:
        if name not in (*NAMES, ALL):
            hint = did_you_mean(name, NAMES) or f"; there are {', '.join(NAMES)}, or {ALL}"
            raise ConfigError(f"early_stop_on: there is no diagnosis {name!r}{hint} (docs/metrics.md)")


def choose_model(model: Any, args: RLOOConfig) -> tuple[Any, str | None]:
    """The model, and the path of the reference where the reference is not a copy of the model."""
    if model is None:
        if args.sft_model_path is None:
            raise ConfigError("no model: pass `model` (a name, a path or an instance)")
        return args.sft_model_path, None
    if args.sft_model_path is not None and not args.beta:
        raise ConfigError("`sft_model_path` together with a model names the reference, and with beta=0.0 there is none")
    return model, args.sft_model_path


def choose_rewards(
    reward_funcs: Any, reward_model: Any, processing_classes: Any, args: RLOOConfig
) -> tuple[list[Any], list[Term], list[Any]]:
    """The reward functions, their terms (weight, gate, condition), and one processing class or None for each.

    Rewards may be given as `reward_funcs`, as `reward_model` or as the option `reward_model_path`.
    """
    given = {
        "reward_funcs": reward_funcs,
        "reward_model": reward_model,
        "reward_model_path": args.reward_model_path,
    }
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"rewards are given twice, as `{named[0]}` and as `{named[1]}`: give one of them")
    terms = as_terms(as_list(given[named[0]]) if named else [], args.reward_weights)
    functions = [one.function for one in terms]
    if reward_model is not None:
        note_once("reward_model=", "`reward_funcs=`")
    if args.reward_weights is not None and len(args.reward_weights) != len(functions):
        raise ConfigError(
            f"Number of reward weights ({len(args.reward_weights)}) must match number of reward functions "
            f"({len(functions)})"
        )
    return functions, terms, check_rewards(functions, processing_classes)


def check_data(train: Any, evaluation: Any, args: RLOOConfig) -> tuple[Any, Any]:
    """Check both data sets, and return them as the trainer uses them."""
    evaluations = evaluation.values() if isinstance(evaluation, dict) else [evaluation]
    if any(d is not None and datasets.is_iterable(d) for d in (train, *evaluations)):
        if args.accelerator_config.dispatch_batches:
            raise ConfigError(
                "Iterable datasets require `dispatch_batches=False`, but it is set to `True` in `accelerator_config`. "
                "Please set it to `False`."
            )
        args.accelerator_config.dispatch_batches = False
    train = datasets.check_train_dataset(train, args.max_steps)
    evaluation = datasets.check_eval_dataset(evaluation)
    check_evaluation(evaluation, args)
    datasets.check_same_format(train, evaluation)
    if datasets.is_iterable(train):
        if args.dynamic_sampling:
            raise ConfigError("dynamic_sampling draws prompts from the data set, which a stream does not allow")
        if args.dataloader_num_workers:
            logger.warning("an iterable data set is read by one process: dataloader_num_workers is set to 0")
            args.dataloader_num_workers = 0
    else:
        # The sampler refuses a data set that is too small for one rollout.
        PlanSampler(make_schedule(args), len(train), shuffle=False, seed=0)
    return train, evaluation


def check_reward_columns(functions: list[Any], train: Any, evaluation: Any) -> None:
    """Refuse a reward function that wants a column which is not there, before a rollout has been generated for it."""
    rewards = [
        FunctionReward(f) for f in functions if not (isinstance(f, (str, nn.Module)) or hasattr(f, "get_rewards"))
    ]
    evaluations = evaluation if isinstance(evaluation, dict) else {"": evaluation}
    named = {f"eval_dataset[{name!r}]" if name else "eval_dataset": data for name, data in evaluations.items()}
    for name, data in {"train_dataset": train, **named}.items():
        if data is not None and (columns := datasets.known_columns(data)):
            rewards_check(rewards, columns, f"`{name}`")


def check_evaluation(evaluation: Any, args: RLOOConfig) -> None:
    """Refuse options that ask for an evaluation where there is no data for it."""
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
    """Refuse a missing column before a model is loaded. A stream is checked later, when it is evaluated."""
    for data in evaluation.values() if isinstance(evaluation, dict) else [evaluation]:
        if column and data is not None and not datasets.is_iterable(data) and column not in data[0]:
            raise DataError(
                f"the evaluation set has no column {column!r} to compare with{did_you_mean(column, data[0])}"
            )
