"""What a vLLM server says of itself: its model, its context length, its dtype, and how weights reach it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rloom.errors import EngineError
from rloom.generation.vllm.client import Client, ServerError
from rloom.generation.vllm.lora import adapter_rank, why_merged
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.same_shape import check_shape
from rloom.generation.vllm.weights import hint_rounding
from rloom.models.load import is_peft_model
from rloom.printable import get_logger

logger = get_logger(__name__)

FOR_ADAPTERS = "start it with `rloom vllm-serve MODEL --max-lora-rank RANK`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server says of itself, and the weights that it has."""

    model: str  # the name under which the policy is asked for
    max_model_length: int
    dtype: torch.dtype
    adapter_only: bool  # whether it is sent the adapter alone
    backend: str | None  # of vLLM's weight transfer; None: through a folder
    versions: bool  # whether it knows versions and checksums of its weights: since 0.32
    version: str = ""  # of the weights that it was sent last; under an adapter, the adapter's name

    @property
    def name(self) -> str:
        """The model that requests name."""
        return self.version if self.adapter_only and self.version else self.model


def look_at(client: Client, options: VllmOptions, model: Any) -> Served:
    """What the server says of itself; an error where it cannot draw from this policy."""
    answer = client.developer("GET", "/server_info?config_format=json")
    with client.reading("/server_info", answer):
        config = answer["vllm_config"]
        info = config["model_config"]
        mode, name = info.get("logprobs_mode"), str(info.get("model", ""))
        dtype = getattr(torch, str(info["dtype"]).removeprefix("torch."))
        max_model_length = int(info["max_model_len"])
        max_rank = int((config.get("lora_config") or {}).get("max_lora_rank", 0))
        backend = (config.get("weight_transfer_config") or {}).get("backend")
    if mode != "processed_logprobs":
        raise EngineError(
            f"the vLLM server reports log-probabilities as {mode}, before temperature: start it with --logprobs-mode "
            "processed_logprobs, as `rloom vllm-serve` does"
        )
    wanted = options.dtype_for(model)
    if dtype != wanted:
        logger.warning("the vLLM server computes in %s and the trainer in %s: `mismatch` will show it", dtype, wanted)
    check_shape(client.address, name, model)
    return Served(
        model=models_of(client)[0],
        max_model_length=max_model_length,
        dtype=dtype,
        adapter_only=_sends_adapter_only(model, max_rank, dtype),
        backend=backend,
        versions=_has_versions(client),
    )


def models_of(client: Client, seconds: float | None = None) -> list[str]:
    """The names that requests may ask for: of the model, and of its adapters."""
    answer = client.get("/v1/models", seconds or client.timeout)
    with client.reading("/v1/models", answer):
        return [entry["id"] for entry in answer["data"]]


def _has_versions(client: Client) -> bool:
    try:
        client.get("/weight_info", client.timeout)
    except ServerError as error:
        if not error.unknown:
            raise
        return False
    return True


def _sends_adapter_only(model: Any, max_rank: int, dtype: torch.dtype) -> bool:
    """Whether the server is sent the adapter alone; `max_rank` is what it was started for, 0 for no adapters."""
    if not is_peft_model(model):
        if max_rank:
            raise EngineError("a vLLM server with --enable-lora takes adapters alone, and the policy has none")
        return False
    reason = why_merged(model)
    if reason is None and not max_rank:
        reason = f"the server was not started for adapters: {FOR_ADAPTERS}"
    elif reason is None and max_rank < adapter_rank(model):
        reason = f"the server was started for adapters of rank {max_rank}, and ours has {adapter_rank(model)}"
    if reason is not None and max_rank:
        raise EngineError(f"{reason}; a vLLM server with --enable-lora takes no other weights")
    if reason is not None:
        hint_rounding(model, dtype, reason)
    return reason is None
