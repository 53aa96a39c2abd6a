"""What an engine is: prompts in, groups of token ids out. Text is decoded by whoever needs it, never re-tokenized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from rloom.errors import EngineError
from rloom.sampling_rules import RULES, check_sampling
from rloom.types import EOS, LENGTH, STOP_STRING, Completion, Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn. `extra` holds options of one engine alone.

    Temperature 0 takes the likeliest token each time; `top_k=0`, `top_p=1`, `min_p=None` and `repetition_penalty=1`
    are off. Values that cannot be drawn with are a [`ConfigError`].

    >>> Sampling(max_completion_length=8, eos_token_ids=(2,), pad_token_id=0, temperature=-1)
    Traceback (most recent call last):
        ...
    rloom.errors.ConfigError: temperature must be 0 (the likeliest token each time) or above, finite, not -1
    """

    max_completion_length: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_sampling({option.name: getattr(self, option.name) for option in fields(self)})
        for name in RULES:  # numbers of numpy's are no numbers to kernels
            value = getattr(self, name)
            if value is not None:
                whole = isinstance(value, Integral)
                object.__setattr__(self, name, int(value) if whole else float(value))

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end a completion."""
        stops = self.extra.get("stop_strings")
        return [] if not stops else [stops] if isinstance(stops, str) else list(stops)


@runtime_checkable
class Engine(Protocol):
    """Generates groups of completions with the policy's current weights, and declares what it can do.

    A trainer also takes an object that has only `generate`: [`abilities_of`] fills in the rest.
    """

    keyed_by_prompt: bool = False
    """Whether a completion's noise is drawn from `seed` and its prompt's `number`. Then all processes are given the
    same seed, and draw what one process would; else each gets a seed of its own."""

    takes_images: bool = False
    """Whether `prompt.inputs`, the tensors of a prompt's images, are handed to the model."""

    def words(self) -> str:
        """What generates, in one line."""
        return f"generation by {type(self).__name__}"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's group as it finishes, in any order; equal `seed` and weights, equal tokens."""
        ...


class InStep(Protocol):
    """Processes that each hold a part of the model, for engines that run on the parts (`training/in_step.py`)."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is true in any process."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes."""
        ...

    def own_parts(self) -> list[Tensor]:
        """What this process holds of each weight."""
        ...

    def lead(self, work: Callable[[], None]) -> None:
        """Do some work in the main process alone, while the others take part in what it needs of the model."""
        ...

    def whole(self, weight: Tensor) -> Tensor:
        """A weight as a whole, for the main process while it leads."""
        ...


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an engine declares."""

    keyed_by_prompt: bool
    takes_images: bool
    # Only the main process sends weights, in `generate`. Where only others have prompts, it is called with none.
    main_sends_weights: bool
    words: str


def abilities_of(engine: Any) -> Abilities:
    """What an engine declares, and defaults for what it does not.

    >>> class Own:
    ...     def generate(self, prompts, num_generations, *, seed): ...
    >>> abilities_of(Own())
    Abilities(keyed_by_prompt=False, takes_images=False, main_sends_weights=False, words='generation by Own')
    """
    names = ("keyed_by_prompt", "takes_images", "main_sends_weights")
    words = engine.words() if hasattr(engine, "words") else Engine.words(engine)
    return Abilities(**{name: getattr(engine, name, False) for name in names}, words=words)


def nothing_asked(prompts: Sequence[Prompt], num_generations: int) -> bool:
    """Whether no completion is asked for, which is done at once; fewer than none are refused."""
    if num_generations < 0:
        raise EngineError(f"num_generations must be 0 or positive, not {num_generations}")
    return not prompts or num_generations == 0


def cut_at_end(tokens: Sequence[int], eos_token_ids: Sequence[int]) -> Completion:
    """The completion up to its first end token, which belongs to it.

    The position of the first end token decides, not equality with the padding token: in many models they are the same.

    >>> completion = cut_at_end([5, 6, 2, 2, 2], eos_token_ids=[2])
    >>> completion.token_ids, completion.stop_reason
    ([5, 6, 2], 'eos')
    """
    tokens = list(tokens)
    ends = [tokens.index(end) for end in eos_token_ids if end in tokens]
    if ends:
        return Completion(token_ids=tokens[: min(ends) + 1], stop_reason=EOS)
    return Completion(token_ids=tokens, stop_reason=LENGTH)


def is_end(tokens: Sequence[int], sampling: Sampling, tokenizer: Any = None) -> str | None:
    """Why a completion ends with its last token, or None: an end token, a stop string just completed, the limit.

    >>> sampling = Sampling(max_completion_length=3, eos_token_ids=(2,), pad_token_id=0)
    >>> is_end([5, 2], sampling), is_end([5, 6], sampling), is_end([5, 6, 7], sampling)
    ('eos', None, 'length')
    """
    if tokens[-1] in sampling.eos_token_ids:
        return EOS
    stops = sampling.stop_strings
    if stops and has_stop(tokens, stops, tokenizer):
        return STOP_STRING
    return LENGTH if len(tokens) >= sampling.max_completion_length else None


def stop_window(stops: Sequence[str]) -> int:
    """Tokens in which what comes before the last of a stop string lies: each is at least a byte. And some to spare."""
    return max(len(stop.encode()) for stop in stops) + 7


def has_stop(tokens: Sequence[int], stops: Sequence[str], tokenizer: Any, new: int = 1) -> bool:
    """Whether one of the last `new` tokens may have completed a stop string."""
    tail = list(tokens[-(stop_window(stops) + new) :])
    text = tokenizer.decode(tail, clean_up_tokenization_spaces=False)  # which would take back what was there
    # Bytes that are no character yet may hide what came before them: then each token has to be looked at.
    return any(stop in text for stop in stops) or (new > 1 and "\N{REPLACEMENT CHARACTER}" in text)
