"""Dynamic sampling: replaces groups whose scores are all equal.

Such groups teach nothing. Groups of other prompts take their place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rloom.errors import NoCompletionError
from rloom.training.processes import ALONE, Processes
from rloom.types import Record, Rollout


def replace_degenerate(
    rollout: Rollout, draw: Callable[[int, int], Rollout], rounds: int, processes: Processes = ALONE
) -> tuple[Rollout, int]:
    """Replace groups without signal in at most `rounds` rounds. Returns the rollout and how many were replaced.

    `draw(count, round)` collects `count` groups of other prompts. Groups that are still without signal at the end stay,
    so that the rollout keeps its size. All processes take part in each round: one that needs none calls `draw(0, …)`.
    """
    replaced = 0
    for number in range(rounds):
        equal = rollout.degenerate()
        missing = [group for group, without in enumerate(equal) if without]
        if not processes.any(bool(missing)):
            break
        try:
            other = draw(len(missing), number)
        except NoCompletionError:
            # The present groups stay; the next round tries again.
            continue
        found = [group for group, without in enumerate(other.degenerate()) if not without]
        swaps = dict(zip(missing, found, strict=False))
        replaced += len(swaps)
        drawn = _drawn_together(rollout, other)
        rollout = _assembled([(other, swaps[g]) if g in swaps else (rollout, g) for g in range(len(equal))])
        rollout.drawn = drawn
    return rollout, replaced


def _drawn_together(rollout: Rollout, other: Rollout) -> list[Record]:
    """The records of both rollouts. Group numbers of the second continue those of the first."""
    before = 1 + max(record.group for record in rollout.drawn)
    for record in other.drawn:
        record.group += before
    return [*rollout.drawn, *other.drawn]


def _assembled(sources: list[tuple[Rollout, int]]) -> Rollout:
    """A rollout of groups taken from other rollouts, before its first use."""
    rows = [
        (source, row, new)
        for new, (source, old) in enumerate(sources)
        for row in (source.groups == old).nonzero().flatten().tolist()
    ]
    sampled = [r.sampling_logprobs[row] if r.sampling_logprobs is not None else None for r, row, _ in rows]
    return Rollout(
        prompt_ids=[r.prompt_ids[row] for r, row, _ in rows],
        completion_ids=[r.completion_ids[row] for r, row, _ in rows],
        groups=torch.tensor([new for _, _, new in rows]),
        scores=torch.stack([r.scores[row] for r, row, _ in rows]),
        score=torch.stack([r.score[row] for r, row, _ in rows]),
        trained=[r.trained[row] for r, row, _ in rows],
        num_groups=len(sources),
        sampling_logprobs=None if any(s is None for s in sampled) else sampled,  # type: ignore[arg-type]
        ended=[bool(r.ended and r.ended[row]) for r, row, _ in rows],
        masks=[r.masks[row] for r, row, _ in rows],
        prompt_inputs=[r.prompt_inputs[row] for r, row, _ in rows],
        total=torch.stack([r.total[row] for r, row, _ in rows]),  # type: ignore[index]
        records=[r.records[row] for r, row, _ in rows],
    )
