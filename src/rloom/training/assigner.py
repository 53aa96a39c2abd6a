"""Credit assignment: log-probabilities, token KLs and advantages of a rollout.

An update calls `assign` once for each share of a rollout. The answer says where the advantages come from:

- *They are known*: the estimator uses scores alone, or a pass before the update has computed the KL.
- *From the training forward*: its own detached log-probabilities give the KL, the reward and the advantages
  (`take_in`), and the same graph is then run backward. This saves a forward. It needs each group whole in one
  micro-batch, and an update that trains on all of the rollout at the weights that sampled it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.algo import KL_ESTIMATORS
from rloom.config import RLOOConfig
from rloom.data.transfer import flat_numbers, upload
from rloom.models.head import exact_kl_chunks
from rloom.models.load import has_dropout
from rloom.models.logprobs import TokenStats
from rloom.models.verify import evaluating
from rloom.observe.clock import PhaseClock
from rloom.observe.metrics import Metrics
from rloom.observe.older_metrics import RolloutFacts, rollout_metrics
from rloom.training.credit import Credit
from rloom.training.passes import Passes, gather, keep, trained_rows
from rloom.training.processes import ALONE, Processes
from rloom.types import MicroBatch, Rollout


class CreditAssigner:
    """Fills a rollout's `policy_logprobs`, `reference_logprobs`, `kl` and `advantages`."""

    def __init__(
        self,
        config: RLOOConfig,
        *,
        passes: Passes,
        credit: Credit,
        metrics: Metrics,
        clock: PhaseClock | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.clock, self.processes = clock or PhaseClock(), processes
        self.config, self.passes, self.credit, self.metrics = config, passes, credit, metrics
        self.estimator = KL_ESTIMATORS[config.choices.kl_estimator]

    @functools.cached_property
    def _has_dropout(self) -> bool:
        return has_dropout(self.passes.policy)

    # -- before a forward

    def begin(self, rollout: Rollout) -> None:
        """Start the work that needs no scores: the GPU runs the reference while the host waits for rewards."""
        self.passes.batcher.settle(rollout)
        if self.passes.reference is not None and not self.estimator.needs_distributions:
            self._reference_pass(rollout)

    def assign(self, model: Any, rollout: Rollout, rows: Sequence[int], *, whole: bool, mode: str = "train") -> bool:
        """Compute the advantages of the rows that an update trains on, or return True: its forward will give them.

        `whole`: the update trains on all of the rollout. An update that is repeated in smaller micro-batches calls this
        again, since they may no longer hold whole groups.
        """
        update = mode == "train"
        # This is the rollout's first update.
        if all(advantage is None for advantage in rollout.advantages):
            if self._in_any(any(rollout.reference_logprobs[row] is None for row in trained_rows(rollout))):
                self.begin(rollout)
            if not self.credit.needs_kl:
                self._set_advantages(rollout, range(len(rollout)), update=update)
            if not whole:
                # Later updates need log-probabilities at the present weights, and this update changes them.
                self._first_pass(model, rollout, keep_logprobs=True)
                if self.credit.needs_kl:
                    self._set_advantages(rollout, range(len(rollout)), update=update)
        if all(rollout.advantages[row] is not None for row in rows):
            return False
        if self._fits_one_forward(model, rollout):
            return True
        self._first_pass(model, rollout, keep_logprobs=False)
        self._set_advantages(rollout, range(len(rollout)), update=update)
        return False

    def _fits_one_forward(self, model: Any, rollout: Rollout) -> bool:
        """Whether the training forward can give the advantages: every group fits a micro-batch, without dropout.

        The KL is that of the policy without dropout. A forward with dropout cannot give it.
        """
        if self.credit.needs_batch or (model.training and self._has_dropout):
            return False
        batcher, tokens = self.passes.batcher, self.passes.budget.tokens
        plans = batcher.plan(rollout, trained_rows(rollout), tokens, whole_groups=True)
        return not self._in_any(any(batcher.size(rollout, rows) > tokens for rows in plans))

    def _in_any(self, flag: bool) -> bool:
        """Whether a pass is needed here; layer by layer, in any process: where one runs it, all must."""
        return self.processes.any(flag) if self.processes.is_layered else flag

    def _first_pass(self, model: Any, rollout: Rollout, *, keep_logprobs: bool) -> None:
        """A forward without gradient: token KLs where the reward needs them, and log-probabilities if asked for.

        An update on the whole rollout keeps the log-probabilities of its own forward instead. With dropout the two
        differ.
        """

        def run(batch: MicroBatch) -> None:
            with evaluating(model):
                stats = self.passes.run(model, batch)
            if batch.idle:
                return
            if keep_logprobs:
                keep(batch.rollout.policy_logprobs, batch, stats.logprobs)
            if self.credit.needs_kl:
                keep(batch.rollout.kl, batch, self.kl(batch, stats))

        self.passes.without_gradient(rollout, run)

    def _reference_pass(self, rollout: Rollout) -> None:
        """The reference's log-probabilities of all rows that will be trained on."""

        def run(batch: MicroBatch) -> None:
            keep(batch.rollout.reference_logprobs, batch, self.passes.by_reference(batch).logprobs)

        with self.clock.measuring("reference"):
            self.passes.without_gradient(rollout, run)

    # -- from a forward

    @torch.no_grad()
    def take_in(self, batch: MicroBatch, stats: TokenStats) -> None:
        """Keep what a training forward at the rollout's weights computed: log-probabilities, KLs, advantages."""
        rollout = batch.rollout
        if batch.first:
            keep(rollout.policy_logprobs, batch, stats.logprobs.detach())
        if batch.one_forward:
            keep(rollout.kl, batch, self.kl(batch, stats))
            self._set_advantages(rollout, _whole_groups(rollout, batch.rows))

    def complete(self, rollout: Rollout, rows: Sequence[int]) -> None:
        """Compute advantages of groups in which no row is trained on, since no forward has computed them."""
        left = [row for row in rows if rollout.advantages[row] is None]
        if left:
            self._set_advantages(rollout, _whole_groups(rollout, left))

    def kl(self, batch: MicroBatch, stats: TokenStats) -> Tensor:
        """Token KLs (B, C), differentiable in the policy's log-probabilities."""
        if self.estimator.needs_distributions:
            return self._exact_kl(batch, stats)
        known = batch.rollout.reference_logprobs
        if any(known[row] is None for row in batch.rows):
            keep(known, batch, self._by_reference(batch).logprobs)
        return self.estimator.function(stats.logprobs, gather(known, batch))

    def _exact_kl(self, batch: MicroBatch, stats: TokenStats) -> Tensor:
        """The exact KL over the vocabulary, computed from both models' heads in chunks."""
        policy, reference = self.passes.whole, self.passes.reference
        assert reference is not None
        size = policy.get_output_embeddings().weight.shape[0]
        using = functools.partial(reference.use, policy, head_only=True)
        # The reference leaves the device before the backward, which needs the memory. Its head is loaded again there.
        with reference.staying():
            return batch.to_table(exact_kl_chunks(stats.head, self._by_reference(batch).head, size, using))

    def _by_reference(self, batch: MicroBatch) -> TokenStats:
        """The reference's forward in the middle of an update, which is counted as the reference's time."""
        with self.clock.measuring("reference"):
            return self.passes.by_reference(batch)

    def advantages(self, batch: MicroBatch) -> Tensor:
        """A micro-batch's advantages: (B,), or (B, C) where each token has its own."""
        values = [batch.rollout.advantages[row] for row in batch.rows]
        if values[0].dim() == 0:  # type: ignore[union-attr]
            return upload(torch.stack(values), self.passes.device)  # type: ignore[arg-type]
        return gather(batch.rollout.advantages, batch)

    def _set_advantages(self, rollout: Rollout, rows: Sequence[int], *, update: bool = True) -> None:
        """Set the advantages of whole groups, from their scores and token KLs."""
        index = torch.tensor(list(rows))
        # Estimators expect group numbers that begin at 0.
        _, groups = rollout.groups[index].unique(return_inverse=True)
        score, kl, mask = rollout.score[index], None, None
        if self.credit.needs_kl:
            kl, mask = _stack([rollout.kl[row] for row in rows])
            score = upload(score, kl.device)
            groups = upload(groups, kl.device)
        values = self.credit.advantages(score, groups, kl, mask, update=update)
        for row, value in zip(rows, values.unbind(0), strict=True):
            rollout.advantages[row] = value if value.dim() == 0 else value[: len(rollout.drawn_ids(row))]

    # -- after the first update

    def record(self, rollout: Rollout, mode: str) -> None:
        """Log a rollout's metrics after its first update. In training they cover all processes."""
        processes = self.processes if mode == "train" else ALONE
        known, kl = [kl for kl in rollout.kl if kl is not None], torch.tensor(torch.nan)
        if processes.any(bool(known)):
            kl = processes.mean(torch.cat(known or [torch.zeros(0)]))
            self.metrics.add(mode, "kl", kl)
        beta = self.credit.beta
        if mode == "train" and self.config.kl_target is not None:
            self.metrics.add(mode, "beta", beta)
            # The next rollout has another weight. This waits for the device, as the log will.
            self.credit.kl_weight.follow(float(kl))
        if self.config.log_older_metrics:
            facts = RolloutFacts.joined(processes.gather(RolloutFacts.of(rollout)))
            for name, value in rollout_metrics(facts, beta).items():
                self.metrics.add(mode, name, value)
        self._record_mismatch(rollout, mode, processes)

    def _record_mismatch(self, rollout: Rollout, mode: str, processes: Processes) -> None:
        """Log how far the engine's log-probabilities are from the trainer's at equal weights.

        Small differences are rounding; large ones are a fault.
        """
        sampled = rollout.sampling_logprobs
        rows = [row for row, policy in enumerate(rollout.policy_logprobs) if policy is not None]
        difference = torch.zeros(0)
        if sampled is not None and rows:
            policy = torch.cat([rollout.policy_logprobs[row] for row in rows]).float()  # type: ignore[misc]
            engine = upload(flat_numbers([sampled[row] for row in rows]), policy.device)
            difference = (policy - engine).abs()
        if processes.any(difference.numel() > 0):
            self.metrics.add(mode, "mismatch/mean", processes.mean(difference))
            self.metrics.add(mode, "mismatch/max", processes.max(difference))


def _whole_groups(rollout: Rollout, rows: Sequence[int]) -> list[int]:
    """All rows of the groups that `rows` belong to, including rows that are not trained on."""
    members = torch.isin(rollout.groups, rollout.groups[torch.tensor(list(rows))])
    return members.nonzero().flatten().tolist()


def _stack(rows: list[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as a padded tensor and its mask, (N, T). None is a row without tokens."""
    known = [row for row in rows if row is not None]
    device = known[0].device if known else torch.device("cpu")
    lengths = [0 if row is None else len(row) for row in rows]
    there = torch.arange(max([*lengths, 1])) < torch.tensor(lengths).unsqueeze(1)
    flat, mask = upload(there.flatten().nonzero().squeeze(-1), device), upload(there.float(), device)
    values = torch.zeros(mask.numel(), device=device)
    return (values.index_copy(0, flat, torch.cat(known)) if known else values).view(mask.shape), mask
