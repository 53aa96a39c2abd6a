"""How near a completion is in meaning to a reference, by sentence embeddings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rloom.errors import RewardError, checks_options
from rloom.rewards.calling.call_options import named_reward
from rloom.rewards.completion_text import text_of, without_surrogates
from rloom.rewards.library.inputs import column_of

DEFAULT = "sentence-transformers/all-MiniLM-L6-v2"
ROWS_PER_FORWARD = 32


class Encoder:
    """Texts to unit vectors: an encoder's last hidden states, pooled as its own settings say, else their mean."""

    def __init__(self, model: Any, tokenizer: Any = None, *, device: str | None = None) -> None:
        from transformers import AutoModel, AutoTokenizer

        name = model if isinstance(model, str) else model.config._name_or_path
        self.pooling = _pooling(name)
        self.model = (AutoModel.from_pretrained(model) if isinstance(model, str) else model).eval()
        self.tokenizer = tokenizer if tokenizer is not None else AutoTokenizer.from_pretrained(name)
        if device is not None:
            self.model.to(device)

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> Tensor:
        """(N, D)"""
        parts = [self._forward(texts[i : i + ROWS_PER_FORWARD]) for i in range(0, len(texts), ROWS_PER_FORWARD)]
        return torch.cat(parts)

    def _forward(self, texts: list[str]) -> Tensor:
        limit = min(getattr(self.model.config, "max_position_embeddings", 512), 512)
        # No tokenizer takes surrogates.
        texts = [without_surrogates(text) for text in texts]
        inputs = self.tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        hidden = self.model(**inputs).last_hidden_state.float()  # (B, T, D)
        mask = inputs["attention_mask"].unsqueeze(-1).float()
        pooled = hidden[:, 0] if self.pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(pooled, dim=-1).cpu()


def _pooling(name: str) -> str:
    """How a sentence-transformers model wants its hidden states pooled."""
    from transformers.utils import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(name, "1_Pooling/config.json", **quiet) if name else None
    if path is None:
        return "mean"
    with open(path) as file:
        chosen = [mode for mode, on in json.load(file).items() if mode.startswith("pooling_mode_") and on is True]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if len(chosen) != 1 or chosen[0] not in known:
        raise RewardError(
            f"{name} pools its hidden states by {', '.join(chosen)}; only the mean and the first token are known"
        )
    return known[chosen[0]]


@checks_options
def semantic_similarity(
    model: Any = DEFAULT, tokenizer: Any = None, *, column: str = "reference", device: str | None = None
) -> Callable[..., list[float | None]]:
    """Make a reward: the cosine between the embeddings of a completion and of a reference in a column.

    Args:
        model: a sentence-embedding model by name or path, or an instance. It is loaded on the first call.
        tokenizer: of an instance that has no name to load one by.
        column: where the references are.
        device: where the model runs; the CPU, or where an instance is, if not given.

    ```python
    near = semantic_similarity("sentence-transformers/all-MiniLM-L6-v2", column="summary")
    ```
    """
    loaded: list[Encoder] = []

    def semantic_similarity_reward(completions: list[Any], **columns: Any) -> list[float | None]:
        needed = f"semantic_similarity needs a column '{column}' with a text to compare with"
        references = column_of(columns, column, needed=needed)
        if not loaded:
            loaded.append(Encoder(model, tokenizer, device=device))
        rows = [i for i, reference in enumerate(references) if reference is not None]
        if not rows:
            return [None] * len(completions)
        vectors = loaded[0]([text_of(completions[i]) for i in rows] + [str(references[i]) for i in rows])
        cosines = (vectors[: len(rows)] * vectors[len(rows) :]).sum(-1)
        by_row = dict(zip(rows, cosines.tolist(), strict=True))
        return [by_row.get(row) for row in range(len(completions))]

    return named_reward(semantic_similarity_reward, "semantic_similarity", streaming=True)
