"""What users call to load a model and put an adapter on it, `load_model` and `add_lora`; and the same under Unsloth's
names. (How the trainer loads the model that it is given is `load.py`.)

Nothing of Unsloth is used: scripts and documents written for it run with the import changed.
"""

from __future__ import annotations

from typing import Any

import torch

from rloom.errors import ConfigError, UnknownOptionError, check_choice
from rloom.models import load as loading
from rloom.models.adapters import fast_dtype, lora, quantization_config
from rloom.models.export import add_saving
from rloom.printable import get_logger

logger = get_logger(__name__)


def load_model(
    name: str,
    *,
    max_seq_length: int | None = None,
    load_in_4bit: bool = False,
    load_in_8bit: bool = False,
    dtype: Any = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """A model and its tokenizer, by hub id or folder.

    `max_seq_length` bounds prompt and completion together: the trainer refuses prompts that leave too little room,
    before training. `load_in_4bit` and `load_in_8bit` quantize through bitsandbytes; a checkpoint that is quantized
    already is taken as it is. Further arguments go to `from_pretrained`. The model has `save_pretrained_merged` and
    `save_pretrained_gguf` (`rloom.models.export`).

    ```python
    model, tokenizer = rloom.load_model("Qwen/Qwen3-4B", max_seq_length=512, load_in_4bit=True)
    ```
    """
    if max_seq_length is not None and max_seq_length < 2:
        raise ConfigError(f"max_seq_length must be at least 2, not {max_seq_length}")
    quantized = load_in_4bit or load_in_8bit
    # float32 learns without care. Quantized weights are left as they are, and what is beside them may be bfloat16.
    kwargs.update(trust_remote_code=trust_remote_code, dtype=dtype or (fast_dtype() if quantized else torch.float32))
    if quantized and getattr(loading.load_config(name, kwargs), "quantization_config", None) is None:
        kwargs["quantization_config"] = quantization_config(
            load_in_4bit=load_in_4bit, load_in_8bit=load_in_8bit, dtype=dtype
        )
    model = loading.load_model(name, **kwargs)
    tokenizer = loading.tokenizer_of(
        loading.load_processing_class(None, model, kwargs.get("revision"), trust_remote_code)
    )
    if max_seq_length is not None:
        own = loading.context_length(model)
        if own is not None and max_seq_length > own:
            logger.warning("max_seq_length=%d is more than the model's %d positions", max_seq_length, own)
        model.max_seq_length = max_seq_length
    return add_saving(model), tokenizer


def add_lora(model: Any, *, r: int = 16, use_gradient_checkpointing: bool | str = True, **options: Any) -> Any:
    """The model under a new LoRA adapter: what of peft's `LoraConfig` is given, and its own defaults otherwise.

    `use_gradient_checkpointing` is "unsloth" in documents written for it; here that means on.

    ```python
    model = rloom.add_lora(model, r=16, target_modules=["q_proj", "v_proj"])
    ```
    """
    if isinstance(use_gradient_checkpointing, str):
        check_choice("use_gradient_checkpointing", use_gradient_checkpointing, ("unsloth", "mlx", "true", "false"))
        use_gradient_checkpointing = use_gradient_checkpointing != "false"
    limit = loading.max_seq_length(model)
    wrapped = loading.wrap_peft(model, lora(r=r, **options), gradient_checkpointing=bool(use_gradient_checkpointing))
    if use_gradient_checkpointing:
        wrapped.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    else:
        wrapped.gradient_checkpointing_disable()
    if limit is not None:
        wrapped.max_seq_length = limit
    return add_saving(wrapped)


NOT_SUPPORTED = {"fast_inference": "engine", "gpu_memory_utilization": "engine", "max_lora_rank": "r"}
"""Options of Unsloth that have no meaning here, and ours that come nearest."""


class FastLanguageModel:
    """`load_model` and `add_lora` under the names that Unsloth gives them."""

    @staticmethod
    def from_pretrained(
        model_name: str, max_seq_length: int | None = None, dtype: Any = None, load_in_4bit: bool = False, **kwargs: Any
    ) -> tuple[Any, Any]:
        """A model and its tokenizer. Options of Unsloth that have no meaning here are refused."""
        for name, instead in NOT_SUPPORTED.items():
            if kwargs.pop(name, None):
                raise UnknownOptionError(
                    f"FastLanguageModel.from_pretrained: `{name}` is not supported; see the option `{instead}`"
                )
        return load_model(model_name, max_seq_length=max_seq_length, dtype=dtype, load_in_4bit=load_in_4bit, **kwargs)

    @staticmethod
    def get_peft_model(model: Any, r: int = 16, random_state: int | None = None, **options: Any) -> Any:
        """The model under a LoRA adapter; `random_state` seeds its weights."""
        if random_state is not None:
            torch.manual_seed(random_state)
        return add_lora(model, r=r, **options)

    @staticmethod
    def for_inference(model: Any) -> Any:
        """Evaluation mode; training switches back by itself."""
        return model.eval()

    @staticmethod
    def for_training(model: Any) -> Any:
        """Training mode."""
        return model.train()
