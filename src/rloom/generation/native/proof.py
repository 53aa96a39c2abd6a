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
from rloom.models.looking import one_row, sees_ahead
from rloom.models.rounding import allowed_difference, rounded_otherwise
from rloom.models.windows import window_to_cross
from rloom.printable import get_logger
from rloom.types import Prompt

if TYPE_CHECKING:
    from rloom.generation.native.runner import Runner

logger = get_logger(__name__)

# Tokens of the longer prompt: more than a page.
LEAST = 72

# Decode steps that are compared.
STEPS = 3

NOISE = 0.06
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
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), _adapters_that_add(model):
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
    finally:
        model.train(training)


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
            _plain(model, runner, prompt, tokens)
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
    worst = _worst(ours, plain)

    def rounding() -> float:
        with rounded_otherwise(model):
            return _worst(run_plain(), plain)

    exact = plain[0].dtype == torch.float32 and not torch.is_autocast_enabled(runner.device.type)
    # Quantized products round otherwise for one row than for many.
    exact &= getattr(runner.base, "hf_quantizer", None) is None
    runner.noise = 1e-3 if exact else allowed_difference(NOISE, worst, rounding)
    if not worst < runner.noise:
        return f"decoding {name} step by step differs from its plain forward by {worst:.1e}"
    return None


def _worst(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of any completion; NaN if there is one."""
    return float(torch.tensor([difference(ours, plain) for ours, plain in zip(found, wanted, strict=True)]).max())


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest between two tensors of logits, as a share of the largest logit; NaN if there is one in either.

    >>> difference(torch.tensor([2.0, 5.0, -torch.inf]), torch.tensor([1.0, 5.0, -torch.inf]))
    0.20000000298023224
    """
    found, wanted = found.float(), wanted.float()
    # Tokens that a model rules out are at −∞ in both.
    apart = (found - wanted).abs().masked_fill(found == wanted, 0.0)
    return float(apart.max() / wanted.abs().masked_fill(wanted.isinf(), 0.0).max().clamp(min=1e-6))


def _plain(model: Any, runner: Runner, prompt: Prompt, tokens: list[int]) -> Tensor:
    """Logits (1 + STEPS, V) of the model on its own, which counts positions itself."""
    if prompt.inputs:
        row = one_row(runner.base, prompt.token_ids, tokens, prompt.inputs, keep=STEPS + 2)
        return model(**row).logits[0, -STEPS - 2 : -1].clone()
    ids = torch.tensor([prompt.token_ids + tokens], device=runner.device)
    few = {"logits_to_keep": STEPS + 2} if "logits_to_keep" in runner.accepts else {}
    return model(input_ids=ids, **few, **runner.no_cache).logits[0, -STEPS - 2 : -1].clone()


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
    limit = getattr(config, "max_position_embeddings", None) or 1024
    length = max(window + 8, LEAST) if window else min(LEAST, max(8, limit // 2))
    draw = random.Random(0)
    vocabulary = min(config.vocab_size, 1000)
    tokens = lambda count: [draw.randrange(vocabulary) for _ in range(count)]  # noqa: E731
    prompts = [Prompt(content="", token_ids=tokens(count)) for count in (length, 5)]
    return prompts, [[tokens(STEPS + 1) for _ in range(2)] for _ in range(2)]
