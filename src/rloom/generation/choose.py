"""Which engine a run uses: the fastest that proves right on the very model, or the one that was asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from transformers import GenerationMixin

from rloom.config.vllm import SERVER
from rloom.errors import ConfigError, EngineError
from rloom.generation.base import Engine, InStep, Sampling
from rloom.generation.forked import ForkedEngine
from rloom.generation.transformers import TransformersEngine
from rloom.generation.vllm.options import VllmOptions
from rloom.models.load import base_of
from rloom.printable import get_logger
from rloom.sampling_rules import ENGINES

logger = get_logger(__name__)

OURS = frozenset({"stop_strings", "bos_token_id"})
"""Entries of `generation_kwargs` that our own engines honour; others are for `model.generate`."""

NEXT = {"native": "the library's cache, forked for each group,", "forked": "`model.generate`"}
"""What is used where an engine does not fit."""


def choose_engine(
    get_model: Callable[[], Any],
    sampling: Sampling,
    *,
    wanted: str | None = None,
    tokenizer: Any = None,
    compiled: bool = False,
    merged: bool | None = None,
    group_size: int = 0,
    longest_prompt: int = 0,
    pad_to_multiple_of: int | None = None,
    never: Sequence[int] = (),
    vllm: VllmOptions | None = None,
    in_step: InStep | None = None,
) -> Engine:
    """An engine for this model. What is asked for by name is had, or an error says why not.

    `never` are tokens that must not be sampled for a prompt with images: those that stand for images. `vllm` says how
    vLLM is run, which is never chosen unasked. `in_step`: given where weights are gathered layer by layer, for which
    there are the forked engine and vLLM's servers.
    """
    if in_step is not None and wanted == "vllm" and vllm is not None and vllm.mode == SERVER:
        return _vllm(get_model, sampling, tokenizer, vllm, in_step)
    if in_step is not None:
        return _layer_by_layer(get_model, sampling, wanted, tokenizer, in_step)
    makers: dict[str, Callable[[], Engine]] = {
        "native": lambda: _native(
            get_model,
            sampling,
            tokenizer=tokenizer,
            compiled=compiled,
            merged=merged,
            group_size=group_size,
            longest_prompt=longest_prompt,
        ),
        "forked": lambda: ForkedEngine(get_model, sampling, tokenizer=tokenizer),
        "transformers": lambda: TransformersEngine(
            get_model, sampling, pad_to_multiple_of=pad_to_multiple_of, tokenizer=tokenizer, never=never
        ),
        "vllm": lambda: _vllm(get_model, sampling, tokenizer, vllm or VllmOptions()),
    }
    foreign = sorted(set(sampling.extra) - OURS)
    if wanted is not None and ENGINES[wanted].own_options and foreign:
        raise ConfigError(
            f"engine='{wanted}' does not know the generation option(s) {', '.join(foreign)}: take them out, or set "
            "engine='transformers'"
        )
    if wanted is not None:
        try:
            return makers[wanted]()
        except EngineError as error:
            option = "`use_vllm` (or `engine`)" if wanted == "vllm" else "`engine`"
            raise EngineError(f"engine='{wanted}': {error}. Leave {option} unset to use one that fits") from error
    if foreign:
        logger.info("generating with model.generate, because of %s", ", ".join(foreign))
        return makers["transformers"]()
    if has_own_generate(get_model()):
        logger.info("generating with the model's own `generate`; engine='native' would not call it")
        return makers["transformers"]()
    for name in ("native", "forked"):
        try:
            return makers[name]()
        except EngineError as error:
            logger.warning("the %s engine does not fit, %s is used, which is slower: %s", name, NEXT[name], error)
    return makers["transformers"]()


def _layer_by_layer(
    get_model: Callable[[], Any],
    sampling: Sampling,
    wanted: str | None,
    tokenizer: Any,
    in_step: InStep,
) -> Engine:
    foreign = sorted(set(sampling.extra) - OURS)
    asked = f"engine={wanted!r}" if wanted not in (None, "forked") else f"generation_kwargs {', '.join(foreign)}"
    if wanted not in (None, "forked") or foreign:
        raise ConfigError(
            "ds3_gather_for_generation=False generates layer by layer, with engine='forked' or vLLM's servers alone: "
            f"leave {asked} out"
        )
    try:
        return ForkedEngine(get_model, sampling, tokenizer=tokenizer, in_step=in_step)
    except EngineError as error:
        raise ConfigError(
            f"ds3_gather_for_generation=False: {error}. Leave it out, so that a copy generates"
        ) from error


def has_own_generate(model: Any) -> bool:
    """Whether somebody has put another `generate` in place of the library's: then it is meant to be called."""
    base = base_of(model)
    generate = inspect.getattr_static(base, "generate", None)
    return generate is None or not inspect.isfunction(generate) or generate.__module__ != GenerationMixin.__module__


def _native(get_model: Callable[[], Any], sampling: Sampling, **options: Any) -> Engine:
    from rloom.generation.native import NativeEngine

    return NativeEngine(get_model, sampling, **options)


def _vllm(
    get_model: Callable[[], Any],
    sampling: Sampling,
    tokenizer: Any,
    options: VllmOptions,
    in_step: InStep | None = None,
) -> Engine:
    from rloom.generation.vllm import VllmEngine, VllmServerEngine

    if options.mode == SERVER:
        return VllmServerEngine(get_model, sampling, options=options, in_step=in_step)
    return VllmEngine(get_model, sampling, tokenizer=tokenizer, options=options)
