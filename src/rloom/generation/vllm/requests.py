"""What is asked of vLLM for a prompt, and its answer as completions; in Python and over HTTP by the same names."""

from __future__ import annotations

import copy
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from rloom.errors import ConfigError, EngineError, did_you_mean
from rloom.generation.base import Sampling
from rloom.generation.native.sampling.noise import key_of
from rloom.generation.vllm.client import HOW_TO_START, Client
from rloom.printable import get_logger
from rloom.types import ABORTED, EOS, LENGTH, STOP_STRING, Completion, Prompt

logger = get_logger(__name__)

PASSED_ON = frozenset(
    {"allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "min_tokens", "presence_penalty"}
)
"""Entries of `generation_kwargs` that go to vLLM as they are. Each changes what is drawn from."""

COLDEST = 0.01
"""The lowest temperature that vLLM draws at; 0, which is none, aside."""

OURS = frozenset({"stop", "stop_strings", "bos_token_id"})
"""Entries that are honoured here. `stop` is vLLM's name of `stop_strings`."""

OWNED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_completion_length",
    "max_new_tokens": "max_completion_length",
    "n": "num_generations",
    "seed": "seed",
    "stop_token_ids": "stop_token_id",
    "eos_token_id": "stop_token_id",
    "structured_outputs": "vllm_structured_outputs_regex",
}
"""Entries that the trainer must know about, and the option of ours to use instead."""


class UnusableAnswerError(EngineError):
    """Completions that cannot be used. Asking again does not help."""


class RequestFormat:
    """Turns prompts into vLLM's requests, and its answers into completions."""

    def __init__(self, sampling: Sampling, regex: str | None = None) -> None:
        _check_extra(sampling.extra)
        self.sampling, self.regex = sampling, regex
        if 0 < sampling.temperature < COLDEST:
            raise ConfigError(
                f"temperature={sampling.temperature}: vLLM draws at {COLDEST} instead of anything below; raise it, or "
                "use another engine"
            )
        self.passed_on = {name: value for name, value in sampling.extra.items() if name in PASSED_ON}
        # The keys of a JSON object are texts.
        if "logit_bias" in self.passed_on:
            self.passed_on["logit_bias"] = {int(token): value for token, value in self.passed_on["logit_bias"].items()}
        self.stops = list(dict.fromkeys([*sampling.stop_strings, *_as_list(sampling.extra.get("stop"))]))

    def hint_filters(self) -> None:
        """Say what filters cost."""
        if self.filtered:
            logger.warning(
                "vLLM reports log-probabilities of the filtered distribution only (top_p, top_k, min_p, "
                "repetition_penalty, …): `mismatch` is not measured in this run"
            )

    @property
    def filtered(self) -> bool:
        """Whether what is drawn from is another distribution than the plain one over the temperature."""
        s = self.sampling
        plain = s.top_p == 1.0 and not s.top_k and not s.min_p and s.repetition_penalty == 1.0
        return not plain or self.regex is not None or bool(self.passed_on)

    def count(self, num_generations: int) -> int:
        """Completions to ask for: of the likeliest tokens there is only one, which vLLM wants to be told."""
        return num_generations if self.sampling.temperature > 0 else 1

    def seeded(self, num_generations: int, *, seed: int, number: int) -> dict[str, Any]:
        """The request for the prompt with this number, with noise of its own: vLLM gives its completions the seeds from
        this one on."""
        return {**self.options(num_generations), "seed": key_of(seed, number, 0)}

    def options(self, num_generations: int) -> dict[str, Any]:
        """A request, but for its tokens and how outputs are constrained.

        End tokens are ours alone: `ignore_eos` leaves vLLM's own out.
        """
        s = self.sampling
        return {
            "n": self.count(num_generations),
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k or 0,
            "min_p": s.min_p or 0.0,
            "repetition_penalty": s.repetition_penalty,
            "max_tokens": s.max_completion_length,
            "ignore_eos": True,
            "stop_token_ids": list(s.eos_token_ids),
            "stop": self.stops,
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            # Of the token that was drawn, and of no other.
            "logprobs": 0,
            **self.passed_on,
        }

    def group(self, completions: list[Completion], num_generations: int) -> list[Completion]:
        """All completions of a prompt; none may be lost."""
        if len(completions) != self.count(num_generations):
            raise UnusableAnswerError(
                f"vLLM returned {len(completions)} completions, {self.count(num_generations)} were asked for"
            )
        if len(completions) == num_generations:
            return completions
        return [copy.deepcopy(completions[0]) for _ in range(num_generations)]

    def completion(
        self, token_ids: Sequence[int], logprobs: Sequence[float | None], finish_reason: str | None
    ) -> Completion:
        """An answer, with rloom's words for why it ended."""
        # JSON has no NaN: a server sends null.
        tokens, found = (
            list(map(operator.index, token_ids)),
            [math.nan if value is None else float(value) for value in logprobs],
        )
        if len(found) != len(tokens):
            raise UnusableAnswerError(f"vLLM returned {len(found)} log-probabilities for {len(tokens)} tokens")
        if any(math.isnan(value) for value in found):
            raise UnusableAnswerError(
                "vLLM's log-probabilities are not finite: the model's weights are broken. Look at the last updates: a "
                "learning rate that is too high, float16 without loss scaling"
            )
        return Completion(
            token_ids=tokens,
            stop_reason=self._stop_reason(tokens, finish_reason),
            logprobs=None if self.filtered else found,
            drawn_logprobs=found if self.filtered else None,
        )

    def _stop_reason(self, tokens: list[int], finish_reason: str | None) -> str:
        if finish_reason == "stop":
            return EOS if tokens and tokens[-1] in self.sampling.eos_token_ids else STOP_STRING
        known = {"length": LENGTH, "abort": ABORTED}
        if finish_reason not in known:
            raise UnusableAnswerError(f"vLLM ended a completion with {finish_reason!r}; see its messages above")
        return known[finish_reason]


def check_lengths(prompts: Sequence[Prompt], most_new: int, limit: int, change: str) -> None:
    """Refuse what vLLM would cut short: it ends completions at its context length as if that were asked for."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    if min(lengths) == 0:
        raise EngineError(f"prompt {lengths.index(0)} has no tokens; there is nothing to continue from")
    if max(lengths) + most_new > limit:
        raise EngineError(
            f"a prompt of {max(lengths)} tokens and a completion of {most_new} do not fit vLLM's context length of "
            f"{limit}: shorten one of them, or {change}"
        )


def _check_extra(extra: dict[str, Any]) -> None:
    known = PASSED_ON | OURS
    for name in extra:
        if name in OWNED:
            raise ConfigError(f"generation_kwargs: take `{name}` out and set RLOOConfig({OWNED[name]}=…) instead")
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(sorted(known - {'bos_token_id'}))}"
            raise ConfigError(f"generation_kwargs: engine='vllm' has no option `{name}`{hint}")


def _as_list(value: Any) -> list[str]:
    return [] if not value else [value] if isinstance(value, str) else list(value)


def check_answer(answer: Any, address: str) -> None:
    """Refuse an answer that is none: of something that is no vLLM server, or of one that ended completions by itself,
    as vLLM does, with a 200, when it is stopped.

    >>> check_answer({"choices": [{"index": 0, "finish_reason": "stop", "logprobs": {"token_logprobs": []}}]}, "a")
    >>> check_answer({"choices": [{"index": 0, "finish_reason": "abort"}]}, "http://a")
    Traceback (most recent call last):
    rloom.errors.EngineError: the vLLM server at http://a has aborted a request: it is being stopped, or told to pause
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    is_list = isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices)
    if is_list and any(choice.get("finish_reason") == "abort" for choice in choices or ()):
        raise EngineError(f"the vLLM server at {address} has aborted a request: it is being stopped, or told to pause")
    if not is_list or not all(map(_has_logprobs, choices or ())):
        raise EngineError(
            f"the vLLM server at {address} has answered a request with what are no completions with log-probabilities: "
            f"{json.dumps(answer)[:500]}. Is it a vLLM server?"
        )


def _has_logprobs(choice: dict[str, Any]) -> bool:
    logprobs = choice.get("logprobs")
    return "index" in choice and isinstance(logprobs, dict) and isinstance(logprobs.get("token_logprobs"), list)


def reader(request_format: RequestFormat, count: int) -> Callable[[Client, Any], list[Completion]]:
    """What reads the answers of servers: `count` completions of one prompt each. Errors name the server."""

    def read(client: Client, answer: Any) -> list[Completion]:
        check_answer(answer, client.address)
        try:
            with client.reading("/v1/completions", answer):
                return read_completions(answer, request_format, count)
        except UnusableAnswerError as error:
            raise UnusableAnswerError(f"{error} (the vLLM server at {client.address})") from error

    return read


def read_completions(answer: dict[str, Any], request_format: RequestFormat, count: int) -> list[Completion]:
    """The completions of one prompt in a server's answer."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(len(choices))):
        raise UnusableAnswerError(f"vLLM has numbered its completions {[choice['index'] for choice in choices]}")
    if any(choice.get("token_ids") is None for choice in choices):
        raise UnusableAnswerError(f"the vLLM server returns no token ids; it is older than 0.22: {HOW_TO_START}")
    found = [
        request_format.completion(choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"])
        for choice in choices
    ]
    return request_format.group(found, count)
