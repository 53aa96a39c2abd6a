"""Learns from rollouts: forward, loss and backward over micro-batches.

The credit assigner computes the advantages. One denominator covers the whole update: micro-batches change speed and
memory, never the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.algo import AGGREGATIONS, KL_PLACEMENTS, RATIO_LEVELS, SURROGATES, aggregate, policy_loss
from rloom.config import RLOOConfig
from rloom.errors import ConfigError
from rloom.models.low_bits import added_as_they_come
from rloom.observe.metrics import Metrics
from rloom.training.assigner import CreditAssigner
from rloom.training.passes import Passes, attention_for, gather, keep, trained_rows
from rloom.training.processes import ALONE, Processes
from rloom.training.update_metrics import UpdateMetrics
from rloom.types import MicroBatch, Prompt, Rollout, Share


class Learner:
    """Turns shares of rollouts into gradients."""

    def __init__(
        self,
        config: RLOOConfig,
        *,
        passes: Passes,
        assigner: CreditAssigner,
        metrics: Metrics,
        aux_loss_weight: float,
        processes: Processes = ALONE,
    ) -> None:
        self.processes = processes
        self.config, self.passes, self.assigner = config, passes, assigner
        self.policy, self.batcher, self.budget = passes.policy, passes.batcher, passes.budget
        self.metrics, self.aux_loss_weight = metrics, aux_loss_weight
        choices = config.choices
        self.kl_in_loss = config.beta != 0.0 and KL_PLACEMENTS[choices.kl_placement].in_loss
        self.aggregation = choices.loss_aggregation
        self.over_tokens = AGGREGATIONS[choices.loss_aggregation].over_tokens
        sequence_ratio = not RATIO_LEVELS[choices.ratio_level].per_token and SURROGATES[choices.surrogate].uses_ratio
        self.untrained_rows_count = sequence_ratio and not self.over_tokens
        self.loss_options: dict[str, Any] = {
            "level": choices.ratio_level,
            "surrogate": choices.surrogate,
            "epsilon_low": config.epsilon,
            "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
            "dual_clip": choices.dual_clip,
        }
        # The denominator and the trained tokens of the current update.
        self.denominator = 1.0
        self.tokens_in_update = 1
        # Tokens that this process runs forward in the current update, prompts included.
        self.tokens_forward = 0
        self.update_metrics = UpdateMetrics(older=self.config.log_older_metrics)

    # -- an update

    def accumulate(
        self,
        model: Any,
        shares: Sequence[Share],
        *,
        compute_loss: Callable[[Any, MicroBatch], Tensor],
        backward: Callable[[Tensor, bool], None],
        skip: bool = True,
    ) -> Tensor:
        """Add the gradients of the update's loss to the parameters, and return the loss.

        With several processes, each runs its own micro-batches, however many there are. Then all have the gradients and
        the loss of the whole update.

        `backward(loss, last)` runs one micro-batch backward; `last` marks the last one.
        `skip`: leave out rows in which our loss has no gradient. Where `compute_loss` adds a term, they may have one.
        Out of memory, the update is repeated from its start in smaller micro-batches, where that is possible.
        """
        shares = merge(shares)
        # A rollout from a checkpoint has not been settled in this process.
        for share in shares:
            self.batcher.settle(share.rollout)
        self._count(shares, self.processes)
        # These passes come before the part that is repeated when memory runs out.
        self._assign(model, shares, "train")
        loss = self._in_pieces_that_fit(model, shares, compute_loss, backward, skip)
        # Processes exchange metrics and gradients here, after the part that may fail and be repeated.
        self.update_metrics.record(self.metrics, "train", self.processes)
        return self.processes.add_up(self.policy.parameters(), loss)

    def _in_pieces_that_fit(
        self, model: Any, shares: Sequence[Share], compute_loss: Any, backward: Any, skip: bool
    ) -> Tensor:
        """Run the update. Out of memory, undo and repeat it; where that is not possible, explain the error."""
        saved = [columns for share in shares for columns in _saved_columns(share.rollout)]

        def work() -> Tensor:
            with self.processes.in_step():
                return self._accumulate(model, shares, compute_loss, backward, skip)

        def undo() -> None:
            self._undo()
            # The failed attempt has filled in values that belong to its own dropout.
            _restore_columns(saved)
            # Smaller micro-batches may no longer hold whole groups. The pass for that comes before the update, as ever.
            self.processes.bring_back_copy()
            self._assign(model, shares, "train")

        idle = functools.partial(self._idle, model, backward)
        return self.processes.retrying(self.budget, work, undo=undo, idle=idle)

    def _idle(self, model: Any, backward: Callable[[Tensor, bool], None], last: bool) -> None:
        """Run a micro-batch from which nothing is learnt."""
        batch = self.passes.idle_batch()
        with self.passes.attention(), attention_for(batch):
            backward(self.passes.idle_loss(model, batch), last)

    def _undo(self) -> None:
        """Remove what a failed update has added to the gradients."""
        self.policy.zero_grad(set_to_none=True)

    def _accumulate(self, model: Any, shares: Sequence[Share], compute_loss: Any, backward: Any, skip: bool) -> Tensor:
        """One attempt at the update's forwards and backwards. Returns this process' loss."""
        self.update_metrics = UpdateMetrics(older=self.config.log_older_metrics)
        total, last = torch.zeros((), device=self.passes.device), False
        with self.passes.attention(), added_as_they_come(self.policy) as widen:
            for batch, last in self._micro_batches(model, shares, lambda share: self._rows(share, skip), "train"):
                loss = self.passes.idle_loss(model, batch) if batch.idle else compute_loss(model, batch)
                backward(loss, last)
                self.processes.micro_batch_done()
                widen()
                total += loss.detach()
        # There was nothing to learn from. Optimizer and scaler still need a backward.
        if not last:
            backward(sum((p.sum() * 0.0 for p in self.policy.parameters() if p.requires_grad), total), True)
            # To the other processes, a gradient says that its weight was trained on. These zeros must not.
            if not self.processes.alone:
                self._undo()
        for share in shares:
            total += self._untrained_loss(share)
        return total

    def _assign(self, model: Any, shares: Sequence[Share], mode: str) -> list[bool]:
        """Assign advantages to all shares. Returns for each share whether its training forward will give them."""
        whole = {id(share.rollout) for share in shares if len(share.rows) == len(share.rollout)}
        return [
            self.assigner.assign(model, share.rollout, share.rows, whole=id(share.rollout) in whole, mode=mode)
            for share in shares
        ]

    def _micro_batches(
        self, model: Any, shares: Sequence[Share], rows_of: Callable[[Share], list[int]], mode: str
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """Micro-batches of the rows that `rows_of` selects, each with whether it is the last. The model's attention is
        set up for each one until the next. Idle ones follow where other processes have more."""
        from_forward = self._assign(model, shares, mode)
        plans = [
            (share.rollout, rows, awaited)
            for share, awaited in zip(shares, from_forward, strict=True)
            for rows in self.batcher.plan(share.rollout, rows_of(share), self.budget.tokens, whole_groups=awaited)
        ]
        # An evaluation is each process' own, unless weights are gathered in it.
        together = mode == "train" or self.processes.is_layered
        rounds = self.processes.rounds(len(plans)) if together else len(plans)
        for number, (rollout, rows, awaited) in enumerate(plans, 1):
            batch = self.batcher.make(rollout, rows, self.passes.device)
            batch.first = any(rollout.policy_logprobs[row] is None for row in rows)
            batch.one_forward = awaited and any(rollout.advantages[row] is None for row in rows)
            with attention_for(batch):
                yield batch, number == rounds
        for number in range(len(plans) + 1, rounds + 1):
            batch = self.passes.idle_batch()
            with attention_for(batch):
                yield batch, number == rounds

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """A micro-batch's share of the update's loss, ready for backward."""
        rollout, mask = batch.rollout, batch.completion_mask
        stats = self.passes.run(model, batch, with_aux_loss=self.aux_loss_weight != 0.0)
        self.assigner.take_in(batch, stats)
        old = stats.logprobs.detach() if batch.first else gather(rollout.policy_logprobs, batch)
        terms = policy_loss(stats.logprobs, old, self.assigner.advantages(batch), mask, **self.loss_options)
        loss = aggregate(terms.values, mask, self.aggregation) / self.denominator
        self.update_metrics.policy_loss = self.update_metrics.policy_loss + loss.detach()
        if self.kl_in_loss:
            kl = self.assigner.kl(batch, stats)
            keep(rollout.kl, batch, kl.detach())
            loss = loss + self.assigner.credit.beta * aggregate(kl, mask, self.aggregation) / self.denominator
        if stats.aux_loss is not None:
            if torch.is_grad_enabled() and not stats.aux_loss.requires_grad:
                raise ConfigError(
                    "the load-balancing loss of this mixture of experts has no gradient: with use_reentrant=True, "
                    "checkpoints hide the routers. Set gradient_checkpointing_kwargs={'use_reentrant': False}"
                )
            loss = loss + self._weighted_aux_loss(stats.aux_loss, batch)
        self.update_metrics.add(stats, terms, mask)
        return loss

    @torch.no_grad()
    def evaluate(self, model: Any, rollout: Rollout) -> Tensor:
        """The loss of a rollout at its own weights (ratio 1), and the metrics that go with it.

        Out of memory, it is repeated in smaller micro-batches. Updates share the budget, so theirs shrink too.
        """
        share = Share(rollout=rollout, rows=range(len(rollout)))
        total = self._evaluated(model, share)
        total += self._untrained_loss(share)
        self.update_metrics.record(self.metrics, "eval")
        return total

    @torch.no_grad()
    def idle_along(self, model: Any, nothing: Rollout) -> None:
        """Take part in an evaluation for which this process has no prompts, where weights are gathered from all
        processes. Its metrics are not recorded."""
        self._evaluated(model, Share(rollout=nothing, rows=range(len(nothing))))

    def _evaluated(self, model: Any, share: Share) -> Tensor:
        """The loss of rows that are trained on, and what its metrics are made of."""
        self._count([share], ALONE)
        self._assign(model, [share], "eval")
        saved = _saved_columns(share.rollout)

        def work() -> Tensor:
            return self._evaluate(model, share)

        def undo() -> None:
            _restore_columns(saved)
            # Smaller micro-batches may no longer hold whole groups. The pass for that is not a part of an attempt.
            self._assign(model, [share], "eval")

        return self.passes.retrying(work, undo=undo, idle=lambda last: self.passes.idle_forward(model))

    def _evaluate(self, model: Any, share: Share) -> Tensor:
        """One attempt at an evaluation's forwards. Returns the loss."""
        self.update_metrics = UpdateMetrics(older=self.config.log_older_metrics)
        total = torch.zeros((), device=self.passes.device)
        with self.passes.attention(), self.passes.reference_stays():
            for batch, _ in self._micro_batches(model, [share], lambda share: trained_rows(share.rollout), "eval"):
                total += self.passes.idle_loss(model, batch) if batch.idle else self.loss(model, batch)
        return total

    def try_worst_case(
        self,
        model: Any,
        prompt: int,
        completion: int,
        k: int,
        *,
        most: int | None = None,
        pictured: Prompt | None = None,
    ) -> int:
        """Run a micro-batch of the budget's size forward and backward, all prompts and completions at their limits.

        `most`: completions that a micro-batch can have, where an update has fewer than fit into the budget. `pictured`:
        a prompt with images that stands for all prompts, since such rows cost more.

        Returns the number of its tokens. The gradients are zero, and are removed. Out of memory, the budget shrinks.
        """
        groups = max(1, self.budget.tokens // (prompt + k * completion)) + 1
        rollout = self.passes.made_up(groups, k, prompt, completion, pictured)
        all_rows = range(len(rollout))[:most]

        def attempt() -> int:
            with self.processes.in_step():
                self.processes.rounds(1)
                rows = self.batcher.plan(rollout, all_rows, self.budget.tokens, whole_groups=False)[0]
                batch = self.batcher.make(rollout, rows, self.passes.device)
                with self.passes.attention(), attention_for(batch):
                    (self.passes.forward(model, batch).logprobs.sum() * 0.0).backward()
                self.processes.micro_batch_done()
            return self.batcher.size(rollout, rows)

        idle = functools.partial(self._idle, model, lambda loss, last: loss.backward())
        try:
            return self.processes.retrying(self.budget, attempt, undo=self._undo, idle=idle)
        finally:
            self._undo()

    # -- which rows

    def _rows(self, share: Share, skip: bool) -> list[int]:
        """Rows to run; with `skip` only those that can have a gradient. A group whose scores are all equal has
        advantages of exactly 0. Where nothing else is in the loss, it is run neither forward nor backward."""
        rollout = share.rollout
        rows = [row for row in share.rows if rollout.trained[row]]
        if not skip or self.assigner.credit.needs_kl or self.kl_in_loss or self.aux_loss_weight:
            return rows
        kept = [row for row in rows if bool((rollout.advantages[row] != 0).any())]  # type: ignore[union-attr]
        self.update_metrics.skipped += len(rows) - len(kept)
        return kept

    def _count(self, shares: Sequence[Share], processes: Processes) -> None:
        """Set the update's denominator over all processes: completions without excluded ones, or trained tokens."""
        tokens = forward = completions = 0
        for share in shares:
            rollout = share.rollout
            for row in share.rows:
                trained = rollout.trained[row]
                tokens += trained * len(rollout.drawn_ids(row))
                forward += trained * (len(rollout.prompt_ids[row]) + len(rollout.completion_ids[row]))
                completions += trained or self.config.truncation.counted
        # transformers sums this count over processes itself.
        self.tokens_forward = forward
        tokens, completions = processes.total(tokens, completions)
        self.tokens_in_update = tokens
        self.denominator = float(max(1, tokens if self.over_tokens else completions))

    def _untrained_loss(self, share: Share) -> Tensor | float:
        """What untrained rows add to the reported loss: −A each, since their ratio is 1. They have no token losses."""
        self.assigner.complete(share.rollout, share.rows)
        if not self.untrained_rows_count:
            return 0.0
        rollout = share.rollout
        values = [rollout.advantages[row] for row in share.rows if not rollout.trained[row]]
        scalars = [value for value in values if value is not None and value.dim() == 0]
        if not scalars:
            return 0.0
        loss = -torch.stack(scalars).sum().to(self.passes.device) / self.denominator
        self.update_metrics.policy_loss = self.update_metrics.policy_loss + loss
        return loss

    def _weighted_aux_loss(self, aux_loss: Tensor, batch: MicroBatch) -> Tensor:
        """The load-balancing loss of a micro-batch, weighted by its share of the update's tokens."""
        share = batch.num_tokens / max(1, self.tokens_in_update)
        self.update_metrics.aux_loss = self.update_metrics.aux_loss + share * aux_loss.detach()
        return self.aux_loss_weight * share * aux_loss


def merge(shares: Sequence[Share]) -> list[Share]:
    """Merge neighbouring shares of one rollout, so that a group that spans two parts is whole again."""
    merged: list[Share] = []
    for share in shares:
        last = merged[-1] if merged else None
        if last is not None and last.rollout is share.rollout and last.rows.stop == share.rows.start:
            merged[-1] = Share(rollout=share.rollout, rows=range(last.rows.start, share.rows.stop))
        else:
            merged.append(share)
    return merged


def _saved_columns(rollout: Rollout) -> list[tuple[list[Any], list[Any]]]:
    """The columns that an update fills in, each with a copy of its present values."""
    columns: list[list[Any]] = [rollout.policy_logprobs, rollout.kl, rollout.advantages]
    return [(column, list(column)) for column in columns]


def _restore_columns(saved: list[tuple[list[Any], list[Any]]]) -> None:
    for column, values in saved:
        column[:] = values
