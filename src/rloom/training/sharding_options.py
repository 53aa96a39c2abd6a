"""What options and launchers say about sharding: who asks for it, and what does not go together with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.fsdp import FSDPModule
from transformers.integrations import deepspeed
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from rloom.algo import KL_ESTIMATORS
from rloom.config import RLOOConfig
from rloom.config.vllm import SERVER
from rloom.data.datasets import image_column
from rloom.errors import ConfigError, in_words
from rloom.models.load import is_peft_model
from rloom.models.reference import trained_beside_adapter
from rloom.printable import get_logger

logger = get_logger(__name__)

LAUNCHED_WITH_FSDP = "ACCELERATE_USE_FSDP"
"""Set to "true" by `accelerate launch` with a configuration for FSDP."""

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "rmsprop", "adagrad")
"""Optimizers that work on sharded weights."""


def asks_to_shard(args: RLOOConfig) -> bool:
    """Whether the options or the launcher ask for FSDP."""
    return bool(args.fsdp) or os.environ.get(LAUNCHED_WITH_FSDP, "").lower() == "true"


def shards(args: RLOOConfig) -> bool:
    """Whether each process of this launch holds a part of the model, by FSDP."""
    return args.world_size > 1 and asks_to_shard(args)


def _asked(args: RLOOConfig, name: str, usual: str) -> str:
    """What the options say, or else the launcher."""
    return str((args.fsdp_config or {}).get(name, os.environ.get(f"FSDP_{name.upper()}", usual))).lower()


def reshards(args: RLOOConfig) -> bool:
    """Whether a layer is let go after its forward, and gathered again for its backward."""
    return _asked(args, "reshard_after_forward", "true") != "false"


def saves_parts(args: RLOOConfig) -> bool:
    """Whether each process writes its part of a checkpoint. What is saved for use alone is whole."""
    parts = _asked(args, "state_dict_type", "full_state_dict") == "sharded_state_dict"
    return parts and not args.save_only_model


def load_as_asked() -> None:
    """Let each process read the weights of models that it loads. `accelerate launch` tells transformers to leave them
    out in all processes but one, since accelerate would send them; models of rewards would then have random weights.
    Under ZeRO-3 transformers would take models apart while it loads them."""
    if "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ:
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    unset_hf_deepspeed_config()


@contextmanager
def others_loaded_whole() -> Iterator[None]:
    """Inside the block models of rewards and a reference are loaded as a whole. By now transformers has been told of
    ZeRO-3 again, and the Trainer goes by that later on."""
    told = deepspeed._hf_deepspeed_config_weak_ref
    load_as_asked()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = told


@contextmanager
def hidden_from_accelerate(args: RLOOConfig) -> Iterator[None]:
    """Keep accelerate from sharding models, inside the block in which its `Accelerator` is made."""
    options, launched = args.fsdp_plugin_args, os.environ.pop(LAUNCHED_WITH_FSDP, None)
    args.fsdp_plugin_args = None
    try:
        yield
    finally:
        args.fsdp_plugin_args = options
        if launched is not None:
            os.environ[LAUNCHED_WITH_FSDP] = launched


def _pushes_each(args: RLOOConfig) -> bool:
    """Whether checkpoints go to the hub, where parts of weights are of no use."""
    return args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end"


def check_layered(trainer: Any) -> None:
    """Refuse what processes do not do equally often, where they generate layer by layer."""
    args, model = trainer.args, trainer.model
    if not trainer.processes.is_layered:
        return
    beside = is_peft_model(model) and args.beta != 0 and trained_beside_adapter(model)
    unsupported = {
        # DeepSpeed cuts an adapter's weights in another way than FSDP2, which cuts a reference.
        "sync_ref_model=True with an adapter, under ZeRO-3,": args.sync_ref_model
        and is_peft_model(model)
        and trainer.processes.external_optimizer,
        "a KL and an adapter beside which other weights are trained": bool(beside),
        "a column of images": image_column(trainer.train_dataset, trainer.eval_dataset) is not None,
        "kl_estimator='full'": args.beta != 0 and KL_ESTIMATORS[args.choices.kl_estimator].needs_distributions,
    }
    for what, asked in unsupported.items():
        if asked:
            raise ConfigError(
                f"{what} does not go together with {_why_layered(args)}, where processes gather layers in step: leave "
                "one of them out"
            )


def _why_layered(args: RLOOConfig) -> str:
    if not args.ds3_gather_for_generation:
        return "ds3_gather_for_generation=False"
    return "weights of which no whole copy fits"


def generates_by_servers(args: RLOOConfig) -> bool:
    """Whether vLLM generates in processes of its own."""
    return args.engine == "vllm" and args.vllm_mode == SERVER


def check_sharding(trainer: Any) -> None:
    """Refuse what does not go together with FSDP."""
    args = trainer.args
    version = _asked(args, "version", "2")
    if version != "2":
        raise ConfigError(f"fsdp_version {version}: rloom shards by FSDP2; set it to 2")
    if "true" in (_asked(args, "cpu_offload", "false"), _asked(args, "offload_params", "false")):
        raise ConfigError("FSDP with weights on the host is not supported: leave cpu_offload out, or train with LoRA")
    if _asked(args, "activation_checkpointing", "false") == "true":
        raise ConfigError("activation_checkpointing of FSDP is not used here: set gradient_checkpointing=True instead")
    kind = _asked(args, "state_dict_type", "full_state_dict")
    if kind not in ("full_state_dict", "sharded_state_dict"):
        raise ConfigError(f"fsdp_state_dict_type {kind.upper()}: use FULL_STATE_DICT or SHARDED_STATE_DICT")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in OPTIMIZERS:
        raise ConfigError(f"optim={optimizer!r} does not work on sharded weights: use {in_words(OPTIMIZERS)}")
    unsupported = {
        "fp16": trainer.accelerator.mixed_precision == "fp16",
        "split_weights=True": bool(args.split_weights),
        "save_on_each_node=True": args.save_on_each_node,
        "push_to_hub=True, unless hub_strategy='end', with SHARDED_STATE_DICT": saves_parts(args)
        and _pushes_each(args),
        "a quantized model": getattr(trainer.model, "is_quantized", False),
        "a model that another trainer has sharded": isinstance(trainer.model, FSDPModule),
        "optimizers=(…)": trainer.optimizer is not None,
        "a column of images": image_column(trainer.train_dataset, trainer.eval_dataset) is not None,
    }
    for what, asked in unsupported.items():
        if asked:
            raise ConfigError(
                f"{what} does not go together with FSDP yet: leave one of them out. Without FSDP each process holds "
                "the whole model"
            )
    for name in ("transformer_layer_cls_to_wrap", "min_num_params"):
        if (args.fsdp_config or {}).get(name):
            logger.warning("fsdp_config[%r] has no effect: each of the model's layers is sharded by itself", name)
