"""Forwards over a rollout's micro-batches, by policy and reference; what they say is kept row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rloom.data.batching import Batcher
from rloom.data.transfer import upload
from rloom.models.attention import CompiledLayers, own_attention, packed_attention, running
from rloom.models.fused import FusedLayers
from rloom.models.logprobs import Forward, TokenStats
from rloom.models.reference import FrozenReference, Reference
from rloom.models.triton_support import has_triton
from rloom.models.verify import evaluating
from rloom.training.budget import TokenBudget
from rloom.types import MicroBatch, Rollout


class Passes:
    """How policy and reference are run on micro-batches."""

    def __init__(
        self,
        *,
        policy: Any,
        reference: Reference | None,
        batcher: Batcher,
        budget: TokenBudget,
        temperature: float,
        compiled: bool = False,
        fused: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.policy, self.reference = policy, reference
        self.batcher, self.budget = batcher, budget
        self.forward = Forward(policy, temperature, keep_logits=keep_logits)
        self._reference_forward = self.forward
        self._attending = [self.forward.base]
        if isinstance(reference, FrozenReference):
            self._reference_forward = Forward(reference.model, temperature)
            self._attending.append(self._reference_forward.base)
        self._layers: CompiledLayers | FusedLayers | None = None
        if compiled and batcher.packed:
            self._layers = CompiledLayers(self._attending)
        elif batcher.packed and fused:
            self._layers = FusedLayers(self._attending)

    def words(self) -> str:
        """How rows are run, in words."""
        if not self.batcher.packed:
            return "updates on padded rows, which are slower (see above for why, or packing=False)"
        return f"updates on packed rows of up to {self.budget.tokens:,} tokens, with {self._form()}"

    def _form(self) -> str:
        if isinstance(self._layers, CompiledLayers):
            return "compiled layers"
        if isinstance(self._layers, FusedLayers):
            return "kernels for attention and layers"
        if self.device.type != "cuda":
            return "plain attention, as on a CPU"
        return "kernels for attention alone" if has_triton() else "plain attention, since Triton is not installed"

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return next(self.policy.parameters()).device

    def attention(self) -> Any:
        """Attention over packed rows for policy and reference, until the last backward is done."""
        if not self.batcher.packed:
            return nullcontext()
        return packed_attention(self._attending, self._layers)

    def reference_stays(self) -> Any:
        """An offloaded reference that is used meanwhile stays on the device until the end, and travels once."""
        return nullcontext() if self.reference is None else self.reference.staying()

    @torch.no_grad()
    def by_reference(self, batch: MicroBatch) -> TokenStats:
        """What the reference says about a micro-batch."""
        assert self.reference is not None
        with self.reference.use(self.policy) as module, evaluating(module):
            return self._reference_forward(module, batch)

    def without_gradient(self, rollout: Rollout, run: Callable[[MicroBatch], None]) -> None:
        """Run over all trained rows. Nothing is kept for a backward, so that many more tokens fit at a time."""

        @torch.no_grad()
        def passes() -> None:
            budget = self.budget.without_gradient
            with self.attention(), self.reference_stays():
                for rows in self.batcher.plan(rollout, trained_rows(rollout), budget, whole_groups=False):
                    batch = self.batcher.make(rollout, rows, self.device)
                    with laid_out(batch):
                        run(batch)

        self.budget.retrying(passes, gradient=False)


def trained_rows(rollout: Rollout) -> list[int]:
    """The rows that are in the loss."""
    return [row for row, trained in enumerate(rollout.trained) if trained]


def keep(column: list[Tensor | None], batch: MicroBatch, values: Tensor) -> None:
    """Keep each row's values, (B, C) → (T_i,) each: views into one flat tensor."""
    flat = values.flatten()[batch.flat]
    for row, part in zip(batch.rows, flat.split(batch.lengths), strict=True):
        column[row] = part


def gather(column: list[Tensor | None], batch: MicroBatch) -> Tensor:
    """Rows' kept values as one padded table, (B, C)."""
    flat = torch.cat([column[row] for row in batch.rows])  # type: ignore[misc]
    return batch.to_table(upload(flat, batch.flat.device))


@contextmanager
def laid_out(batch: MicroBatch) -> Iterator[None]:
    """Attention as the layout of a micro-batch wants it, until its backward is done."""
    with own_attention() if batch.packed is None else running(batch.packed):
        yield
