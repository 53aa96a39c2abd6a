"""One rollout: prompts are prefilled, their sequences decoded together, until the last has ended."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import torch
from torch import Tensor

from rloom.generation.base import Sampling, has_stop, is_end, stop_window
from rloom.generation.native.cache.allocator import PageAllocator
from rloom.generation.native.cache.memory import free_memory
from rloom.generation.native.rows import CHUNK, Readback, not_finite
from rloom.generation.native.runner import STEPS_AHEAD, Runner
from rloom.generation.native.scheduler import SampledSequence, Scheduler, SharedPrompt

PREFILL_TOKENS = 32768
"""Tokens of prompts that one forward takes."""

SHARE_OF_FREE_MEMORY = 0.8
"""What keys and values may take of the memory that is free when a rollout begins."""

FIRST_AT_ONCE = 512
"""Completions that draw their first token together."""


class DecodeLoop:
    """A rollout, which is made and advanced while the runner is `ready`."""

    def __init__(
        self, runner: Runner, prompts: list[SharedPrompt], sampling: Sampling, tokenizer: object, max_sequences: int
    ) -> None:
        self.runner, self.sampling, self.tokenizer = runner, sampling, tokenizer
        self.stops = sampling.stop_strings
        if not runner.geometry.layers:
            runner.prefill([prompts[0].token_ids[:8]])
        longest = max(len(prompt.token_ids) for prompt in prompts)
        runner.graphs.prepare_for(longest, max(len(prompt.sequences) for prompt in prompts))
        places = self._plan_places(prompts, max_sequences)
        total = self._plan_pages(prompts, places)
        self.scheduler = Scheduler(
            prompts,
            pages=PageAllocator(total=total, size=runner.page_size),
            max_new_tokens=sampling.max_completion_length,
            max_sequences=places,
            prefill_tokens=PREFILL_TOKENS,
        )
        self.cache = runner.make_cache(total, sampling.max_completion_length)
        self.readbacks: deque[Readback] = deque()  # of steps that are under way
        self.unfinished = Counter(s.group for prompt in prompts for s in prompt.sequences)  # sequences by group
        self.finished: list[int] = []  # groups that are to be handed over

    # -- memory

    def _plan_places(self, prompts: list[SharedPrompt], most: int) -> int:
        """Sequences that may run at once. Without pages, free memory decides: rows are as long as the longest, prompts
        are kept as they are and padded, and rows are moved into memory of their own when some join or leave."""
        if self.runner.paged:
            return most
        room = self._room()
        prompt, own = 2 * max(len(p.token_ids) for p in prompts), 2 * self.sampling.max_completion_length
        places = room // (prompt + own)
        # With room for more rows than prompts, some share a prompt.
        if places > len(prompts):
            places = max(len(prompts), (room - len(prompts) * prompt) // own)
        return max(1, min(places, most))

    def _plan_pages(self, prompts: list[SharedPrompt], places: int) -> int:
        """Enough for all at full length, or what free memory allows."""
        size = self.runner.page_size
        pages = lambda tokens: -(-tokens // size)  # noqa: E731
        at_once = min(places, sum(len(p.sequences) for p in prompts))
        wanted = sum(pages(len(p.token_ids)) for p in prompts) + at_once * pages(self.sampling.max_completion_length)
        return min(wanted, self._room() // size) + 1

    def _room(self) -> int:
        """Tokens whose keys and values may be kept."""
        free = int(SHARE_OF_FREE_MEMORY * free_memory(self.runner.device))
        return free // self.runner.geometry.bytes_per_token

    # -- steps

    def advance(self) -> None:
        """Run some steps of all that run, and read back what they have drawn: while the next steps are under way, if
        those can begin before."""
        if not self.readbacks:
            self._start()
        if not self.readbacks:
            return
        last = self.readbacks[-1]
        # A sequence that ends in the last steps draws nothing more, or nothing that is used: the device knows of end
        # tokens and limits, not of stop strings.
        if last.sequences == self.scheduler.running and self.runner.can_run_ahead(last.sequences):
            steps = self.scheduler.reserve_ahead(last.steps, STEPS_AHEAD)
            if steps:
                self.readbacks.append(self.runner.run_ahead(self.cache, steps))
        self._take(self.readbacks.popleft())

    def _start(self) -> None:
        """Prefill prompts that fit, then begin some steps of all that run."""
        while prompts := self.scheduler.next_prefill():
            for part in _by_images(prompts):
                self._draw_first_tokens(part, self.runner.prefill_shared(part, self.cache))
        steps = self.scheduler.fill(self.runner.chunk)
        running = self.scheduler.running
        if running:
            expected = max(self.sampling.max_completion_length - len(s.tokens) for s in running)
            self.readbacks.append(self.runner.decode(running, self.cache, steps, expected))

    def _draw_first_tokens(self, prompts: list[SharedPrompt], logits: Tensor) -> None:
        """All sequences of a prompt draw their first token from its prefill; some at a time, since each is a row of the
        vocabulary."""
        sampler, device = self.runner.sampler, logits.device
        lines = [line for line, prompt in enumerate(prompts) for _ in prompt.sequences]
        sequences = [sequence for prompt in prompts for sequence in prompt.sequences]
        seen = None
        if sampler.penalty != 1.0:
            seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
            for line, prompt in enumerate(prompts):
                seen[line, torch.tensor(prompt.token_ids, device=device)] = True
        drawn = []
        # Two tensors, each aligned as kernels were compiled for.
        which = torch.tensor(lines, device=device)
        keys = torch.tensor([s.key for s in sequences], device=device)
        for rows, key in zip(which.split(FIRST_AT_ONCE), keys.split(FIRST_AT_ONCE), strict=True):
            drawn.append(sampler(logits[rows], key, torch.zeros_like(key), None if seen is None else seen[rows]))
        stats = torch.cat([x.stats() for x in drawn]).cpu().numpy()
        if np.isnan(stats[:, :2]).any():
            raise not_finite()
        tokens = torch.cat([x.tokens for x in drawn]).tolist()
        for line, sequence in enumerate(sequences):
            self._extend(sequence, tokens[line : line + 1], stats[line : line + 1])
            if sequence.stop_reason is None:
                self.scheduler.ready.append(sequence)

    def _take(self, readback: Readback) -> None:
        """Read what was drawn, and let go of sequences that have ended."""
        going = []
        for sequence, tokens, stats in zip(readback.sequences, *readback.read(), strict=False):
            if sequence.stop_reason is not None:
                # It ended in the readback before: what it has drawn since is dropped.
                continue
            self._append(sequence, tokens, stats)
            if sequence.stop_reason is None:
                going.append(sequence)
        self.scheduler.running = going

    def _append(self, sequence: SampledSequence, tokens: list[int], stats: np.ndarray) -> None:
        """Add what a sequence has drawn. The device has stopped at end tokens and at the limit, so that the last token
        says whether it has ended; but a stop string may be complete before."""
        at_once = 1 if self._may_stop(sequence, tokens) else CHUNK
        for start in range(0, len(tokens), at_once):
            part = tokens[start : start + at_once]
            # A copy: a view would keep the whole readback.
            self._extend(sequence, part, stats[start : start + len(part)].copy())
            if sequence.stop_reason is not None:
                break

    def _extend(self, sequence: SampledSequence, tokens: list[int], stats: np.ndarray) -> None:
        """Add tokens, and end the sequence if the last of them ends it."""
        sequence.extend(tokens, stats)
        sequence.stop_reason = is_end(sequence.tokens, self.sampling, self.tokenizer)
        if sequence.stop_reason is not None:
            self.scheduler.finish(sequence)
            self.unfinished[sequence.group] -= 1
            if self.unfinished[sequence.group] == 0:
                self.finished.append(sequence.group)

    def _may_stop(self, sequence: SampledSequence, tokens: list[int]) -> bool:
        """Whether a stop string is complete after some of these tokens: then it is found out after which."""
        if not self.stops or not tokens:
            return False
        before = sequence.tokens[-stop_window(self.stops) :]
        return has_stop([*before, *tokens], self.stops, self.tokenizer, len(tokens))


def _by_images(prompts: list[SharedPrompt]) -> list[list[SharedPrompt]]:
    """Those with images, and those without: a forward has images throughout or not at all."""
    parts = [[p for p in prompts if (p.inputs is None) == plain] for plain in (True, False)]
    return [part for part in parts if part]
