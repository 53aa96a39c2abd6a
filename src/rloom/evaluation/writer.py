"""Loads a model and generates completions, as in training.

The command line's verbs that generate use it, and so do opponents of a win rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from rloom.data.images import ImageSources
from rloom.data.model_inputs import placeholder_ids
from rloom.data.prompts import PromptEncoder
from rloom.data.vision import is_vision
from rloom.errors import EngineError
from rloom.generation.base import Engine, Sampling
from rloom.generation.choose import choose_engine
from rloom.generation.images import ImageRouter
from rloom.generation.vllm.options import VllmOptions
from rloom.models import load as loading
from rloom.sampling_rules import check_sampling
from rloom.types import Group


class Writer:
    """Loads a model by name or path, and generates with the fastest engine that supports it.

    `stop_token_ids` end a completion in addition to the model's own end tokens.
    """

    def __init__(
        self,
        name: str,
        *,
        max_completion_length: int,
        chat: bool,
        engine: str | None = None,
        dtype: Any = None,
        processing_class: Any = None,
        trust_remote_code: bool = False,
        stop_token_ids: Sequence[int] = (),
        images: ImageSources | None = None,
        **sampling: Any,
    ) -> None:
        # Options are checked before a model is loaded.
        check_sampling({"max_completion_length": max_completion_length, **sampling})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        # Half precision is slow on most CPUs.
        init = {"dtype": dtype or ("auto" if device == "cuda" else "float32")}
        self.model = loading.load_for_inference(name, **init, trust_remote_code=trust_remote_code).to(device)
        self.processing = loading.load_processing_class(processing_class, self.model, None, trust_remote_code)
        self.tokenizer, self.trust_remote_code = loading.tokenizer_of(self.processing), trust_remote_code
        ends = loading.agree_on_tokens(self.model, self.tokenizer, stop_token_ids, chat=chat)
        self.encoder = PromptEncoder(
            self.processing,
            template_kwargs={},
            context_length=loading.context_length(self.model),
            max_completion_length=max_completion_length,
            images=images,
        )
        self.sampling = Sampling(
            max_completion_length=max_completion_length,
            eos_token_ids=tuple(ends),
            pad_token_id=self.tokenizer.pad_token_id,
            **sampling,
        )
        self.engine: Engine
        if engine is None and is_vision(self.processing):
            self.engine = cast(Engine, ImageRouter(lambda: self._choose(None), self._choose("transformers")))
        else:
            self.engine = self._choose(engine)

    def _choose(self, engine: str | None) -> Engine:
        vision = is_vision(self.processing)
        vllm = VllmOptions(trust_remote_code=self.trust_remote_code)
        return choose_engine(
            lambda: self.model,
            self.sampling,
            wanted=engine,
            tokenizer=self.tokenizer,
            never=placeholder_ids(self.model.config) if vision else (),
            vllm=vllm,
        )

    def write(self, rows: Sequence[dict[str, Any]], count: int, *, seed: int) -> Iterator[tuple[int, Group]]:
        """Generate `count` completions per row. Yields each row's number and group as it finishes."""
        prompts = self.encoder.encode(list(rows))
        if any(prompt.inputs for prompt in prompts) and not self.engine.takes_images:
            raise EngineError("this engine does not take images, and prompts have some: leave --engine unset")
        number = {id(prompt): index for index, prompt in enumerate(prompts)}
        for group in self.engine.generate(prompts, count, seed=seed):
            texts = self.processing.batch_decode([c.token_ids for c in group.completions], skip_special_tokens=True)
            for completion, text in zip(group.completions, texts, strict=True):
                completion.text = text
            yield number[id(group.prompt)], group
