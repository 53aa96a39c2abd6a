"""Decoder layers whose two products are added to the residual in place: h += o(…), and then h += down(…).

By itself a layer launches a kernel for each of the sums, which in a decode step takes as long as reading three million
weights. Which layers are built like that is tried, not looked up: the model is run once on a few tokens, and what each
part of a layer takes and returns is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from rloom.generation.native.layers import Forwards
from rloom.models.fused import is_watched
from rloom.models.load import base_of
from rloom.models.verify import evaluating, plain_logits, probe_tokens

PARTS = (
    "input_layernorm", "self_attn", "self_attn.o_proj", "post_attention_layernorm", "mlp", "mlp.down_proj",
)  # fmt: skip
"""The parts of a layer that take part, as most models name them, in the order in which they are called."""

Call = tuple[dict[str, Any], Any]
"""The arguments of a module's latest call, positional ones under the name `hidden_states`, and what it returned."""


class ResidualLayers:
    """The layers of a model that add two products to their input, and do nothing else with it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 3}
    >>> len(ResidualLayers(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9))).layers)
    3
    """

    def __init__(self, model: nn.Module) -> None:
        candidates = [module for module in model.modules() if _has_plain_parts(module)]
        calls = _calls_in(model, candidates) if candidates else {}
        self.layers = [layer for layer in candidates if _only_adds_products(layer, calls)]
        self.forwards: Forwards = [pair for layer in self.layers for pair in _forwards(layer, calls)]

    def refresh(self) -> None:
        """Nothing to do: the products read the model's own weights."""


def _has_plain_parts(module: Any) -> bool:
    """Whether a module has the parts of a layer, both products plain ones without a bias, hooks or adapters."""
    try:
        parts = dict(zip(PARTS, attrgetter(*PARTS)(module), strict=True))
    except AttributeError:
        return False
    products = [parts["self_attn.o_proj"], parts["mlp.down_proj"]]
    return all(type(x) is nn.Linear and x.bias is None and not is_watched(x) for x in products)


@torch.no_grad()
def _calls_in(model: nn.Module, layers: list[nn.Module]) -> dict[nn.Module, Call]:
    """The calls of layers and their parts while the model runs on a few tokens; none, if it cannot."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        calls[module] = {**dict(zip(["hidden_states"], args, strict=False)), **named}, output

    watched = [part for layer in layers for part in (layer, *attrgetter(*PARTS)(layer))]
    handles = [part.register_forward_hook(note, with_kwargs=True) for part in watched]
    (tokens,) = probe_tokens(base_of(model).config.get_text_config(), 3)
    try:
        with evaluating(model):
            plain_logits(model, tokens, [])
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _only_adds_products(layer: Any, calls: dict[nn.Module, Call]) -> bool:
    """Whether a layer did just what `_forwards` will do: the same tensors went from part to part, and it returned the
    sum."""
    parts = attrgetter(*PARTS)(layer)
    if any(part not in calls for part in (layer, *parts)):
        return False
    (given, returned), *of_parts = (calls[part] for part in (layer, *parts))
    first_norm, attention, output, second_norm, mlp, down = of_parts
    x: Any = given.get("hidden_states")
    between: Any = second_norm[0].get("hidden_states")
    passed_on = (
        first_norm[0].get("hidden_states") is x
        and attention[0].get("hidden_states") is first_norm[1]
        and isinstance(attention[1], tuple)
        and attention[1][0] is output[1]
        and mlp[0].get("hidden_states") is second_norm[1]
        and mlp[1] is down[1]
        and all(attention[0].get(name, x) is value for name, value in given.items() if name != "hidden_states")
        and all(value is None or isinstance(value, bool) for value in _defaults(given, attention[0]).values())
    )
    # Products that are all zero would hide a factor.
    if (
        not passed_on
        or not all(isinstance(t, Tensor) for t in (x, between, returned))
        or not (output[1].any() and down[1].any())
    ):
        return False
    return torch.equal(between, x + output[1]) and torch.equal(returned, between + down[1])


def _defaults(given: dict[str, Any], received: dict[str, Any]) -> dict[str, Any]:
    """What attention receives that the layer was not given: defaults of the layer's own arguments."""
    return {name: value for name, value in received.items() if name not in given}


class _AddingProduct:
    """The forward of a linear layer; while there is a residual, its product is added to that, in place."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear, self.own = linear, linear.forward
        self.residual: Tensor | None = None

    @contextmanager
    def adding_to(self, residual: Tensor) -> Iterator[None]:
        self.residual = residual
        try:
            yield
        finally:
            self.residual = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.residual is None:
            return self.own(x)
        self.residual.flatten(0, 1).addmm_(x.flatten(0, 1), self.linear.weight.t())
        return self.residual


def _forwards(layer: Any, calls: dict[nn.Module, Call]) -> Forwards:
    """Of the layer and of its two products."""
    output, down = _AddingProduct(layer.self_attn.o_proj), _AddingProduct(layer.mlp.down_proj)
    defaults = _defaults(calls[layer][0], calls[layer.self_attn][0])
    forward = partial(_forward, layer, layer.forward, output, down, defaults)
    return [(output.linear, output), (down.linear, down), (layer, forward)]


def _forward(
    layer: Any, own: Callable[..., Tensor], output: _AddingProduct, down: _AddingProduct, defaults: dict[str, Any],
    hidden_states: Tensor, *args: Any, **named: Any,
) -> Tensor:  # fmt: skip
    """For steps of one token a row; the layer's own for all else."""
    if args or not _can_add(hidden_states, output.linear.weight):
        return own(hidden_states, *args, **named)
    normed = layer.input_layernorm(hidden_states)
    with output.adding_to(hidden_states):
        hidden_states = layer.self_attn(hidden_states=normed, **{**defaults, **named})[0]
    normed = layer.post_attention_layernorm(hidden_states)
    with down.adding_to(hidden_states):
        return layer.mlp(normed)


def _can_add(x: Tensor, weight: Tensor) -> bool:
    is_step = x.dim() == 3 and x.shape[1] == 1 and x.is_contiguous()
    # Autocast does not reach sums in place.
    return is_step and x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)
