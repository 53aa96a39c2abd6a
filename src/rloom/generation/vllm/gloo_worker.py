"""The server's side of weights over gloo: `--worker-extension-cls rloom.generation.vllm.gloo_worker.GlooWorker`.

vLLM's own ways into a server's memory need CUDA; this one serves servers on CPUs. Importing the module registers it as
`--weight-transfer-config '{"backend": "gloo"}'`. It needs vLLM 0.28 or newer. `rloom vllm-serve` sets both flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from rloom.generation.vllm.transfer import GlooGroup


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the trainer waits, and this server's place among those that it sends to."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What comes next over the group, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives each weight by a broadcast, in one call or several, and loads all at the end as a checkpoint's."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: GlooGroup | None = None
    _received: list[tuple[str, torch.Tensor]]

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Meet the trainer. A trainer that was started again meets it anew."""
        own = self.parallel_config
        rank = init_info.rank_offset + own.data_parallel_index * own.world_size + own.rank
        self._group = GlooGroup(init_info.master_address, init_info.master_port, rank, init_info.world_size).join()

    def start_weight_update(self) -> None:
        """Forget what an update that was never finished has left."""
        self._received = []

    def finish_weight_update(self) -> None:
        """Load what has come. vLLM's loader takes all weights at once."""
        weights, self._received = iter(self._received), []
        reload_weights(
            self.vllm_config, self.model, weights_iterator=weights, weights_path=None, is_checkpoint_format=True
        )

    def update_weights(self, update_info: Any) -> None:
        """As vLLM's own, less the waiting for a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Keep the weights that come now."""
        assert self._group is not None
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(tensor)
            self._received.append((name, tensor))

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None


WeightTransferEngineFactory.register_engine("gloo", GlooTransferEngine)


class GlooWorker:
    """vLLM mixes it into its workers; what counts is that the module is imported before they are made."""
