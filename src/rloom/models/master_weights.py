"""Any optimizer for bfloat16 weights: it runs on float32 copies of them, the master weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rloom.models.low_bits import (
    LOW_BITS,
    LowBits,
    Piece,
    accumulate_in_float32,
    join_float32,
    low_bits_of,
    split_float32,
    store_float32,
    with_low_bits,
)

MASTERS = "masters"
"""The copies' name in the optimizer's state, and so in checkpoints."""


class MasterWeights(Optimizer):
    """Any optimizer, run on float32 copies of the bfloat16 parameters, which are copied back after each step.

    `wide`: parameters whose state keeps 32 bits in an 8-bit optimizer of bitsandbytes. `low_bits`: the bits that the
    weights drop, if somebody else keeps them (`split_weights.py`); they are kept up.
    """

    def __init__(
        self,
        params: Any,
        *,
        make: Callable[..., Optimizer],
        wide: Iterable[Tensor] = (),
        low_bits: LowBits | None = None,
        **options: Any,
    ) -> None:
        self.low_bits = low_bits
        groups = [g if isinstance(g, dict) else {"params": [g]} for g in params]
        self.masters: dict[Tensor, Tensor] = {}
        copied = [{**group, "params": [self._master(p) for p in group["params"]]} for group in groups]
        _keep_32_bits([self.masters.get(p, p) for p in wide])
        self.inner = make(copied, **options)
        super().__init__([{**group} for group in self.inner.param_groups], dict(self.inner.defaults))
        # One list for both: a schedule that changes it reaches the inner optimizer.
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        accumulate_in_float32(self.masters)

    def _master(self, p: Tensor) -> Tensor:
        """The float32 copy of a bfloat16 parameter, which is noted; any other parameter itself."""
        if p.dtype != torch.bfloat16:
            return p
        value = p.detach()
        value = value.float() if self.low_bits is None else join_float32(value, low_bits_of(p, self.low_bits))
        self.masters[p] = nn.Parameter(value)
        return self.masters[p]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Hand the gradients over, step, copy the weights back."""
        self._take_over_changes()
        for p, master in self.masters.items():
            master.grad = None if p.grad is None else p.grad.float()
        loss = self.inner.step(closure)
        self._hand_back()
        for master in self.masters.values():
            master.grad = None
        return loss

    def _hand_back(self) -> None:
        """Weights become what their copies round to, and the low bits that somebody else keeps what is left of them."""
        for p, master in self.masters.items():
            store_float32(master.detach(), p, None if self.low_bits is None else self.low_bits[p])

    def _take_over_changes(self) -> None:
        """What someone else wrote into the weights holds, a callback or who has loaded a checkpoint: their copies would
        undo it."""
        for p, master in self.masters.items():
            master.copy_(self.value(p, ...))

    def value(self, p: Tensor, piece: Piece) -> Tensor:
        """What a piece of a parameter stands for, as its float32 copy has it.

        Where somebody else wrote to the weight, it is that, with its low bits if they wrote those too. No `if` on
        numbers: the host must not wait.
        """
        if p not in self.masters:
            return p[piece]
        master = self.masters[p][piece]
        weight, own = split_float32(master)
        value = torch.where(p[piece] != weight, p[piece].float(), master)
        if self.low_bits is None:
            return value
        low_bits = self.low_bits[p][piece]
        return torch.where(low_bits != own, join_float32(p[piece], low_bits), value)

    def train(self) -> None:
        """The weights that a schedule-free optimizer trains; nothing for others."""
        self._switch("train")

    def eval(self) -> None:
        """The weights that a schedule-free optimizer evaluates and saves; nothing for others."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        if hasattr(self.inner, mode):
            self._take_over_changes()
            getattr(self.inner, mode)()
            self._hand_back()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of parameters and copies."""
        self.inner.zero_grad(set_to_none)
        for p in self.masters:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the copies."""
        return {**self.inner.state_dict(), MASTERS: [master.detach() for master in self.masters.values()]}

    def _with_saved_bits(self, state: dict[str, Any]) -> list[Tensor]:
        """What the weights stand for with the low bits that lie in a saved state."""
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        bits = {id(p): state["state"].get(n, {}).get(LOW_BITS) for p, n in zip(params, numbers, strict=True)}
        found = []
        for p, master in self.masters.items():
            value, low_bits = self.value(p, ...), bits[id(master)]
            is_saved = isinstance(low_bits, Tensor) and low_bits.dtype == torch.int16
            found.append(with_low_bits(value, low_bits.to(value.device)) if is_saved else value)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Both, to the same bits. An optimizer that ran on float32 weights saved no copies: they are the weights, with
        the low bits that processes save for sharded ones."""
        state = dict(state_dict)
        saved = state.pop(MASTERS, None) or self._with_saved_bits(state)
        known = state["state"].items()
        state["state"] = {number: {k: v for k, v in of.items() if k != LOW_BITS} for number, of in known}
        for master, value in zip(self.masters.values(), saved, strict=True):
            master.copy_(value)
        self._hand_back()
        self.inner.load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def _keep_32_bits(params: list[Tensor]) -> None:
    """Tell bitsandbytes, which knows parameters by their ids: those must be free again when the parameters are gone."""
    if not params:
        return
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.override_config(params, "optim_bits", 32)
    for p in params:
        weakref.finalize(p, manager.pid2config.pop, id(p), None).atexit = False
