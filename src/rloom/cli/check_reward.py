"""`rloom check-reward module:function --data prompts.jsonl`: what a reward gives, before a run depends on it."""

from __future__ import annotations

import dataclasses
import json
import math
from argparse import Namespace
from itertools import islice
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rloom.cli.messages import show_messages
from rloom.cli.parser import Parser, as_usage, count
from rloom.cli.prompt_rows import add_prompt_arguments, check_prompt_arguments, prompt_rows
from rloom.cli.spec import find_rewards
from rloom.errors import ConfigError, DataError
from rloom.printable import printable

if TYPE_CHECKING:
    from rloom.rewards.check import Report, Sample

SUMMARY = "see what rewards give, before a run depends on it"


def add_arguments(parser: Parser) -> None:
    """The verb's arguments."""
    add = parser.add_argument
    named = "named as for rloom train: ready-made, file.py:function(option=1), …"
    add("rewards", nargs="*", metavar="REWARD", help=named)
    add("--reward", "--reward-funcs", nargs="+", default=[], dest="more", metavar="REWARD", help="the same, as there")
    add_prompt_arguments(parser)
    model_help = 'what writes the completions, where the data has no column "completions": a name or path'
    add("--model", "--model-name-or-path", dest="model", metavar="MODEL", help=model_help)
    add("--prompts", type=count, default=16, help="how many prompts to take (default 16)")
    add("--num-generations", type=count, default=8, help="completions per prompt from the model (default 8)")
    add("--max-completion-length", type=count, default=256, help="tokens (default 256)")
    add("--temperature", type=float, default=1.0, help="of the model's sampling (default 1)")
    add("--seed", type=int, default=0, help="of the model's sampling (default 0)")
    add("--dtype", help="of the model's weights: float32, bfloat16, … (default: as saved; float32 on a CPU)")
    add("--trust-remote-code", action="store_true", help="allow models that bring their own Python code")
    add(
        "--isolate-rewards", action="store_true", help="call functions in worker processes, as rloom train does with it"
    )
    limit_help = "seconds per sample for isolated functions (default 60)"
    add("--reward-time-limit", "--time-limit", type=float, default=60.0, metavar="SECONDS", help=limit_help)
    add("--once", action="store_true", help="score once, not twice to see noise: for rewards that cost money")
    add("--json", action="store_true", help="print what was found as JSON")


def run(options: Namespace) -> int:
    """0 when nothing stands against training with these rewards, 1 when something does."""
    from rloom.cli.written import build_rewards
    from rloom.rewards.calling.reward_set import RewardSet
    from rloom.rewards.check import check_rewards
    from rloom.rewards.functions import check_reward_columns

    show_messages()
    with as_usage():
        check_prompt_arguments(options)
    named = [*options.rewards, *options.more]
    if not named:
        raise ConfigError("name a reward: `rloom check-reward math_accuracy --data …`")
    built = build_rewards(find_rewards(named, isolate=options.isolate_rewards))
    samples = read_samples(options)
    # Known before a model is loaded, and writes.
    check_reward_columns(built, [name for sample in samples for name in sample.columns])
    if not samples[0].completions:
        samples = _sampled(samples, options)
    rewards = RewardSet(built, None, on_error="none", time_limit=options.reward_time_limit)
    try:
        reports = check_rewards(rewards, samples, twice=not options.once)
    finally:
        rewards.close()
    number = sum(len(sample.completions) for sample in samples)
    if options.json:
        found = {"completions": number, "prompts": len(samples), "rewards": [_plain(report) for report in reports]}
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        console = Console()
        console.print(f"{number} completions of {len(samples)} prompts.")
        for report in reports:
            _show(report, console)
    return int(any(report.problems for report in reports))


def _plain(report: Report) -> dict[str, Any]:
    """As JSON knows it: null for what is no number."""
    fields = dataclasses.asdict(report)
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}


def _show(report: Report, console: Console) -> None:
    console.print(_table(report))
    for problem in report.problems:
        console.print(f"  [bold red]problem:[/] {_shown(problem)}", highlight=False)
    for remark in report.remarks:
        console.print(f"  [yellow]note:[/] {_shown(remark)}", highlight=False)
    if not report.problems:
        console.print(f"  nothing stands against training with {_shown(report.name)}")


def read_samples(options: Namespace) -> list[Sample]:
    """Prompts with their completions: all have some, or none has."""
    samples = [_sample(row, where) for where, row in islice(prompt_rows(options), options.prompts)]
    if not samples:
        raise DataError(f"{options.data} holds no prompts")
    if len({bool(sample.completions) for sample in samples}) > 1:
        raise DataError(f'{options.data}: some rows have "completions" and others do not')
    return samples


def _sample(row: dict[str, Any], where: str) -> Sample:
    from rloom.rewards.check import Sample

    completions = row.pop("completions", [])
    if not isinstance(completions, list) or len(completions) == 1:
        raise DataError(f'{where}: "completions" is a list of at least two: a group is what RLOO compares within')
    prompt = row.pop("prompt")
    if not isinstance(prompt, str):
        completions = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
    return Sample(prompt=prompt, columns=row, completions=completions)


def _sampled(samples: list[Sample], options: Namespace) -> list[Sample]:
    """The samples, each with completions that a model wrote, as it would in training."""
    if options.model is None:
        source = options.data or "--prompt"
        raise DataError(f'{source} has no "completions": add them, or say with --model what shall write them')
    from rloom.cli.written import write

    rows = [{"prompt": sample.prompt} for sample in samples]
    written = write(
        options.model,
        rows,
        options.num_generations,
        seed=options.seed,
        max_completion_length=options.max_completion_length,
        temperature=options.temperature,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    return [
        dataclasses.replace(sample, completions=replies, completion_ids=[c.token_ids for c in group.completions])
        for sample, replies, group in zip(samples, written.replies, written.groups, strict=True)
    ]


def _shown(text: str) -> str:
    """Words that may come from a reward, as neither the terminal nor the console's markup takes them for its own."""
    return escape(printable(text))


def _table(report: Report) -> Table:
    table = Table(title=_shown(report.name), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "range": f"{report.low:.3g} … {report.high:.3g}",
        "mean ± standard deviation": f"{report.mean:.3g} ± {report.std:.3g}",
        "standard deviation within a prompt's group": f"{report.std_within:.3g}",
        "its share of all variance, which is what RLOO learns from": f"{report.share_within:.0%}",
        "groups whose scores are all equal": f"{report.tied_groups:.0%}",
        "pairs of a group that tie": f"{report.ties:.0%}",
        "without a score (None)": f"{report.none:.0%}",
        "errors": str(report.errors + sum(report.degenerate_errors.values())),
        "noise: change when scored again": "not looked at" if report.noise is None else f"± {report.noise:.3g}",
        "time per completion": f"{report.seconds_per_sample * 1000:.2f} ms",
        "correlation with length": f"{report.length_correlation:+.2f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for kind, score in report.degenerate.items():
        table.add_row(f"degenerate completion: {_shown(kind)}", "None" if score is None else f"{score:.3g}")
    return table
