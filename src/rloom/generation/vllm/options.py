"""How vLLM is run: what `RLOOConfig(vllm_…)` says, without the rest of the config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rloom.config.vllm import COLOCATE

if TYPE_CHECKING:
    from rloom.config import RLOOConfig


ON_THEIR_WAY = "_vllm_weights"
"""In a run's folder: weights on their way to servers, unless the options name another place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is run.

    >>> VllmOptions(mode="server", servers=("http://127.0.0.1:8000",)).timeout
    240.0
    """

    mode: str = COLOCATE
    dtype: torch.dtype | None = None  # what it computes in; None: the model's own
    regex: str | None = None  # what completions must match
    trust_remote_code: bool = False
    # in this process
    gpu_memory_utilization: float = 0.3
    max_model_length: int | None = None
    sleeps: bool = False
    model_impl: str = "vllm"
    compiled: bool | None = None  # None: on a GPU
    # behind servers
    servers: tuple[str, ...] = ("http://127.0.0.1:8000",)
    timeout: float = 240.0  # seconds to wait for one
    group_port: int = 51216  # of the trainer, for the first server that takes weights by nccl or gloo; 0: any
    weights_dir: str | Path | None = None  # seen by both; None: a temporary folder
    sends: bool = True  # whether this process sends weights; of several the main one does, and others wait for it

    @classmethod
    def of(cls, args: RLOOConfig) -> VllmOptions:
        """As `RLOOConfig` says. It computes as the trainer does: in autocast's precision, else in the weights' own."""
        return cls(
            mode=args.vllm_mode,
            dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
            regex=args.vllm_structured_outputs_regex,
            trust_remote_code=args.trust_remote_code,
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_length=args.vllm_max_model_length,
            sleeps=args.vllm_enable_sleep_mode,
            model_impl=args.vllm_model_impl,
            compiled=args.compile_generation,
            servers=args.vllm_servers(),
            group_port=args.vllm_group_port,
            timeout=args.vllm_server_timeout,
            weights_dir=args.vllm_weights_dir or Path(args.output_dir, ON_THEIR_WAY),
            sends=args.process_index == 0,
        )

    def dtype_for(self, model: Any) -> torch.dtype:
        """What vLLM computes in for this model."""
        return self.dtype or next(model.parameters()).dtype
