"""Triton kernels of the head and of AdamW, for what torch would do in many passes over memory. CUDA only; each has a
plain twin that tests hold it against (`head.py`, `optimizers.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from rloom.models.head import LogitTransform


@triton.jit
def _transform(z, scale, cap, temperature, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    z = z * scale
    if CAPPED:
        z = cap * (2 * tl.sigmoid(2 * z / cap) - 1)  # tanh
    return z / temperature


@triton.jit
def _row_stats(  # type: ignore[no-untyped-def]
    logits, targets, logprobs, entropy, normalizer, width, scale, cap, temperature,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of logits in one pass: running maximum, Σ exp, Σ exp·z."""
    row = tl.program_id(0).to(tl.int64)
    top = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, width, BLOCK):
        offset = start + tl.arange(0, BLOCK)
        inside = offset < width
        z = tl.load(logits + row * width + offset, mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, _transform(z, scale, cap, temperature, CAPPED), -float("inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - higher)
        e = tl.exp(z - higher)
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, e * z, 0.0), 0)
        top = higher
    lse = top + tl.log(total)
    chosen = tl.load(logits + row * width + tl.load(targets + row)).to(tl.float32)
    tl.store(logprobs + row, _transform(chosen, scale, cap, temperature, CAPPED) - lse)
    tl.store(entropy + row, lse - weighted / total)
    tl.store(normalizer + row, lse)


@triton.jit
def _row_grads(  # type: ignore[no-untyped-def]
    logits, targets, normalizer, grads, width, scale, cap, temperature, CAPPED: tl.constexpr, BLOCK: tl.constexpr
):
    """(onehot − π)·grad·slope, written over the logits."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < width
    where = logits + row * width + offset
    z = _transform(tl.load(where, mask=inside, other=0.0).to(tl.float32), scale, cap, temperature, CAPPED)
    grad = tl.load(grads + row)
    slope = scale / temperature
    d = -grad * tl.exp(z - tl.load(normalizer + row))
    d = tl.where(offset == tl.load(targets + row), d + grad, d)
    if CAPPED:
        t = z * temperature / cap
        d = d * (1 - t * t)
    tl.store(where, (d * slope).to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _adamw_split(  # type: ignore[no-untyped-def]
    weight, low_bits, grad, exp_avg, exp_avg_sq, skip, count, decay, beta1, beta2, step_size, correction, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW on the float32 word whose upper half, rounded, is the weight and whose low bits lie beside it. Nothing is
    changed where `skip` is set."""
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    inside = inside & (tl.full([BLOCK], 0.0, tl.float32) + tl.load(skip) == 0.0)
    upper = tl.load(weight + offset, mask=inside, other=0).to(tl.int32)
    lower = tl.load(low_bits + offset, mask=inside, other=0).to(tl.int32)
    value = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    g = tl.load(grad + offset, mask=inside, other=0.0)
    m = tl.load(exp_avg + offset, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + offset, mask=inside, other=0.0)
    value = value * decay
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    value = value - step_size * m / (tl.sqrt(v) / correction + eps)
    bits = value.to(tl.int32, bitcast=True)
    upper = (bits + 0x8000) >> 16
    tl.store(weight + offset, upper.to(tl.int16), mask=inside)
    tl.store(low_bits + offset, (bits - (upper << 16)).to(tl.int16), mask=inside)
    tl.store(exp_avg + offset, m, mask=inside)
    tl.store(exp_avg_sq + offset, v, mask=inside)


def row_stats(logits: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exps, (N,) each, of contiguous logits (N, V), in one pass."""
    count, width = logits.shape
    outputs = [torch.empty(count, dtype=torch.float32, device=logits.device) for _ in range(3)]
    options = (transform.scale, transform.softcap or 1.0, transform.temperature)
    _row_stats[(count,)](
        logits, targets, *outputs, width, *options, CAPPED=transform.softcap is not None, BLOCK=8192, num_warps=16
    )
    return outputs[0], outputs[1], outputs[2]


def row_grads(logits: Tensor, targets: Tensor, normalizer: Tensor, grads: Tensor, transform: LogitTransform) -> Tensor:
    """The gradient of Σ grads·log-probabilities with respect to the raw logits, in their place."""
    count, width = logits.shape
    options = (transform.scale, transform.softcap or 1.0, transform.temperature)
    _row_grads[(count, triton.cdiv(width, 8192))](
        logits,
        targets,
        normalizer,
        grads,
        width,
        *options,
        CAPPED=transform.softcap is not None,
        BLOCK=8192,
        num_warps=16,
    )
    return logits


def adamw_split(
    weight: Tensor, state: dict[str, Any], grad: Tensor, group: dict[str, Any], step: int, skip: Tensor
) -> None:
    """One AdamW step of a contiguous bfloat16 weight with its low bits, in one kernel; none if `skip` (1,) is not 0."""
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    count = weight.numel()
    _adamw_split[(triton.cdiv(count, 1024),)](
        weight.view(torch.int16), state["rest"], grad, state["exp_avg"], state["exp_avg_sq"], skip, count,
        1 - lr * group["weight_decay"], beta1, beta2, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5, group["eps"],
        BLOCK=1024,
    )  # fmt: skip
