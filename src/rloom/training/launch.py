"""Refuses launches that rloom does not support: kinds of parallelism, and processes that have not found each other."""

from __future__ import annotations

import os
from typing import Any

from rloom.algo import KL_ESTIMATORS
from rloom.config import RLOOConfig
from rloom.errors import ConfigError
from rloom.printable import get_logger
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
