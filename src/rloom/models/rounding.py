"""How far rounding alone moves what a model computes: the measure for another way to compute the same.

A fixed bound does not do. In half precision a wide and deep model with large gains, as one of random weights is, lies
a tenth of its largest logit away from float32, and so does every other way to compute it; a small one a hundredth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

MOST = 0.3
"""Whatever rounding does: what differs by more is refused, since a wrong mask could hide in it."""


def allowed_difference(usual: float, found: float, own: Callable[[], float]) -> float:
    """What two ways to compute the same may differ by: the usual bound, or twice what rounding does in this model.

    `found` is their difference; `own`, which costs a forward, is only asked where that is above the usual.

    >>> allowed_difference(0.06, 0.01, own=lambda: 0.1)  # not asked
    0.06
    >>> allowed_difference(0.06, 0.08, own=lambda: 0.1)
    0.2
    >>> allowed_difference(0.06, 0.8, own=lambda: 0.4)
    0.3
    """
    return usual if found < usual else min(max(usual, 2 * own()), MOST)


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """What each part of the model returns is off by up to half a rounding step meanwhile, as it is in any other order
    of summation. The same each time."""
    generators: dict[torch.device, torch.Generator] = {}

    def shake(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        draw = torch.rand(output.shape, generator=generators[output.device], device=output.device)
        step = torch.finfo(output.dtype).eps / 2
        return (output.float() * (1 + step * (2 * draw - 1))).to(output.dtype)

    handles = [part.register_forward_hook(shake) for part in model.modules() if next(part.children(), None) is None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
