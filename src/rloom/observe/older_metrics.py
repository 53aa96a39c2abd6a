"""The metrics of older documents: `objective/…`, `policy/…`, `val/…`.

They are logged with `log_older_metrics=True`. Formulas are in docs/metrics.md. They cost no extra forward: they are
sums over what the step has computed anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rloom.types import Rollout


@dataclass(slots=True, kw_only=True)
class RolloutFacts:
    """What these metrics are computed from."""

    score: Tensor  # (N,)
    groups: Tensor  # (N,)
    ended: list[bool] | None
    kl: list[float | None]  # sums over whole completions
    logprobs: list[float | None]  # the policy's, sums over whole completions

    @classmethod
    def of(cls, rollout: Rollout) -> RolloutFacts:
        """The facts of one rollout."""
        return cls(
            score=rollout.score,
            groups=rollout.groups,
            ended=rollout.ended,
            kl=[None if kl is None else float(kl.sum()) for kl in rollout.kl],
            logprobs=[None if one is None else float(one.sum()) for one in rollout.policy_logprobs],
        )

    @classmethod
    def joined(cls, several: Sequence[RolloutFacts]) -> RolloutFacts:
        """Join the parts of several processes. Group numbers stay distinct."""
        before = [sum(len(one.score) for one in several[:rank]) for rank in range(len(several))]
        ended = [one.ended for one in several]
        return cls(
            score=torch.cat([one.score for one in several]),
            groups=torch.cat([one.groups + first for one, first in zip(several, before, strict=True)]),
            ended=None if None in ended else [flag for one in ended for flag in one or []],
            kl=[value for one in several for value in one.kl],
            logprobs=[value for one in several for value in one.logprobs],
        )


def rollout_metrics(rollout: RolloutFacts, beta: float) -> dict[str, float | Tensor]:
    """The metrics of a rollout at its own weights. Each mean is over the completions that have the value: some have no
    score, and completions that are not trained on have no KL."""
    score = rollout.score
    kl = torch.tensor([float("nan") if one is None else one for one in rollout.kl])
    charge = beta * kl.nanmean() if bool((~kl.isnan()).any()) else torch.zeros(())
    # A completion that is not trained on is not charged for a KL.
    reward = score - beta * kl.nan_to_num()
    known = ~score.isnan()
    result: dict[str, float | Tensor] = {
        "objective/scores": score.nanmean(),
        "objective/non_score_reward": charge,
        "objective/rlhf_reward": score.nanmean() - charge,
        "rlhf_reward_var_per_prompt": _mean(_variances(reward[known], rollout.groups[known])),
        "val/num_eos_tokens": float(sum(rollout.ended)) if rollout.ended is not None else float("nan"),
    }
    if bool((~kl.isnan()).any()):
        result["objective/kl"] = kl.nanmean()
    surprises = [-logprobs for logprobs in rollout.logprobs if logprobs is not None]
    if surprises:
        result["objective/entropy"] = sum(surprises) / len(surprises)
    return result


def _variances(values: Tensor, groups: Tensor) -> list[Tensor]:
    parts = [values[groups == group] for group in groups.unique()]
    return [part.var() for part in parts if len(part) > 1]


def _mean(values: list[Tensor]) -> float:
    return float(torch.stack(values).mean()) if values else float("nan")


def ratio_metrics(log_ratios: Tensor) -> dict[str, Tensor]:
    """The metrics of an update's ratios, from their logarithms. There is one per completion or per token. (N,)

    >>> found = ratio_metrics(torch.tensor([0.0, 0.0]))
    >>> {name: float(value) for name, value in found.items()}
    {'policy/approxkl_avg': 0.0, 'val/ratio': 1.0, 'val/ratio_var': 0.0}
    """
    ratios = log_ratios.exp()
    return {
        "policy/approxkl_avg": 0.5 * log_ratios.square().mean(),
        "val/ratio": ratios.mean(),
        "val/ratio_var": ratios.var(correction=0),
    }
