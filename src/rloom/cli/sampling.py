"""Completions from a model, for checks before a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rloom.evaluation.writer import Writer
from rloom.rewards.check import Sample


def sample_completions(samples: list[Sample], options: Any) -> list[Sample]:
    """The samples, each with completions that a model wrote, as it would in training."""
    chat = not isinstance(samples[0].prompt, str)
    writer = Writer(options.model, max_completion_length=options.max_completion_length, chat=chat)
    rows = [{"prompt": sample.prompt} for sample in samples]
    result = []
    for index, group in writer.write(rows, options.num_generations, seed=options.seed):
        texts = [completion.text for completion in group.completions]
        replies = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        ids = [completion.token_ids for completion in group.completions]
        result.append(replace(samples[index], completions=replies, completion_ids=ids))
    return result
