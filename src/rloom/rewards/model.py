"""A sequence-classification model as reward: the logit of prompt plus completion."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rloom.rewards.base import RewardBatch
from rloom.rewards.marks import Marks
from rloom.rewards.texts import without_surrogates

ROWS_PER_FORWARD = 32


class ModelReward:
    """Scores with a reward model, its own tokenizer and its own chat template."""

    def __init__(self, model: nn.Module, tokenizer: Any, *, name: str, template_kwargs: dict[str, Any]) -> None:
        self.model, self.tokenizer, self.name, self.template_kwargs = model, tokenizer, name, template_kwargs
        self.marks = Marks()
        # `rloom train-reward` notes on a model that it was trained on texts with an end token.
        self.ending = (tokenizer.eos_token or "") if getattr(model.config, "ends_with_eos", False) else ""
        model.eval()

    def score(self, batch: RewardBatch) -> list[float]:
        """The model's first logit for each completion."""
        texts = [self._text(p, c) for p, c in zip(batch.prompts, batch.completions, strict=True)]
        texts = [without_surrogates(text) for text in texts]  # which no tokenizer takes
        scores: list[float] = []
        for start in range(0, len(texts), ROWS_PER_FORWARD):
            scores += self._forward(texts[start : start + ROWS_PER_FORWARD])
        return scores

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion + self.ending
        return self.tokenizer.apply_chat_template(prompt + completion, tokenize=False, **self.template_kwargs)

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> list[float]:
        inputs = self.tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        device = next(self.model.parameters()).device
        return self.model(**inputs.to(device)).logits[:, 0].float().tolist()
