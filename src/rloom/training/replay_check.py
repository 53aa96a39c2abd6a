"""Whether a replayed update is that of the run: its options, and the norm of its gradient, which shows the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from rloom.observe.runs import RunReader
from rloom.training.identity import differences, facts_of

CLOSE = 1e-4
"""How far apart two norms may be, as a share: they are summed in other orders."""

NOT_OF_THE_UPDATE = {
    "report_to", "push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision",
}  # fmt: skip
"""Options that a replay sets otherwise: it tells no tracker and no hub."""


def changed_options(trainer: Any, run: RunReader) -> list[str]:
    """What differs between the run's model, data, rewards and options, and those of a trainer, in words."""
    then, now = run.facts(), facts_of(trainer)
    found: list[str] = []
    for part in ("fixed", "options"):
        known = {name: value for name, value in then.get(part, {}).items() if name not in NOT_OF_THE_UPDATE}
        found += differences(known, now[part])
    return found


def changed_norm(trainer: Any, run: RunReader, step: int, norm: float) -> Iterator[str]:
    """Says it, in words, if the norm of an update's gradient is not the logged one: then its weights were others."""
    schedule, logged = trainer.schedule, _logged_norm(run, step)
    whole = schedule.parts_per_update == schedule.parts * schedule.passes
    # A scaler, for float16, makes gradients larger until they are clipped.
    scaled = getattr(trainer.accelerator, "scaler", None) is not None
    if logged is not None and whole and not scaled and not math.isclose(norm, logged, rel_tol=_close(trainer.model)):
        yield f"the gradient's norm was logged as {logged:.6g} and is {norm:.6g}: the weights before it were others"


def _logged_norm(run: RunReader, step: int) -> float | None:
    """The norm that was logged after an update; None where there is no such log."""
    found = [entry["grad_norm"] for entry in run.metrics() if entry["step"] == step and "grad_norm" in entry]
    norm = found[-1] if found else None
    return norm if isinstance(norm, float) and math.isfinite(norm) else None


def _close(model: torch.nn.Module) -> float:
    """How close norms of gradients in their dtype are: those of bfloat16 are rounded to it."""
    return max([CLOSE, *(torch.finfo(p.grad.dtype).eps for p in model.parameters() if p.grad is not None)])
