"""A sequence-classification model as reward: the logit of prompt plus completion."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rloom.printable import get_logger
from rloom.rewards.base import RewardBatch
from rloom.rewards.calling.call_options import CallOptions
from rloom.rewards.completion_text import text_of, without_surrogates

logger = get_logger(__name__)

ROWS_PER_FORWARD = 32


class ModelReward:
    """Scores with a reward model, its own tokenizer and its own chat template."""

    def __init__(self, model: nn.Module, tokenizer: Any, *, name: str, template_kwargs: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.name, self.template_kwargs = model, tokenizer, name, template_kwargs
        self.call_options = CallOptions()
        # `rloom train-reward` notes on a model that it was trained on texts with an end token.
        self.ending = (tokenizer.eos_token or "") if getattr(model.config, "ends_with_eos", False) else ""
        self._told = False
        model.eval()

    def score(self, batch: RewardBatch) -> list[float]:
        """The model's first logit for each completion."""
        texts = [self._text(p, c) for p, c in zip(batch.prompts, batch.completions, strict=True)]
        # No tokenizer takes surrogates.
        texts = [without_surrogates(text) for text in texts]
        scores: list[float] = []
        for start in range(0, len(texts), ROWS_PER_FORWARD):
            scores += self._forward(texts[start : start + ROWS_PER_FORWARD])
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion + self.ending
        messages = [self._words(message) for message in prompt] + completion
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **self.template_kwargs)

    def _words(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message without its images, which this model cannot see: its chat template knows text alone."""
        if not isinstance(message.get("content"), list):
            return message
        if not self._told and any(part.get("type") == "image" for part in message["content"]):
            self._told = True
            logger.warning("the reward model %s judges the text alone: it does not see the prompts' images", self.name)
        return {**message, "content": text_of([message])}

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> list[float]:
        inputs = self.tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self.model.parameters()).device
        return self.model(**inputs.to(device)).logits[:, 0].float().tolist()
