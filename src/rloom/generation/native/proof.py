"""Does this very model decode here as it does on its own? Tried out, not looked up in a list.

What goes wrong goes wrong silently: a model that never calls the attention interface, that keeps other state than keys
and values, or whose window does not arrive, draws fluent nonsense. So its logits are compared with a plain forward's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rloom.data.model_inputs import placeholder_ids
from rloom.generation.native.cache.allocator import PageAllocator
from rloom.generation.native.cache.attention import num_calls
from rloom.generation.native.rows import not_finite
from rloom.generation.native.scheduler import SampledSequence, Scheduler, SharedPrompt
from rloom.models.load import has_virtual_tokens, keeps_other_state
from rloom.models.mask_probe import sees_ahead
from rloom.models.verify import (
    Tolerance,
    allowed_difference,
    evaluating,
    largest_difference,
    plain_logits,
    probe_length,
    probe_tokens,
    rounded_otherwise,
    window_to_cross,
)
from rloom.printable import get_logger
from rloom.types import Prompt

if TYPE_CHECKING:
    from rloom.generation.native.runner import Runner

logger = get_logger(__name__)

# Tokens of the longer prompt: more than a page.
LEAST = 72

# Decode steps that are compared.
STEPS = 3

NOISE = Tolerance.DECODED
"""Of the largest logit: what rounding in half precision makes of it in most models. A wrong mask is off by far more."""


def why_not_native(model: Any, runner: Runner, with_images: list[Prompt] | None = None) -> str | None:
    """None if two prompts with two completions each have the logits of a plain forward, else what went wrong.

    `with_images`: one or two prompts with images, on which it is tried instead.
    """
    base = runner.base
    name = type(base).__name__
    if has_virtual_tokens(model):
        return "the adapter puts virtual tokens before each prompt"
    if getattr(base.config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder model"
    if keeps_other_state(base):
        return f"{name} keeps other state than keys and values"
    if len({p.device for p in model.parameters()}) > 1:
        return f"the weights of {name} lie on several devices"
    text = base.config.get_text_config()
    windows = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    if with_images and runner.rope_index is not None and windows:
        return f"{name} has windows, and positions in several dimensions"
    try:
        with torch.no_grad(), runner.on_device(), evaluating(model), _adapters_that_add(model):
            if with_images is None:
                return _compare(model, runner, name, *_random_tokens(text, window_to_cross(model, text)))
            if sees_ahead(model, with_images[0].token_ids, with_images[0].inputs):
                return f"image tokens of {name} see each other both ways"
            return _compare(model, runner, name, *_completed(with_images, placeholder_ids(base.config)))
    except torch.OutOfMemoryError:
        raise
    # Whatever an architecture does not like about it, other engines remain.
    except Exception as error:
        logger.debug("the engine's forward failed", exc_info=True)
        return f"{name} does not run with the engine's attention ({type(error).__name__}: {str(error)[:120]})"


@contextmanager
def _adapters_that_add(model: Any) -> Iterator[None]:
    """Fresh adapters, which add nothing yet, add something meanwhile: else an error in them would not be seen."""
    fresh = [p for name, p in model.named_parameters() if "lora_B" in name and p.numel() and not p.any()]
    for index, parameter in enumerate(fresh):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
        parameter.copy_(0.1 * noise)
    try:
        yield
    finally:
        for parameter in fresh:
            parameter.zero_()


def _compare(
    model: Any, runner: Runner, name: str, prompts: list[Prompt], completions: list[list[list[int]]]
) -> str | None:
    def run_plain() -> list[Tensor]:
        return [
            plain_logits(model, prompt.token_ids, tokens, prompt.inputs)[:-1]
            for prompt, own in zip(prompts, completions, strict=True)
            for tokens in own
        ]

    plain = run_plain()
    ours, calls = _decoded(runner, prompts, completions)
    layers = runner.base.config.get_text_config().num_hidden_layers
    if calls != layers:
        return f"{calls} of {layers} layers of {name} go through the attention interface"
    if any(logits.isnan().any() for logits in plain):
        return str(not_finite())
    worst = largest_difference(ours, plain)

    def rounding() -> float:
        with rounded_otherwise(model):
            return largest_difference(run_plain(), plain)

    exact = plain[0].dtype == torch.float32 and not torch.is_autocast_enabled(runner.device.type)
    # Quantized products round otherwise for one row than for many.
    exact &= getattr(runner.base, "hf_quantizer", None) is None
    runner.noise = Tolerance.FLOAT32 if exact else allowed_difference(NOISE, worst, rounding)
    if not worst < runner.noise:
        return f"decoding {name} step by step differs from its plain forward by {worst:.1e}"
    return None


def _decoded(runner: Runner, prompts: list[Prompt], completions: list[list[list[int]]]) -> tuple[list[Tensor], int]:
    """Logits (1 + STEPS, V) of each completion, teacher-forced, and attention calls of a step."""
    with runner.ready():
        runner.prefill([prompts[0].token_ids[:4]])
        runner.graphs.prepare_for(max(len(prompt.token_ids) for prompt in prompts), 2)
        shared = [SharedPrompt(list(prompt.token_ids), inputs=prompt.inputs or None) for prompt in prompts]
        for group, (prompt, own) in enumerate(zip(shared, completions, strict=True)):
            prompt.sequences = [SampledSequence(prompt, group, i, i, tokens[:1]) for i, tokens in enumerate(own)]
        limit = STEPS + 1
        total = sum(-(-len(p.token_ids) // runner.page_size) for p in prompts) + 16
        scheduler = Scheduler(
            shared, pages=PageAllocator(total=total, size=runner.page_size), max_new_tokens=limit, max_sequences=4,
            prefill_tokens=1 << 30,
        )  # fmt: skip
        cache = runner.make_cache(total, limit)
        first = runner.prefill_shared(scheduler.next_prefill(), cache)
        scheduler.ready.extend(sequence for prompt in shared for sequence in prompt.sequences)
        scheduler.fill(STEPS)
        found = [[first[s.group]] for s in scheduler.running]
        bucket = runner.bucket_for(scheduler.running)
        for step in range(STEPS):
            bucket.rows.load(scheduler.running, limit, 0)
            cache.arrange(scheduler.running, bucket.tables, STEPS)
            logits = runner.logits(bucket.rows, cache)
            calls = num_calls()
            for row, sequence in enumerate(scheduler.running):
                found[row].append(logits[row])
                sequence.tokens.append(completions[sequence.group][sequence.sample][step + 1])
    runner.graphs.drop()
    return [torch.stack(rows) for rows in found], calls


def _completed(prompts: list[Prompt], placeholders: tuple[int, ...]) -> tuple[list[Prompt], list[list[list[int]]]]:
    """Prompts with images, two of them, so that one row holds the images of several; with two completions each."""
    prompts = (prompts * 2)[:2]
    words = [token for prompt in prompts for token in prompt.token_ids if token not in placeholders] or [0, 1]
    draw = random.Random(0)
    return prompts, [[[draw.choice(words) for _ in range(STEPS + 1)] for _ in range(2)] for _ in prompts]


def _random_tokens(config: Any, window: int) -> tuple[list[Prompt], list[list[list[int]]]]:
    """Two prompts of different lengths with two completions each, across the window if there is one."""
    length = probe_length(config, LEAST, window)
    *prompts, a, b, c, d = probe_tokens(config, length, 5, *[STEPS + 1] * 4)
    return [Prompt(content="", token_ids=tokens) for tokens in prompts], [[a, b], [c, d]]
