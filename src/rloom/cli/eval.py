"""`rloom eval`: a model's completions on a split, scored, counted, compared with a reference and with other answers."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rloom.cli.messages import show_messages
from rloom.cli.options import check_sources, option
from rloom.cli.parser import Parser, as_usage
from rloom.cli.spec import find_rewards
from rloom.data.sources import load_rows
from rloom.errors import ConfigError, DataError, did_you_mean, in_words
from rloom.evaluation.statistics import Estimate, estimate, over_prompts, pass_at, per_token
from rloom.evaluation.win_rate import OPENAI, as_percent
from rloom.printable import printable
from rloom.sampling_rules import ENGINES

if TYPE_CHECKING:
    from rloom.cli.written import Written

SUMMARY = "rewards, pass@k, KL and win rate of a model on a split"
FLAGS_TAKE_SECONDS = True


@dataclass
class EvalOptions:
    """What is evaluated, on what, by whom."""

    model_name_or_path: str | None = option(None, "The model: a hub id, a folder, or an adapter's folder.", "--model")
    dataset_name: str | None = option(None, "Prompts: a hub id, a folder or a file.", "--data")
    dataset_config: str | None = option(None, "Configuration of the data set, where it has several.")
    dataset_test_split: str = option("test", "Split to take prompts from.", "--split")
    columns: list[str] | None = option(None, "Columns under other names: prompt=question answer=solution.")
    num_examples: int | None = option(None, "Prompts to take, from the start. Unset: all.")
    reward_funcs: list[str] | None = option(None, "Rewards, named as for rloom train.", "--reward")
    isolate_rewards: bool = option(False, "Call reward functions in worker processes.")
    reward_time_limit: float = option(60.0, "Seconds per sample for isolated reward functions.")
    pass_threshold: float | None = option(None, "A score from which a completion passes. Unset: 1, for 0/1 scores.")
    pass_at: list[int] | None = option(None, "The k of pass@k. Unset: 1 and num_generations.")
    num_generations: int = option(1, "Completions per prompt.")
    max_completion_length: int = option(256, "Longest completion, in tokens.")
    temperature: float = option(1.0, "Sampling temperature; 0: the likeliest token each time.")
    top_p: float = option(1.0, "Nucleus sampling.")
    seed: int = option(0, "Of the sampling.")
    engine: str | None = option(None, f"What generates: {in_words(ENGINES)}.")
    dtype: str | None = option(None, "Weights: float32, bfloat16, … Unset: as saved; float32 on a CPU.")
    trust_remote_code: bool = option(False, "Allow models that bring their own Python code.")
    fetch_images: bool = option(False, "Fetch images that the data names by address.")
    image_folder: str | None = option(
        None, "Folder that images named by paths are read from. Unset: that of local data, or the working folder."
    )
    reference_model: str | None = option(None, "Report the KL from this model.")
    against: str | None = option(None, "Compare with this model's completions.")
    reference_column: str | None = option(None, "Compare with the texts in this column.")
    judge_model: str | None = option(None, "Who compares: a model's name at --judge_url.")
    judge_url: str | None = option(
        None, f"An OpenAI-compatible address; the key is OPENAI_API_KEY. Unset: OPENAI_BASE_URL, else {OPENAI}."
    )
    judge_reward_model: str | None = option(None, "Who compares: a reward model, by hub id or folder.")
    rubric: str | None = option(None, "What counts for the judge, in words.")
    judge_cache: str | None = option(None, "File in which a judge's answers are kept.")
    output_file: str | None = option(None, "Write the numbers as JSON.")
    save_completions: str | None = option(None, "Write the completions as JSON lines.")


SHOWN = (
    "model_name_or_path", "dataset_name", "dataset_test_split", "columns", "num_examples", "reward_funcs",
    "num_generations", "max_completion_length", "temperature", "reference_model", "against", "reference_column",
    "judge_model", "judge_url", "judge_reward_model", "output_file",
)  # fmt: skip


def add_arguments(parser: Parser) -> None:
    """All flags of the verb."""
    from rloom.cli.flags import add_fields

    parser.description = "Generate on a split; report rewards, pass@k, length, KL and win rate, with 95% intervals."
    add_fields(parser, [EvalOptions], shown=SHOWN, footer="--help-all lists all options.")


def run(given_options: Namespace) -> int:
    """0 when measured."""
    from rloom.cli.flags import given

    values = given(given_options)
    check_sources(values)
    options = EvalOptions(**values)
    show_messages()
    with as_usage():
        _check(options)
    found = evaluate(options)
    win_rate = found.get("win_rate")
    Console().print(_table(found))
    if win_rate is not None:
        print(as_percent(win_rate.value))
    if options.output_file:
        content = {name: _plain(value) for name, value in found.items()}
        Path(options.output_file).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    if win_rate is not None and win_rate.count == 0:
        print("rloom: no verdict of the judge could be read; its messages are above", file=sys.stderr)
        return 1
    return 0


def _plain(value: Estimate) -> dict[str, Any]:
    """As JSON knows it: null for what is no number."""
    fields = dataclasses.asdict(value)
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in fields.items()}


def _check(options: EvalOptions) -> None:
    if not options.model_name_or_path:
        raise ConfigError("no model: --model_name_or_path takes a hub id or a folder")
    if not options.dataset_name:
        raise ConfigError("no prompts: --dataset_name takes a hub id, a folder or a file")
    for name in ("num_generations", "max_completion_length", "num_examples"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name} must be at least 1")
    if options.pass_at and not options.reward_funcs:
        raise ConfigError("--pass_at needs --reward_funcs, which say what passes")
    if options.pass_at and max(options.pass_at) > options.num_generations:
        raise ConfigError(f"pass@{max(options.pass_at)} needs --num_generations {max(options.pass_at)} or more")
    opponents = [options.against, options.reference_column]
    judges = [options.judge_model, options.judge_reward_model]
    if all(opponents) or all(judges):
        raise ConfigError(
            "give one of --against and --reference_column, and one of --judge_model, --judge_reward_model"
        )
    if any(judges) != any(opponents):
        raise ConfigError("a win rate needs an opponent (--against, --reference_column) and a judge (--judge_model, …)")
    if options.reference_model and options.temperature == 0:
        raise ConfigError("the KL is estimated from samples: --reference_model needs a temperature above 0")


# -- measuring


def evaluate(options: EvalOptions) -> dict[str, Estimate]:
    """All numbers by name."""
    rows = _rows(options)
    # What is misspelt is known before minutes pass.
    rewards = find_rewards(options.reward_funcs or (), isolate=options.isolate_rewards)
    _check_columns(rewards, rows)
    written = _write(options, str(options.model_name_or_path), rows, options.num_generations)
    if options.save_completions:
        _save_completions(options.save_completions, written)
    found = {
        "length": over_prompts([[float(len(c.token_ids)) for c in group.completions] for group in written.groups]),
        "truncated": over_prompts([[float(c.truncated) for c in group.completions] for group in written.groups]),
    }
    if rewards:
        found |= _rewards(options, rewards, rows, written)
    if options.reference_model:
        found |= _kl(options, written)
    if options.against or options.reference_column:
        found["win_rate"] = _win_rate(options, rows, written)
    return found


def _check_columns(rewards: list[Any], rows: list[dict[str, Any]]) -> None:
    from rloom.data.datasets import RowList
    from rloom.training.arguments import check_reward_columns

    check_reward_columns(rewards, RowList(rows), None)


def _save_completions(path: str, written: Written) -> None:
    rows = [{"prompt": g.prompt.content, "completions": [c.text for c in g.completions]} for g in written.groups]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write(options: EvalOptions, name: str, rows: list[dict[str, Any]], count: int) -> Written:
    from rloom.cli.written import write
    from rloom.data.images import ImageSources, folder_of

    return write(
        name,
        rows,
        count,
        seed=options.seed,
        max_completion_length=options.max_completion_length,
        engine=options.engine,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        images=ImageSources(options.fetch_images, options.image_folder or folder_of(options.dataset_name)),
        temperature=options.temperature,
        top_p=options.top_p,
    )


def _rows(options: EvalOptions) -> list[dict[str, Any]]:
    from rloom.data.images import has_places, images_of

    assert options.dataset_name is not None
    rows = load_rows(
        options.dataset_name,
        split=options.dataset_test_split,
        config=options.dataset_config,
        columns=options.columns,
    )
    if options.num_examples is not None:
        rows = rows.select(range(min(options.num_examples, len(rows))))
    found = list(rows)
    if not found or "prompt" not in found[0]:
        raise DataError(f"{options.dataset_name} has no column 'prompt': name one with --columns prompt=…")
    if options.reference_model and any(images_of(row) or has_places(row["prompt"]) for row in found):
        raise DataError("--reference_model: the KL of completions of images is not measured here; training reports it")
    column = options.reference_column
    if column and column not in found[0]:
        raise DataError(f"there is no column {column!r}{did_you_mean(column, found[0])}")
    return found


def _rewards(
    options: EvalOptions, rewards: list[Any], rows: list[dict[str, Any]], written: Written
) -> dict[str, Estimate]:
    from rloom.cli.written import score

    result: dict[str, Estimate] = {}
    for name, groups in score(rewards, rows, written, time_limit=options.reward_time_limit).items():
        result[f"rewards/{name}"] = over_prompts(groups)
        ks = options.pass_at or (1, options.num_generations)
        for k, rate in pass_at(groups, ks, options.pass_threshold).items():
            result[f"pass@{k}/{name}"] = rate
    return result


def _kl(options: EvalOptions, written: Written) -> dict[str, Estimate]:
    from rloom.evaluation.divergence import divergence
    from rloom.models.load import load_for_inference

    model, kwargs = written.model, {"dtype": written.model.dtype, "trust_remote_code": options.trust_remote_code}
    reference = load_for_inference(str(options.reference_model), **kwargs).to(model.device)
    prompts = [group.prompt.token_ids for group in written.groups for _ in group.completions]
    completions = [c.token_ids for group in written.groups for c in group.completions]
    values = iter(divergence(model, reference, prompts, completions, temperature=options.temperature))
    per_prompt = [[next(values) for _ in group.completions] for group in written.groups]
    tokens = sum(map(len, completions))
    whole = over_prompts(per_prompt)
    return {"kl": whole, "kl_per_token": per_token(whole, tokens / max(1, len(completions)))}


def _win_rate(options: EvalOptions, rows: list[dict[str, Any]], written: Written) -> Estimate:
    from rloom.data.prompts import as_reply
    from rloom.evaluation.opponents import judge_of

    prompts, ours = [group.prompt.content for group in written.groups], [replies[0] for replies in written.replies]
    if options.against:
        theirs = [replies[0] for replies in _write(options, options.against, rows, 1).replies]
    else:
        column = str(options.reference_column)
        theirs = [as_reply(row[column], conversational=not isinstance(row["prompt"], str)) for row in rows]
    compare = judge_of(
        model=options.judge_model,
        url=options.judge_url,
        reward_model=options.judge_reward_model,
        rubric=options.rubric,
        cache=options.judge_cache,
    )
    return estimate(compare(prompts, ours, theirs))


def _table(found: dict[str, Estimate]) -> Table:
    table = Table(title="evaluation, mean over prompts with 95% interval")
    for name in ("", "mean", "from", "to", "prompts"):
        table.add_column(name, justify="right" if name else "left")
    for name, value in found.items():
        table.add_row(
            escape(printable(name)), f"{value.value:.4g}", f"{value.low:.4g}", f"{value.high:.4g}", str(value.count)
        )
    return table
