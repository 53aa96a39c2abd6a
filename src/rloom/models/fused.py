"""What stands between a layer's products as one kernel each: norms, rotations, gated activations.

Torch launches six to ten kernels for each of them, forward, and more backward; with a GPU as fast as today's, the host
then takes longer to launch a layer than the GPU to run it. Which parts of a model do just what the kernels do is tried
(values and gradients, on random numbers), not looked up; what does something else stays as it is.

Norms and blocks are replaced on the very modules, for as long as a context lasts. Rotations are a function of the
model's Python module, which all models of that kind share: it is replaced for good, by one that asks who calls.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rloom.models.verify import Tolerance, agrees

ROTATION = "apply_rotary_pos_emb"
"""What transformers calls the function that rotates queries and keys."""

Function = Callable[..., Any]
Later = Callable[[Tensor, Tensor], None]
"""Takes cosines and sines by which somebody else will rotate."""


def _kernels() -> Any:
    """The kernels, imported where they are run: Triton is not everywhere."""
    from rloom.models import fused_kernels

    return fused_kernels


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scales = _kernels().norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (*_kernels().norm_grads(grad, *ctx.saved_tensors), None)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _kernels().rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        return (*_kernels().rotate(dq, dk, *ctx.saved_tensors, back=True), None, None)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _kernels().gate(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _kernels().gate_grads(grad, *ctx.saved_tensors)


class FusedLayers:
    """The parts of some models that run as one kernel each while they are `used`."""

    users = 0
    """Contexts in which layers run the kernels, over all threads."""

    def __init__(self, models: list[Any]) -> None:
        self.forwards: list[tuple[nn.Module, Callable[..., Tensor]]] = []
        self.rotates = False
        tried: dict[Any, bool] = {}
        for module in dict.fromkeys(module for model in models for module in model.modules()):
            if (forward := _norm_forward(module, tried) or _block_forward(module, tried)) is not None:
                self.forwards.append((module, forward))
            self.rotates |= _replace_rotation(sys.modules.get(type(module).__module__))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the kernels meanwhile, also in what the backward runs again in a thread of torch's own."""
        FusedLayers.users += 1
        try:
            with rotating(), forwards_replaced(self.forwards):
                yield
        finally:
            FusedLayers.users -= 1


@contextmanager
def forwards_replaced(layers: list[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Let these modules run these forwards meanwhile; what stood on them before (a hook of accelerate's) comes back."""
    before = [layer.__dict__.get("forward") for layer, _ in layers]
    for layer, forward in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for (layer, _), old in zip(layers, before, strict=True):
            if old is None:
                # Uncovers the class' own.
                del layer.forward
            else:
                layer.forward = old


# -- norms and blocks


def _norm_forward(module: Any, tried: dict[Any, bool]) -> Callable[..., Tensor] | None:
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1 or is_watched(module):
        return None
    eps = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None)
    key = (type(module), weight.shape, weight.dtype)
    if key not in tried:
        tried[key] = eps is not None and _does_the_same(
            module.forward, lambda x: _Norm.apply(x, weight, eps), [(3, len(weight))], weight
        )
    return (lambda *x, **named: _Norm.apply(*x, *named.values(), module.weight, eps)) if tried[key] else None


def _block_forward(block: Any, tried: dict[Any, bool]) -> Callable[..., Tensor] | None:
    parts = [block._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(isinstance(part, nn.Module) for part in parts) or is_watched(block):
        return None
    weight = next((p for p in block.parameters() if p.is_floating_point()), None)
    # Quantized: what it computes in is not known here.
    if weight is None:
        return None
    key = (type(block), str(block._modules.get("act_fn")), weight.dtype)
    if key not in tried:
        tried[key] = _is_gated(block, weight)
    if not tried[key]:
        return None

    def forward(*args: Any, **named: Any) -> Tensor:
        (x,) = (*args, *named.values())
        return block.down_proj(_Gate.apply(block.gate_proj(x), block.up_proj(x)))

    return forward


def _is_gated(block: Any, weight: Tensor) -> bool:
    """Whether a block is down(silu(gate) · up), whatever those three are: tried with others in their place."""
    own = {name: block._modules[name] for name in ("gate_proj", "up_proj", "down_proj")}
    stand_ins = {"gate_proj": nn.Identity(), "up_proj": _Reversed(), "down_proj": nn.Identity()}
    # In training mode: what dropout draws must show.
    training, block.training = block.training, True
    block._modules.update(stand_ins)
    # The block's own width, for which the kernel is compiled then.
    width = getattr(own["gate_proj"], "out_features", 64)
    try:
        return _does_the_same(block.forward, lambda x: _Gate.apply(x, x.flip(-1)), [(3, width)], weight)
    finally:
        block._modules.update(own)
        block.training = training


class _Reversed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody listens to a module or has put another forward in its place."""
    return "forward" in module.__dict__ or bool(module._forward_hooks or module._forward_pre_hooks)


def _does_the_same(own: Function, ours: Function, shapes: list[tuple[int, ...]], weight: Tensor) -> bool:
    """Whether two functions have the same values and gradients: on random numbers, on large ones, which some models
    clamp, and on small ones, beside which a norm's epsilon shows."""
    tolerance = Tolerance.KERNEL_FLOAT32 if weight.dtype == torch.float32 else Tolerance.KERNEL

    def same(scale: float) -> bool:
        try:
            expected = _values(own, shapes, weight, scale)
        except Exception:
            # It takes other arguments: it is something else.
            return False
        runs = (
            lambda index=index, value=value: (_values(ours, shapes, weight, scale)[index], value)
            for index, value in enumerate(expected)
        )
        return all(agrees(run, None, tolerance) for run in runs)

    return all(map(same, (1.0, 100.0, 0.01)))


def _values(function: Function, shapes: list[tuple[int, ...]], weight: Tensor, scale: float) -> list[Tensor]:
    """What a function makes of random numbers, and the gradients of those."""
    generator = torch.Generator().manual_seed(0)
    inputs = [(scale * torch.randn(shape, generator=generator)).to(weight).requires_grad_() for shape in shapes]
    with torch.enable_grad():
        found = function(*inputs)
        found = found if isinstance(found, tuple) else (found,)
        slopes = [torch.randn(x.shape, generator=generator).to(x) for x in found]
        return [x.detach() for x in (*found, *torch.autograd.grad(found, inputs, slopes))]


# -- rotations


class _Here(threading.local):
    """What holds for this thread."""

    rotating = False  # it runs a model with the kernels
    later: Later | None = None  # who rotates instead


_here = _Here()


@contextmanager
def rotating(later: Later | None = None) -> Iterator[None]:
    """This thread's models rotate by the kernel meanwhile; or not at all, where `later` is told by what."""
    before = _here.rotating, _here.later
    _here.rotating, _here.later = True, later
    try:
        yield
    finally:
        _here.rotating, _here.later = before


def _is_ours() -> bool:
    """Whether the call comes from a model that runs the kernels: in this thread, or in the one in which torch runs
    layers again for their gradients. A reward's model that runs beside, without gradients, keeps its own rotation."""
    return _here.rotating or (FusedLayers.users > 0 and torch.is_grad_enabled())


def _replace_rotation(module: Any) -> bool:
    """Put a function that can use the kernel in place of a Python module's own; whether there is one."""
    own = getattr(module, ROTATION, None)
    if own is None or hasattr(own, "rloom_kinds"):
        return own is not None
    # Some take one tensor at a time.
    if list(inspect.signature(own).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    # Whether the kernel does the same, by whether all of a head is rotated or a part.
    kinds: dict[bool, bool] = {}

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        # First of all whether it is compiled, which must not see the rest.
        if torch.compiler.is_compiling() or args or kwargs or not _is_ours() or not _fits(q, k, cos):
            return own(q, k, cos, sin, *args, **kwargs)
        whole = cos.shape[-1] == q.shape[-1]
        # Tried with heads of this model, whose kernel is compiled then.
        if whole not in kinds:
            kinds[whole] = _rotates_the_same(own, q, k, cos)
        if not kinds[whole]:
            return own(q, k, cos, sin)
        if _here.later is not None and whole:
            _here.later(cos, sin)
            return q, k
        return _Rotate.apply(q, k, cos, sin)

    apply_rotary_pos_emb.rloom_kinds = kinds  # type: ignore[attr-defined]
    setattr(module, ROTATION, apply_rotary_pos_emb)
    return True


def _rotates_the_same(own: Function, q: Tensor, k: Tensor, cos: Tensor) -> bool:
    """Whether the kernel rotates as a model's own function does.

    Tried in a thread of its own: checkpointing, in which the first call may be, notes what this one's tensors save.
    """

    def tried() -> bool:
        generator = torch.Generator().manual_seed(1)
        angles = [torch.randn((1, 5, cos.shape[-1]), generator=generator).to(cos.detach()) for _ in range(2)]
        shapes: list[tuple[int, ...]] = [(1, x.shape[1], 5, x.shape[-1]) for x in (q, k)]
        with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
            return _does_the_same(
                lambda q, k: own(q, k, *angles), lambda q, k: _Rotate.apply(q, k, *angles), shapes, q.detach()
            )

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(tried).result()


def _fits(q: Tensor, k: Tensor, cos: Tensor) -> bool:
    rotated = cos.shape[-1]
    return (
        q.dim() == k.dim() == 4
        and cos.dim() == 3
        and cos.shape[1] == q.shape[2] == k.shape[2]
        and cos.shape[0] in (1, len(q))
        and rotated % 2 == 0
        and rotated <= q.shape[-1] == k.shape[-1]
        and q.dtype == k.dtype
        and q.dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
