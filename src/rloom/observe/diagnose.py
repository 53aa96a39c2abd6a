"""What is going wrong in a run, in plain words: symptom, likely cause, what to change.

One rule is one function of the run's logs and options; it returns a line, or None. Numbers are compared over windows
of several logs, so that the noise of one batch sets nothing off. The thresholds are rules of thumb: what they give is a
hint, never an error. docs/seeds.md says which document gives which advice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rloom.config import RLOOConfig

WINDOW = 3  # logs that a value is averaged over
FAR = 4  # times a limit: told at once
KL_PER_TOKEN = 0.5  # nats; text has usually come apart by then
ALIKE = 0.9  # share of groups without signal
TRUNCATED = 0.5
CLIPPED = 0.2
MISMATCH = 0.1  # nats per token; rounding of bfloat16 gives 0.01 to 0.02
FLAT_LOGS = 50
KEPT = 500  # entries of the log, from either end


@dataclass(frozen=True, slots=True)
class Course:
    """A metric's values over the logs, oldest first."""

    values: list[float]

    def __len__(self) -> int:
        return len(self.values)

    def first(self, count: int = WINDOW) -> float:
        """The mean of the first values."""
        return fmean(self.values[:count])

    def last(self, count: int = WINDOW) -> float:
        """The mean of the latest values."""
        return fmean(self.values[-count:])


class Logs:
    """A run's log entries by metric, without what was not measured.

    >>> Logs([{"kl": 0.1}, {"kl": None}, {"kl": 0.3}])["kl"].values
    [0.1, 0.3]
    """

    def __init__(self, entries: Sequence[dict[str, Any]]) -> None:
        self.entries = entries

    def __getitem__(self, name: str) -> Course:
        found = [entry.get(name) for entry in self.entries]
        return Course([float(v) for v in found if isinstance(v, (int, float)) and math.isfinite(v)])

    def long(self, *names: str, at_least: int = 2 * WINDOW) -> bool:
        """Whether there are so many values of each."""
        return all(len(self[name]) >= at_least for name in names)


Rule = Callable[[Logs, "RLOOConfig"], str | None]


def kl_explodes(logs: Logs, args: RLOOConfig) -> str | None:
    """The policy runs away from the reference."""
    kl = logs["kl"]
    far = len(kl) > 0 and kl.values[-1] > FAR * KL_PER_TOKEN  # nobody has the time to wait for a trend
    rising = logs.long("kl") and kl.last() >= KL_PER_TOKEN and kl.last() > fmean(kl.values[-2 * WINDOW : -WINDOW])
    if not (far or rising):
        return None
    value, course = (kl.values[-1] if far else kl.last()), (" and rising" if rising else "")
    return (
        f"the KL is {value:.2g} per token{course}: the policy leaves the reference, and texts come apart; lower "
        f"learning_rate (now {args.learning_rate:g}), or raise beta (now {args.beta:g})"
    )


def nothing_is_scored(logs: Logs, args: RLOOConfig) -> str | None:
    """No completion has a score: there is nothing to learn from."""
    unscored = logs["completions/unscored_ratio"].values[-WINDOW:]
    if len(unscored) < WINDOW or min(unscored) < 1 or "completions/unscored_ratio" not in logs.entries[-1]:
        return None
    return (
        "no completion gets a score, so nothing is learned: functions failed (rewards/NAME/errors), gave None for all, "
        "or were asked about no row, because no row has the value that a route or `when` names; set "
        "on_reward_error='raise' to see what fails, and try `rloom check-reward`"
    )


def reward_falls(logs: Logs, args: RLOOConfig) -> str | None:
    """Training makes the model worse by its own measure."""
    if not logs.long("reward", "reward_std"):
        return None
    reward, spread = logs["reward"], logs["reward_std"].first()
    if reward.last() > reward.first() - 0.5 * spread or spread == 0:
        return None
    return (
        f"the reward fell from {reward.first():.3g} to {reward.last():.3g}: updates are too large; lower learning_rate "
        f"(now {args.learning_rate:g}), raise beta (now {args.beta:g}), and start again from an earlier checkpoint"
    )


def reward_jumps(logs: Logs, args: RLOOConfig) -> str | None:
    """More noise than signal from one log to the next."""
    if not logs.long("reward", "reward_std", at_least=10):
        return None
    values, spread = logs["reward"].values[-10:], logs["reward_std"].last(10)
    jumps = [abs(b - a) for a, b in pairwise(values)]
    moves = abs(values[-1] - values[0]) > 0.5 * sum(jumps)  # that is a trend
    if spread == 0 or moves or fmean(jumps) < 0.5 * spread:
        return None
    return (
        f"the reward jumps by {fmean(jumps):.2g} between logs, where completions differ by {spread:.2g}: too few of "
        f"them; raise gradient_accumulation_steps or num_generations (now {args.num_generations}), or lower "
        f"learning_rate (now {args.learning_rate:g})"
    )


def gradient_spikes(logs: Logs, args: RLOOConfig) -> str | None:
    """One update far larger than the others."""
    if not logs.long("grad_norm", at_least=10):
        return None
    *before, latest = logs["grad_norm"].values[-10:]
    if latest < 10 * median(before) or median(before) == 0:
        return None
    limit = args.max_grad_norm or 0.0
    what = f"max_grad_norm={limit:g} held it" if limit else "nothing clips it: set max_grad_norm=1"
    return (
        f"grad_norm is {latest:.3g}, and was {median(before):.3g}: one batch pulls hard ({what}); a larger batch, "
        "reward_clip_range or a lower learning_rate makes it steadier"
    )


def scores_are_constant(logs: Logs, args: RLOOConfig) -> str | None:
    """Every completion of every prompt has had the same score."""
    if not logs.long("reward_std", at_least=WINDOW) or not _constant(logs):
        return None
    return (
        f"every completion scores {logs['reward'].last():.3g}: the reward function tells nothing apart, so nothing is "
        "learnt; try it with `rloom check-reward`, and look at the completions (log_completions=True)"
    )


def _constant(logs: Logs) -> bool:
    return max(logs["reward_std"].values) <= 1e-8


def cold_start(logs: Logs, args: RLOOConfig) -> str | None:
    """Alike from the beginning: the model hardly ever does what is rewarded, or always."""
    if not _alike(logs) or logs["frac_reward_zero_std"].first() < ALIKE:
        return None
    return (
        f"{logs['frac_reward_zero_std'].last():.0%} of groups have had equal scores from the start, which teach "
        "nothing: the task is too hard or too easy for this model; train it with `rloom sft` first, take prompts "
        "that it sometimes gets right, or give partial credit"
    )


def groups_became_alike(logs: Logs, args: RLOOConfig) -> str | None:
    """Alike by now: solved, or collapsed."""
    if not _alike(logs) or logs["frac_reward_zero_std"].first() >= ALIKE:
        return None
    return (
        f"{logs['frac_reward_zero_std'].last():.0%} of groups have equal scores by now (reward "
        f"{logs['reward'].last():.3g}): solved, or collapsed to one answer; harder or more diverse prompts, a higher "
        f"temperature (now {args.temperature:g}), or dynamic_sampling"
    )


def _alike(logs: Logs) -> bool:
    if not logs.long("frac_reward_zero_std", "reward_std") or _constant(logs):
        return False
    return logs["frac_reward_zero_std"].last() >= ALIKE


def entropy_collapses(logs: Logs, args: RLOOConfig) -> str | None:
    """The policy has made up its mind, and explores no more."""
    if not logs.long("entropy"):
        return None
    entropy = logs["entropy"]
    if entropy.first() <= 0 or entropy.last() > 0.1 * entropy.first():
        return None
    return (
        f"entropy fell from {entropy.first():.2g} to {entropy.last():.2g}: the policy hardly explores any more; lower "
        f"learning_rate (now {args.learning_rate:g}), raise beta (now {args.beta:g}) or temperature"
    )


def completions_are_cut_off(logs: Logs, args: RLOOConfig) -> str | None:
    """Scores of half-finished texts."""
    clipped = logs["completions/clipped_ratio"]
    if len(clipped) < WINDOW or clipped.last() <= TRUNCATED:
        return None
    return (
        f"{clipped.last():.0%} of completions are cut off at max_completion_length={args.max_completion_length}: raise "
        "it, set missing_eos_penalty=1, or mask_truncated_completions=True"
    )


def length_explodes(logs: Logs, args: RLOOConfig) -> str | None:
    """Longer and longer: something rewards length, or the policy repeats itself."""
    length = logs["completions/mean_length"]
    near = 0.8 * args.max_completion_length
    if len(length) < 2 * WINDOW or length.last() < max(2 * length.first(), near):
        return None
    return (
        f"completions grew from {length.first():.0f} to {length.last():.0f} tokens: the reward pays for length, or "
        f'texts repeat; set length_regularization="soft_overlong", or raise beta (now {args.beta:g})'
    )


def completions_vanish(logs: Logs, args: RLOOConfig) -> str | None:
    """Shorter and shorter, down to nothing."""
    length = logs["completions/mean_length"]
    if len(length) < 2 * WINDOW or length.last() > max(0.1 * length.first(), 1.5) or length.first() < 4:
        return None
    return (
        f"completions shrank from {length.first():.0f} to {length.last():.1f} tokens: the end has become the safe "
        f"answer; raise beta (now {args.beta:g}), lower learning_rate, or lower missing_eos_penalty"
    )


def updates_are_drastic(logs: Logs, args: RLOOConfig) -> str | None:
    """The ratio to the old policy leaves its range for many completions."""
    clipped, ratio = logs["clip_ratio/region_mean"], logs["val/ratio"]
    far = len(ratio) >= WINDOW and not 0.5 <= ratio.last() <= 2.0
    if not far and (len(clipped) < WINDOW or clipped.last() <= CLIPPED):
        return None
    what = f"val/ratio is {ratio.last():.2g}" if far else f"{clipped.last():.0%} of ratios are clipped"
    return (
        f"{what}: updates between consecutive policies are too drastic; lower learning_rate (now "
        f"{args.learning_rate:g}) or num_iterations (now {args.num_iterations})"
    )


def engine_differs(logs: Logs, args: RLOOConfig) -> str | None:
    """Completions are drawn from another distribution than the one that is trained."""
    found = logs["mismatch/mean"]
    if len(found) < WINDOW or found.last() < MISMATCH:
        return None
    return (
        f"log-probabilities of the engine and of the training forward differ by {found.last():.2g} per token, far more "
        f"than rounding: unless that is the model's dropout, what is sampled is not the policy that is trained; set "
        f"engine='transformers' (now {args.engine!r}), and compile_generation=False if it was on"
    )


def reward_is_gamed(logs: Logs, args: RLOOConfig) -> str | None:
    """The reward rises, and what it stands for falls."""
    if not logs.long("reward") or not logs.long("eval_win_rate_low", "eval_win_rate_high", at_least=2):
        return None
    before, now = logs["eval_win_rate_low"].values[0], logs["eval_win_rate_high"].values[-1]
    if now >= before or logs["reward"].last() <= logs["reward"].first():
        return None
    return (
        f"the reward rises while the judge's win rate fell (from {logs['eval_win_rate'].values[0]:.0%} to "
        f"{logs['eval_win_rate'].values[-1]:.0%}): the reward is being gamed; raise beta (now {args.beta:g}), make the "
        "reward stricter, or stop at an earlier checkpoint"
    )


def no_progress(logs: Logs, args: RLOOConfig) -> str | None:
    """Plenty of signal, and no movement."""
    if not logs.long("reward", "reward_std", "frac_reward_zero_std", at_least=FLAT_LOGS):
        return None
    reward, spread = logs["reward"], logs["reward_std"].first()
    moved = reward.last(10) - reward.first(10)
    if _constant(logs) or logs["frac_reward_zero_std"].last() > 0.5 or abs(moved) > 0.1 * spread:
        return None
    return (
        f"the reward has not moved in {len(reward)} logs, though completions differ: raise learning_rate (now "
        f"{args.learning_rate:g}), lower beta (now {args.beta:g}), or more completions per update"
    )


RULES: tuple[Rule, ...] = (
    kl_explodes, nothing_is_scored, reward_falls, reward_jumps, gradient_spikes, scores_are_constant, cold_start,
    groups_became_alike, entropy_collapses, completions_are_cut_off, length_explodes, completions_vanish,
    updates_are_drastic, engine_differs, reward_is_gamed, no_progress,
)  # fmt: skip


class Doctor:
    """Asks all rules at each log; a rule that has spoken is quiet for `quiet` updates."""

    def __init__(self, quiet: int = 100) -> None:
        self.quiet = quiet
        self.spoke: dict[str, int] = {}  # the update at which a rule last said something

    def look(self, entries: Sequence[dict[str, Any]], args: RLOOConfig, step: int) -> list[str]:
        """What the rules say now.

        >>> from types import SimpleNamespace
        >>> doctor, args = Doctor(), SimpleNamespace(max_completion_length=8)
        >>> logs = [{"completions/clipped_ratio": 1.0}] * 3
        >>> [line.split(":")[0] for line in doctor.look(logs, args, step=3)]
        ['100% of completions are cut off at max_completion_length=8']
        >>> doctor.look(logs, args, step=4)
        []
        """
        if len(entries) > 2 * KEPT:  # rules look at the beginning and at the end; a long run must not make logs slow
            entries = [*entries[:KEPT], *entries[-KEPT:]]
        logs, found = Logs(entries), []
        for rule in RULES:
            name = rule.__name__
            if name in self.spoke and step - self.spoke[name] < self.quiet:
                continue
            line = rule(logs, args)
            if line is not None:
                self.spoke[name] = step
                found.append(line)
        return found
