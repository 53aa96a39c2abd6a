"""Completions from a model, for checks before a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rloom.data.prompts import PromptEncoder
from rloom.generation.base import Sampling
from rloom.generation.transformers import TransformersEngine
from rloom.models import load as loading
from rloom.rewards.check import Sample


def sample_completions(samples: list[Sample], options: Any) -> list[Sample]:
    """The samples, each with completions that a model wrote, as it would in training."""
    model = loading.load_policy(options.model, None, trust_remote_code=False, quantization_config=None)
    processing = loading.load_processing_class(None, model, None, False)
    tokenizer = loading.tokenizer_of(processing)
    chat = not isinstance(samples[0].prompt, str)
    eos = loading.agree_on_tokens(model, tokenizer, None, chat=chat)
    encoder = PromptEncoder(
        processing,
        template_kwargs={},
        context_length=loading.context_length(model),
        max_completion_length=options.max_completion_length,
    )
    sampling = Sampling(
        max_completion_length=options.max_completion_length,
        eos_token_ids=tuple(eos),
        pad_token_id=tokenizer.pad_token_id,
    )
    engine = TransformersEngine(lambda: model, sampling, pad_to_multiple_of=None, tokenizer=tokenizer)
    prompts = encoder.encode([{"prompt": sample.prompt} for sample in samples])
    by_prompt = {id(prompt): sample for prompt, sample in zip(prompts, samples, strict=True)}
    result = []
    for group in engine.generate(prompts, options.num_generations, seed=options.seed):
        ids = [completion.token_ids for completion in group.completions]
        texts = processing.batch_decode(ids, skip_special_tokens=True)
        replies = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
        result.append(replace(by_prompt[id(group.prompt)], completions=replies, completion_ids=ids))
    return result
