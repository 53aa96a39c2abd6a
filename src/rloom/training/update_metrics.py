"""Metrics of an update: sums over its micro-batches.

The sums stay on the device, and become metrics once at the update's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from rloom.algo import LossTerms
from rloom.models.logprobs import TokenStats
from rloom.observe.metrics import Metrics, scalar_mean
from rloom.observe.older_metrics import ratio_metrics
from rloom.training.processes import ALONE, Processes


@dataclass(slots=True)
class UpdateMetrics:
    """Sums over the forwards of one update."""

    entropy: Tensor | float = 0.0
    aux_loss: Tensor | float = 0.0
    tokens: Tensor | float = 0.0
    skipped: int = 0  # completions of groups without signal, which were not run
    low: list[Tensor] = field(default_factory=list)  # share clipped per completion, (B,) each
    high: list[Tensor] = field(default_factory=list)
    older: bool = False  # whether older documents' metrics are wanted too
    log_ratios: list[Tensor] = field(default_factory=list)  # per completion or per token, as in the loss
    policy_loss: Tensor | float = 0.0  # without KL and auxiliary losses

    @torch.no_grad()
    def add(self, stats: TokenStats, terms: LossTerms, mask: Tensor) -> None:
        """Add one micro-batch."""
        self.entropy = self.entropy + (stats.entropy * mask).sum()
        self.tokens = self.tokens + mask.sum()
        self.low.append(_per_completion(terms.low_clipped, mask))
        self.high.append(_per_completion(terms.high_clipped, mask))
        if self.older:
            self.log_ratios.append(terms.log_ratio if terms.log_ratio.dim() == 1 else terms.log_ratio[mask > 0])

    def record(self, metrics: Metrics, mode: str, processes: Processes = ALONE) -> None:
        """Log the means over all processes."""
        if processes.alone:
            self._record(metrics, mode)
        else:
            UpdateMetrics.joined(processes.gather(self._on_host())).record(metrics, mode)

    def _on_host(self) -> UpdateMetrics:
        """A copy on the host, with each list joined, to be sent to other processes."""

        def moved(value: Any) -> Any:
            if isinstance(value, list):
                return [torch.cat(value).detach().cpu()] if value else []
            return value.detach().cpu() if isinstance(value, Tensor) else value

        return UpdateMetrics(**{one.name: moved(getattr(self, one.name)) for one in fields(self)})

    @staticmethod
    def joined(several: Sequence[UpdateMetrics]) -> UpdateMetrics:
        """Join the sums of several processes, as if one process had run all micro-batches."""
        return UpdateMetrics(
            entropy=sum(one.entropy for one in several),
            aux_loss=sum(one.aux_loss for one in several),
            tokens=sum(one.tokens for one in several),
            skipped=sum(one.skipped for one in several),
            low=[part for one in several for part in one.low],
            high=[part for one in several for part in one.high],
            older=several[0].older,
            log_ratios=[part for one in several for part in one.log_ratios],
            policy_loss=sum(one.policy_loss for one in several),
        )

    def _record(self, metrics: Metrics, mode: str) -> None:
        if self.skipped:
            metrics.add(mode, "completions/skipped", float(self.skipped))
        # Nothing was trained on in this update.
        if not self.low:
            return
        metrics.add(mode, "entropy", scalar_mean(torch.as_tensor(self.entropy), self.tokens))
        if isinstance(self.aux_loss, Tensor):
            metrics.add(mode, "aux_loss", self.aux_loss)
        low, high = torch.cat(self.low), torch.cat(self.high)
        metrics.add(mode, "clip_ratio/low_mean", low.mean())
        metrics.add(mode, "clip_ratio/low_min", low.min())
        metrics.add(mode, "clip_ratio/high_mean", high.mean())
        metrics.add(mode, "clip_ratio/high_max", high.max())
        metrics.add(mode, "clip_ratio/region_mean", (low + high).mean())
        if self.older:
            self._record_older(metrics, mode, (low + high).mean())

    def _record_older(self, metrics: Metrics, mode: str, clipped: Tensor) -> None:
        named = {
            **ratio_metrics(torch.cat(self.log_ratios).detach()),
            "policy/clipfrac_avg": clipped,
            "policy/entropy_avg": scalar_mean(torch.as_tensor(self.entropy), self.tokens),
            "loss/policy_avg": torch.as_tensor(self.policy_loss),
        }
        for name, value in named.items():
            metrics.add(mode, name, value)


def _per_completion(clipped: Tensor, mask: Tensor) -> Tensor:
    flags = clipped.float()
    return flags if flags.dim() == 1 else (flags * mask).sum(-1) / mask.sum(-1).clamp(min=1)
