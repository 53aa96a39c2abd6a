"""Whether a kernel that was written for some GPUs runs on this one, and is right there."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from rloom.printable import get_logger

logger = get_logger(__name__)

ROUNDING = 0.02
"""Of the whole, that a kernel may be off by: half precision is off by a quarter of a hundredth."""


def agrees(run: Callable[[], tuple[Tensor, Tensor]], instead: str | None, rounding: float = ROUNDING) -> bool:
    """Whether what a kernel finds is what was expected, up to `rounding`; `run` gives both. If not, `instead` says what
    is done; None: that is no surprise, and nothing is said.

    >>> import torch
    >>> agrees(lambda: (torch.ones(3), torch.ones(3)), "it is done by hand")
    True
    """
    level = logging.DEBUG if instead is None else logging.WARNING
    try:
        found, expected = (x.float() for x in run())
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    except Exception as failure:  # of the compiler, the driver, or for want of memory: nothing that must end a run
        logger.log(level, "%s: the kernel fails (%s)", instead, str(failure)[:160])
        return False
    if not error <= rounding:
        logger.log(level, "%s: the kernel is off by %.1e on this GPU", instead, error)
    return error <= rounding
