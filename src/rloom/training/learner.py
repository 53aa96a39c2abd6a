"""Learning from a rollout: log-probabilities, KL, advantages, loss, backward.

Two forms, one gradient. In the *one-forward* form the training forward's own detached log-probabilities give the KL,
the reward and the advantages, and the same graph is then run backward. It needs the whole of each group in one
micro-batch and one update that sees all of the rollout. Otherwise `prepare` makes a pass of its own first, at the
rollout's weights (*two passes*).

One denominator covers the update: micro-batches change speed and memory, never the gradient.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rloom.algo import aggregate, policy_loss, token_kl
from rloom.data.batching import Batcher
from rloom.data.transfer import flat_numbers, upload
from rloom.errors import ConfigError
from rloom.models.attention import CompiledLayers, own_attention, packed_attention, running
from rloom.models.head import exact_kl_chunks
from rloom.models.logprobs import Forward, TokenStats
from rloom.models.precision import added_as_they_come
from rloom.models.reference import FrozenReference, Reference
from rloom.observe.metrics import Metrics
from rloom.observe.older import rollout_metrics
from rloom.training.budget import TokenBudget
from rloom.training.credit import Credit
from rloom.training.tally import Tally
from rloom.types import MicroBatch, Prompt, Rollout, Share

logger = logging.getLogger(__name__)


NO_GRAD_FACTOR = 8
"""How many times more tokens a forward may have when nothing is kept for a backward."""


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
        batcher: Batcher,
        budget: TokenBudget,
        aux_loss_weight: float,
        keeps_gradients: bool = True,
    ) -> None:
        self.config, self.policy, self.reference = config, policy, reference
        self.credit, self.metrics, self.aux_loss_weight = credit, metrics, aux_loss_weight
        self.batcher, self.budget = batcher, budget
        self.keeps_gradients = keeps_gradients  # else somebody else does (DeepSpeed), and nothing can be taken back
        self.forward = Forward(policy, config.temperature, keep_logits=config.keep_logits)
        self.reference_forward = self.forward
        if isinstance(reference, FrozenReference):
            self.reference_forward = Forward(reference.model, config.temperature)
        choices = config.choices
        self.estimator = choices.kl_estimator
        self.kl_in_loss = config.beta != 0.0 and choices.kl_placement == "loss"
        self.aggregation = choices.loss_aggregation
        self.loss_options: dict[str, Any] = {
            "level": choices.ratio_level,
            "surrogate": choices.surrogate,
            "epsilon_low": config.epsilon,
            "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
            "dual_clip": choices.dual_clip,
        }
        self.attending = [self.forward.base]
        if self.reference_forward is not self.forward:
            self.attending.append(self.reference_forward.base)
        self.compiled = CompiledLayers(self.attending) if config.compile_layers and batcher.packed else None
        self.denominator = 1.0  # of the update in progress
        self.tokens_in_update = 1
        self.tokens_forward = 0  # prompts included
        self.tally = Tally(older=self.config.log_older_metrics)

    # -- before the first update

    def prepare(self, model: Any, rollout: Rollout, *, whole: bool, mode: str = "train") -> None:
        """Fill in what cannot wait for the training forward.

        `whole`: the update that follows is the first and trains on all of the rollout at its own weights.
        """
        train = mode == "train"
        self.batcher.settle(rollout)
        if self.reference is not None and self.estimator != "full":
            self._reference_pass(rollout)
        if not self.credit.needs_kl:
            self._set_advantages(rollout, range(len(rollout)), update=train)
        if not whole or (self.credit.needs_kl and not self._fits_one_forward(rollout)):
            self._first_pass(model, rollout, keep=not whole)
            if self.credit.needs_kl:
                self._set_advantages(rollout, range(len(rollout)), update=train)

    def _fits_one_forward(self, rollout: Rollout) -> bool:
        if self.credit.needs_batch:
            return False
        plans = self.batcher.plan(rollout, self._trained(rollout), self.budget.tokens, whole_groups=True)
        return all(self.batcher.size(rollout, rows) <= self.budget.tokens for rows in plans)

    def _first_pass(self, model: Any, rollout: Rollout, *, keep: bool) -> None:
        """For a KL in the reward, token KLs; and with `keep` the log-probabilities at the rollout's weights.

        An update that trains on all of it at these weights takes those of its own forward: with dropout they differ.
        """

        def run(batch: MicroBatch) -> None:
            with _evaluating(model):
                stats = self.forward(model, batch)
            if keep:
                self._store(rollout.policy_logprobs, batch, stats.logprobs)
            if self.credit.needs_kl:
                self._store(rollout.kl, batch, self._kl(batch, stats))

        self._without_gradient(rollout, run)

    def _reference_pass(self, rollout: Rollout) -> None:
        """The reference's log-probabilities of all that will be trained on."""

        def run(batch: MicroBatch) -> None:
            self._store(rollout.reference_logprobs, batch, self._reference_stats(batch).logprobs)

        self._without_gradient(rollout, run)

    def _without_gradient(self, rollout: Rollout, run: Callable[[MicroBatch], None]) -> None:
        """Run over all trained rows. Nothing is kept for a backward, so that many more tokens fit at a time."""

        @torch.no_grad()
        def passes() -> None:
            budget = self.budget.tokens * NO_GRAD_FACTOR
            with self._attention():
                for rows in self.batcher.plan(rollout, self._trained(rollout), budget, whole_groups=False):
                    batch = self.batcher.make(rollout, rows, self._device)
                    with _running(batch):
                        run(batch)

        self.budget.retrying(passes)

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
        Out of memory, the update is redone from its start in smaller micro-batches, where gradients are kept here.
        """
        shares = merge(shares)
        for share in shares:  # of a checkpoint, it was not prepared here
            self.batcher.settle(share.rollout)
        self._count(shares)
        work = lambda: self._accumulate(model, shares, compute_loss, backward)  # noqa: E731
        if self.keeps_gradients:
            known = [_known(share.rollout) for share in shares]

            def undo() -> None:
                self._undo()
                for columns in known:  # what the failed attempt has found out, with its own dropout
                    for column, values in columns:
                        column[:] = values

            return self.budget.retrying(work, undo=undo)
        try:
            return work()
        except torch.OutOfMemoryError as error:
            error.add_note(
                "under DeepSpeed the update cannot be done again in smaller pieces: set max_tokens_per_micro_batch "
                f"below {self.budget.tokens}"
            )
            raise

    def _undo(self) -> None:
        """Take back what a failed update has added to the gradients."""
        self.policy.zero_grad(set_to_none=True)

    def _accumulate(self, model: Any, shares: Sequence[Share], compute_loss: Any, backward: Any) -> Tensor:
        self.tally = Tally(older=self.config.log_older_metrics)
        for share in shares:  # a budget that has shrunk may no longer hold whole groups
            if self._one_forward(share.rollout, share.rows) and not self._fits_one_forward(share.rollout):
                self._first_pass(model, share.rollout, keep=False)
                self._set_advantages(share.rollout, range(len(share.rollout)))
        plans = [
            (share.rollout, rows, one_forward)
            for share in shares
            for one_forward in [self._one_forward(share.rollout, share.rows)]
            for rows in self.batcher.plan(
                share.rollout, self._worthwhile(share), self.budget.tokens, whole_groups=one_forward
            )
        ]
        total = torch.zeros((), device=self._device)
        with self._attention(), added_as_they_come(self.policy) as widen:
            for index, (rollout, rows, one_forward) in enumerate(plans):
                batch = self.batcher.make(rollout, rows, self._device)
                batch.first = any(rollout.policy_logprobs[row] is None for row in rows)
                batch.one_forward = one_forward and self._one_forward(rollout, rows)
                with _running(batch):
                    loss = compute_loss(model, batch)
                    backward(loss, index == len(plans) - 1)
                widen()
                total += loss.detach()
        if not plans:  # nothing to learn from; the optimizer still wants to see gradients
            backward(sum((p.sum() * 0.0 for p in self.policy.parameters() if p.requires_grad), total), True)
        for share in shares:
            total += self._untrained_loss(share)
        self.tally.record(self.metrics, "train")
        return total

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """A micro-batch's share of the update's loss, ready for backward."""
        rollout, mask = batch.rollout, batch.completion_mask
        stats = self.forward(model, batch, with_aux_loss=self.aux_loss_weight != 0.0)
        if batch.first:
            self._store(rollout.policy_logprobs, batch, stats.logprobs.detach())
        if batch.one_forward:
            with torch.no_grad():
                self._store(rollout.kl, batch, self._kl(batch, stats))
            self._set_advantages(rollout, _whole_groups(rollout, batch.rows))
        old = stats.logprobs.detach() if batch.first else self._gather(rollout.policy_logprobs, batch)
        terms = policy_loss(stats.logprobs, old, self._advantages(batch), mask, **self.loss_options)
        loss = aggregate(terms.values, mask, self.aggregation) / self.denominator
        self.tally.policy_loss = self.tally.policy_loss + loss.detach()
        if self.kl_in_loss:
            kl = self._kl(batch, stats)
            self._store(rollout.kl, batch, kl.detach())
            loss = loss + self.config.beta * aggregate(kl, mask, self.aggregation) / self.denominator
        if stats.aux_loss is not None:
            if torch.is_grad_enabled() and not stats.aux_loss.requires_grad:
                raise ConfigError(
                    "the load-balancing loss of this mixture of experts has no gradient: with use_reentrant=True, "
                    "checkpoints hide the routers. Set gradient_checkpointing_kwargs={'use_reentrant': False}"
                )
            loss = loss + self._weighted_aux_loss(stats.aux_loss, batch)
        self.tally.add(stats, terms, mask)
        return loss

    @torch.no_grad()
    def evaluate(self, model: Any, rollout: Rollout) -> Tensor:
        """The loss of a rollout at its own weights (ratio 1), and the metrics that go with it."""
        self.prepare(model, rollout, whole=True, mode="eval")
        share = Share(rollout=rollout, rows=range(len(rollout)))
        self._count([share])
        self.tally = Tally(older=self.config.log_older_metrics)
        total = torch.zeros((), device=self._device)
        one_forward = self._one_forward(rollout, share.rows)
        plans = self.batcher.plan(rollout, self._trained(rollout), self.budget.tokens, whole_groups=one_forward)
        with self._attention():
            for rows in plans:
                batch = self.batcher.make(rollout, rows, self._device)
                batch.first = any(rollout.policy_logprobs[row] is None for row in rows)
                batch.one_forward = one_forward
                with _running(batch):
                    total += self.loss(model, batch)
        total += self._untrained_loss(share)
        self.tally.record(self.metrics, "eval")
        return total

    def record_kl(self, rollout: Rollout, mode: str) -> None:
        """The mean token KL of a rollout, once it is known."""
        known = [kl for kl in rollout.kl if kl is not None]
        if known:
            self.metrics.add(mode, "kl", torch.cat(known).mean())

    def record_older(self, rollout: Rollout, mode: str) -> None:
        """Older documents' metrics of a rollout, where they are wanted."""
        if self.config.log_older_metrics:
            for name, value in rollout_metrics(rollout, self.config.beta).items():
                self.metrics.add(mode, name, value)

    def record_mismatch(self, rollout: Rollout, mode: str) -> None:
        """How far the engine's log-probabilities are from the trainer's, at equal weights: rounding, or a fault."""
        sampled = rollout.sampling_logprobs
        rows = [row for row, policy in enumerate(rollout.policy_logprobs) if policy is not None]
        if sampled is None or not rows:
            return
        policy = torch.cat([rollout.policy_logprobs[row] for row in rows]).float()  # type: ignore[misc]
        engine = upload(flat_numbers([sampled[row] for row in rows]), policy.device)
        difference = (policy - engine).abs()
        self.metrics.add(mode, "mismatch/mean", difference.mean())
        self.metrics.add(mode, "mismatch/max", difference.max())

    def try_worst_case(
        self, model: Any, prompt: int, completion: int, k: int, *, pictured: Prompt | None = None
    ) -> int:
        """Run a micro-batch of the budget's size forward and backward, all prompts and completions at their limits.

        With `pictured`, a prompt with images, all prompts are that one: such rows cost more.

        Returns its tokens. The gradients are those of 0, and are taken back. Out of memory, the budget shrinks as ever.
        """
        groups = max(1, self.budget.tokens // (prompt + k * completion)) + 1
        token = self.batcher.pad_token_id
        rollout = Rollout(
            prompt_ids=[pictured.token_ids if pictured else [token] * prompt for _ in range(groups * k)],
            completion_ids=[[token] * completion for _ in range(groups * k)],
            groups=torch.arange(groups).repeat_interleave(k),
            scores=torch.zeros(groups * k, 1),
            score=torch.zeros(groups * k),
            trained=[True] * (groups * k),
            prompt_inputs=[pictured.inputs for _ in range(groups * k)] if pictured else [],
        )

        def attempt() -> int:
            rows = self.batcher.plan(rollout, range(len(rollout)), self.budget.tokens, whole_groups=False)[0]
            batch = self.batcher.make(rollout, rows, self._device)
            with self._attention(), _running(batch):
                (self.forward(model, batch).logprobs.sum() * 0.0).backward()
            return self.batcher.size(rollout, rows)

        try:
            return self.budget.retrying(attempt, undo=self._undo)
        finally:
            self._undo()

    # -- which rows

    def _trained(self, rollout: Rollout) -> list[int]:
        return [row for row, trained in enumerate(rollout.trained) if trained]

    def _worthwhile(self, share: Share) -> list[int]:
        """Rows that can have a gradient. Decided on the host, from scores: a group whose scores are all equal has
        advantages of exactly 0, and when nothing else is in the loss it costs neither forward nor backward."""
        rollout = share.rollout
        rows = [row for row in share.rows if rollout.trained[row]]
        if self.credit.needs_kl or self.kl_in_loss or self.aux_loss_weight:
            return rows
        kept = [row for row in rows if bool((rollout.advantages[row] != 0).any())]  # type: ignore[union-attr]
        self.tally.skipped += len(rows) - len(kept)
        return kept

    def _one_forward(self, rollout: Rollout, rows: Sequence[int]) -> bool:
        """Whether the advantages of these rows are still to come from the training forward."""
        return self.credit.needs_kl and any(rollout.advantages[row] is None for row in rows)

    def _count(self, shares: Sequence[Share]) -> None:
        """The update's denominator: completions (excluded ones aside), or trained tokens for a token mean."""
        tokens = forward = completions = 0
        for share in shares:
            rollout = share.rollout
            for row in share.rows:
                trained = rollout.trained[row]
                tokens += trained * len(rollout.completion_ids[row])
                forward += trained * (len(rollout.prompt_ids[row]) + len(rollout.completion_ids[row]))
                completions += trained or self.config.truncation != "exclude"
        self.tokens_in_update, self.tokens_forward = tokens, forward
        self.denominator = float(max(1, tokens if self.aggregation == "token_mean" else completions))

    # -- KL and advantages

    def _kl(self, batch: MicroBatch, stats: TokenStats) -> Tensor:
        """Token KLs (B, C), differentiable in the policy's log-probabilities."""
        if self.estimator == "full":
            reference = self._reference_stats(batch)
            size = self.policy.get_output_embeddings().weight.shape[0]
            assert self.reference is not None
            using = functools.partial(self.reference.use, self.policy)
            return batch.to_table(exact_kl_chunks(stats.head, reference.head, size, using))
        known = batch.rollout.reference_logprobs
        if any(known[row] is None for row in batch.rows):
            self._store(known, batch, self._reference_stats(batch).logprobs)
        return token_kl(self.estimator, stats.logprobs, self._gather(known, batch))

    @torch.no_grad()
    def _reference_stats(self, batch: MicroBatch) -> TokenStats:
        assert self.reference is not None
        with self.reference.use(self.policy) as module, _evaluating(module):
            return self.reference_forward(module, batch)

    def _set_advantages(self, rollout: Rollout, rows: Sequence[int], *, update: bool = True) -> None:
        """Advantages of whole groups, from scores and the token KLs that are known."""
        index = torch.tensor(list(rows))
        _, groups = rollout.groups[index].unique(return_inverse=True)  # numbered from 0
        score, kl, mask = rollout.score[index], None, None
        if self.credit.needs_kl:
            kl, mask = _stack([rollout.kl[row] for row in rows])
            score = upload(score, kl.device)
            groups = upload(groups, kl.device)
        values = self.credit.advantages(score, groups, kl, mask, update=update)
        for row, value in zip(rows, values.unbind(0), strict=True):
            rollout.advantages[row] = value if value.dim() == 0 else value[: len(rollout.completion_ids[row])]

    def _advantages(self, batch: MicroBatch) -> Tensor:
        values = [batch.rollout.advantages[row] for row in batch.rows]
        if values[0].dim() == 0:  # type: ignore[union-attr]
            return upload(torch.stack(values), self._device)  # type: ignore[arg-type]
        return self._gather(batch.rollout.advantages, batch)

    def _untrained_loss(self, share: Share) -> Tensor | float:
        """What rows without gradient add to the reported loss: their ratio is 1, so −A; of tokens they have none."""
        choices = self.config.choices
        if self.aggregation == "token_mean" or choices.surrogate != "clip" or choices.ratio_level != "sequence":
            return 0.0
        rollout = share.rollout
        values = [rollout.advantages[row] for row in share.rows if not rollout.trained[row]]
        scalars = [value for value in values if value is not None and value.dim() == 0]
        return -torch.stack(scalars).sum().to(self._device) / self.denominator if scalars else 0.0

    def _weighted_aux_loss(self, aux_loss: Tensor, batch: MicroBatch) -> Tensor:
        """The load-balancing loss of a micro-batch, weighted by its share of the update's tokens."""
        share = batch.num_tokens / max(1, self.tokens_in_update)
        self.tally.aux_loss = self.tally.aux_loss + share * aux_loss.detach()
        return self.aux_loss_weight * share * aux_loss

    # -- tensors

    @property
    def _device(self) -> torch.device:
        return next(self.policy.parameters()).device

    def _attention(self) -> Any:
        """Attention over packed rows for policy and reference, until the last backward is done."""
        if not self.batcher.packed:
            return nullcontext()
        return packed_attention(self.attending, self.compiled)

    def _store(self, column: list[Tensor | None], batch: MicroBatch, values: Tensor) -> None:
        """Keep each row's values, (B, C) → (T_i,) each: views into one flat tensor."""
        flat = values.flatten()[batch.flat]
        for row, part in zip(batch.rows, flat.split(batch.lengths), strict=True):
            column[row] = part

    def _gather(self, column: list[Tensor | None], batch: MicroBatch) -> Tensor:
        """Rows' kept values as one padded table, (B, C)."""
        flat = torch.cat([column[row] for row in batch.rows])  # type: ignore[misc]
        return batch.to_table(upload(flat, self._device))


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


def _known(rollout: Rollout) -> list[tuple[list[Any], list[Any]]]:
    """What an update may fill in, each with what it holds now."""
    columns: list[list[Any]] = [rollout.policy_logprobs, rollout.kl, rollout.advantages]
    return [(column, list(column)) for column in columns]


def _whole_groups(rollout: Rollout, rows: Sequence[int]) -> list[int]:
    """All rows of the groups that `rows` belong to, those that are not trained on included."""
    members = torch.isin(rollout.groups, rollout.groups[torch.tensor(list(rows))])
    return members.nonzero().flatten().tolist()


def _stack(rows: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Ragged rows as a padded tensor and its mask; None is a row of no tokens. (N, T)"""
    known = [row for row in rows if row is not None]
    device = known[0].device if known else torch.device("cpu")
    lengths = [0 if row is None else len(row) for row in rows]
    there = torch.arange(max([*lengths, 1])) < torch.tensor(lengths).unsqueeze(1)
    flat, mask = upload(there.flatten().nonzero().squeeze(-1), device), upload(there.float(), device)
    values = torch.zeros(mask.numel(), device=device)
    return (values.index_copy(0, flat, torch.cat(known)) if known else values).view(mask.shape), mask


@contextmanager
def _running(batch: MicroBatch) -> Iterator[None]:
    with own_attention() if batch.packed is None else running(batch.packed):
        yield


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for a while: no dropout, no gradient checkpointing."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
