"""`rloom preflight`: what `rloom train` takes, but a few groups only: what the run will be like, and what to set."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rloom.cli import train
from rloom.cli.messages import show_messages
from rloom.cli.options import check_sources, load_data, option
from rloom.cli.parser import Parser, UsageError, as_usage
from rloom.errors import ConfigError, UnknownOptionError
from rloom.printable import printable

if TYPE_CHECKING:
    from rloom.config import RLOOConfig
    from rloom.preflight.dry_run import DryRun
    from rloom.preflight.recommend import Advice
    from rloom.preflight.summary import Summary

SUMMARY = "try a few groups before a run: what it will be like"
FLAGS_TAKE_SECONDS = True


@dataclass
class PreflightOptions:
    """What preflight takes beside what `rloom train` takes."""

    groups: int = option(8, "Prompts to try, with num_generations completions each.")
    output: str = option("preflight.yaml", "Where the recommended options go, for `rloom train --config`.")
    price_per_hour: float | None = option(None, "What an hour of this machine costs (one process), for the estimate.")
    once: bool = option(False, "Score completions once, not twice to see noise: for rewards that cost money.")
    json: bool = option(False, "Print what was found as JSON.")


OWN = tuple(field.name for field in dataclasses.fields(PreflightOptions))


def add_arguments(parser: Parser) -> None:
    """All flags of the verb."""
    from rloom.cli.flags import add_fields
    from rloom.config import RLOOConfig

    parser.description = "Run a few groups as `rloom train` would, change nothing, and say what the run will be like."
    footer = "Every option of `rloom train` is a flag: --help-all lists them."
    add_fields(parser, [PreflightOptions, *train.CLASSES, RLOOConfig], shown=(*OWN, *train.SHOWN), footer=footer)


def run(options: argparse.Namespace) -> int:
    """0 when nothing stands against the run, 1 when something does."""
    from rloom.cli.flags import given

    show_messages()
    values = given(options)
    check_sources(values)
    # Imports torch.
    from rloom.preflight.summary import write_recipe

    own = PreflightOptions(**{name: values.pop(name) for name in OWN if name in values})
    if own.groups < 2:
        raise UsageError("--groups must be at least 2: the first update is left out of the timings")
    values.setdefault("output_dir", "out")
    with as_usage():
        # It is changed while plans are made of it.
        plan = train.make_plan(dict(values))
    if plan.config.world_size > 1:
        raise ConfigError("preflight runs in one process: start it without a launcher")
    summary = examine(plan, own, values)
    write_recipe(own.output, summary.recipe, summary.advice)
    if own.json:
        print(json.dumps(summary.plain(), indent=1, allow_nan=False, default=str))
    else:
        print(printable("\n".join(summary.lines())))
        print(printable(f"written to {own.output}; next: rloom train --config {shlex.quote(own.output)}"))
    return int(bool(summary.problems))


def examine(plan: train.Plan, own: PreflightOptions, values: dict[str, Any]) -> Summary:
    """Make a dry run in a folder that does not stay, and say what it has found. `values`: what was given."""
    from rloom.preflight.dry_run import DryRun, dry_config

    rows, _ = load_data(plan.data)
    with tempfile.TemporaryDirectory(prefix="rloom-preflight-") as folder:
        trainer = DryRun(
            plan.model.model_name_or_path,
            train.rewards_of(plan) or None,
            dry_config(plan.config, own.groups, folder, rows),
            rows,
            quantization_config=plan.quantization,
            peft_config=plan.peft,
            rate=plan.config.learning_rate,
            size=plan.config.generation_batch_size or 0,
        )
        return summarize(trainer, plan, own, rows, values)


def summarize(trainer: DryRun, plan: train.Plan, own: PreflightOptions, rows: Any, values: dict[str, Any]) -> Summary:
    """Run, and put together what is known."""
    from rloom.data.datasets import first_row, is_iterable
    from rloom.models.load import tokenizer_of
    from rloom.preflight.ends import end_notes, end_problems
    from rloom.preflight.estimate import whole_run
    from rloom.preflight.recommend import cold_start, recommend
    from rloom.preflight.summary import Summary

    found, encoder = trainer.measure(), trainer.collector.encoder
    tokenizer, ends = tokenizer_of(trainer.processing_class), trainer.eos_token_ids
    problems = end_problems(encoder, tokenizer, first_row(rows) or {"prompt": ""}, found.records, ends)
    if (cold := cold_start(found)) is not None:
        problems.append(f"{cold}{sft_command(plan)}")
    reports = check_scores(trainer, found.records, twice=not own.once)
    problems += [f"{report.name}: {problem}" for report in reports for problem in report.problems]
    room = None if encoder.context_length is None else encoder.context_length - encoder.longest
    if found.memory is not None and found.memory.micro_batch is None:
        problems.append(
            "the worst shape does not fit: set gradient_checkpointing or --use_peft, or shorten completions"
        )
    advice = recommend(found, plan.config, context=room, prompts=None if is_iterable(rows) else len(rows))
    options, config, refused = fitting_recipe(values, plan, advice)
    problems += refused
    return Summary(
        found=found,
        recipe=options,
        rewards=reports,
        estimate=whole_run(found, plan.config, rows, own.price_per_hour),
        recommended=whole_run(found, config, rows, own.price_per_hour),
        advice=advice,
        problems=problems,
        notes=end_notes(tokenizer, ends, chat=trainer.chat)
        + [f"{report.name}: {remark}" for report in reports for remark in report.remarks],
    )


def fitting_recipe(
    values: dict[str, Any], plan: train.Plan, advice: list[Advice]
) -> tuple[dict[str, Any], RLOOConfig, list[str]]:
    """The recipe, and the config that `rloom train` makes of it. Where it is refused: what was given, and why as a
    problem."""
    from rloom.preflight.summary import recipe

    options = recipe(values, advice)
    try:
        return options, train.make_plan(dict(options)).config, []
    except (ConfigError, UnknownOptionError) as error:
        problem = f"what is recommended does not fit what was given, and is left out of the recipe: {error}"
        return values, plan.config, [problem]


def check_scores(trainer: DryRun, records: Any, *, twice: bool) -> Any:
    """What `rloom check-reward` says of the same completions."""
    from rloom.rewards.check import Sample, check_rewards

    samples: dict[int, Sample] = {}
    for record in records:
        columns = {name: value for name, value in record.prompt.columns.items() if name != "prompt"}
        empty = Sample(prompt=record.prompt.content, columns=columns, completions=[])
        sample = samples.setdefault(id(record.prompt), empty)
        sample.completions.append(record.reply)
        sample.completion_ids.append(record.completion.token_ids)
    try:
        return check_rewards(trainer.rewards, list(samples.values()), twice=twice)
    finally:
        trainer.rewards.close()


def sft_command(plan: train.Plan) -> str:
    """How to train the model supervised, first."""
    model = plan.model.model_name_or_path or plan.config.sft_model_path
    return f": rloom sft --model {shlex.quote(str(model))} --data ANSWERS.jsonl --output_dir sft"
