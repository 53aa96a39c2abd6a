"""Hints for options outside the recommended ranges.

A hint is one log line at the start of a run, never an error. One rule is one function of the options; it returns a
hint, or None. docs/seeds.md says where each range is from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rloom.config import RLOOConfig
from rloom.printable import get_logger

logger = get_logger(__name__)

FULL_RATE = (5e-7, 3e-6)
ADAPTER_RATE = (1e-6, 1e-5)
GROUP = (4, 16)
BETA = (0.01, 0.1)
GRADIENT = (0.5, 1.0)
BATCH = (128, 512)


def learning_rate(args: RLOOConfig, adapter: bool) -> str | None:
    """Learning rates are lower than in supervised training. Adapters tolerate higher ones."""
    low, high = ADAPTER_RATE if adapter else FULL_RATE
    what = "an adapter" if adapter else "all weights"
    if args.learning_rate > high:
        return (
            f"learning_rate={args.learning_rate:g} is high for {what} (usual: {low:g} to {high:g}): if the KL explodes,"
            " lower it"
        )
    if args.learning_rate < low:
        return (
            f"learning_rate={args.learning_rate:g} is low for {what} (usual: {low:g} to {high:g}): expect slow learning"
        )
    return None


def group_size(args: RLOOConfig, adapter: bool) -> str | None:
    """The baseline is the mean of K−1 completions, so small groups make it noisy."""
    k, (low, high) = args.num_generations, GROUP
    if k < low:
        return f"num_generations={k}: the baseline is the mean of {k - 1}; {low} to 8 make a steadier one"
    if k > high:
        return f"num_generations={k}: beyond {high} returns diminish; more prompts per batch may serve better"
    return None


def kl_weight(args: RLOOConfig, adapter: bool) -> str | None:
    """A small beta lets the policy drift; a large one holds it in place."""
    low, high = BETA
    if args.beta < low:
        return (
            f"beta={args.beta:g}: little holds the policy near the reference (usual: {low:g} to {high:g}); watch for "
            "gamed rewards"
        )
    if args.beta > high:
        return f"beta={args.beta:g} holds the policy close to the reference (usual: {low:g} to {high:g})"
    return None


def gradient_clip(args: RLOOConfig, adapter: bool) -> str | None:
    """Without a value function, gradients spike, so clipping matters."""
    low, high = GRADIENT
    norm = args.max_grad_norm or 0.0
    if norm == 0.0:
        return (
            f"max_grad_norm=0: gradients are not clipped, and without a value function they spike ({low:g} to {high:g})"
        )
    return None if low <= norm <= high else f"max_grad_norm={norm:g} is outside the usual {low:g} to {high:g}"


def global_batch(args: RLOOConfig, adapter: bool) -> str | None:
    """Large batches average out the variance of policy gradients."""
    low, high = BATCH
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    if size < low:
        return (
            f"{size} completions per update: {low} to {high} average more noise out; raise gradient_accumulation_steps"
        )
    return None if size <= high else f"{size} completions per update: more than the usual {low} to {high}"


def truncation(args: RLOOConfig, adapter: bool) -> str | None:
    """A truncated completion says little about the completion that it would have become."""
    if args.truncation.trained and not args.missing_eos_penalty and not args.length_regularization:
        return (
            "truncated completions are trained on as they are: mask_truncated_completions=True, or missing_eos_penalty"
        )
    return None


RULES: tuple[Callable[[Any, bool], str | None], ...] = (
    learning_rate, group_size, kl_weight, gradient_clip, global_batch, truncation,
)  # fmt: skip


def hints(args: RLOOConfig, *, adapter: bool) -> list[str]:
    """The hints that the rules give for these options."""
    return [hint for rule in RULES if (hint := rule(args, adapter))]


def advise(args: RLOOConfig, *, adapter: bool) -> None:
    """Log the hints, unless `advice=False`."""
    if args.advice:
        for hint in hints(args, adapter=adapter):
            logger.warning("hint: %s", hint)
