"""Log-probabilities and entropy from hidden states, without the logits ever being in memory as a whole.

The vocabulary is wide: 32k tokens × 152k logits are 20 GB in float32. Here hidden states go through the head in chunks,
forward, and once more in chunks, backward:

    z = transform(h Wᵀ + b) / temperature       transform: a model's own scale and soft-cap of its logits
    log π(y) = z_y − lse(z),   H = lse(z) − Σ_v π_v z_v
    ∂ log π(y) / ∂z = onehot(y) − π

`captured_head` does this *inside* the model's own forward, in place of the head's: weights that are sharded are
gathered there and nowhere else, and whatever stands between decoder and head in an architecture is honoured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from rloom.models.fused import forwards_replaced
from rloom.models.load import base_of
from rloom.models.triton_support import runs_kernels

CHUNK_BYTES = 1 << 29
"""Of logits at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What a model does to its logits after the head: z·scale, then cap·tanh(z/cap); and the training temperature."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    @classmethod
    def of(cls, model: Any, temperature: float) -> LogitTransform:
        """As the model's config declares it: gemma's soft-cap, cohere's, granite's and Falcon-H1's scales.

        What is declared by another name is found by `model_checks.check_head`.
        """
        config = model.config.get_text_config()

        def declared(name: str) -> float | None:
            return getattr(config, name, None)

        scale = float(declared("logit_scale") or 1.0) * float(declared("lm_head_multiplier") or 1.0)
        scale /= float(declared("logits_scaling") or 1.0)
        softcap = declared("final_logit_softcapping") or declared("logits_soft_cap")
        return cls(scale=scale, softcap=softcap or None, temperature=temperature)

    def apply(self, logits: Tensor) -> Tensor:
        """Transformed logits in float32."""
        logits = logits.float()
        if self.softcap is not None:
            return torch.tanh(logits * (self.scale / self.softcap)) * (self.softcap / self.temperature)
        return logits if self.scale == self.temperature else logits * (self.scale / self.temperature)

    def slope(self, transformed: Tensor) -> Tensor | float:
        """d transform / d logits, from the transformed logits."""
        factor = self.scale / self.temperature
        if self.softcap is None:
            return factor
        return (1 - (transformed * (self.temperature / self.softcap)).square()) * factor


@dataclass(slots=True, kw_only=True)
class HeadOutput:
    """What the head said about N tokens: log-probabilities and entropies, and how to have logits of some of them."""

    logprobs: Tensor  # (N,)
    entropy: Tensor  # (N,), detached
    hidden: Tensor  # (N, H)
    logits: Callable[[Tensor], Tensor]  # hidden states (n, H) → transformed logits (n, V)


def run_head(
    head: nn.Module,
    forward: Callable[..., Tensor],
    hidden: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    *,
    keep: bool = False,
) -> HeadOutput:
    """Log-probabilities and entropies of `targets` (N,) from hidden states (N, H).

    `keep`: keep the logits for the backward after all: faster, in more memory.
    """

    def logits(part: Tensor) -> Tensor:
        return transform.apply(forward(part))

    # Not a forward that somebody has put in its place.
    own = getattr(forward, "__func__", None) is nn.Linear.forward
    if type(head) is nn.Linear and own and head.weight.is_floating_point():
        dtype = head.weight.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        bias = None if head.bias is None else head.bias.to(dtype)
        keep = keep and torch.is_grad_enabled()
        logprobs, entropy = _LinearHead.apply(hidden.to(dtype), head.weight.to(dtype), bias, targets, transform, keep)
    else:
        # An adapter on the head, or a quantized head: recomputed through the module itself.
        num_logits = int(getattr(head, "out_features", None) or head.weight.shape[0])  # type: ignore[index]
        logprobs, entropy = _through_module(logits, hidden, targets, num_logits, keep)
    # Of a distribution that is all but certain, rounding may leave less than 0.
    entropy = entropy.clamp(min=0.0)
    return HeadOutput(logprobs=logprobs, entropy=entropy, hidden=hidden, logits=logits)


def rows_at_a_time(num_logits: int, dtype: torch.dtype = torch.float32) -> int:
    """Rows whose logits take about CHUNK_BYTES."""
    return max(16, CHUNK_BYTES // (dtype.itemsize * num_logits))


def exact_kl_chunks(
    policy: HeadOutput, reference: HeadOutput, num_logits: int, using: Callable[[], AbstractContextManager[Any]]
) -> Tensor:
    """The exact KL at each token, (N,), from both models' hidden states in chunks; differentiable in the policy.

    `using`: a context in which the reference's head is the reference's (adapters off, weights where they compute).
    """

    def kl(mine: Tensor, theirs: Tensor) -> Tensor:
        p = policy.logits(mine).log_softmax(-1)
        with torch.no_grad(), using():
            q = reference.logits(theirs).log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)

    size = rows_at_a_time(num_logits)
    pairs = zip(policy.hidden.split(size), reference.hidden.split(size), strict=True)
    return torch.cat([checkpoint(kl, mine, theirs, use_reentrant=False) for mine, theirs in pairs])


def _through_module(
    logits: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, num_logits: int, keep: bool
) -> tuple[Tensor, Tensor]:
    def stats(part: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        z = logits(part)
        lse = z.logsumexp(-1)
        with torch.no_grad():
            entropy = lse - (z.softmax(-1) * z).sum(-1)
        return z.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - lse, entropy

    size = rows_at_a_time(num_logits)
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    run = stats if keep else functools.partial(checkpoint, stats, use_reentrant=False)
    parts = [run(part, wanted) for part, wanted in pairs]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).detach()


class _LinearHead(torch.autograd.Function):
    """The formulas of the module's docstring for a plain linear head, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        size = max(1, len(hidden)) if keep else rows_at_a_time(weight.shape[0], weight.dtype)
        logits = None
        for start in range(0, len(hidden), size):
            # Let go of these logits before the next are there.
            part, logits = slice(start, start + size), None
            logits = F.linear(hidden[part], weight, bias)
            logprobs[part], entropy[part], normalizer[part] = row_stats(logits, targets[part], transform)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer)
        ctx.transform, ctx.grad_dtype = transform, _gradient_dtype(weight)
        ctx.logits = logits if keep else None
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, normalizer = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        # Their gradient is written over them: kept logits serve once.
        kept, ctx.logits = ctx.logits, None
        size = rows_at_a_time(weight.shape[0], weight.dtype) if kept is None else len(hidden)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = F.linear(hidden[part], weight, bias) if kept is None else kept
            dz = row_grads(logits, targets[part], normalizer[part], grad[part], ctx.transform)
            if grad_hidden is not None:
                grad_hidden[part] = dz @ weight
            if grad_weight is not None:
                _add_product(grad_weight, dz, hidden[part])
            if grad_bias is not None:
                grad_bias += dz.float().sum(0)
            # Before the next chunk is there.
            del logits, dz
        return grad_hidden, _as(grad_weight, ctx.grad_dtype), _as(grad_bias, ctx.grad_dtype), None, None, None


def row_stats(logits: Tensor, targets: Tensor, transform: LogitTransform) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and log-sum-exps of rows of raw logits (n, V)."""
    if runs_kernels(logits.device):
        from rloom.models import kernels

        return kernels.row_stats(logits, targets, transform)
    z = transform.apply(logits)
    lse = z.logsumexp(-1)
    entropy = lse - (z - lse.unsqueeze(-1)).exp().mul_(z).sum(-1)
    return z.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - lse, entropy, lse


def row_grads(logits: Tensor, targets: Tensor, normalizer: Tensor, grad: Tensor, transform: LogitTransform) -> Tensor:
    """d Σ grad·log-probabilities / d raw logits: grad·(onehot(y) − π)·slope, in the logits' dtype."""
    if runs_kernels(logits.device):
        from rloom.models import kernels

        return kernels.row_grads(logits, targets, normalizer, grad.contiguous(), transform)
    z = transform.apply(logits)
    slope = transform.slope(z)
    dz = (z - normalizer.unsqueeze(-1)).exp_().mul_(-grad.unsqueeze(-1))
    dz.scatter_add_(1, targets.unsqueeze(-1), grad.unsqueeze(-1))
    return dz.mul_(slope).to(logits.dtype)


def _gradient_dtype(weight: Tensor) -> torch.dtype:
    """float32 where a half-precision parameter accumulates its gradient so: nothing is rounded then, and not copied."""
    return (weight.is_leaf and weight.grad_dtype) or weight.dtype


def _as(grad: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if grad is None else grad.to(dtype)


def _add_product(total: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """total += dzᵀ h, accumulated in float32 also where the factors are bfloat16."""
    if dz.dtype == total.dtype:
        total.addmm_(dz.T, hidden)
    elif dz.is_cuda:
        torch.addmm(total, dz.T, hidden, out_dtype=total.dtype, out=total)
    else:
        total += dz.T @ hidden


def nothing_of(values: Tensor) -> Tensor:
    """0, with a gradient of 0 for values of any size.

    >>> values = torch.tensor([1.0, -torch.inf], requires_grad=True)
    >>> nothing_of(values).backward()
    >>> values.grad
    tensor([0., 0.])
    """
    return values.nan_to_num().sum() * 0.0


def is_gathered_by_hooks(model: Any) -> bool:
    """Whether hooks gather a model's weights for the backward.

    FSDP2's and ZeRO-3's do so when a gradient reaches what a module has returned. The log-probabilities are not what
    the model returns, so they must depend on that, and that on them.
    """
    return isinstance(model, FSDPModule) or hasattr(base_of(model).get_output_embeddings().weight, "ds_id")


@contextmanager
def captured_head(
    model: Any,
    source: Tensor | None,
    targets: Tensor,
    transform: LogitTransform,
    *,
    keep: bool = False,
    depends: bool = False,
) -> Iterator[list[HeadOutput]]:
    """While this lasts, the model's head computes [`HeadOutput`]s of `targets` instead of logits.

    `source` (N,) picks the hidden states, flattened over batch and position, that predict them; None: all, in order.
    The model gets a tensor with one logit per state in return, which costs nothing and means nothing. `depends`: it is
    to depend on the log-probabilities, with a gradient of 0 (`is_gathered_by_hooks`).
    """
    head = model.get_output_embeddings()
    forward = head.forward
    outputs: list[HeadOutput] = []

    def instead(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        flat = hidden.flatten(0, -2)
        wanted = flat if source is None else flat[source]
        outputs.append(run_head(head, forward, wanted, targets, transform, keep=keep))
        few = hidden[..., :1]
        return few + nothing_of(outputs[-1].logprobs).to(few.dtype) if depends else few

    with forwards_replaced([(head, instead)]):
        yield outputs
