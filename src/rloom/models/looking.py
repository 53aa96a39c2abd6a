"""Does a model let tokens see later ones? Some do within an image, which neither packed rows nor prefills of ours know.

Its masks are looked at, not its numbers: in half precision the difference is lost in rounding as soon as some text
follows the image.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rloom.data.model_inputs import Inputs, fitted_to, join
from rloom.models.attention import attention_for_text, attention_of
from rloom.models.load import base_of

NAME = "rloom_looking"

_masks: list[Tensor] = []  # of the forward that is looked at; layers of one kind share theirs


def one_row(base: Any, prompt: list[int], completion: list[int], shown: Inputs, *, keep: int) -> dict[str, Any]:
    """A prompt with images and a completion as a model takes them on its own; the logits of the last `keep` tokens."""
    accepts = inspect.signature(type(base).forward).parameters
    ids = torch.tensor([prompt + completion], device=next(base.parameters()).device)
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= {name: value for name, value in (("use_cache", False), ("logits_to_keep", keep)) if name in accepts}
    return inputs | fitted_to(base, join([shown], len(prompt), len(completion)))


@torch.no_grad()
def sees_ahead(model: Any, prompt: list[int], shown: Inputs) -> bool:
    """Whether any layer's mask is open above the diagonal in a forward over a prompt with images."""
    base = base_of(model)
    before = attention_of(base.config)
    base.set_attn_implementation(attention_for_text(base.config, NAME))
    try:
        model(**one_row(base, prompt, [], shown, keep=1))
        return any(bool(mask.triu(diagonal=1).any()) for mask in _masks)
    finally:
        _masks.clear()
        base.set_attn_implementation(before)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    if attention_mask is not None and not any(attention_mask is mask for mask in _masks):
        _masks.append(attention_mask)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """True where a token sees another; never left out, as it may be where it is the usual one."""
    kwargs.pop("allow_is_causal_skip", None)
    return sdpa_mask(*args, allow_is_causal_skip=False, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
