"""Loading the policy and its tokenizer, as TRL does: by name or path, or taken as given, with LoRA on top; and what can
be asked of a loaded model. (What users call to load a model is `quick_load.py`.)"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from rloom.cpu_bfloat16 import make_bfloat16_safe
from rloom.errors import ConfigError, needs_extra
from rloom.models.adapters import keep_differentiable
from rloom.models.no_model import lacks_config, why_no_model
from rloom.printable import get_logger

logger = get_logger(__name__)

NO_DATA = {"": "meta"}
"""As `device_map` of `from_pretrained`: no weights are read."""


def is_peft_model(model: Any) -> bool:
    """Whether `model` is a PeftModel, without importing peft when it is not."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """The model as transformers knows it, without its adapter."""
    return model.get_base_model() if is_peft_model(model) else model


def has_virtual_tokens(model: Any) -> bool:
    """Whether an adapter puts tokens of its own before each prompt."""
    return is_peft_model(model) and any(getattr(c, "is_prompt_learning", False) for c in model.peft_config.values())


def load_policy(
    model: Any,
    init_kwargs: dict[str, Any] | None,
    *,
    trust_remote_code: bool,
    quantization_config: Any = None,
    device: Any = None,
    without_data: bool = False,
) -> Any:
    """The model to train: loaded if it is a name or path, else as given. A quantized one is loaded where it is trained,
    `device`: it cannot be moved there. `without_data`: its weights are not read, and have shapes alone."""
    if not isinstance(model, str):
        for name, value in (("model_init_kwargs", init_kwargs), ("quantization_config", quantization_config)):
            if value is not None:
                logger.warning("`%s` has no effect: the model is already instantiated", name)
        return model
    kwargs = {"trust_remote_code": trust_remote_code, **(init_kwargs or {})}
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise ConfigError("`quantization_config` is given twice: as an argument and in `model_init_kwargs`")
        kwargs["quantization_config"] = quantization_config
    if device is not None and kwargs.get("quantization_config") is not None:
        kwargs.setdefault("device_map", {"": device})
    elif without_data:
        kwargs.setdefault("device_map", NO_DATA)
    return load_model(model, **kwargs)


def load_model(name: str, **kwargs: Any) -> Any:
    """`from_pretrained` with the architecture that the checkpoint names, in float32 unless told otherwise."""
    kwargs["dtype"] = _dtype(kwargs.get("dtype", "float32"))
    # Products in bfloat16 may run on this CPU; "auto" may turn out to be bfloat16.
    if kwargs["dtype"] not in (torch.float32, torch.float16) and not torch.cuda.is_available():
        make_bfloat16_safe()
    names = load_config(name, kwargs).architectures or [""]
    architecture = getattr(transformers, names[0], None) or AutoModelForCausalLM
    return architecture.from_pretrained(name, **kwargs)


def load_config(name: str, kwargs: dict[str, Any]) -> PretrainedConfig:
    """The config of a checkpoint that is loaded with these arguments."""
    own = {key: kwargs[key] for key in ("trust_remote_code", "revision") if key in kwargs}
    try:
        return AutoConfig.from_pretrained(name, **own)
    except (OSError, ValueError) as error:
        # Of a folder without a config the library says that its model has no type. Other errors of that kind are clear.
        if isinstance(error, ValueError) and not lacks_config(name):
            raise
        # The library's own words do not always say which model.
        raise OSError(why_no_model(name, error)) from error


def load_for_inference(name: str, **kwargs: Any) -> Any:
    """A model by name or path; the folder of an adapter gives its base with the adapter merged in."""
    folder = Path(name)
    if not (folder / "adapter_config.json").exists() or (folder / "config.json").exists():
        return load_model(name, **kwargs)
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise needs_extra("the adapter", "peft", "peft") from error
    base = load_model(str(PeftConfig.from_pretrained(name).base_model_name_or_path), **kwargs)
    return PeftModel.from_pretrained(base, name).merge_and_unload()


def _dtype(value: Any) -> Any:
    if value is None or value == "auto" or isinstance(value, torch.dtype):
        return value
    if value in ("bfloat16", "float16", "float32"):
        return getattr(torch, value)
    raise ConfigError(f"`dtype` must be 'auto', 'bfloat16', 'float16', 'float32' or a torch.dtype, not {value!r}")


def load_processing_class(processing_class: Any, model: Any, revision: str | None, trust_remote_code: bool) -> Any:
    """The tokenizer or processor: as given, or loaded by the model's name."""
    if processing_class is None:
        name = model.config._name_or_path
        if not name:
            raise ConfigError("the model has no name to load a tokenizer by; pass `processing_class`")
        processing_class = AutoProcessor.from_pretrained(
            name,
            revision=revision,
            truncation_side="left",
            padding_side="left",
            trust_remote_code=trust_remote_code,
        )
    if not isinstance(processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
        raise TypeError("The `processing_class` must be either a `PreTrainedTokenizerBase` or a `ProcessorMixin`")
    return processing_class


def tokenizer_of(processing_class: Any) -> PreTrainedTokenizerBase:
    """The tokenizer inside a processor, or the tokenizer itself."""
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def agree_on_tokens(
    model: Any, tokenizer: Any, extra_stops: Sequence[int], *, chat: bool = False, template: str | None = None
) -> list[int]:
    """All tokens that end a completion; sets the padding token on model and tokenizer alike.

    Every end token that the model's generation config declares counts (an end-of-turn token, say), the tokenizer's
    own and, for chat prompts, the special token with which the chat template (a processor has its own) ends a reply.
    """
    config = model.config.get_text_config()
    _check_stops(extra_stops, config)
    declared = getattr(model.generation_config, "eos_token_id", None)
    declared = [declared] if isinstance(declared, int) else list(declared or ())
    own = [] if tokenizer.eos_token_id in declared else [tokenizer.eos_token_id]
    found = [*own, *declared, *extra_stops, end_of_turn(tokenizer, template) if chat else None]
    ends = [token for token in dict.fromkeys(found) if token is not None]
    if not ends:
        raise ConfigError(
            "neither the tokenizer nor the model's generation config has an end-of-sequence token, so no completion "
            "could end; set `tokenizer.eos_token` or `model.generation_config.eos_token_id`"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = ends[0]
    config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return ends


def _check_stops(stops: Sequence[int], config: PretrainedConfig) -> None:
    """Refuse a token that the model does not have: it would never end anything."""
    for stop in stops:
        if not 0 <= stop < config.vocab_size:
            raise ConfigError(
                f"the stop token {stop} is none of the model's, whose ids are 0 to {config.vocab_size - 1}"
            )


def end_of_turn(tokenizer: Any, template: str | None = None) -> int | None:
    """The special token that the chat template puts right after a reply, if it puts one."""
    if template is None and getattr(tokenizer, "chat_template", None) is None:
        return None
    # Something that no template contains.
    mark = "5f3a9"
    text = _rendered(tokenizer, template, ["a", mark])
    # Templates of vision-language models may know contents in parts only.
    if mark not in text:
        text = _rendered(tokenizer, template, [[{"type": "text", "text": content}] for content in ("a", mark)])
    # A template may refuse such a conversation; then nothing is found behind the mark.
    after = text.rpartition(mark)[2].lstrip() if mark in text else ""
    ids = tokenizer(after, add_special_tokens=False)["input_ids"] if after else []
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None


def _rendered(tokenizer: Any, template: str | None, contents: list[Any]) -> str:
    """A user's turn and a reply as the chat template writes them; nothing if it refuses them."""
    turns = [{"role": role, "content": content} for role, content in zip(("user", "assistant"), contents, strict=True)]
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, chat_template=template)
    except Exception as error:
        logger.debug("the chat template did not render a plain conversation: %s", error)
        return ""


def keeps_other_state(model: nn.Module) -> bool:
    """Whether the library marks a model, or a part of it, as one that carries more from token to token than keys and
    values. With small weights that is too little to show in a comparison of logits."""
    return any(getattr(module, "_is_stateful", False) for module in model.modules())


def has_position_table(model: Any) -> bool:
    """Whether positions are looked up in a table (GPT-2, OPT), beyond which there is nothing."""
    config = model.config.get_text_config()
    rotary = any(getattr(config, name, None) for name in ("rope_parameters", "rope_theta", "rope_scaling"))
    limit = context_length(model)
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return not rotary and limit is not None and any(limit <= size <= limit + 2 for size in tables)


def context_length(model: Any) -> int | None:
    """The longest sequence that the model's positions allow, None if they do not limit it."""
    config = model.config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def max_seq_length(model: Any) -> int | None:
    """The limit on prompt and completion that the model was loaded with; it may stand on a model inside."""
    for module in (model, getattr(model, "base_model", None), base_of(model)):
        value = getattr(module, "max_seq_length", None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def wrap_peft(model: Any, peft_config: Any, *, gradient_checkpointing: bool) -> Any:
    """The model under a new adapter, or as it is when `peft_config` is None."""
    keep_differentiable(model)
    if peft_config is not None:
        model = _new_adapter(model, peft_config)
    # Else checkpointed blocks behind frozen embeddings would get no gradient.
    if is_peft_model(model) and gradient_checkpointing:
        model.enable_input_require_grads()
    return model


def begins_with_weights(peft_config: Any) -> bool:
    """Whether a new adapter is computed from the base weights (PiSSA, OLoRA, …): without their data it cannot be made.

    >>> from types import SimpleNamespace
    >>> [begins_with_weights(SimpleNamespace(init_lora_weights=how)) for how in (True, "gaussian", "pissa")]
    [False, False, True]
    """
    begun = getattr(peft_config, "init_lora_weights", True)
    return isinstance(begun, str) and begun.lower() != "gaussian"


def _new_adapter(model: Any, peft_config: Any) -> Any:
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise needs_extra("`peft_config`", "peft", "peft") from error
    if not isinstance(peft_config, PeftConfig):
        raise TypeError(f"`peft_config` must be a `peft.PeftConfig`, got {type(peft_config).__name__}.")
    if is_peft_model(model):
        raise ConfigError(
            "the model is a PeftModel already and `peft_config` is given too; merge and unload the adapter first, or "
            "leave `peft_config` out to train the adapter that is there"
        )
    own_saving = hasattr(model, "save_pretrained_merged")
    model = get_peft_model(model, peft_config)
    if own_saving:
        # Those of the base would save it without the adapter.
        from rloom.models.export import add_saving

        add_saving(model)
    if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
        # QLoRA trains its adapters in bfloat16; DoRA's magnitudes move by less than bfloat16 can hold.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "lora_magnitude_vector" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    return model


DROPOUT_NAMES = ("attention_dropout", "attn_dropout", "dropout")
"""Where layers keep a dropout probability as a plain number."""


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout probability to 0, also those that attention layers keep as a plain number."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in DROPOUT_NAMES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def has_dropout(model: nn.Module) -> bool:
    """Whether any dropout probability is above 0."""
    return any(
        (isinstance(module, nn.Dropout) and module.p > 0)
        or any(isinstance(p := getattr(module, name, None), float) and p > 0 for name in DROPOUT_NAMES)
        for module in model.modules()
    )
