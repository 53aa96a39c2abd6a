"""A model in parts, where what needs no gradient runs on the parts too.

A layer is gathered from all processes while it runs, and so is a weight that is looked at as a whole. Then all
processes must do the same things in the same order. Engines differ in how they get there: in the forked one each
process generates, and those that are done idle along (`any`). What the main process does alone, such as sending weights
to a vLLM server and comparing what it answers, it leads (`lead`): it tells the others of each weight and each forward,
and they take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rloom.models.verify import evaluating
from rloom.training.processes import Processes

WEIGHT, FORWARD, END = "weight", "forward", "end"


class InStep:
    """The processes that hold parts of one model, as an engine sees them."""

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self._model, self._processes = model, processes
        # While the main process leads: the places of weights among all, by id.
        self._places: dict[int, int] = {}

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process."""
        return self._processes.any(flag)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        return self._processes.gather(value)

    def own_parts(self) -> list[Tensor]:
        """What this process holds of each weight."""
        return [self._processes.own_part(p) for p in self._model.parameters()]

    # -- the main process leads

    @torch.no_grad()
    def lead(self, work: Callable[[], None]) -> None:
        """Do some work in the main process alone, while the others take part in what it needs of the model."""
        self._processes.after_forwards()
        weights = list(self._model.parameters())
        try:
            if self._processes.is_main:
                self._lead(work, weights)
            else:
                self._take_part(weights)
        finally:
            self._processes.after_forwards()

    def whole(self, weight: Tensor) -> Tensor:
        """A weight as a whole. Only for the main process, while it leads."""
        if id(weight) in self._places and self._processes.is_part(weight):
            self._tell(WEIGHT, self._places[id(weight)])
            return self._processes.whole(weight)
        # It has not been taken apart, or a forward has just gathered it.
        return weight

    def _lead(self, work: Callable[[], None], weights: Sequence[Tensor]) -> None:
        self._places = {id(p): place for place, p in enumerate(weights)}
        # In front of the hooks that gather weights.
        handle = self._model.register_forward_pre_hook(self._tell_forward, prepend=True, with_kwargs=True)
        try:
            work()
        finally:
            handle.remove()
            self._places = {}
            # Also after an error: the others would wait for ever.
            self._tell(END)

    def _take_part(self, weights: Sequence[Tensor]) -> None:
        device = next(iter(weights)).device
        while (order := self._processes.from_main(None))[0] != END:
            if order[0] == WEIGHT:
                self._processes.whole(weights[order[1]])
            else:
                args, kwargs = order[1:]
                self._processes.after_forwards()
                with evaluating(self._model):
                    self._model(*_on(device, args), **dict(zip(kwargs, _on(device, kwargs.values()), strict=True)))

    def _tell_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = _on(torch.device("cpu"), kwargs.values())
        self._tell(FORWARD, _on(torch.device("cpu"), args), dict(zip(kwargs, values, strict=True)))
        # What an earlier forward has gathered may be there still, or not: a state dict lets go of it, say.
        self._processes.after_forwards()

    def _tell(self, *order: Any) -> None:
        self._processes.from_main(order)


def _on(device: torch.device, values: Any) -> list[Any]:
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]
