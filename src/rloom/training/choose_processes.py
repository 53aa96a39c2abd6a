"""Chooses how the model of a launch is distributed: whole in each process, in parts by FSDP2, or by DeepSpeed."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.distributed import distributed_c10d

from rloom.config import RLOOConfig
from rloom.printable import get_logger
from rloom.training.exchange import heartbeat, host_group
from rloom.training.processes import Processes
from rloom.training.sharded import ShardedProcesses
from rloom.training.sharding_options import asks_to_shard, reshards, saves_parts
from rloom.training.zero import ZeroProcesses, check_version, complete_config, settle_stage
from rloom.training.zero_checkpoint import writes_itself
from rloom.training.zero_engine import DeepSpeedProcess

logger = get_logger(__name__)


def processes_of(args: RLOOConfig, accelerator: Accelerator) -> Processes:
    """The processes of this launch."""
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    own_files = zero and _settle(accelerator.state.deepspeed_plugin, args)
    if args.world_size == 1:
        return DeepSpeedProcess(device=args.device, own_files=own_files) if zero else Processes()
    heartbeat()
    if args.device.type == "cpu":
        # On GPUs transformers does it. Else processes would wait half an hour for one that is gone.
        distributed_c10d._set_pg_timeout(timedelta(seconds=args.ddp_timeout))
    place = args.process_index, args.world_size
    options = {
        "group": host_group(args.ddp_timeout),
        "device": args.device,
        "bucket_megabytes": args.ddp_bucket_cap_mb,
    }
    if not zero and not asks_to_shard(args):
        return Processes(*place, **options)
    options |= {
        "half": torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
        "keep_copy": args.keep_whole_copy,
        "layered": not args.ds3_gather_for_generation,
        "offload_frozen": args.offload_reference,
    }
    if zero:
        stage = accelerator.state.deepspeed_plugin.zero_stage
        return ZeroProcesses(*place, stage=stage, own_files=own_files, **options)
    return ShardedProcesses(*place, reshard=reshards(args), saves_parts=saves_parts(args), **options)


def _settle(plugin: Any, args: RLOOConfig) -> bool:
    """Settle DeepSpeed's configuration. Returns whether DeepSpeed writes the optimizer's state itself."""
    check_version()
    # DeepSpeed calls them in each update, and torch would say so each time.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    main = args.process_index == 0
    if settle_stage(plugin) and main:
        logger.warning(
            "DeepSpeed runs as ZeRO-2 instead of ZeRO-1, which is wrong with grad_accum_dtype: the result is the same, "
            "in less memory. To run ZeRO-1, leave grad_accum_dtype out"
        )
    complete_config(plugin.deepspeed_config, args)
    own_files = writes_itself(plugin.deepspeed_config)
    if own_files and main:
        logger.warning(
            "with offload_optimizer to NVMe, or in part, DeepSpeed writes the optimizer's state itself, a part for "
            "each process: as many have to go on from a checkpoint"
        )
    return own_files
