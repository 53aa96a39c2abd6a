"""`rloom check-reward module:function --data prompts.jsonl`: what a reward gives, before a run depends on it."""

from __future__ import annotations

from itertools import islice
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rloom.cli.json_lines import read_rows
from rloom.cli.messages import show_messages
from rloom.cli.spec import find_reward
from rloom.errors import ConfigError, DataError
from rloom.printable import printable
from rloom.rewards.build import build_reward, load_reward_model, reward_tokenizer
from rloom.rewards.build import check_rewards as check_kinds
from rloom.rewards.calling.reward_set import RewardSet
from rloom.rewards.check import Report, Sample, check_rewards


def run(options: Any) -> int:
    """The verb: 0 when nothing stands against training with these rewards, 1 when something does."""
    show_messages()
    console = Console()
    named = [*options.rewards, *options.more]
    if not named:
        raise ConfigError("name a reward: `rloom check-reward math_accuracy --data …`")
    functions = [_loaded(find_reward(spec)) for spec in named]
    samples = read_samples(options.data, options.prompts)
    if not all(sample.completions for sample in samples):
        samples = _sampled(samples, options)
    built = [_built(function) for function in functions]
    rewards = RewardSet(built, None, on_error="none", time_limit=options.time_limit)
    try:
        reports = check_rewards(rewards, samples)
    finally:
        rewards.close()
    count = sum(len(sample.completions) for sample in samples)
    console.print(f"{count} completions of {len(samples)} prompts.")
    for report in reports:
        console.print(_table(report))
        for problem in report.problems:
            console.print(f"  [bold red]problem:[/] {_shown(problem)}", highlight=False)
        for remark in report.remarks:
            console.print(f"  [yellow]note:[/] {_shown(remark)}", highlight=False)
        if not report.problems:
            console.print(f"  nothing stands against training with {_shown(report.name)}")
    return int(any(report.problems for report in reports))


def _loaded(reward: Any) -> Any:
    """A reward model that was named, as a model."""
    if isinstance(reward, str) and not reward.startswith(("http://", "https://")):
        return load_reward_model(reward, trust_remote_code=False, init_kwargs=None)
    return reward


def _built(function: Any) -> Any:
    classes = check_kinds([function], None)
    if hasattr(function, "config"):
        classes = [reward_tokenizer(function, None, revision=None, trust_remote_code=False)]
    return build_reward(function, classes[0], place=lambda model: model, template_kwargs={})


def read_samples(path: str, limit: int) -> list[Sample]:
    """Prompts from a file of JSON lines, with their completions where it has any."""
    samples = [_sample(row, where) for where, row in islice(read_rows(path), limit)]
    if not samples:
        raise DataError(f"{path} holds no prompts")
    with_completions = [bool(sample.completions) for sample in samples]
    if any(with_completions) and not all(with_completions):
        raise DataError(f'{path}: some rows have "completions" and others do not')
    return samples


def _sample(row: dict[str, Any], where: str) -> Sample:
    completions = row.pop("completions", [])
    if not isinstance(completions, list) or len(completions) == 1:
        raise DataError(f'{where}: "completions" is a list of at least two: a group is what RLOO compares within')
    prompt = row.pop("prompt")
    if not isinstance(prompt, str):
        completions = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
    return Sample(prompt=prompt, columns=row, completions=completions)


def _sampled(samples: list[Sample], options: Any) -> list[Sample]:
    """Completions from a model."""
    if options.model is None:
        raise DataError(f'{options.data} has no "completions": add them, or say with --model what shall write them')
    from rloom.cli.sampling import sample_completions

    return sample_completions(samples, options)


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
        "time per completion": f"{report.seconds_per_sample * 1000:.2f} ms",
        "correlation with length": f"{report.length_correlation:+.2f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    for kind, score in report.degenerate.items():
        table.add_row(f"degenerate completion: {_shown(kind)}", "None" if score is None else f"{score:.3g}")
    return table
