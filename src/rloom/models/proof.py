"""Does this very model compute the same on a packed row as on padded ones? Tried out, not looked up in a list.

Architectures that keep other state than keys and values (convolutions, recurrences), or that do not go through
transformers' attention interface, give wrong numbers without an error: so the numbers are compared.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from rloom.data.batching import Batcher
from rloom.errors import ConfigError
from rloom.models.attention import num_calls, packed_attention, running
from rloom.models.fused import FusedLayers
from rloom.models.load import base_of, has_virtual_tokens, keeps_other_state
from rloom.models.logprobs import Forward
from rloom.models.looking import sees_ahead
from rloom.models.rounding import allowed_difference, rounded_otherwise
from rloom.models.windows import window_to_cross
from rloom.printable import get_logger
from rloom.types import Rollout

logger = get_logger(__name__)

NOISE = 0.05  # of the largest log-probability, and half as much of gradients: what rounding makes of it in most models
WITH_GRADIENT = 1024  # tokens of a window up to which gradients are compared too; activations of more take memory


def proves_packing(model: Any, layers: FusedLayers | None = None) -> bool:
    """Whether packed rows may be used for this model, with these layers if there are any; says why not otherwise."""
    reason = why_not_packed(model, layers=layers)
    if layers is not None:
        if reason is not None:
            logger.warning("norms, rotations and activations are not run by kernels: with those, %s", reason)
        return reason is None
    if reason is not None:
        logger.warning("training uses padded micro-batches, which are slower: %s", reason)
    return reason is None


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model that does more to its logits than training knows of: its log-probabilities would be wrong."""
    base = base_of(model)
    if has_virtual_tokens(model):
        return
    if base.get_output_embeddings() is None:
        return
    rollout = _rollout(base.config.get_text_config())
    prompt, completion = rollout.prompt_ids[-1], rollout.completion_ids[-2]
    rollout.prompt_ids, rollout.completion_ids = [prompt], [completion]
    device = next(model.parameters()).device
    batch = Batcher(packed=False, pad_token_id=0).make(rollout, [0], device)
    forward, training = Forward(model, temperature=1.0), model.training
    model.eval()
    try:
        ours = forward(model, batch).logprobs[0]
        ids = torch.tensor([prompt + completion], device=device)
        options = {"use_cache": False} if "use_cache" in forward.accepts else {}
        logits = model(input_ids=ids, **options).logits[0, len(prompt) - 1 : -1].float()
    finally:
        model.train(training)
    plain = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    error = _difference(ours, plain)
    if error > 0.02:
        raise ConfigError(
            f"{type(base).__name__} does something to its logits that this version does not know: log-probabilities "
            f"would be off by {error:.1e}. It cannot be trained with rloom yet"
        )


def proves_packed_images(model: Any, rollout: Rollout) -> bool:
    """Whether packed rows may be used for prompts with images too, tried on some of this rollout's; says why not."""
    some = _pictured(rollout)
    reason = why_not_packed(model, some)
    if reason is not None:
        logger.warning("prompts with images are trained on in padded micro-batches, which are slower: %s", reason)
    return reason is None


def why_not_packed(model: Any, rollout: Rollout | None = None, layers: FusedLayers | None = None) -> str | None:
    """None if a packed and a padded forward agree in log-probabilities and in a gradient, else what went wrong.

    Tried on `rollout`, or on one of random tokens; the packed one with `layers`, if there are any.
    """
    base = base_of(model)
    if has_virtual_tokens(model):
        return "the adapter puts virtual tokens before each prompt"
    if base.get_output_embeddings() is None:
        return f"{type(base).__name__} names no output head"
    if keeps_other_state(base):
        return f"{type(base).__name__} keeps other state than keys and values"
    training = model.training
    model.eval()
    try:
        if rollout is not None and sees_ahead(model, rollout.prompt_ids[0], rollout.prompt_inputs[0]):
            return f"image tokens of {type(base).__name__} see each other both ways"
        if rollout is not None:
            return _compare(model, base, rollout)
        config = base.config.get_text_config()
        window = window_to_cross(model, config)
        reason = _compare(model, base, _rollout(config, window if window <= WITH_GRADIENT else 0), layers=layers)
        return _across(model, base, window) if reason is None and window > WITH_GRADIENT else reason
    except Exception as error:  # whatever an architecture does not like about packed rows, padded ones remain
        logger.debug("the packed forward failed", exc_info=True)
        return f"{type(base).__name__} does not run on packed rows ({type(error).__name__}: {str(error)[:120]})"
    finally:
        model.train(training)


def _across(model: Any, base: Any, window: int) -> str | None:
    """What is wrong across a long window; nothing that is known of, where there is no memory to try it."""
    try:
        return _compare(model, base, _rollout(base.config.get_text_config(), window), with_gradient=False)
    except torch.OutOfMemoryError:
        logger.info("a window of %d tokens was not tried out: there is no memory for it", window)
        return None


def _compare(
    model: Any, base: Any, rollout: Rollout, *, with_gradient: bool = True, layers: FusedLayers | None = None
) -> str | None:
    config = base.config.get_text_config()
    rows = list(range(len(rollout)))
    device = next(model.parameters()).device
    forward = Forward(model, temperature=1.0)
    probe = _probe(model) if with_gradient else None
    padded = Batcher(packed=False, pad_token_id=0).make(rollout, rows, device)
    packing = Batcher(packed=True, pad_token_id=0)
    packing.images_packed = True
    packed = packing.make(rollout, rows, device)
    assert packed.packed is not None

    def run_plain() -> tuple[Tensor, Tensor | None]:
        with torch.set_grad_enabled(with_gradient):
            logprobs = forward(model, padded).logprobs
            return logprobs, None if probe is None else _gradient(logprobs, probe)

    plain, plain_grad = run_plain()
    with torch.set_grad_enabled(with_gradient), packed_attention([base], layers), running(packed.packed):
        ours = forward(model, packed).logprobs
        calls = num_calls()
        our_grad = None if probe is None else _gradient(ours, probe)
    if calls != config.num_hidden_layers:
        return (
            f"{calls} of {config.num_hidden_layers} layers of {type(base).__name__} go through the attention interface"
        )
    error = _difference(ours, plain)
    grad_error = _gradient_error(our_grad, plain_grad)

    def own() -> float:
        with rounded_otherwise(model):
            logprobs, gradient = run_plain()
        return max(_difference(logprobs, plain), _gradient_error(gradient, plain_grad) / 2)

    exact = base.get_output_embeddings().weight.dtype == torch.float32 and not torch.is_autocast_enabled(device.type)
    # A wrong mask is off by far more.
    allowed = 1e-3 if exact else allowed_difference(NOISE, max(error, grad_error / 2), own)
    if not (error < allowed and grad_error < 2 * allowed):
        return (
            f"packed and padded forwards of {type(base).__name__} differ by {error:.1e}, gradients by {grad_error:.1e}"
        )
    return None


def _rollout(config: Any, window: int = 0) -> Rollout:
    """Two prompts of different lengths with two completions each, the longer across the window if there is one."""
    limit = getattr(config, "max_position_embeddings", None) or 1024
    length = window + 8 if window else min(24, max(8, limit // 2))
    draw = random.Random(0)
    tokens = min(config.vocab_size, 1000)
    lengths = [(length, 5), (length, 3), (4, 6), (4, 2)]
    prompts = {size: [draw.randrange(tokens) for _ in range(size)] for size, _ in lengths}
    count = len(lengths)
    return Rollout(
        prompt_ids=[prompts[size] for size, _ in lengths],
        completion_ids=[[draw.randrange(tokens) for _ in range(size)] for _, size in lengths],
        groups=torch.tensor([0, 0, 1, 1]),
        scores=torch.zeros(count, 1),
        score=torch.zeros(count),
        trained=[True] * count,
    )


def _pictured(rollout: Rollout) -> Rollout:
    """The two shortest prompts with images, with two completions each, made of those that they got."""
    shortest: dict[int, list[int]] = {}  # rows by group
    for row in sorted(range(len(rollout)), key=lambda row: len(rollout.prompt_ids[row])):
        if rollout.prompt_inputs[row] and rollout.completion_ids[row]:
            shortest.setdefault(int(rollout.groups[row]), []).append(row)
    rows = [found[0] for found in list(shortest.values())[:2] for _ in range(2)]
    lengths = [5, 3, 6, 2][: len(rows)]
    return Rollout(
        prompt_ids=[rollout.prompt_ids[row] for row in rows],
        completion_ids=[
            (rollout.completion_ids[row] * n)[i % 2 :][:n] for i, (row, n) in enumerate(zip(rows, lengths, strict=True))
        ],
        groups=torch.arange(len(rows)) // 2,
        scores=torch.zeros(len(rows), 1),
        score=torch.zeros(len(rows)),
        trained=[True] * len(rows),
        prompt_inputs=[rollout.prompt_inputs[row] for row in rows],
    )


def _probe(model: Any) -> Tensor | None:
    """A parameter deep in the model whose gradient passes through attention: the first trainable one of a layer.

    None where all of the decoder is frozen.
    """
    base = base_of(model)
    decoder = {id(p) for p in base.get_decoder().parameters()}  # a vision tower's have no part in text
    trainable = [
        (n, p) for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point() and id(p) in decoder
    ]
    inner = [p for n, p in trainable if ".0." in n and p.dim() == 2]
    return next(iter(inner or [p for _, p in trainable]), None)


def _gradient(logprobs: Tensor, probe: Tensor) -> Tensor:
    return torch.autograd.grad(logprobs.sum(), probe)[0].float()


def _gradient_error(ours: Tensor | None, plain: Tensor | None) -> float:
    return 0.0 if ours is None or plain is None else _difference(ours, plain)


def _difference(ours: Tensor, plain: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    ours, plain = ours.detach().float(), plain.detach().float()
    return float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-6))
