"""A scripted engine, for tests of ours and of anybody's reward functions and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rloom.generation.base import cut_at_end
from rloom.types import Group, Prompt


class FakeEngine:
    """Answers from a script instead of a model.

    `script(prompt, sample, seed)` returns the token ids of one completion, or None for a completion that could not
    be had (its group is then smaller). Calls are kept in `calls`.

        >>> engine = FakeEngine(lambda prompt, sample, seed: [7, 8 + sample, 2], eos_token_ids=[2])
        >>> prompt = Prompt(content="hello", token_ids=[4, 5])
        >>> [c.token_ids for c in next(engine.generate([prompt], 2, seed=0)).completions]
        [[7, 8, 2], [7, 9, 2]]
    """

    keyed_by_prompt = False
    takes_images = True
    """The script sees `prompt.images`."""

    def __init__(self, script: Callable[[Prompt, int, int], list[int] | None], *, eos_token_ids: Sequence[int]) -> None:
        self.script, self.eos_token_ids = script, tuple(eos_token_ids)
        self.calls: list[tuple[list[Prompt], int, int]] = []

    def words(self) -> str:
        """What generates, in one line."""
        return "generation by a script, without a model"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield the scripted groups, in order."""
        self.calls.append((list(prompts), num_generations, seed))
        for prompt in prompts:
            drawn = [self.script(prompt, sample, seed) for sample in range(num_generations)]
            completions = [cut_at_end(tokens, self.eos_token_ids) for tokens in drawn if tokens is not None]
            yield Group(prompt=prompt, completions=completions)
