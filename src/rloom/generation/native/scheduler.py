"""Who is generated next: continuous batching as plain bookkeeping. No tensors here.

A prompt waits, is prefilled once (equal prompts together), and draws the first token of all its sequences from that.
Sequences then wait for a place among those that are decoded. Memory for keys and values is taken page by page; when
it runs out, the youngest sequence is sent back to begin again later: its noise is keyed by position, so that it will
draw the same tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from rloom.errors import EngineError
from rloom.generation.native.cache.allocator import PageAllocator


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt whose keys and values all its sequences read. Equal prompts of several groups are one."""

    token_ids: list[int]
    sequences: list[SampledSequence] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    unfinished: int = 0
    inputs: Any = None  # the tensors of its images, if it has some
    next_position: int | None = None  # of its first completion token, where that is not the prompt's length


@dataclass(slots=True, eq=False)
class SampledSequence:
    """One completion in the making."""

    prompt: SharedPrompt
    group: int  # which of the caller's prompts
    sample: int  # which of its completions
    key: int  # of its noise
    tokens: list[int] = field(default_factory=list)
    stats: list[Any] = field(default_factory=list)  # arrays (n, 3): log-probability, the drawn one's, entropy
    stop_reason: str | None = None
    pages: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are kept: all but the last, which is the next input."""
        return len(self.tokens) - 1

    @property
    def position(self) -> int:
        """Of the next input, counted from the prompt's first token."""
        start = self.prompt.next_position
        return (len(self.prompt.token_ids) if start is None else start) + self.cached

    def restart(self) -> None:
        """Back to the first token, which the prompt's prefill has drawn, with statistics of its own."""
        del self.tokens[1:], self.stats[1:]

    def extend(self, tokens: list[int], stats: Any) -> None:
        """Add tokens that were drawn, and their statistics (n, 3)."""
        self.tokens += tokens
        self.stats.append(stats)


class Scheduler:
    """Decides who is prefilled, who is decoded, and who has to wait."""

    def __init__(
        self,
        prompts: list[SharedPrompt],
        *,
        pages: PageAllocator,
        max_new_tokens: int,
        max_sequences: int,
        prefill_tokens: int,
    ) -> None:
        self.pages, self.max_new_tokens = pages, max_new_tokens
        self.max_sequences, self.prefill_tokens = max_sequences, prefill_tokens
        self.waiting = deque(prompts)  # to be prefilled
        self.ready: deque[SampledSequence] = deque()  # to be decoded: their first token is drawn
        self.running: list[SampledSequence] = []
        self.requeued = 0  # sequences that had to begin again
        self._longest = pages.needed(max_new_tokens)  # pages of a completion that goes to the limit
        self._prompt_pages = 0  # of prompts whose keys and values are kept
        for prompt in prompts:
            prompt.unfinished = len(prompt.sequences)
            self._check_fits(prompt)

    def _check_fits(self, prompt: SharedPrompt) -> None:
        needed = self.pages.needed(len(prompt.token_ids)) + self._longest
        if needed > self.pages.usable:
            raise EngineError(
                f"a prompt of {len(prompt.token_ids)} tokens with a completion of {self.max_new_tokens} needs "
                f"{needed * self.pages.size} tokens of key-value memory, and there is room for "
                f"{self.pages.usable * self.pages.size}: lower max_completion_length, free memory, or use "
                "engine='transformers'"
            )

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return not (self.waiting or self.ready or self.running)

    def next_prefill(self) -> list[SharedPrompt]:
        """Prompts to prefill now, so many that the places are filled.

        Room for one completion at full length is always left beside the prompts, so that there is always progress.
        """
        chosen: list[SharedPrompt] = []
        tokens = 0
        sequences = len(self.running) + len(self.ready)
        while self.waiting and sequences < self.max_sequences:
            prompt = self.waiting[0]
            wanted = min(len(prompt.sequences), self.max_sequences)
            # A prefill stalls all that run: it waits until there are places for its whole group.
            if sequences and not chosen and self.max_sequences - sequences < wanted:
                break
            needed = self.pages.needed(len(prompt.token_ids))
            if self._prompt_pages + needed + self._longest > self.pages.usable or self.pages.free < needed:
                break
            if chosen and tokens + len(prompt.token_ids) > self.prefill_tokens:
                break
            prompt.pages = self.pages.take(needed) or []
            chosen.append(self.waiting.popleft())
            self._prompt_pages += needed
            tokens += len(prompt.token_ids)
            sequences += len(prompt.sequences)
        return chosen

    def fill(self, steps: int) -> int:
        """Give places and pages for the next `steps` tokens; says how many steps all that run can go.

        A sequence that finds no page sends the youngest back. One sequence alone always fits.
        """
        steps = min(steps, max((self.max_new_tokens - len(s.tokens) for s in [*self.running, *self.ready]), default=0))
        before, kept, queue = self.requeued, [], deque(self.running)
        while queue:
            sequence = queue.popleft()
            while not (fits := self._reserve(sequence, steps)) and queue:
                self._send_back(queue.pop())
            if fits:
                kept.append(sequence)
            else:
                self._send_back(sequence)
        self.running = kept
        growing = sum(len(s.pages) < self._longest for s in self.running)
        while self.ready and len(self.running) < self.max_sequences:
            # A page is left for each row that still grows: else the newcomer would soon be sent back.
            if self.running and (self.requeued > before or self.pages.free <= growing):
                break
            if not self._reserve(self.ready[0], steps):
                break
            growing += len(self.ready[0].pages) < self._longest
            self.running.append(self.ready.popleft())
        assert self.running or not self.ready, "a sequence alone must fit"
        return steps

    def reserve_ahead(self, ahead: int, steps: int) -> int:
        """Give pages for `steps` tokens after the `ahead` that are just being drawn; says how many steps it may be.

        0 where somebody waits for a place, since those who come next are chosen when it is known who left, or where
        there are too few pages (some may have been given).
        """
        if self.waiting or self.ready:
            return 0
        steps = min(steps, max((self.max_new_tokens - len(s.tokens) for s in self.running), default=0) - ahead)
        return steps if steps > 0 and all(self._reserve(s, ahead + steps) for s in self.running) else 0

    def finish(self, sequence: SampledSequence) -> None:
        """A sequence has ended: its pages are free, and its prompt's if it was the last."""
        self._free(sequence)
        prompt = sequence.prompt
        prompt.unfinished -= 1
        if prompt.unfinished == 0:
            self._prompt_pages -= len(prompt.pages)
            self._free(prompt)

    def _free(self, owner: SampledSequence | SharedPrompt) -> None:
        self.pages.give(owner.pages)
        owner.pages = []

    def _reserve(self, sequence: SampledSequence, steps: int) -> bool:
        """Whether a sequence has pages for `steps` more tokens, or could be given those that are missing."""
        wanted = min(sequence.cached + steps, self.max_new_tokens)
        taken = self.pages.take(max(0, self.pages.needed(wanted) - len(sequence.pages)))
        sequence.pages += taken or []
        return taken is not None

    def _send_back(self, sequence: SampledSequence) -> None:
        self._free(sequence)
        sequence.restart()
        self.ready.appendleft(sequence)
        self.requeued += 1
