"""Runs policy and reference over a rollout's micro-batches.

Results are kept row by row in the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from rloom.data.batching import Batcher
from rloom.data.transfer import upload
from rloom.models.attention import CompiledLayers, own_attention, packed_attention, running
from rloom.models.fused import FusedLayers
from rloom.models.head import nothing_of
from rloom.models.logprobs import Forward, TokenStats
from rloom.models.reference import FrozenReference, Reference
from rloom.models.triton_support import has_triton
from rloom.models.verify import evaluating
from rloom.training.budget import TokenBudget
from rloom.training.processes import Processes
from rloom.types import MicroBatch, Prompt, Rollout

T = TypeVar("T")


class Passes:
    """Runs policy and reference on micro-batches, with the attention and the kernels that were chosen."""

    def __init__(
        self,
        *,
        policy: Any,
        without_gradient: Any = None,
        reference: Reference | None,
        batcher: Batcher,
        budget: TokenBudget,
        temperature: float,
        compiled: bool = False,
        fused: bool = False,
        keep_logits: bool = False,
        in_step_with: Processes | None = None,
    ) -> None:
        self.policy, self.reference = policy, reference
        # Processes that must run a pass without gradient equally often, since weights are gathered in it.
        self.in_step_with = in_step_with
        # What runs where nothing is learnt. Other than the policy, where that is sharded.
        self.whole = policy if without_gradient is None else without_gradient
        self.batcher, self.budget = batcher, budget
        self.forward = self._whole_forward = Forward(policy, temperature, keep_logits=keep_logits)
        self._attending = [self.forward.base]
        if self.whole is not policy:
            self._whole_forward = Forward(self.whole, temperature)
            self._attending.append(self._whole_forward.base)
        self._reference_forward = self._whole_forward
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
        """The device of the policy."""
        return next(self.policy.parameters()).device

    def attention(self) -> Any:
        """Give policy and reference an attention for packed rows, until the last backward is done."""
        if not self.batcher.packed:
            return nullcontext()
        return packed_attention(self._attending, self._layers)

    def reference_stays(self) -> Any:
        """Keep an offloaded reference on the device inside the block, so that it is moved once."""
        return nullcontext() if self.reference is None else self.reference.staying()

    def run(self, model: Any, batch: MicroBatch, *, with_aux_loss: bool = False) -> TokenStats:
        """The policy's forward. Without gradient, sharded weights are run as the whole copy of them."""
        if not torch.is_grad_enabled() and self.whole is not self.policy:
            return self._whole_forward(self.whole, batch, with_aux_loss=with_aux_loss)
        return self.forward(model, batch, with_aux_loss=with_aux_loss)

    def idle_batch(self) -> MicroBatch:
        """A micro-batch of two tokens, from which nothing is learnt."""
        batch = self.batcher.make(self.made_up(1, 1, 1, 1), [0], self.device)
        batch.idle = True
        return batch

    def idle_loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """A loss of 0, whose backward adds nothing to the gradients."""
        return nothing_of(self.forward(model, batch).logprobs)

    @torch.no_grad()
    def idle_forward(self, model: Any) -> None:
        """Run an idle micro-batch forward."""
        batch = self.idle_batch()
        with self.attention(), attention_for(batch):
            self.idle_loss(model, batch)

    def nothing(self) -> Rollout:
        """A rollout of one row that is not trained on: nothing of it is run, but for idle micro-batches."""
        rollout = self.made_up(1, 1, 1, 1)
        rollout.trained = [False]
        return rollout

    def made_up(self, groups: int, k: int, prompt: int, completion: int, pictured: Prompt | None = None) -> Rollout:
        """A rollout of made-up tokens. `pictured`: a prompt with images that stands for all prompts."""
        token, count = self.batcher.pad_token_id, groups * k
        return Rollout(
            prompt_ids=[pictured.token_ids if pictured else [token] * prompt for _ in range(count)],
            completion_ids=[[token] * completion for _ in range(count)],
            groups=torch.arange(groups).repeat_interleave(k),
            scores=torch.zeros(count, 1),
            score=torch.zeros(count),
            trained=[True] * count,
            prompt_inputs=[pictured.inputs for _ in range(count)] if pictured else [],
        )

    @torch.no_grad()
    def by_reference(self, batch: MicroBatch) -> TokenStats:
        """The reference's log-probabilities and hidden states of a micro-batch."""
        assert self.reference is not None
        with self.reference.use(self.whole) as module, evaluating(module):
            return self._reference_forward(module, batch)

    def without_gradient(
        self, rollout: Rollout, run: Callable[[MicroBatch], None], rows: list[int] | None = None
    ) -> None:
        """Call `run` on micro-batches of rows (None: of all that are trained). Nothing is kept for a backward, so many
        more tokens fit."""
        chosen = trained_rows(rollout) if rows is None else rows

        @torch.no_grad()
        def passes() -> None:
            plans = self.batcher.plan(rollout, chosen, self.budget.without_gradient, whole_groups=False)
            with self.attention(), self.reference_stays():
                for batch in self._batches_in_step(rollout, plans):
                    with attention_for(batch):
                        run(batch)

        @torch.no_grad()
        def idle(last: bool) -> None:
            batch = self.idle_batch()
            with self.attention(), attention_for(batch):
                run(batch)

        self.retrying(passes, idle=idle, without_gradient=True)

    def retrying(
        self,
        work: Callable[[], T],
        *,
        undo: Callable[[], None] | None = None,
        idle: Callable[[bool], None],
        without_gradient: bool = False,
    ) -> T:
        """Run forwards without a backward. Out of memory, undo and repeat them in smaller micro-batches: in this
        process alone, or in all where they run in step. `without_gradient`: their size is that of such passes."""
        processes = self.in_step_with
        if processes is None:
            return self.budget.retrying(work, undo, gradient=not without_gradient)

        def attempt() -> T:
            # Every attempt begins with nothing gathered, also where a rollout was generated before it.
            processes.after_forwards()
            return work()

        try:
            return processes.retrying(self.budget, attempt, undo=undo, idle=idle, gradient=False)
        finally:
            processes.after_forwards()

    def _batches_in_step(self, rollout: Rollout, plans: list[list[int]]) -> Iterator[MicroBatch]:
        """A rollout's micro-batches, and idle ones where other processes have more."""
        # Asked before the first pass: in it, a process with more micro-batches waits for weights of all others.
        rounds = len(plans) if self.in_step_with is None else self.in_step_with.rounds(len(plans))
        for rows in plans:
            yield self.batcher.make(rollout, rows, self.device)
        for _ in range(rounds - len(plans)):
            yield self.idle_batch()


def trained_rows(rollout: Rollout) -> list[int]:
    """The rows that are in the loss."""
    return [row for row, trained in enumerate(rollout.trained) if trained]


def keep(column: list[Tensor | None], batch: MicroBatch, values: Tensor) -> None:
    """Keep each row's values in a column of the rollout, (B, C) → (D_i,) each. They are views into one flat tensor."""
    flat = values.flatten()[batch.flat]
    for row, part in zip(batch.rows, flat.split(batch.lengths), strict=True):
        column[row] = part


def gather(column: list[Tensor | None], batch: MicroBatch) -> Tensor:
    """The kept values of a micro-batch's rows as one padded table, (B, C)."""
    flat = torch.cat([column[row] for row in batch.rows])  # type: ignore[misc]
    return batch.to_table(upload(flat, batch.flat.device))


@contextmanager
def attention_for(batch: MicroBatch) -> Iterator[None]:
    """Set attention up for the layout of a micro-batch, until its backward is done: packed rows, or padded ones."""
    with own_attention() if batch.packed is None else running(batch.packed):
        yield
