"""What a verb is given beside the training options: a model, data, rewards. Names and defaults are TRL's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rloom.data.sources import check_source, check_splits, load_rows
from rloom.errors import ConfigError


def option(default: Any, help: str, *aliases: str) -> Any:
    """A field that is a flag, with further names for it."""
    return field(default=default, metadata={"help": help, "aliases": list(aliases)})


@dataclass
class ModelOptions:
    """Which model, in which precision, under which adapter."""

    model_name_or_path: str | None = option(None, "The model: a hub id or a folder.", "--model")
    model_revision: str | None = option(None, "Branch, tag or commit of the model.")
    dtype: str | None = option(None, "Weights: float32, bfloat16, float16 or auto. Unset: float32.")
    attn_implementation: str | None = option(None, "Attention as transformers names it: sdpa, eager, …")
    load_in_4bit: bool = option(False, "Quantize the base weights to 4 bits (bitsandbytes); needs an adapter.")
    load_in_8bit: bool = option(False, "Quantize the base weights to 8 bits (bitsandbytes); needs an adapter.")
    bnb_4bit_quant_type: str = option("nf4", "4-bit format: nf4 or fp4.")
    use_bnb_nested_quant: bool = option(False, "Quantize the quantization constants too.")


@dataclass
class LoraOptions:
    """An adapter to train instead of all weights."""

    use_peft: bool = option(False, "Train a LoRA adapter instead of all weights.", "--lora")
    lora_r: int = option(16, "LoRA: rank.")
    lora_alpha: int = option(32, "LoRA: scale; the adapter counts alpha/r times.")
    lora_dropout: float = option(0.05, "LoRA: dropout.")
    lora_target_modules: list[str] | None = option(None, "LoRA: layers, by name; unset: every linear layer.")
    lora_modules_to_save: list[str] | None = option(None, "LoRA: further layers to train whole.")
    use_rslora: bool = option(False, "LoRA: scale by alpha/√r.")
    use_dora: bool = option(False, "LoRA: with magnitudes (DoRA).")
    merge_adapter: bool = option(False, "Save the merged model too, in OUTPUT/merged.")


@dataclass
class DataOptions:
    """Which prompts."""

    dataset_name: str | None = option(
        None, "Prompts: a hub id, a folder, or a .jsonl, .json, .parquet or .csv file.", "--data"
    )
    dataset_config: str | None = option(None, "Configuration of the data set, where it has several.")
    dataset_train_split: str = option("train", "Split to train on; `train[:100]` takes a part.")
    dataset_test_split: str | None = option(None, "Split to evaluate on: at `eval_strategy`, or once at the end.")
    eval_data: str | None = option(None, "Evaluation prompts from elsewhere, named as `dataset_name` is.")
    dataset_streaming: bool = option(False, "Read the data while training; needs max_steps.")
    columns: list[str] | None = option(None, "Columns under other names: prompt=question answer=solution.")


@dataclass
class RewardOptions:
    """What scores."""

    reward_funcs: list[str] | None = option(
        None, "Rewards: ready-made names, file.py:function, module:function, addresses, or models.", "--reward"
    )
    isolate_rewards: bool = option(
        False, "Call reward functions in worker processes, each sample for `reward_time_limit` seconds at most."
    )


def lora_config(options: LoraOptions, given: set[str], **changes: Any) -> Any:
    """peft's config, None without `--use_peft`; a LoRA option that would then have no effect is refused."""
    if not options.use_peft:
        idle = sorted(given & {f.name for f in fields(LoraOptions)} - {"use_peft"})
        if idle:
            raise ConfigError(f"--{idle[0]} has no effect without --use_peft: add that, or leave it out")
        return None
    from rloom.models.adapters import lora

    targets = options.lora_target_modules
    return lora(
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules="all-linear" if targets in (None, ["all-linear"]) else targets,
        use_rslora=options.use_rslora,
        use_dora=options.use_dora,
        modules_to_save=options.lora_modules_to_save,
        **changes,
    )


def quantization(options: ModelOptions, given: set[str], *, adapter: bool) -> Any:
    """bitsandbytes' config, None where nothing is to be quantized."""
    if not options.load_in_4bit:
        idle = sorted(given & {"bnb_4bit_quant_type", "use_bnb_nested_quant"})
        if idle:
            raise ConfigError(f"--{idle[0]} has no effect without --load_in_4bit: add that, or leave it out")
    if not (options.load_in_4bit or options.load_in_8bit):
        return None
    if not adapter:
        raise ConfigError("quantized weights cannot be trained themselves: add --use_peft to train an adapter on them")
    from rloom.models.adapters import quantization_config

    return quantization_config(
        load_in_4bit=options.load_in_4bit,
        load_in_8bit=options.load_in_8bit,
        quant_type=options.bnb_4bit_quant_type,
        nested=options.use_bnb_nested_quant,
        dtype=options.dtype,
    )


def init_kwargs(options: ModelOptions, own: Any) -> dict[str, Any] | None:
    """Arguments of `from_pretrained`: the flags', and `--model_init_kwargs`."""
    flags = {
        "dtype": options.dtype,
        "revision": options.model_revision,
        "attn_implementation": options.attn_implementation,
    }
    flags = {name: value for name, value in flags.items() if value is not None}
    both = sorted(set(flags) & set(own or {}))
    if both:
        raise ConfigError(f"`{both[0]}` is given twice: as a flag and in model_init_kwargs")
    return {**(own or {}), **flags} or None


def check_sources(values: dict[str, Any]) -> None:
    """Refuse data that is not there, before torch is imported."""
    for name in ("dataset_name", "eval_data"):
        if isinstance(source := values.get(name), str):
            check_source(source)


def load_data(data: DataOptions, *, prompts: bool = True) -> tuple[Any, Any]:
    """Training rows, and evaluation rows or None. `prompts`: each row must have one."""
    assert data.dataset_name is not None
    options: dict[str, Any] = {"columns": data.columns, "prompts": prompts}
    own = {**options, "config": data.dataset_config}
    train = load_rows(data.dataset_name, split=data.dataset_train_split, streaming=data.dataset_streaming, **own)
    if data.eval_data is not None:
        return train, load_rows(data.eval_data, split=data.dataset_test_split or "train", **options)
    if data.dataset_test_split is None:
        return train, None
    check_splits(data.dataset_name, data.dataset_train_split, data.dataset_test_split)
    return train, load_rows(data.dataset_name, split=data.dataset_test_split, **own)


def save_trained(
    trainer: Any, lora: LoraOptions, *, noting: Callable[[], AbstractContextManager[None]] = nullcontext
) -> None:
    """Save the model or the adapter, and the merged model if asked for. `noting` watches what is written beside."""
    trainer.save_model()
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return
    folder = Path(trainer.args.output_dir)
    print(f"rloom: the trained {'adapter' if lora.use_peft else 'model'} is in {folder}", file=sys.stderr)
    if lora.merge_adapter:
        from rloom.models.adapters import save_merged

        with noting():
            save_merged(trainer.model, trainer.processing_class, folder / "merged")
        print(f"rloom: the merged model is in {folder / 'merged'}", file=sys.stderr)
