"""The whole copy of sharded weights, which runs what needs no gradient: generation, the reference, evaluation.

It is filled from the parts of all processes before each rollout. Where memory is short it is let go of before each
update, and allocated again at the next filling. That changes no result, so it may be decided by the memory that is
free.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable

import psutil
import torch
from torch import Tensor, nn

from rloom.errors import ConfigError
from rloom.generation.native.cache.memory import free_memory
from rloom.printable import get_logger

logger = get_logger(__name__)

ROOM = 0.25
"""The share of a device's memory that must be left for an update's activations, if the copy is kept beside them."""

PER_TRAINED = 12
"""Bytes that an update needs for each weight that a process holds and trains: its gradient and Adam's moments."""


class WholeCopy:
    """A copy of a model, without memory for its weights until it is filled. `half`: their dtype; None: their own.

    >>> model = nn.Linear(8, 8)
    >>> whole = WholeCopy(model, half=None, device=torch.device("cpu"))
    >>> whole.nbytes, whole.module.weight.shape
    (8, torch.Size([8, 8]))
    >>> whole.fill(["weight", "bias"], dict(model.named_parameters()).__getitem__)
    >>> torch.equal(whole.module.weight, model.weight), whole.nbytes
    (True, 288)
    >>> whole.free()
    >>> whole.nbytes
    8
    """

    def __init__(self, model: nn.Module, *, half: torch.dtype | None, device: torch.device) -> None:
        check_room(size_of(model.parameters(), half), device)
        # In evaluation mode: there is no dropout where nothing is learnt.
        self.module = without_memory(model, half=half, device=device).eval()
        # Others are the copy's own, such as a reference's adapter: nobody could fill them again.
        self._filled = {name for name, _ in model.named_parameters()}
        self.is_freed = True

    @property
    def nbytes(self) -> int:
        """Bytes that its weights take at present."""
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self.module.parameters()}
        return sum(storages.values())

    def free(self) -> None:
        """Let go of the weights. Their shapes stay: each is a view of a single number."""
        for name, p in self.module.named_parameters():
            if name in self._filled:
                p.data = _no_memory(p, p.dtype, p.device)
        self.is_freed = True

    @torch.no_grad()
    def fill(self, names: Iterable[str], value: Callable[[str], Tensor]) -> None:
        """Copy weights in. All of them must be named where the copy was let go of."""
        copies = dict(self.module.named_parameters())
        if self.is_freed:
            device = next(iter(copies.values())).device
            check_room(size_of((copies[name] for name in self._filled), None), device)
        for name in names:
            p = copies[name]
            if self.is_freed:
                p.data = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            p.copy_(value(name))
        self.is_freed = False


def fits_beside_update(whole: WholeCopy, trained: int, device: torch.device) -> bool:
    """Whether the copy, which is in memory now, can stay there during updates. `trained`: weights that this process
    holds and trains. Says what was decided in words."""
    free, total = free_memory(device), _total_memory(device)
    left = free - PER_TRAINED * trained * _sharers(device)
    stays = left >= ROOM * total
    logger.info(
        "the whole copy of the weights (%.2f GiB) %s updates: with gradients and moments beside it %.2f GiB of %.2f "
        "are left, and activations are given %.2f. keep_whole_copy decides otherwise",
        whole.nbytes / 2**30,
        "stays in memory during" if stays else "is let go of before",
        left / 2**30,
        total / 2**30,
        ROOM * total / 2**30,
    )
    return stays


def check_room(needed: int, device: torch.device) -> None:
    """Refuse a copy that does not fit, and say what would.

    >>> check_room(1 << 60, torch.device("cpu"))
    Traceback (most recent call last):
        ...
    rloom.errors.ConfigError: a whole copy of the weights takes 1073741824.00 GiB, and ... GiB are free: ...
    """
    lack = lacking_room(needed, device)
    if lack is not None:
        raise ConfigError(
            f"{lack}: generate by vLLM servers (use_vllm=True, vllm_mode='server'), for which there is no need of one; "
            "or set ds3_gather_for_generation=False to generate layer by layer, which is slow, or bf16=True, which "
            "halves a float32 copy, or offload_reference=True; or take GPUs with more memory or a smaller model"
        )


def lacking_room(needed: int, device: torch.device) -> str | None:
    """What is missing for a copy of this size, in words; None if it fits."""
    free = free_memory(device) // _sharers(device)
    if needed <= free:
        return None
    return f"a whole copy of the weights takes {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free"


def size_of(parameters: Iterable[Tensor], half: torch.dtype | None) -> int:
    """Bytes that a copy of some weights takes."""
    return sum(p.numel() * (half.itemsize if half and p.is_floating_point() else p.element_size()) for p in parameters)


def without_memory(model: nn.Module, *, half: torch.dtype | None, device: torch.device) -> nn.Module:
    """A copy of a model whose weights have shapes and no memory yet; `half`: their dtype, None: their own.

    Buffers are copied as they are: rounded angles would rotate otherwise. There is no need for memory for a second
    model on the way.
    """
    empty = {
        id(p): nn.Parameter(_no_memory(p, half if half and p.is_floating_point() else p.dtype, device), p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, empty)


def _no_memory(p: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of the weight's shape that is a view of a single number."""
    return torch.zeros((), dtype=dtype, device=device).expand(p.shape)


def _sharers(device: torch.device) -> int:
    """How many processes share a device's memory: those of a host on its CPU, one on a GPU."""
    return 1 if device.type == "cuda" else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _total_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return int(psutil.virtual_memory().total)
    return int(torch.cuda.get_device_properties(device).total_memory)


def cast(parameters: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Give floating-point weights another dtype, in place."""
    for p in parameters:
        if p.is_floating_point():
            p.data = p.data.to(dtype)
