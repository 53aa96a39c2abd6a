"""What both engines that use vLLM share: prompts become requests, answers become groups, and some are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from rloom.errors import EngineError
from rloom.generation.base import Sampling
from rloom.generation.vllm import proof
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.requests import RequestFormat
from rloom.generation.vllm.weights import check_sendable
from rloom.models.verify import rounded_otherwise
from rloom.types import Completion, Group, Prompt

Answers = Generator[tuple[int, list[Completion]], None, None]
Run = Callable[[RequestFormat, Sequence[Prompt], int, int], Answers]


class VllmBase(ABC):
    """An engine that has vLLM draw completions, with weights that it is sent whenever they changed."""

    keyed_by_prompt = False
    takes_images = False

    def __init__(self, get_model: Callable[[], Any], sampling: Sampling, options: VllmOptions) -> None:
        self.get_model, self.sampling, self.options = get_model, sampling, options
        self.request_format = RequestFormat(sampling, options.regex)
        self.request_format.hint_filters()
        check_sendable(get_model())
        self.syncs = 0  # how often weights were handed over
        self._sent: tuple[Any, ...] | None = None  # the fingerprint of the weights that vLLM has

    @abstractmethod
    def _run(self, request_format: RequestFormat, prompts: Sequence[Prompt], count: int, seed: int) -> Answers:
        """Each prompt's number and completions, as they finish."""

    def _groups(self, prompts: Sequence[Prompt], num_generations: int, seed: int) -> Iterator[Group]:
        with closing(self._run(self.request_format, prompts, num_generations, seed)) as answers:
            for index, completions in answers:
                yield Group(prompt=prompts[index], completions=completions)

    def _probe_groups(self, model: Any) -> list[list[Completion]]:
        """What vLLM answers to a few prompts now."""
        return probe_requests(model, self.sampling, self._run)

    def _compared(self, model: Any, groups: list[list[Completion]]) -> proof.Probe:
        """Those answers beside what the policy's own forward says to them."""
        return compare_probe(model, self.sampling, groups)

    def _try_regex(self, model: Any) -> None:
        """An expression that vLLM does not understand is told at the start."""
        if self.options.regex is None:
            return
        request_format = RequestFormat(replace(self.sampling, max_completion_length=1), self.options.regex)
        try:
            list(self._run(request_format, proof.probe_prompts(model)[:1], 1, proof.SEED))
        except EngineError as error:
            raise EngineError(f"vllm_structured_outputs_regex={self.options.regex!r}: {error}") from error


def probe_requests(model: Any, sampling: Sampling, run: Run) -> list[list[Completion]]:
    """What vLLM answers to a few prompts now; `run` asks it."""
    prompts, request_format = proof.probe_prompts(model), RequestFormat(proof.probe_sampling(sampling))
    answers = dict(run(request_format, prompts, proof.COMPLETIONS, proof.SEED))
    return [answers[index] for index in range(len(prompts))]


def compare_probe(model: Any, sampling: Sampling, groups: list[list[Completion]]) -> proof.Probe:
    """Those answers beside what the policy's own forward says to them."""
    prompts, temperature = proof.probe_prompts(model), proof.probe_sampling(sampling).temperature

    def own() -> list[float]:
        return proof.own_logprobs(model, prompts, groups, temperature)

    plain = own()

    def rounding() -> float:
        with rounded_otherwise(model):
            return proof.mean_difference(plain, own())

    return proof.Probe(prompts=prompts, completions=groups, own=plain, rounding=rounding)
