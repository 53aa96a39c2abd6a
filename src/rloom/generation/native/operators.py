"""Operators of ours that a compiled layer calls: `torch.ops.rloom.…`.

Registered by hand rather than with `torch.library.custom_op`, whose checks cost half a millisecond per call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_library = torch.library.Library("rloom", "FRAGMENT")


def define_operator(schema: str, run: Callable[..., Tensor], make_result: Callable[..., Tensor]) -> None:
    """Register `run` under the name in the schema, for CUDA and for the CPU (where Triton interprets its kernels).

    `make_result` returns an empty tensor of the result's shape: the compiler calls it in place of `run`.
    """
    name = schema.split("(")[0]
    _library.define(schema)
    for device in ("CUDA", "CPU"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"rloom::{name}", make_result)
