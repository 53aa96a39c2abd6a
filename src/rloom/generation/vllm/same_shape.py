"""Whether a server's model has the shape of the model in training, where its folder can be seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rloom.errors import EngineError
from rloom.models.load import base_of

SHAPE = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "vocab_size", "n_embd", "n_layer", "n_head",
)  # fmt: skip


def check_shape(address: str, served: str, model: Any) -> None:
    """Refuse a server of a model of another shape. Weights that do not fit would leave it unusable, for later runs too.

    `served` is the name by which it was started. Of one that is no folder here nothing is known.
    """
    path = Path(served, "config.json")
    # A relative path is seen from where the server was started.
    if not path.is_absolute() or not path.is_file():
        return
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    theirs, ours = config.get("text_config", config), base_of(model).config.get_text_config().to_dict()
    for name in SHAPE:
        if name in theirs and name in ours and theirs[name] != ours[name]:
            raise EngineError(
                f"the vLLM server at {address} serves {served}, whose {name} is {theirs[name]}, and that of the model "
                f"in training is {ours[name]}: start the server with the model that is trained"
            )
