"""The model and the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rloom.config.topic import Topic, option


@dataclass
class ModelTopic(Topic):
    """How the model is loaded."""

    model_init_kwargs: dict[str, Any] | str | None = option(
        None, "Arguments of `from_pretrained` when the model is given by name (`dtype`, `revision`, …)."
    )
    trust_remote_code: bool = option(False, "Allow models and tokenizers that bring their own Python code.")
    router_aux_loss_coef: float | None = option(
        None, "Weight of a mixture-of-experts model's load-balancing loss; unset: the model's own; 0: off."
    )
    disable_dropout: bool = option(False, "Switch dropout off in policy and reference.")
