"""TRL's options for vLLM: which of them mean something together, and what they come to as `engine`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from rloom.errors import ConfigError, check_choice

OF_ONE_MODE = {
    "colocate": (
        "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length",
        "vllm_tensor_parallel_size", "compile_generation",
    ),
    "server": (
        "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_weights_dir",
    ),
}  # fmt: skip
"""Options that mean something in one mode of vLLM alone."""


def resolve_vllm(config: Any, given: Collection[str]) -> None:
    """TRL's `use_vllm` and our `engine` say the same, or contradict each other."""
    if config.use_vllm and config.engine not in (None, "vllm"):
        raise ConfigError(f"use_vllm=True and engine={config.engine!r} contradict each other: leave one of them out")
    if "use_vllm" in given and not config.use_vllm and config.engine == "vllm":
        raise ConfigError("use_vllm=False and engine='vllm' contradict each other: leave one of them out")
    if config.use_vllm:
        config.engine = "vllm"
    changed = [f.name for f in fields(config) if f.name.startswith("vllm_") and getattr(config, f.name) != f.default]
    if config.engine == "vllm":
        config.use_vllm = True
        _check_vllm(config, [*changed, *(["compile_generation"] if config.compile_generation is not None else [])])
    elif changed:
        raise ConfigError(f"`{changed[0]}` has no effect without use_vllm=True: leave it out, or set that too")


def _check_vllm(config: Any, changed: list[str]) -> None:
    check_choice("vllm_mode", config.vllm_mode, OF_ONE_MODE)
    check_choice("vllm_model_impl", config.vllm_model_impl, ("vllm", "transformers"))
    for mode, names in OF_ONE_MODE.items():
        for name in names:
            if name in changed and mode != config.vllm_mode:
                where = "a flag of the server" if config.vllm_mode == "server" else "for vllm_mode='server'"
                raise ConfigError(f"`{name}` has no effect with vllm_mode={config.vllm_mode!r}: it is {where}")
    if "vllm_group_port" in changed:
        raise ConfigError(
            "`vllm_group_port` has no effect: weights reach the server through a folder (vllm_weights_dir)"
        )
    if config.cache_implementation is not None:
        raise ConfigError("`cache_implementation` is for `model.generate`: leave it out, or set engine='transformers'")
    if config.vllm_tensor_parallel_size != 1:
        raise ConfigError(
            f"vllm_tensor_parallel_size={config.vllm_tensor_parallel_size}: a colocated vLLM runs on this process' "
            "device alone; set it to 1, or vllm_mode='server', whose server may have as many as it likes"
        )
    if config.world_size > 1:
        raise ConfigError(
            f"engine='vllm' generates for one process so far, and there are {config.world_size}: leave `engine` and "
            "`use_vllm` unset"
        )
    if not 0 < config.vllm_gpu_memory_utilization <= 1:
        raise ConfigError(f"vllm_gpu_memory_utilization must be in (0, 1], not {config.vllm_gpu_memory_utilization}")
    if config.vllm_server_timeout <= 0:
        raise ConfigError(f"vllm_server_timeout must be above 0, not {config.vllm_server_timeout}")
