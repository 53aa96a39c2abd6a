"""Does a model let tokens see later ones? Some do within an image, which neither packed rows nor our prefills know.

Its masks are looked at, not its numbers: in half precision the difference is lost in rounding as soon as some text
follows the image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rloom.data.model_inputs import Inputs
from rloom.models.attention import attention_for_text, attention_of
from rloom.models.load import base_of
from rloom.models.verify import plain_logits

NAME = "rloom_mask_probe"

_masks: list[Tensor] = []
"""The masks of the forward that is looked at, each once: layers of one kind share theirs."""


@torch.no_grad()
def sees_ahead(model: Any, prompt: list[int], images: Inputs) -> bool:
    """Whether any layer's mask is open above the diagonal in a forward over a prompt with images."""
    base = base_of(model)
    before = attention_of(base.config)
    base.set_attn_implementation(attention_for_text(base.config, NAME))
    try:
        plain_logits(model, prompt, [], images)
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
    """True where a token sees another. Never left out, as the library does where it is the usual one."""
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
