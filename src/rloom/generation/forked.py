"""Generation with the library's own cache, forked: each prompt is run once, and its keys and values are repeated for
the group. For models that the native engine does not fit (other attention, position biases) but whose cache can be
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rloom.errors import EngineError
from rloom.generation.base import InStep, Sampling, is_end, nothing_asked
from rloom.generation.native.sampling.noise import key_of
from rloom.generation.native.sampling.sampler import Drawn, Sampler
from rloom.generation.padding import pad_left
from rloom.models.verify import (
    Tolerance,
    accepted,
    evaluating,
    largest_difference,
    plain_logits,
    probe_tokens,
    raise_in_step,
)
from rloom.printable import get_logger
from rloom.types import Completion, Group, Prompt

logger = get_logger(__name__)


class _Fork:
    """One batch: prompts padded on the left, then K rows of each, one token at a time."""

    def __init__(self, model: Any, prompts: list[list[int]], k: int) -> None:
        self.model = model
        device = next(model.parameters()).device
        ids, mask = (x.to(device) for x in pad_left(prompts, 0))
        inputs = self._inputs(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0))
        output = model(**inputs, **accepted(model, logits_to_keep=1), use_cache=True)
        self.cache = output.past_key_values
        self.cache.batch_repeat_interleave(k)
        self.logits = output.logits[:, -1].repeat_interleave(k, 0)  # (B·K, V)
        self.mask = mask.repeat_interleave(k, 0)

    def _inputs(self, ids: Tensor, mask: Tensor, positions: Tensor) -> dict[str, Any]:
        return {"input_ids": ids, "attention_mask": mask, **accepted(self.model, position_ids=positions)}

    def step(self, tokens: Tensor) -> None:
        """Take one more token per row in, (B·K,)."""
        positions = self.mask.sum(-1, keepdim=True)
        self.mask = torch.cat([self.mask, torch.ones_like(positions)], 1)
        inputs = self._inputs(tokens.unsqueeze(1), self.mask, positions)
        self.logits = self.model(**inputs, past_key_values=self.cache, use_cache=True).logits[:, -1]


class ForkedEngine:
    """Samples from the trained model, all groups in one batch, each prompt run once.

    `in_step`: given where each forward gathers weights from all processes. Then each runs as many as the one that has
    most to do.
    """

    keyed_by_prompt = True
    takes_images = False

    def __init__(
        self,
        get_model: Callable[[], Any],
        sampling: Sampling,
        *,
        tokenizer: Any = None,
        in_step: InStep | None = None,
    ) -> None:
        self.get_model, self.sampling, self.tokenizer = get_model, sampling, tokenizer
        self.in_step = in_step
        self.sampler = Sampler(sampling)
        reason = why_not_forked(get_model())
        if reason is not None:
            raise EngineError(reason)

    def words(self) -> str:
        """What generates, in one line."""
        how = "layer by layer, which is slow" if self.in_step else "slower than the native engine"
        return f"generation with the library's cache, forked for each group: {how}"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield the groups in order, once all are done."""
        if nothing_asked(prompts, num_generations):
            if self.in_step is not None:
                self._idle_along(self.in_step)
            return
        rows = self._rows(prompts, num_generations, seed)
        for index, prompt in enumerate(prompts):
            yield Group(prompt=prompt, completions=rows[index * num_generations : (index + 1) * num_generations])

    def _rows(self, prompts: Sequence[Prompt], k: int, seed: int) -> list[Completion]:
        model = self.get_model()
        with evaluating(model), torch.no_grad():
            fork = _Fork(model, [prompt.token_ids for prompt in prompts], k)
            device = fork.logits.device
            numbers = [index if p.number is None else p.number for index, p in enumerate(prompts)]
            keys = torch.tensor([key_of(seed, number, j) for number in numbers for j in range(k)], device=device)
            rows = [
                Completion(token_ids=[], stop_reason="", logprobs=[], drawn_logprobs=[], entropies=[]) for _ in keys
            ]
            seen = self._seen(prompts, k, fork.logits)
            for step in range(self.sampling.max_completion_length):
                drawn = self.sampler(fork.logits, keys, torch.full_like(keys, step), seen)
                if seen is not None:
                    seen.scatter_(1, drawn.tokens.unsqueeze(1), True)
                self._take(rows, drawn)
                if not self._goes_on(rows):
                    break
                fork.step(drawn.tokens)
        if not self.sampler.filters:
            for row in rows:
                row.drawn_logprobs = None
        return rows

    def _idle_along(self, in_step: InStep) -> None:
        """Run as many forwards as the other processes, which have prompts: each gathers weights from all."""
        model = self.get_model()
        with evaluating(model), torch.no_grad():
            fork = _Fork(model, [[0]], 1)
            # As often as `_goes_on` is asked in `_rows`.
            for _ in range(self.sampling.max_completion_length):
                if not in_step.any(False):
                    break
                fork.step(fork.mask.new_zeros(1))

    def _goes_on(self, rows: list[Completion]) -> bool:
        """Whether another step is run: rows that have ended draw nothing in it."""
        unfinished = not all(row.stop_reason for row in rows)
        return unfinished if self.in_step is None else self.in_step.any(unfinished)

    def _seen(self, prompts: Sequence[Prompt], k: int, logits: Tensor) -> Tensor | None:
        """Which tokens occur in each row, (B·K, V), for the repetition penalty; None without one."""
        if self.sampler.penalty == 1.0:
            return None
        seen = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        for index, prompt in enumerate(prompts):
            seen[index * k : (index + 1) * k, torch.tensor(prompt.token_ids, device=logits.device)] = True
        return seen

    def _take(self, rows: list[Completion], drawn: Drawn) -> None:
        """Add the tokens that were drawn to the rows that have not ended."""
        for row, token, numbers in zip(rows, drawn.tokens.tolist(), drawn.stats().tolist(), strict=True):
            if row.stop_reason:
                continue
            row.token_ids.append(token)
            for values, number in zip((row.logprobs, row.drawn_logprobs, row.entropies), numbers, strict=True):
                assert values is not None
                values.append(number)
            row.stop_reason = is_end(row.token_ids, self.sampling, self.tokenizer) or ""


@torch.no_grad()
def why_not_forked(model: Any) -> str | None:
    """None if two prompts, forked and continued, have the logits of a plain forward, else what went wrong."""
    name = type(model).__name__
    one, other, completion = probe_tokens(model.config.get_text_config(), 3, 1, 2)
    try:
        with evaluating(model):
            fork = _Fork(model, [one, other], 2)
            steps = [fork.logits]
            for token in completion:
                fork.step(torch.full((4,), token, device=fork.logits.device))
                steps.append(fork.logits)
            forked = torch.stack(steps, 1)  # (4, 1 + C, V)
            plain = [plain_logits(model, prompt, completion) for prompt in (one, other)]
    except Exception as error:
        raise_in_step(model, error, "servers that generate (vllm_mode='server') do without")
        logger.debug("the forked forward failed", exc_info=True)
        return f"the cache of {name} cannot be forked ({type(error).__name__}: {str(error)[:120]})"
    # The second row of each prompt: a cache that was repeated in another order would show.
    worst = largest_difference([forked[1], forked[3]], plain)
    weight = next(model.parameters())
    exact = weight.dtype == torch.float32 and not torch.is_autocast_enabled(weight.device.type)
    allowed = Tolerance.FLOAT32 if exact else Tolerance.DECODED
    return None if worst < allowed else f"{name} decodes with a forked cache {worst:.1e} off its plain forward"
