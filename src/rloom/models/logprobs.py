"""Log-probabilities of completions under a model: one forward over a micro-batch, in either layout.

They are of softmax(logits / temperature) over the whole vocabulary, whatever top-k or top-p did to sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rloom.data.model_inputs import fitted_to
from rloom.models.head import HeadOutput, LogitTransform, captured_head, is_gathered_by_hooks, nothing_of
from rloom.models.load import base_of
from rloom.models.positions import image_positions, rope_index_of
from rloom.models.verify import accepted
from rloom.types import MicroBatch, PackedRow


@dataclass(slots=True, kw_only=True)
class TokenStats:
    """What one forward says about the completion tokens, (B, C) each."""

    logprobs: Tensor
    entropy: Tensor  # detached
    head: HeadOutput  # the same, flat, and what the exact KL needs
    aux_loss: Tensor | None = None  # (), a mixture of experts' load balancing


class Forward:
    """How to run one model on micro-batches. What it does to its logits is looked up once."""

    def __init__(self, model: Any, temperature: float, *, keep_logits: bool = False) -> None:
        self.keep_logits = keep_logits
        self.base = base_of(model)
        self.rope_index = rope_index_of(self.base)
        self.transform = LogitTransform.of(self.base, temperature)

    def __call__(self, model: Any, batch: MicroBatch, *, with_aux_loss: bool = False) -> TokenStats:
        """One forward: log-probability and entropy of each completion token."""
        inputs, source = self._packed(batch, batch.packed) if batch.packed is not None else self._padded(batch)
        inputs |= accepted(self.base, use_cache=False)
        if with_aux_loss:
            inputs["output_router_logits"] = True
        options = {"keep": self.keep_logits, "depends": is_gathered_by_hooks(model)}
        with captured_head(self.base, source, batch.targets, self.transform, **options) as outputs:
            result = model(**inputs)
        (head,) = outputs
        logprobs = head.logprobs
        if options["depends"]:
            logprobs = logprobs + nothing_of(result.logits)
        return TokenStats(
            logprobs=batch.to_table(logprobs),
            entropy=batch.to_table(head.entropy),
            head=head,
            aux_loss=result.aux_loss if with_aux_loss else None,
        )

    def _packed(self, batch: MicroBatch, row: PackedRow) -> tuple[dict[str, Any], Tensor | None]:
        """Inputs of a packed row, and which hidden states predict completion tokens; None: all that reach the head."""
        inputs: dict[str, Any] = {"input_ids": row.input_ids, "position_ids": row.position_ids}
        if batch.prompt_inputs:
            inputs |= fitted_to(self.base, batch.prompt_inputs)
            if self.rope_index is not None:
                inputs["position_ids"] = image_positions(self.rope_index, batch, row)
        few = accepted(self.base, logits_to_keep=row.source)
        return inputs | few, None if few else row.source

    def _padded(self, batch: MicroBatch) -> tuple[dict[str, Any], Tensor]:
        """Inputs of padded rows, and which hidden states predict completion tokens: those from the last prompt token
        on, but the last."""
        assert batch.input_ids is not None
        assert batch.places is not None
        length, width = batch.input_ids.shape[1], batch.width
        few = accepted(self.base, logits_to_keep=width + 1)
        keep = width + 1 if few else length
        source = batch.places // width * keep + (keep - width - 1) + batch.places % width
        inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, **few}
        inputs |= fitted_to(self.base, batch.prompt_inputs)
        # Where images have positions in several dimensions, the model alone can count them.
        if not (batch.prompt_inputs and self.rope_index):
            inputs |= accepted(self.base, position_ids=batch.position_ids)
        return inputs, source
