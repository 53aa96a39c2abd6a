"""Generation with the very model that is trained: prompts prefilled once, groups decoded together, handed over as they
finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from typing import Any

import numpy as np
import torch

from rloom.data.model_inputs import placeholder_ids
from rloom.errors import EngineError
from rloom.generation.base import Sampling, has_stop, is_end, nothing_asked, stop_window
from rloom.generation.native.cache.allocator import Pages
from rloom.generation.native.cache.memory import free_memory
from rloom.generation.native.layers.lora import is_plain_lora
from rloom.generation.native.proof import NOISE, why_not_native
from rloom.generation.native.rows import Look, not_finite
from rloom.generation.native.runner import AHEAD, Runner, lock_of
from rloom.generation.native.sampling.noise import key_of
from rloom.generation.native.sampling.sampler import Sampler
from rloom.generation.native.scheduler import Scheduler, Sequence, SharedPrompt
from rloom.models.load import base_of
from rloom.printable import get_logger
from rloom.types import Completion, Group, Prompt

logger = get_logger(__name__)

PREFILL_TOKENS = 32768
"""Tokens of prompts that one forward takes."""

SHARE_OF_FREE_MEMORY = 0.8
"""What keys and values may take of the memory that is free when a rollout begins."""


FIRST_AT_ONCE = 512
"""Completions that draw their first token together."""


class NativeEngine:
    """Samples from the trained weights themselves: there is no second model to be kept in step. (Under LoRA there are
    copies, of the adapters or of what they are merged into, for a rollout.)

    `get_model` gives the model; `compiled` has its decode step compiled, which takes some seconds once; `merged` has
    LoRA adapters merged into copies of their layers' weights (None: in float32, where there is room); `group_size` is
    how many completions a prompt is expected to have, and `longest_prompt` its tokens: kernels are compiled and graphs
    captured for those at once. Raises [`EngineError`] if the model does not decode here as it does on its own.
    """

    keyed_by_prompt = True
    takes_images = True
    """Where the model proves to decode after them as it does on its own, which is tried on the first that come."""

    def __init__(
        self,
        get_model: Callable[[], Any],
        sampling: Sampling,
        *,
        tokenizer: Any = None,
        max_sequences: int = 512,
        compiled: bool = False,
        merged: bool | None = None,
        group_size: int = 0,
        longest_prompt: int = 0,
        prove: bool = True,
    ) -> None:
        self.get_model, self.sampling, self.tokenizer = get_model, sampling, tokenizer
        self.max_sequences, self.compiled, self.merged = max_sequences, compiled, merged
        self.group_size, self.longest_prompt = group_size, longest_prompt
        self.fused = True  # kernels for norms, rotations and activations
        self.late = True  # rotations are left to the attention kernel
        self.paged = False  # found out below
        self.noise = NOISE  # what rounding makes of logits, found out below
        self.stops = sampling.stop_strings
        if self.stops and tokenizer is None:
            raise EngineError("stop_strings need a tokenizer")
        # whether what is drawn from is another distribution than the plain one
        self.filtered = Sampler(sampling, _never(get_model())).filters
        self.runner: Runner | None = None
        self._images: tuple[str | None] | None = None  # why prompts with images cannot be had, once that was tried
        self._seen: tuple[Any, ...] | None = None  # the weights that the runner was made for
        self.requeued = 0
        if prove and (reason := self._why_not(get_model())) is not None:
            raise EngineError(reason)

    def _why_not(self, model: Any) -> str | None:
        """What goes wrong here, if anything does. What makes it wrong is left out where it can be: adapters that round
        too much away when merged, kernels that stand in for parts that do more than those."""
        with lock_of(base_of(model)):  # another thread may generate with it
            runner = self._new_runner(model)
            reason, merged = why_not_native(model, runner), bool(runner.merged.copies)
            fused, self.paged = runner.fused is not None, runner.geometry is not None and runner.paged
            self.noise = runner.noise
            del runner  # and with it the memory of copies
            if reason is not None and merged and self._is_right(model, merged=False):
                logger.warning("adapters are not merged into copies of their layers: with those, %s", reason)
                return None
            if reason is not None and fused and self._is_right(model, late=False):
                return None  # heads of which a part is rotated: by a kernel of its own
            if reason is not None and fused and self._is_right(model, fused=False):
                logger.warning("norms and rotations run as they are, which is slower: with kernels, %s", reason)
                return None
            return reason

    def _is_right(self, model: Any, **changes: bool) -> bool:
        """Whether nothing goes wrong with these choices; they stay if so."""
        before = {name: getattr(self, name) for name in changes}
        vars(self).update(changes)
        right = why_not_native(model, self._new_runner(model)) is None
        if not right:
            vars(self).update(before)
        return right

    def _new_runner(self, model: Any) -> Runner:
        return Runner(
            model, Sampler(self.sampling, _never(model)), max_new_tokens=self.sampling.max_completion_length,
            eos_token_ids=self.sampling.eos_token_ids, compiled=self.compiled, merged=self.merged,
            group_size=self.group_size, longest_prompt=self.longest_prompt, fused=self.fused,
            late=self.late, noise=self.noise,
        )  # fmt: skip

    def _current_runner(self) -> Runner:
        """The runner of the present model; a new one where weights have moved, since graphs hold their addresses."""
        model = self.get_model()
        with lock_of(base_of(model)):
            if self.runner is None or self._seen != _whereabouts(model):
                if self.runner is not None:
                    self.runner.drop_graphs()
                self.runner = None  # first: it keeps the memory of weights that have moved
                self.runner = self._new_runner(model)
                self._seen = _whereabouts(model)  # after the runner has laid weights together
            return self.runner

    def words(self) -> str:
        """What generates, in words."""
        how = "pages and CUDA graphs" if self.paged else "padded rows, as on a CPU"
        compiled = ", compiled" if self.compiled else ""
        return f"generation by the native engine, with {how}{compiled}"

    def why_not_images(self, prompts: Listing[Prompt]) -> str | None:
        """None if prompts with images decode here as they do on their own, else what goes wrong; tried once, on the
        shortest and the longest of these."""
        if self._images is None:
            ordered = sorted((p for p in prompts if p.inputs), key=lambda prompt: len(prompt.token_ids))
            some = ordered[:1] + ordered[1:][-1:]
            model = self.get_model()
            try:
                with lock_of(base_of(model)):
                    self._images = (why_not_native(model, self._current_runner(), some),)
            except torch.OutOfMemoryError:  # which may be otherwise next time
                return "there was no memory left to try it"
        return self._images[0]

    # -- a rollout

    def generate(self, prompts: Listing[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's group as it finishes; equal `seed` and weights, equal tokens."""
        if nothing_asked(prompts, num_generations):
            return
        if any(prompt.inputs for prompt in prompts) and (reason := self.why_not_images(prompts)) is not None:
            raise EngineError(f"prompts with images do not run here: {reason}. Leave `engine` unset")
        runner = self._current_runner()
        self._check(prompts, runner)
        shared, groups = _share(prompts, num_generations, seed)
        left = [num_generations] * len(prompts)
        finished: list[int] = []

        def end(sequence: Sequence, scheduler: Scheduler) -> None:
            scheduler.finish(sequence)
            left[sequence.group] -= 1
            if left[sequence.group] == 0:
                finished.append(sequence.group)

        looks: deque[Look] = deque()
        with runner.ready():
            cache, scheduler = self._begin(runner, shared)
        while not scheduler.done:
            with runner.ready():
                while not (finished or scheduler.done):
                    self._advance(runner, cache, scheduler, looks, end)
            while finished:  # outside: whoever is handed a group may want the model as it was
                group = finished.pop(0)
                yield Group(prompt=prompts[group], completions=[self._completion(s) for s in groups[group]])
        self.requeued += scheduler.requeued
        if scheduler.requeued:
            logger.info("%d completions had to begin again: memory for keys and values ran out", scheduler.requeued)

    def _check(self, prompts: Listing[Prompt], runner: Runner) -> None:
        """What would otherwise end in another prompt's logits, or in a fault on the device."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        if min(lengths) == 0:
            raise EngineError(f"prompt {lengths.index(0)} has no tokens; there is nothing to continue from")
        limit = runner.position_limit
        longest = max(lengths) + self.sampling.max_completion_length
        if limit is not None and longest > limit:
            raise EngineError(
                f"a prompt of {max(lengths)} tokens and a completion of {self.sampling.max_completion_length} pass the "
                f"{limit} positions up to which this model's rows do not influence each other: shorten them, or set "
                "engine='transformers'"
            )

    def _begin(self, runner: Runner, shared: list[SharedPrompt]) -> tuple[Any, Scheduler]:
        if runner.geometry is None:
            runner.prefill([shared[0].token_ids[:8]])
        longest = max(len(prompt.token_ids) for prompt in shared)
        runner.prepare_for(longest, max(len(prompt.sequences) for prompt in shared))
        places = self._plan_places(runner, shared)
        total = self._plan_pages(runner, shared, places)
        scheduler = Scheduler(
            shared,
            pages=Pages(total=total, size=runner.page_size),
            max_new_tokens=self.sampling.max_completion_length,
            max_sequences=places,
            prefill_tokens=PREFILL_TOKENS,
        )
        return runner.make_cache(total), scheduler

    def _plan_places(self, runner: Runner, shared: list[SharedPrompt]) -> int:
        """Sequences that may run at once. Without pages, free memory decides: rows are as long as the longest, prompts
        are kept as they are and padded, and rows are moved into memory of their own when some join or leave."""
        if runner.paged:
            return self.max_sequences
        room = self._room(runner)
        prompt, own = 2 * max(len(p.token_ids) for p in shared), 2 * self.sampling.max_completion_length
        places = room // (prompt + own)
        if places > len(shared):  # some share a prompt
            places = max(len(shared), (room - len(shared) * prompt) // own)
        return max(1, min(places, self.max_sequences))

    def _plan_pages(self, runner: Runner, shared: list[SharedPrompt], places: int) -> int:
        """Enough for all at full length, or what free memory allows."""
        size = runner.page_size
        pages = lambda tokens: -(-tokens // size)  # noqa: E731
        at_once = sum(len(p.sequences) for p in shared)
        wanted = sum(pages(len(p.token_ids)) for p in shared)
        wanted += min(at_once, places) * pages(self.sampling.max_completion_length)
        return min(wanted, self._room(runner) // size) + 1

    def _room(self, runner: Runner) -> int:
        """Tokens whose keys and values may be kept."""
        assert runner.geometry is not None
        return int(SHARE_OF_FREE_MEMORY * free_memory(runner.device)) // runner.geometry.bytes_per_token

    def _advance(
        self, runner: Runner, cache: Any, scheduler: Scheduler, looks: deque[Look], end: Callable[..., None]
    ) -> None:
        """Some steps of all that run, and a look at what they have drawn, while the next are under way if possible."""
        if not looks:
            self._start(runner, cache, scheduler, looks, end)
        if looks and self._nothing_hangs_on(looks[-1], runner, scheduler):
            steps = scheduler.go_on(ahead=looks[-1].steps, steps=AHEAD)
            if steps:
                looks.append(runner.go_on(cache, steps))
        if looks:
            self._take(looks.popleft(), scheduler, end)

    def _nothing_hangs_on(self, look: Look, runner: Runner, scheduler: Scheduler) -> bool:
        """Whether the next steps can begin before it is read. Whoever ends meanwhile draws nothing more, or nothing
        that is looked at: the device knows of end tokens and limits, not of texts."""
        return look.sequences == scheduler.running and runner.can_go_on(look.sequences)

    def _start(
        self, runner: Runner, cache: Any, scheduler: Scheduler, looks: deque[Look], end: Callable[..., None]
    ) -> None:
        """Prefill who fits, then begin some steps of all that run."""
        while prompts := scheduler.next_prefill():
            for part in _by_images(prompts):
                logits = runner.prefill_shared(part, cache)
                self._first_tokens(runner, part, logits, scheduler, end)
        steps = scheduler.fill(runner.chunk)
        if not scheduler.running:
            return
        expected = max(self.sampling.max_completion_length - len(s.tokens) for s in scheduler.running)
        looks.append(runner.decode(scheduler.running, cache, steps, expected))

    def _first_tokens(
        self, runner: Runner, prompts: list[SharedPrompt], logits: Any, scheduler: Scheduler, end: Callable[..., None]
    ) -> None:
        """All sequences of a prompt draw their first token from its prefill."""
        sequences = [(i, s) for i, prompt in enumerate(prompts) for s in prompt.sequences]
        device = logits.device
        which = torch.tensor([i for i, _ in sequences], device=device)
        keys = torch.tensor([s.key for _, s in sequences], device=device)
        seen = None
        if runner.sampler.penalty != 1.0:
            seen = torch.zeros(logits.shape, dtype=torch.bool, device=device)
            for line, prompt in enumerate(prompts):
                seen[line, torch.tensor(prompt.token_ids, device=device)] = True
        tokens, stats = self._draw_first(runner, logits, which, keys, seen)
        for line, (_, sequence) in enumerate(sequences):
            sequence.extend([tokens[line]], stats[line : line + 1])
            sequence.stop_reason = is_end(sequence.tokens, self.sampling, self.tokenizer)
            if sequence.stop_reason is None:
                scheduler.start(sequence)
            else:
                end(sequence, scheduler)

    def _draw_first(
        self, runner: Runner, logits: Any, which: Any, keys: Any, seen: Any
    ) -> tuple[list[int], np.ndarray]:
        """A token for each key from the logits of its prompt; some at a time, since each is a row of the vocabulary."""
        drawn = []
        for lines, part in zip(which.split(FIRST_AT_ONCE), keys.split(FIRST_AT_ONCE), strict=True):
            before = None if seen is None else seen[lines]
            drawn.append(runner.draw(logits[lines], part, torch.zeros_like(part), before))
        stats = torch.cat([x.stats() for x in drawn]).cpu().numpy()
        if np.isnan(stats[:, :2]).any():
            raise not_finite()
        return torch.cat([x.tokens for x in drawn]).tolist(), stats

    def _take(self, look: Look, scheduler: Scheduler, end: Callable[..., None]) -> None:
        """Read what was drawn, and let go of who has ended."""
        going: list[Sequence] = []
        for sequence, tokens, stats in zip(look.sequences, *look.read(), strict=False):
            if sequence.stop_reason is not None:
                continue  # it ended in the look before this one: what it drew since is nobody's
            if self._may_stop(sequence, tokens):
                self._append_one_by_one(sequence, tokens, stats)
            else:  # the device has stopped at end tokens and at the limit: the last token says which
                sequence.extend(tokens, stats[: len(tokens)].copy())  # a view would keep the whole look
                sequence.stop_reason = is_end(sequence.tokens, self.sampling, self.tokenizer)
            if sequence.stop_reason is None:
                going.append(sequence)
            else:
                end(sequence, scheduler)
        scheduler.running = going

    def _may_stop(self, sequence: Sequence, tokens: list[int]) -> bool:
        """Whether a stop string is complete after some of these: then it is found out after which."""
        if not self.stops or not tokens:
            return False
        before = sequence.tokens[-stop_window(self.stops) :]
        return has_stop([*before, *tokens], self.stops, self.tokenizer, len(tokens))

    def _append_one_by_one(self, sequence: Sequence, tokens: list[int], stats: np.ndarray) -> None:
        """A stop string may be complete before the last of them."""
        for index, token in enumerate(tokens):
            sequence.extend([token], stats[index : index + 1].copy())
            sequence.stop_reason = is_end(sequence.tokens, self.sampling, self.tokenizer)
            if sequence.stop_reason is not None:
                break

    def _completion(self, sequence: Sequence) -> Completion:
        assert sequence.stop_reason is not None
        logprobs, drawn_logprobs, entropies = np.concatenate(sequence.stats).T.tolist()
        return Completion(
            token_ids=sequence.tokens,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs,
            drawn_logprobs=drawn_logprobs if self.filtered else None,
            entropies=entropies,
        )


def _share(
    prompts: Listing[Prompt], num_generations: int, seed: int
) -> tuple[list[SharedPrompt], list[list[Sequence]]]:
    """Equal prompts as one; and each prompt's sequences."""
    shared: dict[tuple[int, ...], SharedPrompt] = {}
    groups: list[list[Sequence]] = []
    for index, prompt in enumerate(prompts):
        inputs = prompt.inputs or None  # equal tokens may stand for other images
        key = (*prompt.token_ids, -1, id(inputs)) if inputs else tuple(prompt.token_ids)
        one = shared.setdefault(key, SharedPrompt(list(prompt.token_ids), inputs=inputs))
        number = index if prompt.number is None else prompt.number
        group = [Sequence(one, index, sample, key_of(seed, number, sample)) for sample in range(num_generations)]
        one.sequences += group
        groups.append(group)
    return list(shared.values()), groups


def _never(model: Any) -> list[int]:
    """Tokens that stand for images: a forward over one that was drawn would look for an image that is not there."""
    size = model.get_output_embeddings().weight.shape[0]
    return [token for token in placeholder_ids(model.config) if 0 <= token < size]  # some have names outside of it


def _by_images(prompts: list[SharedPrompt]) -> list[list[SharedPrompt]]:
    """Those with images, and those without: a forward has images throughout or not at all."""
    parts = [[p for p in prompts if (p.inputs is None) == plain] for plain in (True, False)]
    return [part for part in parts if part]


def _whereabouts(model: Any) -> tuple[Any, ...]:
    """Changes when weights are moved or replaced or computed with otherwise, not when they are updated in place."""
    pointers = [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
    adapters = [m for m in model.modules() if hasattr(m, "disable_adapters") and hasattr(m, "merged")]
    switches = [
        (m.disable_adapters, m.merged, m.active_adapters, sorted(getattr(m, "scaling", {}).items()), is_plain_lora(m))
        for m in adapters
    ]
    device = next(model.parameters()).device.type
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (id(model), hash(tuple(pointers)), hash(str(switches)), autocast)
