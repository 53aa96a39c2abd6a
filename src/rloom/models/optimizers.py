"""Optimizers that let bfloat16 weights learn, and which of them takes an optimizer's place.

- [`SplitAdamW`] keeps the low bits of each weight (`low_bits.py`) in its state: 2 bytes a parameter, where a float32
  copy takes 4.
- [`MasterWeights`] (`master_weights.py`) wraps any other optimizer around float32 copies.

Both may be given the low bits that weights have at the start (`split_weights.py`: those of a float32 model), and keep
them up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rloom.models.low_bits import (
    LOW_BITS,
    LowBits,
    Piece,
    Value,
    accumulate_in_float32,
    accumulates_in_float32,
    as_they_are,
    dither_,
    join_float32,
    low_bits_of,
    store_float32,
)
from rloom.models.master_weights import MasterWeights
from rloom.models.triton_support import runs_kernels
from rloom.printable import get_logger

logger = get_logger(__name__)

ELEMENTS_AT_A_TIME = 1 << 26
"""float32 words joined at once: a quarter of a gigabyte."""


class SplitAdamW(Optimizer):
    """AdamW whose bfloat16 parameters keep the bits that bfloat16 drops. Others are updated as torch's AdamW does.

    `low_bits`: those that somebody else keeps, who sees what they become. `dither`: draw those that are all 0 before
    the first update ([`rloom.models.low_bits.dither_`]).

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
        low_bits: LowBits | None = None,
        dither: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.low_bits = {} if low_bits is None else low_bits
        self.dither = dither
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
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if _has_kernel(p):
                    self._update_by_kernel(p, group)
            for batch in _in_batches(p for p in params if not _has_kernel(p)):
                self._update_joined(batch, group)
        self.skip = None
        return loss

    def _update_by_kernel(self, p: Tensor, group: dict[str, Any]) -> None:
        from rloom.models.kernels import adamw_split

        state = self._state(p)
        state["step"] += 1
        skip = _zero(p.device) if self.skip is None else self.skip
        adamw_split(p, state, p.grad.float(), group, int(state["step"]), skip)  # type: ignore[union-attr]

    def _update_joined(self, params: list[Tensor], group: dict[str, Any]) -> None:
        """torch's fused AdamW, on float32 words that are joined for it and split again."""
        states = [self._state(p) for p in params]
        halves = [(p, s) for p, s in zip(params, states, strict=True) if p.dtype == torch.bfloat16]
        words = {id(p): join_float32(p, s[LOW_BITS]) for p, s in halves}
        steps = [s["step"] for s in states]
        torch._foreach_add_(steps, 1)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            [words.get(id(p), p) for p in params],
            [p.grad.float() for p in params],  # type: ignore[union-attr]
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            steps,
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
            store_float32(words[id(p)], p, s[LOW_BITS])

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        # A checkpoint of an optimizer that keeps nothing, as plain SGD, may have low bits alone.
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=_step_device(p))
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
        if p.dtype == torch.bfloat16 and LOW_BITS not in state:
            state[LOW_BITS] = low_bits_of(p, self.low_bits)
            if self.dither:
                # Another seed for each weight, the same in every run and process.
                dither_(p, state[LOW_BITS], seed=len(self.state))
        return state

    def value(self, p: Tensor, piece: Piece) -> Tensor:
        """What a piece of a parameter stands for, with its low bits."""
        low_bits = self.state.get(p, {}).get(LOW_BITS, self.low_bits.get(p))
        return p[piece] if low_bits is None else join_float32(p[piece], low_bits[piece].to(p.device))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round the state to the parameters' bfloat16: the saved numbers are put back.

        Where the low bits are somebody else's, who has read them from the weights' own file, those hold; but a file of
        bfloat16 weights has none. Another optimizer may have carried along what it did not know.
        """
        super().load_state_dict(state_dict)
        self._put_back(state_dict)
        for p, state in self.state.items():
            saved = state.pop(LOW_BITS, None)
            if p.dtype != torch.bfloat16:
                continue
            state[LOW_BITS] = low_bits_of(p, self.low_bits)
            if saved is not None and saved.dtype == torch.int16 and not bool(state[LOW_BITS].any()):
                state[LOW_BITS].copy_(saved)

    def _put_back(self, state_dict: dict[str, Any]) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        names = [name for group in state_dict["param_groups"] for name in group["params"]]
        for p, name in zip(params, names, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                device = _step_device(p) if key == "step" else p.device
                self.state[p][key] = value.to(device, copy=True) if isinstance(value, Tensor) else value


@functools.cache
def _zero(device: torch.device) -> Tensor:
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


# -- which optimizer


def values_of(optimizer: Any) -> Value:
    """What parameters stand for to an optimizer; to one that is not of ours, what they are.

    DeepSpeed's is such a one: its float32 masters lie flattened in buffers of its own.
    """
    # accelerate wraps it.
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner.value if isinstance(inner, SplitAdamW | MasterWeights) else as_they_are


def can_keep_low_bits(cls: Any, options: dict[str, Any]) -> bool:
    """Whether an optimizer can be run on float32 words; some choose their parameters themselves (GaLore, LOMO)."""
    return isinstance(cls, type) and not {"params", "model", "optimizer_dict"} & set(options)


def optimizer_with_low_bits(
    cls: Any, options: dict[str, Any], model: nn.Module, low_bits: LowBits | None = None, *, dither: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The optimizer to use instead of `cls` for a model with bfloat16 parameters, with its options; `cls` for others.

    `low_bits`: those that the weights have at the start; the optimizer keeps them up. `dither`: see [`SplitAdamW`].
    """
    params = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if not params:
        return cls, options
    if not can_keep_low_bits(cls, options):
        logger.warning(
            "%s works on the bfloat16 weights themselves: updates smaller than bfloat16 can hold are lost", cls
        )
        return cls, options
    accumulate_in_float32(params)
    kept = {} if low_bits is None else {"low_bits": low_bits}
    if cls is torch.optim.AdamW:
        known = ("lr", "betas", "eps", "weight_decay")
        return SplitAdamW, {**kept, "dither": dither, **{name: options[name] for name in known if name in options}}
    if "bitsandbytes" in str(cls) and options.get("optim_bits") == 8:
        # As transformers' Trainer has it, which would name the weights, and not the copies that are optimised.
        embeddings = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        options = {**options, "wide": embeddings}
    # A class: the Trainer takes other callables for factories.
    return MasterWeights, {**options, **kept, "make": cls}


def warn_of_lost_bits(model: nn.Module) -> None:
    """Say what a user's own optimizer does not do for bfloat16 weights.

    Those above have made the gradients float32: there is nothing to say of them.
    """
    bfloat16 = [p for p in model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    if not all(map(accumulates_in_float32, bfloat16)):
        logger.warning(
            "the model's weights are bfloat16 and `optimizers=` was given: updates smaller than bfloat16 can hold are "
            "lost. Use rloom.models.optimizers.SplitAdamW, leave `optimizers` out, or load the model in float32"
        )
