"""Generation with `model.generate`: the engine that works for every model that transformers can sample from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rloom.data.model_inputs import fitted_to, join
from rloom.errors import ConfigError, EngineError, did_you_mean
from rloom.generation.base import Sampling, cut_at_end, nothing_asked
from rloom.generation.padding import pad_left
from rloom.models.verify import evaluating
from rloom.printable import get_logger
from rloom.types import STOP_STRING, Completion, Group, Prompt

logger = get_logger(__name__)


class TransformersEngine:
    """Samples from the very model that is trained, all groups of a rollout in one left-padded batch.

    It takes images. Tokens that stand for them (`never`) are not sampled then: a forward over them would look for
    images that are not there.
    """

    keyed_by_prompt = False
    takes_images = True

    def __init__(
        self,
        get_model: Callable[[], Any],
        sampling: Sampling,
        *,
        pad_to_multiple_of: int | None = None,
        tokenizer: Any = None,
        never: Sequence[int] = (),
    ) -> None:
        _check_extra(sampling.extra)
        self.get_model, self.sampling, self.pad_to_multiple_of = get_model, sampling, pad_to_multiple_of
        self.tokenizer = tokenizer
        options = _generate_options(sampling)
        self.generation_config = GenerationConfig(**options)
        never = [*never, *(options.get("suppress_tokens") or ())]
        self.with_images = GenerationConfig(**options | {"suppress_tokens": never or None})

    def words(self) -> str:
        """What generates, in one line."""
        return "generation by `model.generate`: slower than the native engine"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield the groups in order, once all are done: `model.generate` hands over nothing earlier."""
        if nothing_asked(prompts, num_generations):
            return
        model = self.get_model()
        rows = [prompt.token_ids for prompt in prompts for _ in range(num_generations)]
        input_ids, attention_mask = pad_left(rows, self.sampling.pad_token_id, self.pad_to_multiple_of)
        device = next(model.parameters()).device
        shown = join([prompt.inputs for prompt in prompts for _ in range(num_generations)], input_ids.shape[1], 0)
        config = self.with_images if shown else self.generation_config
        with torch.no_grad(), _sampling_mode(model, config), _own_randomness(seed, device):
            output = model.generate(
                input_ids=input_ids.to(device),
                attention_mask=attention_mask.to(device),
                generation_config=config,
                **self._penalty(attention_mask.to(device)),
                **fitted_to(model, shown),
                **({"tokenizer": self.tokenizer} if self.sampling.extra.get("stop_strings") else {}),
            )
        sampled = output[:, input_ids.shape[1] :].tolist()
        if len(sampled) != len(rows):
            raise EngineError(f"model.generate returned {len(sampled)} completions, {len(rows)} were asked for")
        completions = [self._completion(tokens) for tokens in sampled]
        for index, prompt in enumerate(prompts):
            start = index * num_generations
            yield Group(prompt=prompt, completions=completions[start : start + num_generations])

    def _penalty(self, attention_mask: Tensor) -> dict[str, Any]:
        penalty = self.sampling.repetition_penalty
        if penalty == 1.0:
            return {}
        return {"logits_processor": LogitsProcessorList([RepetitionPenalty(penalty, attention_mask)])}

    def _completion(self, tokens: list[int]) -> Completion:
        completion = cut_at_end(tokens, self.sampling.eos_token_ids)
        stops = self.sampling.stop_strings
        if not stops:
            return completion
        # After a stop string comes padding, which may be the end token itself: neither was sampled.
        ends = {*self.sampling.eos_token_ids, self.sampling.pad_token_id}
        end = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
        text = self.tokenizer.decode(tokens[:end])
        if any(stop in text for stop in stops):
            return Completion(token_ids=tokens[:end], stop_reason=STOP_STRING)
        return completion


class RepetitionPenalty(LogitsProcessor):
    """Divides the logits of tokens that a row has seen, those below 0 multiplied: as the library's, which takes the
    padding before short prompts for a token that was seen."""

    def __init__(self, penalty: float, attention_mask: Tensor) -> None:
        self.penalty, self.mask = penalty, attention_mask.bool()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits (B, V) after `input_ids` (B, T), whose first tokens are the prompts."""
        mask = self.mask.repeat_interleave(len(input_ids) // len(self.mask), 0)  # several beams to a prompt
        width = mask.shape[1]
        seen = input_ids.clone()
        seen[:, :width] = torch.where(mask, input_ids[:, :width], input_ids[:, width - 1 : width])
        score = scores.gather(1, seen)
        return scores.scatter(1, seen, torch.where(score < 0, score * self.penalty, score / self.penalty))


OWNED = {
    "temperature": "temperature",
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "num_return_sequences": "num_generations",
    "eos_token_id": "stop_token_id",
}
"""Options of `generate` that the trainer must know about, and the option of ours to use instead."""


def _check_extra(extra: dict[str, Any]) -> None:
    """Refuse what would make training and sampling disagree, and what `generate` does not know."""
    known = set(GenerationConfig().to_dict()) | {"stop_strings"}
    for name in extra:
        if name in OWNED:
            raise ConfigError(f"generation_kwargs: take `{name}` out and set RLOOConfig({OWNED[name]}=…) instead")
        if name.startswith(("return_dict", "output_")):
            raise ConfigError(f"generation_kwargs: `{name}` changes what `generate` returns; leave it out")
        if name not in known:
            raise ConfigError(f"generation_kwargs: `generate` has no option `{name}`{did_you_mean(name, known)}")
    if extra.get("num_beams", 1) != 1:
        logger.warning("num_beams=%s: completions of a beam are not independent samples", extra["num_beams"])


def _generate_options(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_new_tokens": sampling.max_completion_length,
        "do_sample": sampling.temperature > 0,
        "temperature": sampling.temperature or 1.0,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "eos_token_id": list(sampling.eos_token_ids),
        "pad_token_id": sampling.pad_token_id,
        "disable_compile": True,
        **sampling.extra,
    }


@contextmanager
def _sampling_mode(model: Any, generation_config: GenerationConfig) -> Iterator[None]:
    """Evaluation mode (no dropout, caching allowed), and no sampling options but ours.

    `generate` fills what its argument leaves open from the model's own generation config, so that a checkpoint's
    top_k or repetition penalty would silently change what is sampled from: ours takes its place meanwhile.
    """
    owners = [model]
    if hasattr(model, "get_base_model"):  # a PeftModel copies its config onto the model inside
        owners.append(model.get_base_model())
    before = [owner.generation_config for owner in owners]
    for owner in owners:
        owner.generation_config = generation_config
    try:
        with evaluating(model):
            yield
    finally:
        for owner, config in zip(owners, before, strict=True):
            owner.generation_config = config


@contextmanager
def _own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Draw from `seed` alone, and leave the process' random state as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
