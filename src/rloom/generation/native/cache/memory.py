"""Memory that is free on the device that generates."""

from __future__ import annotations

import psutil
import torch


def free_memory(device: torch.device) -> int:
    """Bytes that are free, including those that torch has reserved and does not use."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
