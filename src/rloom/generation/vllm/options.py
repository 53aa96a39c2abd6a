"""How vLLM is run: what `RLOOConfig(vllm_…)` says, without the rest of the config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

COLOCATE, SERVER = "colocate", "server"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is run.

    >>> VllmOptions(mode="server", server="http://127.0.0.1:8000").timeout
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
    # behind a server
    server: str = "http://127.0.0.1:8000"
    timeout: float = 240.0  # seconds to wait for it
    weights_dir: str | Path | None = None  # seen by both; None: a temporary folder

    def dtype_for(self, model: Any) -> torch.dtype:
        """What vLLM computes in for this model."""
        return self.dtype or next(model.parameters()).dtype
