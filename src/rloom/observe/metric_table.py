"""The table of all metrics: names, meanings, reductions, and who logs them.

A new metric needs an entry here. docs/metrics.md shows these entries: a test compares them, and `python -m
rloom.observe.metric_table` prints the tables. Reward functions may not log the names of the trainer's own metrics.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Metric:
    """One or more metrics that are explained together. In a name, NAME stands for a reward's and K for a number.

    `reduction` says how values become one: `mean` over those since the last log; `last` for a running count; `total`
    for a running total of each process, where the largest value of a process counts, summed over processes.
    """

    names: tuple[str, ...]
    what: str
    how_to_read: str = ""
    reduction: Literal["mean", "last", "total"] = "mean"
    logged_by: Literal["trainer", "rewards"] = "trainer"


METRICS = (
    Metric(
        ("reward",),
        "mean over completions of Σ_f w_f · score_f, gates applied, before penalties, normalisation and clip",
        "should rise; it is what you asked for, not what you want: look at the completions",
    ),
    Metric(("reward_std",), "its standard deviation over the batch"),
    Metric(
        ("rewards/NAME/mean", "rewards/NAME/std"),
        "one reward function's values, where it applied",
        "None when it applied to nothing",
    ),
    Metric(
        ("rewards/NAME/time",),
        "time spent in the function, per rollout; in all workers and threads together",
        "longer than generation: isolate it, or give it more workers",
    ),
    Metric(("rewards/NAME/none_ratio",), "share of completions that it gave no score; absent when 0"),
    Metric(
        ("rewards/NAME/errors", "rewards/NAME/timeouts", "rewards/NAME/crashes"),
        "samples per rollout on which it failed, was cut off, or took its worker process with it; absent when 0",
        "the first of each is named in a warning",
    ),
    Metric(
        (
            "judge/calls",
            "judge/cached",
            "judge/unparsed",
            "judge/prompt_tokens",
            "judge/completion_tokens",
            "judge/cost",
        ),
        "a judge's totals so far",
        reduction="total",
        logged_by="rewards",
    ),
    Metric(
        ("frac_reward_zero_std",),
        "share of groups whose scores are all equal, of two scores or more",
        "these teach nothing (but for the KL); near 1: the task is too hard, too easy, or the reward too coarse",
    ),
    Metric(
        ("kl",),
        "mean over completion tokens of the KL estimate from the reference, at the rollout's weights; only "
        "with `beta` ≠ 0. With the KL in the loss: of the completions of the rollout's first update",
        "0 at the start. k1 may be negative on a batch: that is noise, not a bug. Rising steeply: the policy "
        "leaves the reference",
    ),
    Metric(
        ("beta",),
        "the present weight of the KL; only with `kl_target`, which adapts it after each rollout",
        "rises while `kl` is above its target. Far from where it began: set `beta` near it, or another target",
    ),
    Metric(
        ("mismatch/mean", "mismatch/max"),
        "mean and largest absolute difference between the trainer's and the engine's log-probabilities of "
        "completion tokens, at equal weights",
        "rounding: 0.009 in a bfloat16 run, below 1e-5 in float32. Growing or large: sampling and training "
        "no longer agree on the policy",
    ),
    Metric(
        ("entropy",),
        "mean over the completion tokens that an update was run on of −Σ_v π(v) log π(v), at the training temperature",
        "falls as the policy becomes sure; towards 0: no more exploration",
    ),
    Metric(
        ("loss",),
        "−mean of ρ·A",
        "around 0 on-policy, since advantages of a group sum to 0. **It says nothing about progress**; its "
        "gradient does the work",
    ),
    Metric(
        ("updates/skipped",),
        "updates whose gradient was not finite: they are not made; absent when there are none. Five in a row "
        "end the run",
        "a score that overflows, or weights on their way there",
    ),
    Metric(("grad_norm", "learning_rate"), "before clipping; at this update"),
    Metric(
        ("clip_ratio/low_mean", "clip_ratio/low_min"),
        "share of an update's completions whose ratio is below 1−ε and whose advantage is negative; with "
        '`ratio_level="token"` of each completion\'s tokens, then their mean and least',
        "0 on-policy. Above a few percent with several updates per rollout: smaller steps",
    ),
    Metric(
        ("clip_ratio/high_mean", "clip_ratio/high_max"), "the same above 1+ε with a positive advantage; the largest"
    ),
    Metric(("clip_ratio/region_mean",), "both"),
    Metric(
        ("completions/mean_length", "completions/min_length", "completions/max_length"),
        "tokens that the policy drew, the end token included",
        "running up to the limit: length is rewarded somehow",
    ),
    Metric(
        ("completions/clipped_ratio",),
        "share cut off at `max_completion_length`",
        "high: raise the limit, or `missing_eos_penalty`, or mask them",
    ),
    Metric(
        (
            "completions/mean_terminated_length",
            "completions/min_terminated_length",
            "completions/max_terminated_length",
        ),
        "over those that ended by themselves",
    ),
    Metric(
        ("completions/repetition",),
        "mean over completions of the share of pairs of neighbouring tokens that stood there before (of n pairs with d "
        "different ones, 1 − d/n)",
        "rising with the reward: texts repeat because that is paid for; look at the completions",
    ),
    Metric(
        ("completions/unscored_ratio",), "share of completions without a score or that could not be had; absent when 0"
    ),
    Metric(
        ("completions/skipped",),
        "completions of updates that were not run because their advantage is exactly 0 (equal scores, no KL, "
        "no `compute_loss` of your own); absent when 0",
        "the same question as `frac_reward_zero_std`",
    ),
    Metric(("completions/replaced_groups",), "groups that `dynamic_sampling` replaced, per rollout"),
    Metric(("num_tokens",), "prompt and completion tokens so far", reduction="last"),
    Metric(
        ("step_time",),
        "seconds per update, sampling included; of several processes, the main one's (all other numbers are "
        "those of all)",
    ),
    Metric(
        ("time/generation",),
        "seconds per update of encoding prompts, waiting for the engine and decoding. All of `time/…` is of the main "
        "process, by the host's clock, no second twice; what a GPU still does when the host goes on is counted where "
        "the host waits for it",
        "most of an update where completions are long",
    ),
    Metric(
        ("time/rewards",),
        "the same of waiting for scores once all completions are there. What streaming rewards did before, while "
        "others were generated, was not waited for: `rewards/NAME/time` has it",
        "large: isolate a slow function, so that it runs during generation, or give it more workers",
    ),
    Metric(
        ("time/reference",),
        "the same of the reference's forwards; 0 with `beta` = 0. On a GPU, of launching them: they run while rewards "
        "are awaited",
    ),
    Metric(
        ("time/update",),
        "the same of forwards, backwards, the exchange between processes and the optimizer's step",
        "large: raise `max_tokens_per_micro_batch` while memory allows it",
    ),
    Metric(
        ("time/saving",),
        "the same of checkpoints; those of the updates before, since a checkpoint is written after its update's log",
        "large: raise `save_steps`",
    ),
    Metric(("aux_loss",), "a mixture of experts' load-balancing loss"),
    Metric(("epoch", "step"), "counted by transformers", reduction="last"),
)

EVALUATION_METRICS = (
    Metric(
        ("reward", "rewards/NAME/mean", "completions/mean_length", "completions/clipped_ratio", "kl"),
        "as above",
        "two evaluations whose intervals overlap by far have shown no difference",
    ),
    Metric(
        ("rewards/NAME/pass@1", "rewards/NAME/pass@K"),
        "where all scores of the set are 0 or 1: 1 − C(n−c, k)/C(n, k) from c passes in n, the unbiased "
        "probability that one of k completions passes",
        "pass@1 rising and pass@K falling: the policy becomes sure of what it knew",
    ),
    Metric(
        ("win_rate",),
        "share of prompts on which a judge prefers the first completion to the opponent's; a tie is half, "
        "and so is a verdict that turns with the order; None where the judge never answered",
        "reward up and win rate down: the reward is being gamed; raise `beta`",
    ),
)
"""Means over all prompts of a set, as `eval_NAME` with an interval, `eval_NAME_low` and `eval_NAME_high`."""

OLDER_METRICS = (
    Metric(
        ("objective/kl",),
        "mean of Σ_t kl_it over the completions that are trained on: per completion, where `kl` is per token",
        "as `kl`, and grows with length",
    ),
    Metric(
        ("objective/entropy",),
        "1/N Σ_i −Σ_t log π(y_it)",
        "an estimate of the entropy of whole completions; falls with length too",
    ),
    Metric(("objective/scores",), "mean of score_i over the completions that have one"),
    Metric(("objective/non_score_reward",), "β · `objective/kl`", "the price of the KL. Some programs log it negated"),
    Metric(
        ("objective/rlhf_reward",),
        "`objective/scores` − `objective/non_score_reward`",
        "what training maximises: should keep going up",
    ),
    Metric(
        ("rlhf_reward_var_per_prompt",),
        "mean over prompts of the variance of score_i − β Σ_t kl_it within the group",
        "falls as the policy becomes sure; 0: nothing left to compare",
    ),
    Metric(
        ("policy/approxkl_avg",),
        "mean of ½ (log ρ)², ρ the ratio to the old policy as the loss uses it",
        "0 on the first update of a rollout. Not `objective/kl`: this is how far updates of one rollout go",
    ),
    Metric(("policy/clipfrac_avg",), "`clip_ratio/region_mean`"),
    Metric(("policy/entropy_avg",), "`entropy`"),
    Metric(("loss/policy_avg",), "the loss without KL or auxiliary terms", "says nothing about progress"),
    Metric(
        ("val/ratio", "val/ratio_var"),
        'mean and variance (over n) of ρ, over completions (over tokens with `ratio_level="token"`)',
        "floats around 1.0. 2, 1000 or 0.1: updates are too drastic; lower `learning_rate` or `num_iterations`",
    ),
    Metric(
        ("val/num_eos_tokens",),
        "completions of the rollout that ended with an end token",
        "low: raise `max_completion_length`, or set `missing_eos_penalty`",
    ),
    Metric(("eps",), "`episode` / seconds of training"),
    Metric(("episode",), "completions asked for so far, over all processes", reduction="last"),
    Metric(("lr",), "`learning_rate`"),
)
"""The names of older documents, logged with `log_older_metrics=True`."""


@functools.cache
def is_own(name: str) -> bool:
    """Whether a name is the trainer's own, so that a reward function must not log it.

    >>> is_own("reward"), is_own("rewards/anything"), is_own("eval_mine"), is_own("judge/calls"), is_own("mine")
    (True, True, True, False, False)
    """
    own = [metric for metric in METRICS if metric.logged_by == "trainer"]
    folders = tuple(f"{one.split('/')[0]}/" for metric in own for one in metric.names if "/" in one)
    names = {one for metric in (*own, *EVALUATION_METRICS, *OLDER_METRICS) for one in metric.names}
    return name in names or name.startswith((*folders, "eval_", "train_"))


def is_total(name: str) -> bool:
    """Whether values of a metric are running totals of a process: a judge's counts, and what is logged beside them."""
    totals = {f"{one.split('/')[0]}/" for metric in METRICS if metric.reduction == "total" for one in metric.names}
    return name.startswith(tuple(totals))


@functools.cache
def find(name: str) -> Metric | None:
    """The entry of a name, given without `eval_`. None for a name that a reward function has chosen.

    >>> find("rewards/my_reward/pass@4").what[:24]
    'where all scores of the '
    """
    for metric in (*METRICS, *EVALUATION_METRICS, *OLDER_METRICS):
        for one in metric.names:
            pattern = re.escape(one).replace("NAME", ".+").replace("@K", r"@\d+")
            if re.fullmatch(pattern, name):
                return metric
    return None


def markdown(metrics: tuple[Metric, ...], *, prefix: str = "", what: str = "what it is") -> str:
    """The rows of docs/metrics.md."""
    lines = [f"| metric | {what} | how to read it |", "|---|---|---|"]
    for metric in metrics:
        names = ", ".join(f"`{prefix}{name}`" for name in metric.names)
        lines.append(f"| {names} | {metric.what} | {metric.how_to_read} |".replace("|  |", "| |"))
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(METRICS), markdown(EVALUATION_METRICS, prefix="eval_"), sep="\n\n")
    print(f"\n{markdown(OLDER_METRICS, what='formula')}")
