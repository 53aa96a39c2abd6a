"""bfloat16 weights that learn.

A bfloat16 weight has 8 bits of precision: at a learning rate of 1e-6 most updates are smaller than the gap to the next
bfloat16 number and would be rounded away. Here the optimizer keeps the bits that bfloat16 drops, so that weights move
as float32 ones do, while the model computes (and samples) with the bfloat16 weights themselves, with no cast per step.

- [`SplitAdamW`] splits the float32 word: the weight holds the upper 16 bits, rounded, and the state a signed 16-bit
  rest. 2 bytes a parameter instead of 4 for a copy.
- [`MasterWeights`] wraps any other optimizer around float32 copies.

Both may be given the rests that weights have at the start (`split.py`: those of a float32 model), and keep them up.

Gradients accumulate in float32 (torch's `grad_dtype`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rloom.models.gpu import runs_kernels
from rloom.printable import get_logger

logger = get_logger(__name__)

ELEMENTS_AT_A_TIME = 1 << 26  # float32 words joined at once: a quarter of a gigabyte

Value = Callable[[Tensor, slice | EllipsisType], Tensor]
"""Tells what a piece of a parameter stands for: `p[piece]`, and the bits that somebody keeps for it."""


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """The float32 number that a bfloat16 weight and its 16-bit rest stand for."""
    return ((weight.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 number as the nearest bfloat16 weight and a signed 16-bit rest.

    >>> value = torch.tensor([1.0 + 2**-12, -3.1415927])
    >>> weight, rest = split(value)
    >>> weight
    tensor([ 1.0000, -3.1406], dtype=torch.bfloat16)
    >>> torch.equal(join(weight, rest), value)
    True
    """
    bits = value.view(torch.int32)
    upper = (bits + 0x8000) >> 16
    return upper.short().view(torch.bfloat16), (bits - (upper << 16)).short()


class SplitAdamW(Optimizer):
    """AdamW whose bfloat16 parameters keep the bits that bfloat16 drops. Others are updated as torch's AdamW does.

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> accumulate_in_float32([weight])
    >>> optimizer = SplitAdamW([weight], lr=1e-5, weight_decay=0.0)
    >>> for _ in range(500):  # 500 steps of 1e-5, each far below the spacing of bfloat16 at 1 (0.0039)
    ...     weight.grad = torch.ones(2)
    ...     optimizer.step()
    >>> weight
    Parameter containing:
    tensor([0.9961, 0.9961], dtype=torch.bfloat16, requires_grad=True)
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        rests: MutableMapping[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.rests = {} if rests is None else rests  # somebody else's, who sees what they become
        self.skip: Tensor | None = None  # (1,) on the device: not 0 if the next step shall change nothing
        accumulate_in_float32(p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in _in_batches(p for p in group["params"] if p.grad is not None):
                self._update(batch, group)
        self.skip = None
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for p in params:
            if _has_kernel(p):
                self._update_in_one_kernel(p, group)
        others = [p for p in params if not _has_kernel(p)]
        if others:
            self._update_joined(others, group)

    def _update_in_one_kernel(self, p: Tensor, group: dict[str, Any]) -> None:
        from rloom.models.kernels import adamw_split

        state = self._state(p)
        state["step"] += 1
        skip = _nothing(p.device) if self.skip is None else self.skip
        adamw_split(p, state, p.grad.float(), group, int(state["step"]), skip)  # type: ignore[union-attr]

    def _update_joined(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self._state(p) for p in params]
        halves = [(p, s) for p, s in zip(params, states, strict=True) if p.dtype == torch.bfloat16]
        words = {id(p): join(p, s["rest"]) for p, s in halves}
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [words.get(id(p), p) for p in params],
            [p.grad.float() for p in params],  # type: ignore[union-attr]
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            _count([s["step"] for s in states]),
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.skip,
        )
        for p, s in halves:
            weight, rest = split(words[id(p)])
            p.copy_(weight)
            s["rest"].copy_(rest)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=_step_device(p))
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype == torch.bfloat16 and "rest" not in state:
            state["rest"] = _rest_of(p, self.rests)
        return state

    def values(self) -> Value:
        """What parameters stand for, with the bits that are kept for them."""
        rests = {**self.rests, **{p: state["rest"] for p, state in self.state.items() if "rest" in state}}
        return lambda p, piece: join(p[piece], rests[p][piece].to(p.device)) if p in rests else p[piece]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round the state to the parameters' bfloat16: put the saved bits back.

        Where the bits are somebody else's, who has read them from the weights' own file, those hold; but a file of
        bfloat16 weights has none. Another optimizer may have carried along what it did not know.
        """
        super().load_state_dict(state_dict)
        _put_back(self, state_dict)
        for p, state in self.state.items():
            saved = state.pop("rest", None)
            if p.dtype != torch.bfloat16:
                continue
            rest = state["rest"] = _rest_of(p, self.rests)
            if saved is not None and saved.dtype == torch.int16 and not bool(rest.any()):
                rest.copy_(saved)


class MasterWeights(Optimizer):
    """Any optimizer, run on float32 copies of the bfloat16 parameters, which are copied back after each step.

    `wide`: parameters whose state keeps 32 bits in an 8-bit optimizer of bitsandbytes.
    """

    def __init__(
        self,
        params: Any,
        *,
        make: Callable[..., Optimizer],
        wide: Iterable[Tensor] = (),
        rests: MutableMapping[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> None:
        self.rests = rests  # somebody else's, who sees what they become
        groups = [g if isinstance(g, dict) else {"params": [g]} for g in params]
        self.pairs: list[tuple[Tensor, Tensor]] = []
        copied = [{**group, "params": [self._master(p) for p in group["params"]]} for group in groups]
        masters = {id(p): master for p, master in self.pairs}
        _keep_32_bits([masters.get(id(p), p) for p in wide])
        self.inner = make(copied, **options)
        super().__init__([{**group} for group in self.inner.param_groups], dict(self.inner.defaults))
        self.param_groups = self.inner.param_groups  # one list: a schedule that changes it reaches the optimizer
        self.state = self.inner.state
        accumulate_in_float32(p for p, _ in self.pairs)

    def _master(self, p: Tensor) -> Tensor:
        if p.dtype != torch.bfloat16:
            return p
        master = nn.Parameter(p.detach().float() if self.rests is None else join(p.detach(), _rest_of(p, self.rests)))
        self.pairs.append((p, master))
        return master

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Hand the gradients over, step, copy the weights back."""
        self._take_over_changes()
        for p, master in self.pairs:
            master.grad = None if p.grad is None else p.grad.float()
        loss = self.inner.step(closure)
        for p, master in self.pairs:
            self._hand_back(p, master)
            master.grad = None
        return loss

    def _hand_back(self, p: Tensor, master: Tensor) -> None:
        """The weight is what its copy rounds to; who keeps the rest of it has that too."""
        weight, rest = split(master.detach())
        p.copy_(weight)
        if self.rests is not None:
            self.rests[p].copy_(rest)

    def _take_over_changes(self) -> None:
        """What someone else wrote into the weights holds, a callback or who has loaded a checkpoint: their copies would
        undo it."""
        for p, master in self.pairs:
            master.copy_(self._value(p, master, ...))

    def values(self) -> Value:
        """What parameters stand for, as their float32 copies have it."""
        masters = dict(self.pairs)
        return lambda p, piece: self._value(p, masters[p], piece) if p in masters else p[piece]

    def _value(self, p: Tensor, master: Tensor, piece: slice | EllipsisType) -> Tensor:
        """The float32 copy; where somebody else wrote to the weight, that, and with its rest if they wrote that too. No
        `if` on numbers: the host must not wait."""
        weight, own = split(master[piece])
        value = torch.where(p[piece] != weight, p[piece].float(), master[piece])
        if self.rests is None:
            return value
        rest = self.rests[p][piece]
        return torch.where(rest != own, join(p[piece], rest), value)

    def train(self) -> None:
        """The weights that a schedule-free optimizer trains; nothing for others."""
        self._switch("train")

    def eval(self) -> None:
        """The weights that a schedule-free optimizer evaluates and saves; nothing for others."""
        self._switch("eval")

    @torch.no_grad()
    def _switch(self, mode: str) -> None:
        if not hasattr(self.inner, mode):
            return
        self._take_over_changes()
        getattr(self.inner, mode)()
        for p, master in self.pairs:
            self._hand_back(p, master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of parameters and copies."""
        self.inner.zero_grad(set_to_none)
        for p, _ in self.pairs:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and the copies."""
        return {**self.inner.state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Both, to the same bits. An optimizer that ran on float32 weights saved no copies: they are the weights."""
        state = dict(state_dict)
        saved = state.pop("masters", None) or [self._value(p, master, ...) for p, master in self.pairs]
        for (p, master), value in zip(self.pairs, saved, strict=True):
            master.copy_(value)
            self._hand_back(p, master)
        self.inner.load_state_dict(state)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


def values_of(optimizer: Any) -> Value:
    """What parameters stand for to an optimizer; to one that is not of this module, what they are.

    DeepSpeed's is such a one: its float32 masters lie flattened in buffers of its own.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    return inner.values() if isinstance(inner, SplitAdamW | MasterWeights) else as_they_are


def as_they_are(p: Tensor, piece: slice | EllipsisType) -> Tensor:
    """A piece of a parameter for which nobody keeps more bits than it has."""
    return p[piece]


def accumulate_in_float32(params: Iterable[Tensor]) -> None:
    """Let bfloat16 parameters have float32 gradients, so that micro-batches add up without rounding."""
    for p in params:
        if p.dtype == torch.bfloat16 and p.requires_grad and p.is_leaf:
            p.grad_dtype = None  # torch refuses float32 while there is a bfloat16 gradient
            if p.grad is not None:
                p.grad = p.grad.float()
            p.grad_dtype = torch.float32


@contextmanager
def added_as_they_come(model: Any) -> Iterator[Callable[[], None]]:
    """Meanwhile bfloat16 gradients are added to float32 ones as they come. Autograd would cast each to float32 first:
    a pass over memory more. Yields a function to call after each backward, which widens those that came first.

    The head's own gradient comes in float32 (`head.py`), and may be added to the embedding's before: left as it is.
    """
    head = model.get_output_embeddings()
    params = [p for p in model.parameters() if _widened(p) and p is not getattr(head, "weight", None)]

    def widen() -> None:
        for p in params:
            if p.grad is not None and p.grad.dtype == torch.bfloat16:
                p.grad = p.grad.float()

    for p in params:
        p.grad_dtype = None
    try:
        yield widen
        widen()
    finally:
        for p in params:
            if p.grad is not None and p.grad.dtype == torch.bfloat16:
                p.grad = None  # of an update that failed, and is begun again
            p.grad_dtype = torch.float32


def _widened(p: Tensor) -> bool:
    return p.dtype == torch.bfloat16 and p.requires_grad and p.is_leaf and p.grad_dtype == torch.float32


def can_keep_the_bits(cls: Any, options: dict[str, Any]) -> bool:
    """Whether an optimizer can be run on float32 words; some choose their parameters themselves (GaLore, LOMO)."""
    return isinstance(cls, type) and not {"params", "model", "optimizer_dict"} & set(options)


def keeps_the_bits(
    cls: Any, options: dict[str, Any], model: nn.Module, rests: MutableMapping[Tensor, Tensor] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The optimizer to use instead of `cls` for a model with bfloat16 parameters; `cls` itself for others.

    `rests`: what the weights drop at the start; the optimizer keeps it up.
    """
    params = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if not params:
        return cls, options
    if not can_keep_the_bits(cls, options):
        logger.warning(
            "%s works on the bfloat16 weights themselves: updates smaller than bfloat16 can hold are lost", cls
        )
        return cls, options
    accumulate_in_float32(params)
    kept = {} if rests is None else {"rests": rests}
    if cls is torch.optim.AdamW:
        known = ("lr", "betas", "eps", "weight_decay")
        return SplitAdamW, {**kept, **{name: value for name, value in options.items() if name in known}}
    if "bitsandbytes" in str(cls) and options.get("optim_bits") == 8:
        options = {**options, "wide": _embeddings(model)}
    return MasterWeights, {**options, **kept, "make": cls}  # a class: the Trainer takes other callables for factories


def _embeddings(model: nn.Module) -> list[Tensor]:
    """What transformers' Trainer has 8-bit optimizers keep 32 bits for; it would name the weights, and not the copies
    that are optimised."""
    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def _keep_32_bits(params: list[Tensor]) -> None:
    """Tell bitsandbytes, which knows parameters by their ids: those must be free again when the parameters are gone."""
    if not params:
        return
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.override_config(params, "optim_bits", 32)
    for p in params:
        weakref.finalize(p, manager.pid2config.pop, id(p), None).atexit = False


def warn_of_lost_bits(model: nn.Module) -> None:
    """What a user's own optimizer does not do for bfloat16 weights, unless it is one of those above: they have made
    the gradients float32."""
    if any(p.requires_grad and p.dtype == torch.bfloat16 and not _widened(p) for p in model.parameters()):
        logger.warning(
            "the model's weights are bfloat16 and `optimizers=` was given: updates smaller than bfloat16 can hold are "
            "lost. Use rloom.models.precision.SplitAdamW, leave `optimizers` out, or load the model in float32"
        )


def _rest_of(p: Tensor, rests: MutableMapping[Tensor, Tensor]) -> Tensor:
    """The bits that a weight drops, beside it; zeros that are noted where nobody has any. What was frozen once may have
    its bits on the host."""
    rest = rests.get(p)
    if rest is None or rest.device != p.device:
        zeros = torch.zeros_like(p, dtype=torch.int16)
        rests[p] = rest = zeros if rest is None else rest.to(p.device)
    return rest


@functools.cache
def _nothing(device: torch.device) -> Tensor:
    """A zero that is there already: another for each parameter would be a launch each."""
    return torch.zeros(1, device=device)


def _has_kernel(p: Tensor) -> bool:
    """Whether a parameter is updated by the Triton kernel."""
    return runs_kernels(p.device) and p.dtype == torch.bfloat16 and p.is_contiguous()


def _step_device(p: Tensor) -> torch.device:
    """Where a parameter's steps are counted: on the host for the kernel, which takes numbers and must not wait."""
    return torch.device("cpu") if _has_kernel(p) else p.device


def _in_batches(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters of one device, so many that their float32 words take a bounded amount of memory."""
    batch: list[Tensor] = []
    size = 0
    for p in params:
        if batch and (size + p.numel() > ELEMENTS_AT_A_TIME or p.device != batch[0].device):
            yield batch
            batch, size = [], 0
        batch.append(p)
        size += p.numel()
    if batch:
        yield batch


def _count(steps: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(steps, 1)
    return steps


def _put_back(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    for p, name in zip(params, names, strict=True):
        for key, value in state_dict["state"].get(name, {}).items():
            device = _step_device(p) if key == "step" else p.device
            optimizer.state[p][key] = value.to(device, copy=True) if isinstance(value, Tensor) else value
