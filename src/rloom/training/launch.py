"""Refuses launches that rloom does not support.

These are unsupported kinds of parallelism, processes that have not found each other, and processes with different
options or data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from rloom.algo import KL_ESTIMATORS
from rloom.config import RLOOConfig
from rloom.data import datasets
from rloom.data.images import without_images
from rloom.errors import ConfigError
from rloom.printable import get_logger
from rloom.rewards import RewardSet
from rloom.training.identity import without_secrets
from rloom.training.processes import Processes
from rloom.training.sharding_options import asks_to_shard, check_sharding

logger = get_logger(__name__)


def check_launch(joined: int) -> None:
    """Refuse processes that were launched together and have not found each other. `joined` counts those that have."""
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    on_a_cpu = "On a CPU: RLOOConfig(use_cpu=True) and `torchrun --nproc_per_node 2 script.py`"
    if launched > 1 and joined == 1:
        raise ConfigError(
            f"{launched} processes were launched (WORLD_SIZE) and have not found each other, since torch sees no GPU "
            f"for them: each would train alone. {on_a_cpu}; on GPUs, launch one process for each"
        )
    # With --cpu, accelerate's launcher sets the address for several processes, and starts only one.
    by_accelerate = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if joined == 1 and by_accelerate and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            "`accelerate launch` was told to start several processes, and has started one, as it does on a CPU. "
            f"{on_a_cpu}. If one is what you want: --num_processes 1, and no MASTER_ADDR in the environment"
        )


def check_several(args: RLOOConfig) -> None:
    """Refuse FSDP in one process, before a model is loaded."""
    if not asks_to_shard(args) or args.world_size > 1:
        return
    check_launch(args.world_size)
    if not args.fsdp:
        raise ConfigError(
            "the configuration of `accelerate launch` shards over several processes (FSDP), and this is one: add "
            "--num_processes N, or leave --config_file out"
        )
    raise ConfigError(
        "fsdp=True shards over several processes, and this is one: launch with `torchrun --nproc_per_node N script.py` "
        "(of a command: `torchrun --nproc_per_node N -m rloom train …`), or leave fsdp out"
    )


MAY_DIFFER = (
    # What a launcher says to each process, and what its machine has.
    "local_rank", "image_folder", "dataloader_num_workers", "dataloader_prefetch_factor", "reward_workers",
    "max_tokens_per_micro_batch", "vllm_gpu_memory_utilization",
    # Where things are: a server has other names on other machines, and some files are the main process' alone.
    "vllm_server_base_url", "vllm_server_host", "vllm_weights_dir", "eval_judge_cache",
    # Where and how something is shown, often by one process alone.
    "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "hub_token",
    "log_level", "log_level_replica", "log_format", "log_completions", "num_completions_to_print", "log_unique_prompts",
    "disable_tqdm", "advice",
)  # fmt: skip
"""Options that may differ between processes. Any other may decide what happens when: each process decides by itself,
and one that waits for what the others do not do waits for ever."""

MAY_DIFFER_IN_LOADING = ("device_map", "max_memory", "cache_dir")
"""So it is with these of `model_init_kwargs`."""

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Where an object lies in memory, as its text says."""


def check_same_everywhere(processes: Processes, args: RLOOConfig, model: Any, train: Any, evaluation: Any) -> None:
    """Refuse processes that were given different options, data, models or adapters."""
    if processes.alone:
        return
    values = _options(args) | {"model": _weights(model)} | _summary("train_dataset", train)
    for name, data in evaluation.items() if isinstance(evaluation, Mapping) else [(None, evaluation)]:
        if data is not None:
            values |= _summary(f"eval_dataset[{name!r}]" if name else "eval_dataset", data)
    processes.check_same(values)


def check_same_rewards(processes: Processes, rewards: RewardSet) -> None:
    """Refuse processes that were given different rewards: columns of one would be added to another's."""
    if not processes.alone:
        weights = [f"{float(weight):g}" for weight in rewards.weights]
        processes.check_same({"reward_funcs": str(rewards.names), "weights of rewards": str(weights)})


def _options(args: RLOOConfig) -> dict[str, str]:
    """The options that must be equal, as texts. Other fields that a subclass has are its own business."""
    names = [field.name for field in dataclasses.fields(RLOOConfig) if field.name not in MAY_DIFFER]
    given = {name: getattr(args, name) for name in names}
    if isinstance(given["model_init_kwargs"], Mapping):
        loading = given["model_init_kwargs"].items()
        given["model_init_kwargs"] = {name: value for name, value in loading if name not in MAY_DIFFER_IN_LOADING}
    shown = {name: _as_text(value) for name, value in without_secrets(given).items()}
    # Addresses, which the message of a difference would show, password and all.
    values = {name: shown[name] if name in shown else f"not shown, digest {_digest(given[name])}" for name in names}
    return values | {"number of vLLM servers": str(len(args.vllm_servers()))}


def _weights(model: Any) -> str:
    """Names and shapes of what is trained. Tied weights count under both names: where a model is made without data, as
    FSDP2 does in all processes but one, they are not tied yet."""
    weights = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    shapes = sorted((name, tuple(p.shape)) for name, p in weights)
    size = f"{len(weights)} trained weights of {sum(p.numel() for _, p in weights):,} numbers"
    return f"{type(model).__name__} with {size}, digest {_digest(str(shapes))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _as_text(value: Any) -> str:
    """A value as a text that is the same in all processes: without addresses, sets and dictionaries in order.

    >>> _as_text({"b": {8, 1}, "a": [print, None]})
    '{a: [<built-in function print>, None], b: {1, 8}}'
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{name}: {_as_text(item)}' for name, item in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_as_text, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_as_text, value))}]"
    return ADDRESS.sub("", str(value))


def _summary(name: str, data: Any) -> dict[str, str]:
    """A data set's length and some prompts. Of a stream: its first prompt, where it can be read again."""
    if datasets.is_iterable(data):
        return {f"{name} (its first prompt)": _beginning(datasets.first_row(data) or {})}
    some = [_beginning(data[index]) for index in (0, len(data) // 2, len(data) - 1)] if len(data) else []
    return {f"len({name})": str(len(data)), f"{name} (its first, middle and last prompt)": str(some)}


def _beginning(row: dict[str, Any]) -> str:
    return str(without_images(row.get("prompt") or ""))[:80]


WITHOUT_EFFECT = ("ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph")
"""Options of DistributedDataParallel, which is not used here."""


def check_parallelism(trainer: Any) -> None:
    """Refuse kinds of parallelism that are not supported: data parallelism and FSDP2 are."""
    kind = str(trainer.accelerator.distributed_type).rsplit(".", 1)[-1]
    if kind != "DEEPSPEED" and not kind.startswith("MULTI_"):
        raise ConfigError(
            f"{kind} with {trainer.accelerator.num_processes} processes is not supported: shard weights, gradients and "
            "optimizer with fsdp=True or DeepSpeed, or save memory with LoRA (peft_config), 4-bit weights, "
            "offload_reference=True or optim='adamw_8bit'"
        )
    if asks_to_shard(trainer.args):
        check_sharding(trainer)
    parallelism = trainer.args.parallelism_config
    sharded = [name for name in ("tp_size", "dp_shard_size") if getattr(parallelism, name, 1) not in (1, None)]
    if sharded or getattr(trainer.model, "_tp_size", None) not in (1, None):
        raise ConfigError(
            f"{sharded[0] if sharded else 'tp_plan'}: weights that are spread over processes are not supported; leave "
            "it out, so that each process holds the whole model"
        )
    for name in WITHOUT_EFFECT:
        if getattr(trainer.args, name, None) is not None and trainer.is_world_process_zero():
            logger.warning(
                "%s has no effect: gradients are added up once, after an update's last backward",
                name,
            )


def check_devices(trainer: Any) -> None:
    """Refuse devices, launches and DeepSpeed stages that are not supported."""
    if trainer.args.n_gpu > 1:
        raise ConfigError(
            "several GPUs are visible to one process, which Trainer would use through nn.DataParallel: make one "
            "visible with CUDA_VISIBLE_DEVICES=0"
        )
    check_launch(trainer.accelerator.num_processes)
    if trainer.accelerator.num_processes > 1:
        check_parallelism(trainer)
    stage = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", 2)
    # Stage 3 shards weights, which one process cannot do.
    stages = (1, 2) if trainer.accelerator.num_processes == 1 else (1, 2, 3)
    if stage not in stages:
        raise ConfigError(
            f"zero_optimization.stage is {stage}: rloom trains with DeepSpeed's ZeRO-1 and ZeRO-2, and in several "
            "processes with ZeRO-3; set it to 2 (with offload_optimizer, if memory is short), or leave `deepspeed` out"
        )
    if stage == 3 and trainer.args.beta:
        estimator = trainer.args.choices.kl_estimator
        if KL_ESTIMATORS[estimator].needs_distributions:
            raise ConfigError(
                f"kl_estimator={estimator!r} does not go together with ZeRO-3, which lets go of the head after the "
                "forward: set fsdp=True instead, or another kl_estimator"
            )
