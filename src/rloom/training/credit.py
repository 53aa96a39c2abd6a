"""Turns raw scores into advantages.

The options are resolved once, in the constructors. The formulas are in `algo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.algo import (
    ADVANTAGE_ESTIMATORS,
    KL_PLACEMENTS,
    NORMALIZERS,
    MovingAverage,
    RunningMoments,
    clip,
    clip_advantages,
    length_penalty,
    missing_eos,
    normalize,
    reward_to_go,
    weighted_sum,
)
from rloom.config import RLOOConfig
from rloom.rewards.compose import Composition
from rloom.training.kl_weight import KLWeight
from rloom.training.processes import ALONE, Processes


class Shaper:
    """score_i = Σ_f w_f·f_i − penalties, then normalised, then clipped. Keeps the running moments.

    `composition` gates and scales each column of scores before the sum.
    """

    def __init__(self, config: RLOOConfig, weights: Tensor, composition: Composition | None = None) -> None:
        self.weights, self.composition = weights, composition
        self.penalty = config.missing_eos_penalty
        self.length_kind = config.length_regularization
        limit = config.max_completion_length
        self.length_options: dict[str, Any] = {
            "coefficient": config.length_coefficient,
            "max_length": limit,
            "margin": config.length_margin or max(1, limit // 5),
        }
        normalization = config.choices.normalize_rewards
        self.normalizer = None if normalization is None else NORMALIZERS[normalization]
        self.limits = config.choices.reward_clip_range
        self.moments = RunningMoments()

    def __call__(
        self, scores: Tensor, lengths: Tensor, ended: Tensor, failed: Tensor | None = None, *, update: bool
    ) -> Tensor:
        """(N, F) → (N,), NaN where nothing could score. `update=False` leaves the moments alone (evaluation).

        `failed` (N, F): where a reward's call failed. Gates on that reward are closed there.
        """
        if self.composition is not None:
            scores = self.composition.scaled(self.composition.gated(scores, failed), update=update)
        score = missing_eos(weighted_sum(scores, self.weights), ended, self.penalty)
        score = score - length_penalty(lengths, self.length_kind, **self.length_options)
        if self.normalizer is not None:
            score = self.normalizer.function(score, self.moments, update)
        return clip(score, self.limits)

    def together(
        self, processes: Processes, scores: Tensor, lengths: Tensor, ended: Tensor, failed: Tensor | None = None
    ) -> Tensor:
        """Shape a rollout of several processes. Normalisation statistics and running moments cover all processes.
        Returns this process' part."""
        if processes.alone:
            return self(scores, lengths, ended, failed, update=True)
        own = torch.zeros_like(scores, dtype=torch.bool) if failed is None else failed
        several = processes.gather((scores, lengths, ended, own))
        counts = [len(lengths) for _, lengths, _, _ in several]
        shaped = self(*(torch.cat(column) for column in zip(*several, strict=True)), update=True)
        return shaped.split(counts)[processes.rank]

    def total(self, scores: Tensor, failed: Tensor | None = None) -> Tensor:
        """The weighted sum of gated scores, without penalties or normalisation: `reward` in the log. (N, F) → (N,)"""
        gated = scores if self.composition is None else self.composition.gated(scores, failed)
        return weighted_sum(gated, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """The running moments of the score and of its terms."""
        moments = self.moments
        composed = self.composition.state_dict() if self.composition is not None else {}
        return {"moments": [moments.count, moments.mean, moments.squares], "composition": composed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.moments.count, self.moments.mean, self.moments.squares = state["moments"]
        if self.composition is not None:
            self.composition.load_state_dict(state["composition"])


class Credit:
    """Computes advantages from shaped scores and, where the KL is part of the reward, from token KLs."""

    def __init__(self, config: RLOOConfig, processes: Processes = ALONE) -> None:
        self.processes = processes
        self.kl_weight = KLWeight(config)
        self.placement = KL_PLACEMENTS[config.choices.kl_placement]
        self.estimator = ADVANTAGE_ESTIMATORS[config.choices.advantage_estimator]
        self.advantage_clip = config.choices.advantage_clip
        self.normalize_advantages = config.choices.normalize_advantages
        self.average = MovingAverage(momentum=config.baseline_momentum)

    @property
    def beta(self) -> float:
        """The present weight of the KL."""
        return self.kl_weight.value

    @property
    def needs_kl(self) -> bool:
        """Whether advantages depend on log-probabilities, and not on scores alone."""
        return self.beta != 0.0 and not self.placement.in_loss

    @property
    def needs_batch(self) -> bool:
        """Whether advantages depend on other groups, so that the whole rollout must be known first."""
        return self.normalize_advantages or self.estimator.needs_batch

    def advantages(
        self, score: Tensor, groups: Tensor, kl: Tensor | None, mask: Tensor | None, *, update: bool = True
    ) -> Tensor:
        """Advantages (N,), or (N, T) if the KL is credited per token. `kl` and `mask` are (N, T), None if not needed.

        `update=False`, in evaluation, does not update the moving average, and compares within this process.
        """
        if self.processes.alone or not (self.needs_batch and update):
            return self._advantages(score, groups, kl, mask, update=update)
        return self._together(score, groups, kl, mask)

    def _together(self, score: Tensor, groups: Tensor, kl: Tensor | None, mask: Tensor | None) -> Tensor:
        """Advantages that compare the completions of all processes. Returns this process' part."""
        own = [None if x is None else x.cpu() for x in (score, groups, kl, mask)]
        scores, numbers, kls, masks = zip(*self.processes.gather(own), strict=True)
        counts = [len(one) for one in scores]
        numbers = tuple(one + sum(counts[:rank]) for rank, one in enumerate(numbers))
        tables = [None if kl is None else torch.cat(_padded(several)) for several in (kls, masks)]
        whole = self._advantages(torch.cat(scores), torch.cat(numbers), *tables, update=True)
        mine = whole.split(counts)[self.processes.rank].to(score.device)
        return mine if kl is None or mine.dim() == 1 else mine[:, : kl.shape[1]]

    def _advantages(
        self, score: Tensor, groups: Tensor, kl: Tensor | None, mask: Tensor | None, *, update: bool
    ) -> Tensor:
        in_reward = kl is not None and self.placement.before_baseline
        reward = score - self.beta * (kl * mask).sum(-1) if in_reward else score  # type: ignore[operator]
        result = self.estimator.function(reward, groups, self.average, update)
        result = clip_advantages(result, self.advantage_clip)
        usable = self.estimator.usable(reward, groups)
        if kl is not None and self.placement.per_token:
            assert mask is not None
            result, usable = self._per_token(result, usable, kl, mask)
        if self.normalize_advantages and usable.any():
            known = torch.where(usable, result, result.new_full((), torch.nan))
            result = normalize(known)
        return torch.where(usable, result, torch.zeros_like(result))

    def _per_token(self, result: Tensor, usable: Tensor, kl: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Charge token t only with the KL from t on: the KL of earlier tokens does not depend on it."""
        to_go = reward_to_go(kl, mask)  # (N, T)
        charged = self.beta * (kl * mask).sum(-1, keepdim=True) if self.placement.before_baseline else 0.0
        per_token = result.unsqueeze(-1) + charged - self.beta * to_go
        return per_token, usable.unsqueeze(-1) & (mask > 0)

    def state_dict(self) -> dict[str, Any]:
        """The moving average, and the KL's weight."""
        return {"value": self.average.value, "kl_weight": self.kl_weight.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self.average.value = state["value"]
        # Checkpoints of older versions have no weight.
        if "kl_weight" in state:
            self.kl_weight.load_state_dict(state["kl_weight"])


def _padded(tables: Sequence[Tensor]) -> list[Tensor]:
    """Pad tables (N, T) to the width of the widest."""
    width = max(table.shape[1] for table in tables)
    return [torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables]
