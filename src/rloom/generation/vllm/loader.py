"""Starts vLLM with weights that are in this process's memory already."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rloom.generation.vllm.weights import check_taken, checkpoint_weights

LOADER = "rloom"

_policy: list[Any] = []
"""The model whose weights vLLM takes, while it starts. vLLM makes its loaders itself, from a name alone."""


@contextmanager
def loading_from(model: Any) -> Iterator[None]:
    """While this is open, vLLM's `load_format="rloom"` means this model's weights, without its adapter."""
    _register()
    _policy.append(model)
    try:
        yield
    finally:
        _policy.pop()


@functools.cache
def _register() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(LOADER)
    class PolicyLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """They are here."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            load_base_weights(model, _policy[-1])


def load_base_weights(theirs: Any, policy: Any) -> None:
    """Load vLLM's model with the policy's weights, its adapter left out."""
    names = {name for name, _ in theirs.named_parameters()}
    check_taken(names, theirs.load_weights(checkpoint_weights(policy, names, adapters=False)))
