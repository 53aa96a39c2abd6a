"""What a preflight has found: as plain data, as text, and as a recipe."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rloom.config.older_names import RENAMED
from rloom.observe.numbers import GIB, duration
from rloom.preflight.dry_run import Measurement
from rloom.preflight.estimate import Estimate
from rloom.preflight.group_size import comparable, have_signal, spread_within
from rloom.preflight.recommend import Advice
from rloom.rewards.calling.addresses import may_hold_secret
from rloom.rewards.check import Report
from rloom.training.identity import without_secrets

BATCH_OPTIONS = (
    "train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size",
    "num_mini_batches",
)  # fmt: skip
"""Options that say how large a batch is, and would contradict a recommended size."""


@dataclass(slots=True, kw_only=True)
class Summary:
    """All of it."""

    found: Measurement
    recipe: dict[str, Any]  # what `rloom train` is to be given next; secrets among it
    rewards: list[Report]
    estimate: Estimate | None  # with the options as they were given; None: of unknown length
    recommended: Estimate | None  # with the recipe's
    advice: list[Advice]
    problems: list[str]  # reasons not to train like this
    notes: list[str]

    def plain(self) -> dict[str, Any]:
        """As JSON knows it."""
        plain = {
            "base": self.base(),
            "seconds_per_completion": self.found.seconds,
            "movement_of_one_update": self.found.movement,
            "memory": dataclasses.asdict(self.found.memory) if self.found.memory else None,
            "rewards": [dataclasses.asdict(report) for report in self.rewards],
            "run": dataclasses.asdict(self.estimate) if self.estimate else None,
            "run_as_recommended": dataclasses.asdict(self.recommended) if self.recommended else None,
            "recommended": [dataclasses.asdict(one) for one in self.advice],
            "problems": self.problems,
            "notes": self.notes,
        }
        return _finite(plain)

    def base(self) -> dict[str, Any]:
        """What the given model does: scores, their spread within groups, lengths."""
        groups, lengths = self.found.groups, self.found.completion_tokens
        scores, compared = [score for group in groups for score in group], comparable(groups)
        values = sorted(set(scores))
        return {
            "prompts": len(groups),
            "completions": len(self.found.records),
            "mean_score": fmean(scores) if scores else None,
            "success": fmean(score == values[1] for score in scores) if len(values) == 2 else None,
            "std_within_groups": spread_within(groups) if compared else None,
            "groups_with_signal": have_signal(groups) if compared else 0.0,
            "groups_left_out": len(groups) - len(compared),
            "mean_length": fmean(lengths),
            "longest": max(lengths),
            "truncated": fmean(record.completion.truncated for record in self.found.records),
        }

    def lines(self) -> list[str]:
        """As text for people."""
        parts = [("base model", self._base()), ("rewards", self._rewards()), ("speed", self._speed()),
                 ("memory", self._memory()), ("whole run", self._run())]  # fmt: skip
        lines = [f"{'' if n else title:12}{line}" for title, several in parts for n, line in enumerate(several)]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.advice:
            lines.append("recommended:")
        for one in self.advice:
            change = "as it is" if one.value == one.now else f"now {one.now}"
            lines.append(f"  {one.option}: {one.value} ({change}): {one.reason}")
        return lines

    def _base(self) -> list[str]:
        base = self.base()
        scores = "no scores" if base["mean_score"] is None else f"mean score {base['mean_score']:.3g}"
        success = "" if base["success"] is None else f", success {base['success']:.0%}"
        within = "" if base["std_within_groups"] is None else f", ± {base['std_within_groups']:.2g} within groups"
        count = f"{base['completions']} completions of {base['prompts']} prompts"
        signal = f"{base['groups_with_signal']:.0%} of groups have signal"
        if left_out := base["groups_left_out"]:
            signal += f" ({left_out} with fewer than two scores left out)"
        lengths = f"{base['mean_length']:.0f} tokens on average, at most {base['longest']}"
        return [f"{count}: {scores}{success}{within}; {signal}", f"{lengths}; {base['truncated']:.0%} truncated"]

    def _rewards(self) -> list[str]:
        return [
            f"{one.name}: {one.low:.3g} … {one.high:.3g}, {one.mean:.3g} ± {one.std:.2g}, noise "
            f"{'not looked at' if one.noise is None else f'± {one.noise:.2g}'}, "
            f"{1000 * one.seconds_per_sample:.2g} ms per completion"
            for one in self.rewards
        ]

    def _speed(self) -> list[str]:
        seconds = self.found.seconds
        tokens = fmean(self.found.completion_tokens) / max(seconds["generation"], 1e-9)
        shown = ", ".join(f"{phase} {1000 * value:.2g} ms" for phase, value in seconds.items())
        return [f"per completion: {shown}; generation writes {tokens:,.0f} tokens per second"]

    def _memory(self) -> list[str]:
        memory = self.found.memory
        if memory is None:
            return []
        fits = f"fits, in micro-batches of {memory.micro_batch:,} tokens" if memory.micro_batch else "does not fit"
        return [
            f"{memory.peak / GIB:.2f} of {memory.whole / GIB:.0f} GiB ({memory.device})",
            f"the worst shape, prompts of {memory.prompt} and completions of {memory.completion} tokens, {fits}",
        ]

    def _run(self) -> list[str]:
        if self.estimate is None:
            return ["of unknown length: a stream without max_steps"]
        lines = [f"{_in_words(self.estimate)}, as the options are"]
        if self.advice and self.recommended is not None:
            lines.append(f"{_in_words(self.recommended)}, with those that are recommended, at the same lengths")
        return [*lines, "evaluations and checkpoints apart"]


def _in_words(run: Estimate) -> str:
    cost = "" if run.cost is None else f", costs {run.cost:,.2f}"
    size = f"{run.updates:,} updates, {run.completions:,} completions, {run.tokens:,} tokens"
    return f"{size}: {duration(run.seconds)}{cost}"


def recipe(given: dict[str, Any], advice: list[Advice]) -> dict[str, Any]:
    """The options that were given, with what is recommended in their place.

    >>> one = Advice(option="num_generations", value=8, now=4, reason="")
    >>> recipe({"model_name_or_path": "m", "rloo_k": 4}, [one])
    {'model_name_or_path': 'm', 'num_generations': 8}
    """
    recommended = {one.option for one in advice}
    gone = {older for older, name in RENAMED.items() if name in recommended}
    gone |= set(BATCH_OPTIONS) if "per_device_train_batch_size" in recommended else set()
    kept = {name: value for name, value in given.items() if name not in gone}
    return kept | {one.option: one.value for one in advice}


def write_recipe(path: str | Path, options: dict[str, Any], advice: list[Advice]) -> None:
    """Write a recipe that `rloom train --config` takes, with the reasons of what is in it as comments. Recipes are
    shared: what may be secret is left out, and a comment names it."""
    import yaml

    kept = {name: value for name, value in without_secrets(options).items() if not may_hold_secret(value)}
    followed = [one for one in advice if options.get(one.option) == one.value]
    comments = [f"# {one.option}: {one.reason}" for one in followed]
    comments += [
        f"# {name}: it, or a part of it, is left out, as a secret; give it to `rloom train` as a flag"
        for name, value in options.items()
        if name not in kept or kept[name] != value
    ]
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True)
    Path(path).write_text("\n".join([*comments, text]), encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
