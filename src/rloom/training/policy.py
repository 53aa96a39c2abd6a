"""Loads the policy: the model with its adapter and its tokenizer, and what its reference will be a copy of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import ProcessorMixin

from rloom.config import RLOOConfig
from rloom.config.topic import parsed
from rloom.data.vision import is_vision
from rloom.errors import ConfigError, in_words
from rloom.models import load as loading
from rloom.models.reference import add_reference_adapter, needs_own_adapter
from rloom.sampling_rules import ENGINES
from rloom.training.placement import loads_without_data
from rloom.training.sharding_options import load_as_asked


@dataclass(slots=True, kw_only=True)
class Policy:
    """The model to train, with its tokenizer."""

    model: Any
    processing_class: Any
    tokenizer: Any
    eos_token_ids: list[int]
    vision: bool  # whether prompts may have images
    new_adapter: bool


def make_policy(
    model: Any, processing_class: Any, args: RLOOConfig, quantization_config: Any, peft_config: Any, *, chat: bool
) -> Policy:
    """Load the policy as it will be trained: the model with its adapter, the tokenizer, and the end tokens."""
    load_as_asked()
    revision = parsed(args.model_init_kwargs).get("revision") if isinstance(model, str) else None
    model = loading.load_policy(
        model,
        parsed(args.model_init_kwargs) or None,
        trust_remote_code=args.trust_remote_code,
        quantization_config=quantization_config,
        device=args.device,
        without_data=loads_without_data(args) and not loading.begins_with_weights(peft_config),
    )
    processing_class = loading.load_processing_class(processing_class, model, revision, args.trust_remote_code)
    vision = is_vision(processing_class)
    if isinstance(processing_class, ProcessorMixin) and not vision:
        raise ConfigError(
            f"{type(processing_class).__name__} is a processor without images; rloom trains on text and images: pass "
            "the model's tokenizer"
        )
    tokenizer = loading.tokenizer_of(processing_class)
    template = getattr(processing_class, "chat_template", None)
    stops = [] if args.stop_token_id is None else [args.stop_token_id]
    eos_token_ids = loading.agree_on_tokens(model, tokenizer, stops, chat=chat, template=template)
    model = loading.wrap_peft(model, peft_config, gradient_checkpointing=args.gradient_checkpointing)
    if args.disable_dropout:
        loading.disable_dropout(model)
    return Policy(
        model=model,
        processing_class=processing_class,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids,
        vision=vision,
        new_adapter=peft_config is not None,
    )


def prepare_reference(policy: Policy, path: str | None, args: RLOOConfig, *, sharded: bool) -> bool:
    """Whether the reference will be a copy of the policy. An adapter's copy is put beside it now where the policy will
    be `sharded`: none can be added later."""
    if args.beta == 0.0 or path is not None:
        return False
    model = policy.model
    own = loading.is_peft_model(model)
    if sharded and needs_own_adapter(model, new_adapter=policy.new_adapter, follows=args.sync_ref_model):
        add_reference_adapter(model)
    return not own


def check_images(policy: Policy, column: str | None, args: RLOOConfig) -> None:
    """Refuse a column of images where the model or the engine cannot process images."""
    if column is None:
        return
    if not policy.vision:
        raise ConfigError(
            f"the data has a column {column!r}, and {type(policy.processing_class).__name__} is a tokenizer: pass a "
            "vision-language model with its processor as `processing_class`, or remove the column"
        )
    if args.engine is not None and not ENGINES[args.engine].takes_images:
        others = in_words(f"engine={name!r}" for name, engine in ENGINES.items() if engine.takes_images)
        raise ConfigError(
            f"engine={args.engine!r} does not take images, and the data has a column {column!r}: leave `engine` "
            f"unset, or set {others}"
        )
