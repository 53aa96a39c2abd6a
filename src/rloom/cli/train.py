"""`rloom train`: from a model, prompts and rewards named on the command line to a saved, trained model."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloom.cli.messages import show_messages
from rloom.cli.options import (
    DataOptions,
    LoraOptions,
    ModelOptions,
    RewardOptions,
    check_sources,
    init_kwargs,
    load_data,
    lora_config,
    save_trained,
)
from rloom.cli.options import quantization as quantization_of
from rloom.cli.parser import Parser, UsageError, as_usage
from rloom.cli.spec import find_rewards
from rloom.errors import ConfigError

if TYPE_CHECKING:
    from rloom.config import RLOOConfig
    from rloom.training.trainer import RLOOTrainer

SUMMARY = "train a model with RLOO, on your prompts and rewards"
FLAGS_TAKE_SECONDS = True

CLASSES = (ModelOptions, LoraOptions, DataOptions, RewardOptions)
"""What is given beside `RLOOConfig`."""

SHOWN = (
    "model_name_or_path", "dataset_name", "dataset_train_split", "columns", "reward_funcs",
    "isolate_rewards", "reward_time_limit", "output_dir",
    "num_generations", "max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "beta", "max_steps", "num_train_epochs", "objective", "use_peft", "load_in_4bit", "logging_steps",
    "log_completions", "log_format", "resume_from_checkpoint", "report_to",
)  # fmt: skip
SAMPLE_TABLES = 10
"""Tables of completions over the run, where nothing else was asked for."""

EVALUATED_LAST = (
    "evaluation prompts are given and eval_strategy is not: they are evaluated once, after the last update "
    "(--eval_strategy steps: more often; no: never)"
)
NOT_EVALUATED = "evaluation prompts are given and eval_strategy is no: they are not used"


@dataclass(slots=True, kw_only=True)
class Plan:
    """What shall be trained, from flags that fit together; nothing is loaded yet."""

    model: ModelOptions
    lora: LoraOptions
    data: DataOptions
    rewards: RewardOptions
    config: RLOOConfig
    peft: Any
    quantization: Any
    time_limit_given: bool  # by a flag or a recipe
    evaluate_last: bool  # evaluation prompts, where there are some: no strategy says when


def add_arguments(parser: Parser) -> None:
    """All flags of the verb."""
    from rloom.cli.flags import add_fields
    from rloom.config import RLOOConfig
    from rloom.config.older_names import INIT_ONLY_NAMES

    parser.description = "Train a model with RLOO: K completions per prompt, scored, each compared with its siblings."
    footer = "Every option of RLOOConfig is a flag: --help-all lists them."
    add_fields(parser, [*CLASSES, RLOOConfig], shown=SHOWN, footer=footer)
    for name in INIT_ONLY_NAMES:
        parser.add_argument(
            f"--{name}", type=int, default=argparse.SUPPRESS, help="Older name: completions per update."
        )


def run(options: argparse.Namespace) -> int:
    """0 when trained and saved."""
    from rloom.cli.flags import given

    show_messages()
    with as_usage():
        values = given(options)
        check_sources(values)
        # It is changed while plans are made of it.
        plan = make_plan(dict(values))
    begin = _resume(plan.config.resume_from_checkpoint)
    if isinstance(begin, str) and begin != "auto":
        from rloom.training.checkpoint import check_named

        # A model takes long to load.
        check_named(begin, plan.config.output_dir)
    # Imports torch: complaints about flags come before that.
    from rloom.cli.command_note import CommandNote

    trainer = make_trainer(plan)
    trainer.add_callback(CommandNote(trainer, values))
    trainer.report.next_command = next_command(plan)
    trainer.train(resume_from_checkpoint=begin)
    save_trained(trainer, plan.lora, noting=trainer.folder.writing)
    return 0


def next_command(plan: Plan) -> str:
    """The command that measures what was trained, beside what it was trained from."""
    data, config = plan.data, plan.config
    split = data.dataset_test_split or ("train" if data.eval_data else data.dataset_train_split)
    flags: dict[str, list[Any]] = {
        "model": [config.output_dir],
        "data": [data.eval_data or data.dataset_name],
        "dataset_config": [data.dataset_config] if data.dataset_config and not data.eval_data else [],
        "split": [split],
        "columns": data.columns or [],
        "reward": plan.rewards.reward_funcs or [config.reward_model_path],
        "max_completion_length": [config.max_completion_length],
        "reference_model": [plan.model.model_name_or_path or config.sft_model_path],
    }
    words = [word for flag, values in flags.items() if values for word in (f"--{flag}", *map(str, values))]
    return shlex.join(["rloom", "eval", *words])


def make_plan(values: dict[str, Any]) -> Plan:
    """Each class made of what was given."""
    from rloom.cli.flags import split

    # Told before torch is imported, which takes seconds.
    _check_given(values)
    from rloom.config import RLOOConfig
    from rloom.data.images import folder_of
    from rloom.training.arguments import check_diagnoses

    *parts, own = split(values, [*CLASSES, RLOOConfig])
    model, lora, data, rewards = (cls(**part) for cls, part in zip(CLASSES, parts, strict=True))
    assert data.dataset_name is not None
    if not (own.get("log_completions") or "num_sample_generations" in own):
        own["num_sample_generations"] = SAMPLE_TABLES
    config = RLOOConfig(**own)
    check_diagnoses(config.early_stop_on or [])
    config.image_folder = config.image_folder or folder_of(data.dataset_name)
    config.model_init_kwargs = init_kwargs(model, config.model_init_kwargs)
    return Plan(
        model=model,
        lora=lora,
        data=data,
        rewards=rewards,
        config=config,
        peft=lora_config(lora, set(values)),
        quantization=quantization_of(model, set(values), adapter=lora.use_peft),
        time_limit_given="reward_time_limit" in own,
        evaluate_last="eval_strategy" not in own,
    )


def _check_given(values: dict[str, Any]) -> None:
    """Refuse a command without a model, prompts or a reward."""
    if not values.get("dataset_name"):
        raise ConfigError("no prompts: --data takes a hub id, a folder or a file")
    if not (values.get("reward_funcs") or values.get("reward_model_path")):
        raise ConfigError("no reward: --reward takes names, file.py:function, addresses or models")
    if not (values.get("model_name_or_path") or values.get("sft_model_path")):
        raise ConfigError("no model: --model takes a hub id or a folder")


def make_trainer(plan: Plan) -> RLOOTrainer:
    """The trainer of a plan; models and data are loaded."""
    from rloom.cli.last_evaluation import LastEvaluation
    from rloom.training.trainer import RLOOTrainer

    train, evaluation = load_data(plan.data)
    callbacks = [LastEvaluation()] if evaluation is not None and plan.evaluate_last else []
    if evaluation is not None and plan.config.eval_strategy == "no" and plan.config.process_index == 0:
        print(f"rloom: {EVALUATED_LAST if callbacks else NOT_EVALUATED}", file=sys.stderr)
    return RLOOTrainer(
        plan.model.model_name_or_path,
        rewards_of(plan) or None,
        plan.config,
        train,
        evaluation,
        callbacks=callbacks,
        quantization_config=plan.quantization,
        peft_config=plan.peft,
    )


def rewards_of(plan: Plan) -> list[Any]:
    """The rewards; a time limit that none of them would keep is refused."""
    from rloom.rewards.calling.call_options import call_options_of

    found = find_rewards(plan.rewards.reward_funcs or (), isolate=plan.rewards.isolate_rewards)
    if plan.time_limit_given and not any(call_options_of(one).isolated for one in found):
        raise UsageError(
            "--reward_time_limit has no effect on rewards that are not isolated: add --isolate_rewards, or leave it out"
        )
    return found


def _resume(value: str | None) -> str | bool | None:
    """`auto`, a path, or yes: the newest."""
    return True if str(value).lower() in ("true", "yes", "1") else value
