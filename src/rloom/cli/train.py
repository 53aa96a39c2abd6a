"""`rloom train`: from a model, prompts and rewards named on the command line to a saved, trained model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloom.cli.flags import Flags, split
from rloom.cli.messages import show_messages
from rloom.cli.options import DataOptions, LoraOptions, ModelOptions, RewardOptions, init_kwargs, lora_config
from rloom.cli.options import quantization as quantization_of
from rloom.cli.spec import find_reward
from rloom.config import RLOOConfig
from rloom.config.older_names import INIT_ONLY_NAMES
from rloom.data.images import folder_of
from rloom.data.sources import check_splits, load_rows
from rloom.errors import ConfigError, UnknownOptionError

CLASSES = (ModelOptions, LoraOptions, DataOptions, RewardOptions, RLOOConfig)
SHOWN = (
    "model_name_or_path", "dataset_name", "dataset_train_split", "columns", "reward_funcs", "output_dir",
    "num_generations", "max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "beta", "max_steps", "num_train_epochs", "objective", "use_peft", "load_in_4bit", "logging_steps",
    "log_completions", "resume_from_checkpoint", "report_to",
)  # fmt: skip
SAMPLE_TABLES = 10  # over the run, where nothing else was asked for


def flags() -> Flags:
    """All flags of the verb."""
    parser = Flags(
        CLASSES,
        prog="rloom train",
        description="Train a model with RLOO: K completions per prompt, scored, each compared with its siblings.",
        shown=SHOWN,
        footer="Every option of RLOOConfig is a flag: --help-all lists them.",
    )
    for name in INIT_ONLY_NAMES:
        parser.add_argument(
            f"--{name}", type=int, default=argparse.SUPPRESS, help="Older name: completions per update."
        )
    return parser


def main(argv: Sequence[str]) -> int:
    """The verb: 0 when trained and saved; wrong usage leaves with 2."""
    parser = flags()
    values = parser.given(argv)
    show_messages()
    try:
        plan = _plan(values)
    except (ConfigError, UnknownOptionError) as error:
        parser.error(str(error))
    trainer = _trainer(plan)
    trainer.train(resume_from_checkpoint=_resume(plan["config"].resume_from_checkpoint))
    _save(trainer, plan["lora"])
    return 0


def _plan(values: dict[str, Any]) -> dict[str, Any]:
    """The options, each class made of what was given; nothing is loaded yet."""
    parts = split(values, CLASSES)
    model, lora, data, rewards = (cls(**part) for cls, part in zip(CLASSES, parts[:-1], strict=False))
    if not data.dataset_name:
        raise ConfigError("no prompts: --dataset_name takes a hub id, a folder or a file")
    own = parts[-1]
    if not (rewards.reward_funcs or own.get("reward_model_path")):
        raise ConfigError("no reward: --reward_funcs takes names, file.py:function, addresses or models")
    if not (model.model_name_or_path or own.get("sft_model_path")):
        raise ConfigError("no model: --model_name_or_path takes a hub id or a folder")
    if not (own.get("log_completions") or "num_sample_generations" in own):
        own["num_sample_generations"] = SAMPLE_TABLES
    config = RLOOConfig(**own)
    config.image_folder = config.image_folder or folder_of(data.dataset_name)
    config.model_init_kwargs = init_kwargs(model, config.model_init_kwargs)
    given = set(values)
    return {
        "model": model,
        "lora": lora,
        "data": data,
        "config": config,
        "rewards": rewards,
        "peft": lora_config(lora, given),
        "quantization": quantization_of(model, given, adapter=lora.use_peft),
    }


def _trainer(plan: dict[str, Any]) -> Any:
    from rloom.training.trainer import RLOOTrainer

    config, rewards = plan["config"], plan["rewards"]
    train, evaluation = load_data(plan["data"], config)
    return RLOOTrainer(
        plan["model"].model_name_or_path,
        [find_reward(spec) for spec in rewards.reward_funcs] if rewards.reward_funcs else None,
        config,
        train,
        evaluation,
        quantization_config=plan["quantization"],
        peft_config=plan["peft"],
    )


def load_data(data: DataOptions, config: Any) -> tuple[Any, Any]:
    """Training rows, and evaluation rows or None."""
    options: dict[str, Any] = {"config": data.dataset_config, "columns": data.columns}
    assert data.dataset_name is not None
    streaming = data.dataset_streaming
    train = load_rows(data.dataset_name, split=data.dataset_train_split, streaming=streaming, **options)
    if data.eval_data is None and data.dataset_test_split is None:
        return train, None
    where = data.eval_data or data.dataset_name
    if data.eval_data is not None:
        options["config"] = None
    if data.eval_data is None:
        check_splits(where, data.dataset_train_split, str(data.dataset_test_split))
    evaluation = load_rows(where, split=data.dataset_test_split or "train", **options)
    if config.eval_strategy == "no":
        print("rloom: evaluation prompts are given and eval_strategy is no: they are not used", file=sys.stderr)
    return train, evaluation


def _resume(value: str | None) -> str | bool | None:
    """`auto`, a path, or yes: the newest."""
    return True if str(value).lower() in ("true", "yes", "1") else value


def _save(trainer: Any, lora: LoraOptions) -> None:
    trainer.save_model()
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    folder = Path(trainer.args.output_dir)
    print(f"rloom: the trained {'adapter' if lora.use_peft else 'model'} is in {folder}", file=sys.stderr)
    if lora.merge_adapter:
        from rloom.models.adapters import save_merged

        with trainer.folder.writing():
            save_merged(trainer.model, trainer.processing_class, folder / "merged")
        print(f"rloom: the merged model is in {folder / 'merged'}", file=sys.stderr)
