"""Self-checks: does another way to run this very model compute what its plain forward computes?

It is tried out, not looked up in a list of architectures. What goes wrong goes wrong silently: a model that does not
call the attention interface, that keeps other state than keys and values, or whose window does not arrive gives wrong
numbers without an error. So each check runs both ways on a few tokens and compares the numbers.

This module owns what the checks share: the tokens, evaluation mode, the plain forward, the difference, and how large
that may be. The checks are:

- `model_checks.py`: the head, and packed rows, before training;
- `generation/native/proof.py`, `generation/forked.py` and `generation/vllm/proof.py`: the engines;
- `fused.py` and the native engine's kernels, by [`agrees`].
"""

from __future__ import annotations

import functools
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from rloom.data.model_inputs import Inputs, fitted_to, join
from rloom.models.load import base_of
from rloom.printable import get_logger

logger = get_logger(__name__)


class Tolerance:
    """How far two ways to compute the same may differ: of the largest value, where no other measure is named.

    A wrong mask, or other weights, are off by far more than any of these.
    """

    # In float32, for every model check: only the order of sums differs.
    FLOAT32 = 1e-3
    # Log-probabilities of packed rows in half precision, where a model rounds as most do; of gradients, twice as much.
    PACKED = 0.05
    # Logits of tokens decoded one by one in half precision, where a model rounds as most do.
    DECODED = 0.06
    # The same for a model that rounds worse: in a larger difference a wrong mask could hide, so it is refused.
    ROUNDING = 0.3
    # Log-probabilities by our head and by the model's own, after one and the same decoder: only logits are rounded.
    HEAD = 0.02
    # A kernel's result in half precision, by its norm: rounding makes 0.0025 of it.
    KERNEL = 0.02
    # A kernel's result in float32, by its norm: only the order of sums differs.
    KERNEL_FLOAT32 = 1e-4
    # vLLM's log-probabilities, in nats per token, with float32 weights. Other weights are off by about 1.
    VLLM_FLOAT32 = 0.02
    # The same in half precision, which vLLM's kernels round in other places.
    VLLM = 0.1


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while: no dropout, no gradient checkpointing.

    >>> layer = nn.Dropout()
    >>> with evaluating(layer):
    ...     layer.training
    False
    >>> layer.training
    True
    """
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def raise_in_step(model: nn.Module, error: Exception, otherwise: str) -> None:
    """Raise an error of a check that other processes wait for: where weights are in parts, each forward gathers them
    from all. What an architecture does not like, all find alike; memory runs out in one. `otherwise` says what to do.
    """
    # By FSDP2, or by DeepSpeed's ZeRO-3.
    in_parts = isinstance(model, FSDPModule) or any(hasattr(p, "ds_id") for p in model.parameters())
    if in_parts and isinstance(error, torch.OutOfMemoryError):
        error.add_note(f"memory ran out while it was tried out how this model can be run; {otherwise}")
        raise error


@functools.cache
def _parameters_of(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def accepted_by(model: Any) -> frozenset[str]:
    """The names of the arguments that a model's forward takes, also where somebody has put another in its place."""
    forward = base_of(model).forward
    return _parameters_of(getattr(forward, "__func__", forward))


def accepted(model: Any, **arguments: Any) -> dict[str, Any]:
    """Those of some arguments that a model's forward takes.

    >>> accepted(nn.Linear(2, 2), input="x", use_cache=False)
    {'input': 'x'}
    """
    return {name: value for name, value in arguments.items() if name in accepted_by(model)}


def plain_logits(model: Any, prompt: list[int], completion: list[int], images: Inputs | None = None) -> Tensor:
    """Logits (1 + C, V) of a model run on its own: those that predict the completion, and what comes after it.

    `images`: the tensors of the prompt's images. Nothing else is given that a model finds out by itself.
    """
    base, keep = base_of(model), len(completion) + 1
    ids = torch.tensor([prompt + completion], device=next(model.parameters()).device)
    inputs = accepted(base, use_cache=False, logits_to_keep=keep)
    if images:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs |= fitted_to(base, join([images], len(prompt), len(completion)))
    return model(input_ids=ids, **inputs).logits[0, -keep:].clone()


def probe_tokens(config: PretrainedConfig, *lengths: int) -> list[list[int]]:
    """Random tokens that any vocabulary has, the same each time: one list for each length.

    >>> from transformers import LlamaConfig
    >>> probe_tokens(LlamaConfig(vocab_size=9), 3, 2)
    [[6, 6, 0], [4, 8]]
    """
    draw, vocabulary = random.Random(0), min(config.vocab_size, 1000)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in lengths]


def probe_length(config: PretrainedConfig, usual: int, window: int) -> int:
    """The length of the longer probe prompt: across the attention window (0: none), and within the model's positions.

    >>> from transformers import LlamaConfig
    >>> probe_length(LlamaConfig(max_position_embeddings=40), usual=24, window=0)
    20
    """
    return max(window + 8, min(usual, max(8, _positions(config) // 2)))


LONGEST_WINDOW = 8192
"""Windows up to this are crossed on a GPU."""

TRIED_ON_CPU = 10**11
"""Windows are crossed on a CPU up to this many tokens times weights: ten to twenty seconds."""


def window_to_cross(model: nn.Module, config: PretrainedConfig) -> int:
    """The attention window of a model, if a prompt that is longer can be run, and soon enough; else 0.

    >>> from transformers import MistralConfig, MistralForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    >>> config = MistralConfig(**sizes, num_hidden_layers=1, vocab_size=9, sliding_window=4096)
    >>> window_to_cross(MistralForCausalLM(config), config)
    4096
    """
    window = getattr(config, "sliding_window", None) or 0
    if window > _positions(config) - 16:
        return 0
    weights = list(model.parameters())
    longest = LONGEST_WINDOW
    if weights[0].device.type == "cpu":
        longest = min(longest, TRIED_ON_CPU // sum(p.numel() for p in weights))
    if window > longest:
        logger.info("a window of %d tokens was not tried out: that would take long here", window)
        return 0
    return window


def _positions(config: PretrainedConfig) -> int:
    return getattr(config, "max_position_embeddings", None) or 1024


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest between two tensors, as a share of the largest wanted value; NaN if there is one in either.

    >>> difference(torch.tensor([2.0, 5.0, -torch.inf]), torch.tensor([1.0, 5.0, -torch.inf]))
    0.20000000298023224
    """
    found, wanted = found.detach().float(), wanted.detach().float()
    # Tokens that a model rules out have logits of −∞ in both.
    apart = (found - wanted).abs().masked_fill(found == wanted, 0.0)
    return float(apart.max() / wanted.abs().masked_fill(wanted.isinf(), 0.0).max().clamp(min=1e-6))


def largest_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest of any pair; NaN if there is one, which Python's `max` would forget."""
    return float(torch.tensor([difference(*pair) for pair in zip(found, wanted, strict=True)]).max())


def allowed_difference(usual: float, found: float, own: Callable[[], float]) -> float:
    """What two ways to compute the same may differ by: the usual bound, or twice what rounding does in this model.

    A fixed bound does not do. In half precision a wide and deep model with large gains, as one of random weights is,
    lies a tenth of its largest logit away from float32, and so does every other way to compute it; a small one a
    hundredth. `found` is the difference; `own`, which costs a forward, is only asked where that is above the usual.

    >>> allowed_difference(0.06, 0.01, own=lambda: 0.1)  # not asked
    0.06
    >>> allowed_difference(0.06, 0.08, own=lambda: 0.1)
    0.2
    >>> allowed_difference(0.06, 0.8, own=lambda: 0.4)
    0.3
    """
    return usual if found < usual else min(max(usual, 2 * own()), Tolerance.ROUNDING)


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Meanwhile each part of the model returns numbers that are off by up to half a rounding step, as they are in any
    other order of summation. The same each time."""
    generators: dict[torch.device, torch.Generator] = {}

    def shake(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        draw = torch.rand(output.shape, generator=generators[output.device], device=output.device)
        step = torch.finfo(output.dtype).eps / 2
        return (output.float() * (1 + step * (2 * draw - 1))).to(output.dtype)

    handles = [part.register_forward_hook(shake) for part in model.modules() if next(part.children(), None) is None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def agrees(run: Callable[[], tuple[Tensor, Tensor]], instead: str | None, tolerance: float = Tolerance.KERNEL) -> bool:
    """Whether a kernel, which was written for some GPUs, runs on this one and is right there.

    `run` gives what the kernel found and what was expected. `instead` says what is done without the kernel, for a
    warning; None where that is no surprise, and nothing is said.

    >>> agrees(lambda: (torch.ones(3), torch.ones(3)), "it is done by hand")
    True
    """
    level = logging.DEBUG if instead is None else logging.WARNING
    try:
        found, expected = (x.float() for x in run())
        error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    except Exception as failure:
        # The compiler's, the driver's, or for want of memory: nothing that must end a run.
        logger.log(level, "%s: the kernel fails (%s)", instead, str(failure)[:160])
        return False
    if not error <= tolerance:
        logger.log(level, "%s: the kernel is off by %.1e on this GPU", instead, error)
    return error <= tolerance
