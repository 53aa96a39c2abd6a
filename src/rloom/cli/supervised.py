"""What `rloom sft` and `rloom train-reward` share. Both are TRL's trainers with the flags of `rloom train`.

TRL keeps these two well; a second implementation would be one more to keep. It is an optional package.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.cli.flags import add_fields, given, split
from rloom.cli.messages import show_messages
from rloom.cli.options import (
    DataOptions,
    LoraOptions,
    ModelOptions,
    check_sources,
    init_kwargs,
    load_data,
    lora_config,
    option,
    save_trained,
)
from rloom.cli.options import quantization as quantization_of
from rloom.cli.parser import Parser, as_usage
from rloom.errors import ConfigError, DataError, needs_extra


@dataclass
class HeldOutOptions:
    """What is kept back to measure on."""

    held_out: float = option(0.0, "Share of the training rows to keep back and evaluate on at the end.")


CLASSES = (ModelOptions, LoraOptions, DataOptions, HeldOutOptions)
SHOWN = (
    "model_name_or_path", "dataset_name", "columns", "held_out", "output_dir", "max_length", "learning_rate",
    "per_device_train_batch_size", "num_train_epochs", "max_steps", "use_peft", "load_in_4bit",
)  # fmt: skip


def trl_class(name: str, verb: str) -> Any:
    """A class of TRL, or an error that says how to get it."""
    try:
        import trl
    except ImportError as error:
        raise needs_extra(verb, "trl", "sft") from error
    return getattr(trl, name)


def add_arguments(parser: Parser, config: str, shown: Sequence[str] = ()) -> None:
    """The verb's flags: model, adapter, data, and all of a config of TRL's."""
    footer = f"Every option of TRL's {config} is a flag: --help-all lists them."
    add_fields(parser, [*CLASSES, trl_class(config, parser.prog)], shown=[*SHOWN, *shown], footer=footer)


def run(
    options: Namespace,
    config: str,
    trainer: str,
    columns: Sequence[Sequence[str]],
    prepare: Callable[[Any], None] = lambda trainer: None,
    **lora: Any,
) -> int:
    """Train, measure on what was kept back, save. `prepare` is given the trainer before it trains.

    `config` and `trainer` are TRL's; `columns` are the sets of columns that rows may have, one of which they must.
    """
    values = given(options)
    check_sources(values)
    show_messages()
    config_class, trainer_class = trl_class(config, "rloom sft"), trl_class(trainer, "rloom sft")
    with as_usage():
        made, adapter = _make(values, config_class, trainer_class, columns, lora)
    prepare(made)
    made.train()
    if made.eval_dataset is not None:
        _report(made.evaluate())
    save_trained(made, adapter)
    return 0


def _make(
    values: dict[str, Any], config: Any, trainer: Any, columns: Sequence[Sequence[str]], lora: dict[str, Any]
) -> tuple[Any, LoraOptions]:
    """The trainer, and the options of its adapter."""
    import torch

    from rloom.config.training import bf16_is_fast

    *parts, own = split(values, [*CLASSES, config])
    model, adapter, data, held_out = (cls(**part) for cls, part in zip(CLASSES, parts, strict=True))
    if not model.model_name_or_path:
        raise ConfigError("no model: --model_name_or_path takes a hub id or a folder")
    if not 0 <= held_out.held_out < 1:
        raise ConfigError(f"--held_out is a share from 0 to 1, not {held_out.held_out}")
    if own.get("bf16") is None and not own.get("fp16"):
        own["bf16"] = bf16_is_fast(bool(own.get("use_cpu")))
    if not torch.accelerator.is_available():
        own["use_cpu"] = True
    args = config(**own)
    args.model_init_kwargs = init_kwargs(model, args.model_init_kwargs)
    peft = lora_config(adapter, set(values), **lora)
    quantized = quantization_of(model, set(values), adapter=adapter.use_peft)
    train, evaluation = _data(data, held_out.held_out, args.seed)
    named = [[args.dataset_text_field]] if getattr(args, "dataset_text_field", None) else []
    _check_columns(train, [*columns, *named])
    options = {"train_dataset": train, "eval_dataset": evaluation, "peft_config": peft}
    return trainer(model.model_name_or_path, args=args, quantization_config=quantized, **options), adapter


def _data(data: DataOptions, held_out: float, seed: int) -> tuple[Any, Any]:
    """Training rows, and rows to measure on or None."""
    if not data.dataset_name:
        raise ConfigError("no data: --dataset_name takes a hub id, a folder or a file")
    if data.dataset_streaming:
        raise ConfigError("--dataset_streaming is for rloom train")
    train, evaluation = load_data(data, prompts=False)
    if evaluation is None and held_out:
        parts = train.train_test_split(test_size=held_out, seed=seed)
        return parts["train"], parts["test"]
    return train, evaluation


def _check_columns(rows: Any, columns: Sequence[Sequence[str]]) -> None:
    """TRL would stop at a missing key, after minutes and without saying what it had looked for."""
    if not any(set(wanted) <= set(rows.column_names) for wanted in columns):
        raise DataError(
            f"the rows have {', '.join(map(repr, rows.column_names))}, and need "
            f"{', or '.join(' and '.join(map(repr, wanted)) for wanted in columns)}: name them with --columns new=old"
        )


def _report(metrics: dict[str, float]) -> None:
    wanted = ("eval_accuracy", "eval_margin", "eval_loss", "eval_mean_token_accuracy")
    found = [f"{name.removeprefix('eval_')} {metrics[name]:.4f}" for name in wanted if name in metrics]
    print(f"held out: {', '.join(found)}")
