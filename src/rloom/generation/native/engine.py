"""Generation with the very model that is trained: prompts prefilled once, groups decoded together, handed over as they
finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rloom.data.model_inputs import placeholder_ids
from rloom.errors import EngineError
from rloom.generation.base import Sampling, nothing_asked
from rloom.generation.native.decode_loop import DecodeLoop
from rloom.generation.native.layers.lora import is_plain_lora
from rloom.generation.native.proof import NOISE, why_not_native
from rloom.generation.native.runner import Runner, lock_of
from rloom.generation.native.sampling.noise import key_of
from rloom.generation.native.sampling.sampler import Sampler
from rloom.generation.native.scheduler import SampledSequence, SharedPrompt
from rloom.models.load import base_of
from rloom.printable import get_logger
from rloom.types import Completion, Group, Prompt

logger = get_logger(__name__)


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
        if sampling.stop_strings and tokenizer is None:
            raise EngineError("stop_strings need a tokenizer")
        self.get_model, self.sampling, self.tokenizer = get_model, sampling, tokenizer
        self.max_sequences, self.compiled, self.merged = max_sequences, compiled, merged
        self.group_size, self.longest_prompt = group_size, longest_prompt
        # These four are found out by the proof.
        self.fused = True  # norms, rotations and activations are kernels
        self.late_rotation = True  # rotations are left to the attention kernel
        self.paged = False
        self.noise = NOISE  # what rounding makes of logits, as a share of the largest
        # Whether what is drawn from is another distribution than the plain one.
        self.filtered = Sampler(sampling, _never_drawn(get_model())).filters
        self.runner: Runner | None = None
        self._images: tuple[str | None] | None = None  # why prompts with images cannot be had, once that was tried
        self._seen: tuple[Any, ...] | None = None  # the weights that the runner was made for
        self.requeued = 0
        if prove and (reason := self._why_not(get_model())) is not None:
            raise EngineError(reason)

    def _why_not(self, model: Any) -> str | None:
        """What goes wrong here, if anything does. An option that makes it wrong is switched off where that helps:
        adapters that round too much away when merged, kernels that stand in for parts that do more than those."""
        # Another thread may generate with this model.
        with lock_of(base_of(model)):
            runner = self._new_runner(model)
            reason = why_not_native(model, runner)
            self.paged, self.noise = bool(runner.geometry.layers) and runner.paged, runner.noise
            switches = _switches(runner) if reason is not None else {}
            # Frees the copies of weights that it holds, before the next runner makes some.
            del runner
            for option, told in switches.items():
                before = getattr(self, option)
                setattr(self, option, False)
                if why_not_native(model, self._new_runner(model)) is None:
                    if told:
                        logger.warning("%s, %s", told, reason)
                    return None
                setattr(self, option, before)
            return reason

    def _new_runner(self, model: Any) -> Runner:
        return Runner(
            model, Sampler(self.sampling, _never_drawn(model)), max_new_tokens=self.sampling.max_completion_length,
            eos_token_ids=self.sampling.eos_token_ids, compiled=self.compiled, merged=self.merged,
            group_size=self.group_size, longest_prompt=self.longest_prompt, fused=self.fused,
            late_rotation=self.late_rotation, noise=self.noise,
        )  # fmt: skip

    def _current_runner(self) -> Runner:
        """The runner of the present model; a new one where weights have moved, since graphs hold their addresses."""
        model = self.get_model()
        with lock_of(base_of(model)):
            if self.runner is None or self._seen != _addresses(model):
                if self.runner is not None:
                    self.runner.graphs.drop()
                # Let go of the old one first: it keeps the memory of weights that have moved.
                self.runner = None
                self.runner = self._new_runner(model)
                # Only now: the runner has moved weights, to make them contiguous.
                self._seen = _addresses(model)
            return self.runner

    def release(self) -> None:
        """Let go of graphs and buffers, which hold memory of the weights. The next rollout makes them anew."""
        with lock_of(base_of(self.get_model())):
            if self.runner is not None:
                self.runner.graphs.drop()
            self.runner = self._seen = None

    def words(self) -> str:
        """What generates, in one line."""
        how = "pages and CUDA graphs" if self.paged else "padded rows, as on a CPU"
        compiled = ", compiled" if self.compiled else ""
        return f"generation by the native engine, with {how}{compiled}"

    def why_not_images(self, prompts: Sequence[Prompt]) -> str | None:
        """None if prompts with images decode here as they do on their own, else what goes wrong; tried once, on the
        shortest and the longest of these."""
        if self._images is None:
            ordered = sorted((p for p in prompts if p.inputs), key=lambda prompt: len(prompt.token_ids))
            some = ordered[:1] + ordered[1:][-1:]
            model = self.get_model()
            try:
                with lock_of(base_of(model)):
                    self._images = (why_not_native(model, self._current_runner(), some),)
            # Next time there may be enough.
            except torch.OutOfMemoryError:
                return "there was no memory left to try it"
        return self._images[0]

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's group as it finishes; equal `seed` and weights, equal tokens."""
        if nothing_asked(prompts, num_generations):
            return
        if any(prompt.inputs for prompt in prompts) and (reason := self.why_not_images(prompts)) is not None:
            raise EngineError(f"prompts with images do not run here: {reason}. Leave `engine` unset")
        runner = self._current_runner()
        self._check(prompts, runner)
        shared, groups = _share(prompts, num_generations, seed)
        with runner.ready():
            loop = DecodeLoop(runner, shared, self.sampling, self.tokenizer, self.max_sequences)
        while not loop.scheduler.done:
            with runner.ready():
                while not (loop.finished or loop.scheduler.done):
                    loop.advance()
            # Outside of `ready`: whoever is handed a group may want the model as it was.
            while loop.finished:
                group = loop.finished.pop(0)
                yield Group(prompt=prompts[group], completions=[self._completion(s) for s in groups[group]])
        requeued = loop.scheduler.requeued
        self.requeued += requeued
        if requeued:
            logger.info("%d completions had to begin again: memory for keys and values ran out", requeued)

    def _check(self, prompts: Sequence[Prompt], runner: Runner) -> None:
        """Refuse what would otherwise end in another prompt's logits, or in a fault on the device."""
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

    def _completion(self, sequence: SampledSequence) -> Completion:
        assert sequence.stop_reason is not None
        logprobs, drawn_logprobs, entropies = np.concatenate(sequence.stats).T.tolist()
        return Completion(
            token_ids=sequence.tokens,
            stop_reason=sequence.stop_reason,
            logprobs=logprobs,
            drawn_logprobs=drawn_logprobs if self.filtered else None,
            entropies=entropies,
        )


def _switches(runner: Runner) -> dict[str, str]:
    """Options that may be switched off, in the order in which they are tried, and what the log then says."""
    found: dict[str, str] = {}
    if runner.layers.merged.copies:
        found["merged"] = "adapters are not merged into copies of their layers: with those"
    if runner.layers.fused is not None:
        # Heads of which a part is rotated are then rotated by a kernel of its own, which costs little.
        found["late_rotation"] = ""
        found["fused"] = "norms and rotations run as they are, which is slower: with kernels"
    return found


def _share(
    prompts: Sequence[Prompt], num_generations: int, seed: int
) -> tuple[list[SharedPrompt], list[list[SampledSequence]]]:
    """Equal prompts as one; and each prompt's sequences."""
    shared: dict[tuple[int, ...], SharedPrompt] = {}
    groups: list[list[SampledSequence]] = []
    for index, prompt in enumerate(prompts):
        inputs = prompt.inputs or None
        # Equal tokens may stand for other images.
        key = (*prompt.token_ids, -1, id(inputs)) if inputs else tuple(prompt.token_ids)
        one = shared.setdefault(key, SharedPrompt(list(prompt.token_ids), inputs=inputs))
        number = index if prompt.number is None else prompt.number
        group = [SampledSequence(one, index, sample, key_of(seed, number, sample)) for sample in range(num_generations)]
        one.sequences += group
        groups.append(group)
    return list(shared.values()), groups


def _never_drawn(model: Any) -> list[int]:
    """Tokens that stand for images: a forward over one that was drawn would look for an image that is not there. Some
    models have names for tokens outside of their vocabulary."""
    size = model.get_output_embeddings().weight.shape[0]
    return [token for token in placeholder_ids(model.config) if 0 <= token < size]


def _addresses(model: Any) -> tuple[Any, ...]:
    """Changes when weights are moved or replaced or computed with otherwise, not when they are updated in place."""
    pointers = [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
    switches = [
        (m.disable_adapters, m.merged, m.active_adapters, sorted(getattr(m, "scaling", {}).items()), is_plain_lora(m))
        for m in model.modules()
        if hasattr(m, "disable_adapters") and hasattr(m, "merged")
    ]
    device = next(model.parameters()).device.type
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    return (id(model), hash(tuple(pointers)), hash(str(switches)), autocast)
