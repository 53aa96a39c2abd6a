"""Learning from a rollout: log-probabilities, KL, advantages, loss, backward.

Two forms, one gradient. In the *one-forward* form the training forward's own detached log-probabilities give the KL,
the reward and the advantages, and the same graph is then run backward. It needs the whole of each group in one
micro-batch and one update that sees all of the rollout. Otherwise `prepare` makes a pass of its own first, at the
rollout's weights (*two passes*).

One denominator covers the update: micro-batches change speed and memory, never the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rloom.algo import aggregate, exact_kl, policy_loss, token_kl
from rloom.data.batching import pad_rows, plan_rows
from rloom.models.logprobs import TokenStats, forward_arguments, token_stats
from rloom.models.reference import Reference
from rloom.observe.metrics import Metrics
from rloom.training.credit import Credit
from rloom.training.tally import Tally
from rloom.types import MicroBatch, Rollout, Share


class Learner:
    """Turns shares of rollouts into gradients."""

    def __init__(
        self,
        config: Any,
        *,
        policy: Any,
        reference: Reference | None,
        credit: Credit,
        metrics: Metrics,
        pad_token_id: int,
        aux_loss_weight: float,
    ) -> None:
        self.config, self.policy, self.reference = config, policy, reference
        self.credit, self.metrics, self.aux_loss_weight = credit, metrics, aux_loss_weight
        self.pad_token_id = pad_token_id
        self.accepts = forward_arguments(policy)
        self.exact = config.kl_estimator == "full"
        self.kl_in_loss = config.beta != 0.0 and config.kl_placement == "loss"
        self.aggregation = str(config.loss_aggregation)
        self.loss_options: dict[str, Any] = {
            "level": config.ratio_level,
            "surrogate": config.surrogate,
            "epsilon_low": config.epsilon,
            "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
            "dual_clip": config.dual_clip,
        }
        self.denominator = 1.0  # of the update in progress
        self.tokens_in_update = 1
        self.tokens_forward = 0  # prompts included
        self.tally = Tally()

    # -- before the first update

    def prepare(self, model: Any, rollout: Rollout, *, whole: bool, mode: str = "train") -> None:
        """Fill in what cannot wait for the training forward.

        `whole`: the update that follows is the first and trains on all of the rollout at its own weights.
        """
        train = mode == "train"
        if not self.credit.needs_kl:
            self._set_advantages(rollout, range(len(rollout)), update=train)
        if not whole or (self.credit.needs_kl and not self._fits_one_forward(rollout)):
            self._first_pass(model, rollout)
            if self.credit.needs_kl:
                self._set_advantages(rollout, range(len(rollout)), update=train)

    def _fits_one_forward(self, rollout: Rollout) -> bool:
        largest = int(rollout.groups.bincount().max())
        return not self.credit.needs_batch and largest <= self._max_rows

    @property
    def _max_rows(self) -> int:
        return self.config.per_device_train_batch_size

    @torch.no_grad()
    def _first_pass(self, model: Any, rollout: Rollout) -> None:
        """Policy log-probabilities at the rollout's weights and, for a KL in the reward, the reference's."""
        for batch in self._batches(rollout, range(len(rollout)), whole_groups=False):
            with _evaluating(model):
                stats = self._forward(model, batch, keep_logits=self.credit.needs_kl and self.exact)
            self._store(rollout.policy_logprobs, batch, stats.logprobs)
            if self.credit.needs_kl:
                self._store(rollout.kl, batch, self._kl(batch, stats))

    # -- an update

    def accumulate(
        self,
        model: Any,
        shares: Sequence[Share],
        *,
        compute_loss: Callable[[Any, MicroBatch], Tensor],
        backward: Callable[[Tensor, bool], None],
    ) -> Tensor:
        """Gradients of the update's loss, summed into the parameters; returns the loss.

        `backward(loss, last)` runs one micro-batch backward; `last` marks the one at which processes may synchronise.
        """
        self.denominator = self._denominator(shares)
        self.tally = Tally()
        batches = [
            (share.rollout, rows)
            for share in merge(shares)
            for rows in plan_rows(
                share.rollout, share.rows, self._max_rows, whole_groups=self._one_forward(share.rollout, share.rows)
            )
        ]
        total = torch.zeros((), device=self._device)
        for index, (rollout, rows) in enumerate(batches):
            batch = self._pad(rollout, rows)
            if batch is not None:
                loss = compute_loss(model, batch)
                backward(loss, index == len(batches) - 1)
                total += loss.detach()
            total += self._untrained_loss(rollout, rows)
        self.tally.record(self.metrics, "train")
        return total

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """A micro-batch's share of the update's loss, ready for backward."""
        rollout, mask = batch.rollout, batch.completion_mask
        first = rollout.policy_logprobs[batch.rows[0]] is None
        one_forward = self._one_forward(rollout, batch.rows)
        keep_logits = self.exact and (self.kl_in_loss or one_forward)
        stats = self._forward(model, batch, keep_logits=keep_logits, with_aux_loss=self.aux_loss_weight != 0.0)
        if first:
            self._store(rollout.policy_logprobs, batch, stats.logprobs.detach())
        if one_forward:
            with torch.no_grad():
                self._store(rollout.kl, batch, self._kl(batch, stats))
            self._set_advantages(rollout, self._group_rows(rollout, batch.rows))
        old = self._gather(rollout.policy_logprobs, batch)
        terms = policy_loss(stats.logprobs, old, self._advantages(batch), mask, **self.loss_options)
        loss = aggregate(terms.values, mask, self.aggregation) / self.denominator
        if self.kl_in_loss:
            kl = self._kl(batch, stats)
            self._store(rollout.kl, batch, kl.detach())
            loss = loss + self.config.beta * aggregate(kl, mask, self.aggregation) / self.denominator
        if stats.aux_loss is not None:
            loss = loss + self._weighted_aux_loss(stats.aux_loss, batch)
        self.tally.add(stats, terms, mask)
        return loss

    @torch.no_grad()
    def evaluate(self, model: Any, rollout: Rollout) -> Tensor:
        """The loss of a rollout at its own weights (ratio 1), and the metrics that go with it."""
        self.prepare(model, rollout, whole=True, mode="eval")
        share = Share(rollout=rollout, rows=range(len(rollout)))
        self.denominator = self._denominator([share])
        self.tally = Tally()
        total = torch.zeros((), device=self._device)
        one_forward = self._one_forward(rollout, share.rows)
        for rows in plan_rows(rollout, share.rows, self._max_rows, whole_groups=one_forward):
            batch = self._pad(rollout, rows)
            if batch is not None:
                total += self.loss(model, batch)
            total += self._untrained_loss(rollout, rows)
        self.tally.record(self.metrics, "eval")
        return total

    # -- parts

    def _one_forward(self, rollout: Rollout, rows: Sequence[int]) -> bool:
        """Whether the advantages of these rows are still to come from the training forward."""
        return self.credit.needs_kl and any(rollout.advantages[row] is None for row in rows)

    def _forward(self, model: Any, batch: MicroBatch, **options: Any) -> TokenStats:
        return token_stats(model, batch, temperature=self.config.temperature, accepts=self.accepts, **options)

    def _kl(self, batch: MicroBatch, stats: TokenStats) -> Tensor:
        """Token KLs (B, C), differentiable in the policy's log-probabilities."""
        assert self.reference is not None
        if self.exact:
            reference = self._reference_stats(batch, keep_logits=True)
            # Both come already divided by the temperature.
            return exact_kl(stats.logits, reference.logits)  # type: ignore[arg-type]
        if batch.rollout.reference_logprobs[batch.rows[0]] is None:
            reference = self._reference_stats(batch, keep_logits=False)
            self._store(batch.rollout.reference_logprobs, batch, reference.logprobs)
        known = self._gather(batch.rollout.reference_logprobs, batch)
        return token_kl(str(self.config.kl_estimator), stats.logprobs, known)

    @torch.no_grad()
    def _reference_stats(self, batch: MicroBatch, *, keep_logits: bool) -> TokenStats:
        assert self.reference is not None
        with self.reference.use(self.policy) as module, _evaluating(module):
            return self._forward(module, batch, keep_logits=keep_logits)

    def _set_advantages(self, rollout: Rollout, rows: Sequence[int], *, update: bool = True) -> None:
        """Advantages of whole groups, from scores and the token KLs that are known."""
        index = torch.tensor(list(rows))
        score, groups = rollout.score[index], rollout.groups[index]
        kl = mask = None
        if self.credit.needs_kl:
            kl, mask = _stack([rollout.kl[row] for row in rows])
            score, groups = score.to(kl.device), groups.to(kl.device)
        values = self.credit.advantages(score, groups, kl, mask, update=update)
        for position, row in enumerate(rows):
            value = values[position]
            rollout.advantages[row] = value if value.dim() == 0 else value[: len(rollout.completion_ids[row])]

    def _advantages(self, batch: MicroBatch) -> Tensor:
        values = [batch.rollout.advantages[row] for row in batch.rows]
        if values[0].dim() == 0:  # type: ignore[union-attr]
            return torch.stack(values).to(batch.input_ids.device)  # type: ignore[arg-type]
        return self._gather(batch.rollout.advantages, batch)

    def _untrained_loss(self, rollout: Rollout, rows: Sequence[int]) -> Tensor | float:
        """What rows without gradient add to the reported loss: their ratio is 1, so −A; token means know no rows."""
        if self.aggregation == "token_mean" or self.config.surrogate != "clip":
            return 0.0
        values = [rollout.advantages[row] for row in rows if not rollout.trained[row]]
        scalars = [value for value in values if value is not None and value.dim() == 0]
        return -torch.stack(scalars).sum().to(self._device) / self.denominator if scalars else 0.0

    def _weighted_aux_loss(self, aux_loss: Tensor, batch: MicroBatch) -> Tensor:
        """The load-balancing loss of a micro-batch, weighted by its share of the update's tokens."""
        share = batch.num_tokens / max(1, self.tokens_in_update)
        self.tally.aux_loss = self.tally.aux_loss + share * aux_loss.detach()
        return self.aux_loss_weight * share * aux_loss

    def _denominator(self, shares: Sequence[Share]) -> float:
        """Completions in the update (excluded ones aside), or trained tokens for a token mean."""
        tokens = forward = completions = 0
        for share in shares:
            rollout = share.rollout
            for row in share.rows:
                trained = bool(rollout.trained[row])
                tokens += trained * len(rollout.completion_ids[row])
                forward += trained * (len(rollout.prompt_ids[row]) + len(rollout.completion_ids[row]))
                completions += trained or self.config.truncated_completions != "exclude"
        self.tokens_in_update, self.tokens_forward = tokens, forward
        return float(max(1, tokens if self.aggregation == "token_mean" else completions))

    def record_kl(self, rollout: Rollout, mode: str) -> None:
        """The mean token KL of a rollout, once it is known."""
        known = [kl for kl in rollout.kl if kl is not None]
        if known:
            self.metrics.add(mode, "kl", torch.cat(known).mean())

    # -- rows and tensors

    @property
    def _device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def _batches(self, rollout: Rollout, rows: Sequence[int], *, whole_groups: bool) -> Iterator[MicroBatch]:
        for part in plan_rows(rollout, rows, self._max_rows, whole_groups=whole_groups):
            batch = self._pad(rollout, part)
            if batch is not None:
                yield batch

    def _pad(self, rollout: Rollout, rows: Sequence[int]) -> MicroBatch | None:
        """The trained ones among `rows` as tensors; None when there is none."""
        kept = [row for row in rows if rollout.trained[row]]
        if not kept:
            return None
        multiple = self.config.pad_to_multiple_of
        return pad_rows(rollout, kept, pad_token_id=self.pad_token_id, multiple=multiple, device=self._device)

    def _group_rows(self, rollout: Rollout, rows: Sequence[int]) -> list[int]:
        """All rows of the groups that `rows` belong to, those that are not trained on included."""
        members = torch.isin(rollout.groups, rollout.groups[torch.tensor(list(rows))])
        return members.nonzero().flatten().tolist()

    def _store(self, column: list[Tensor | None], batch: MicroBatch, values: Tensor) -> None:
        """Keep each row's values, (B, C) → (T_i,) each."""
        for position, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            column[row] = values[position, :length].clone()

    def _gather(self, column: list[Tensor | None], batch: MicroBatch) -> Tensor:
        """Rows' kept values as one padded tensor, (B, C)."""
        result = torch.zeros_like(batch.completion_mask)
        for position, (row, length) in enumerate(zip(batch.rows, batch.lengths, strict=True)):
            values = column[row]
            assert values is not None
            result[position, :length] = values
        return result


def merge(shares: Sequence[Share]) -> list[Share]:
    """Neighbouring shares of one rollout as one, so that groups that a part boundary cuts come together again."""
    merged: list[Share] = []
    for share in shares:
        last = merged[-1] if merged else None
        if last is not None and last.rollout is share.rollout and last.rows.stop == share.rows.start:
            merged[-1] = Share(rollout=share.rollout, rows=range(last.rows.start, share.rows.stop))
        else:
            merged.append(share)
    return merged


def _stack(rows: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Ragged rows as a padded tensor and its mask; None is a row of no tokens. (N, T)"""
    known = [row for row in rows if row is not None]
    width = max((len(row) for row in known), default=1)
    device = known[0].device if known else torch.device("cpu")
    values = torch.zeros(len(rows), width, device=device)
    mask = torch.zeros_like(values)
    for index, row in enumerate(rows):
        if row is not None:
            values[index, : len(row)] = row
            mask[index, : len(row)] = 1
    return values, mask


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for a while: no dropout, no gradient checkpointing."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
