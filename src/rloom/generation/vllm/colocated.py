"""vLLM in this process: with its own copy of the weights, replaced by the policy's whenever those have changed."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rloom.errors import EngineError
from rloom.generation.base import Sampling, nothing_asked
from rloom.generation.vllm import proof
from rloom.generation.vllm.adapter import (
    adapter_rank,
    base_fingerprint,
    is_active,
    largest_rank,
    room_for,
    why_folded,
    write_adapter,
)
from rloom.generation.vllm.loader import LOADER, loading_from
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.requests import Asking, check_lengths
from rloom.generation.vllm.starting import (
    clean_up,
    describe,
    engine_options,
    import_vllm,
    in_our_words,
    shut_down,
)
from rloom.generation.vllm.surroundings import (
    RolloutNoise,
    give_back_classes,
    own_randomness,
    remember_classes,
    starting_vllm,
    temporary_folder,
)
from rloom.generation.vllm.weights import base_of, check_sendable, checkpoint_weights, fingerprint, hint_rounding
from rloom.models.load import is_peft_model
from rloom.types import Completion, Group, Prompt

_running: weakref.ref[VllmEngine] | None = None
"""vLLM keeps its process groups in globals, so that two of it in one process break each other."""


class VllmEngine:
    """Generates with vLLM in the trainer's process (`vllm_mode="colocate"`).

    vLLM is started without weights, from the model's config and tokenizer alone. They come from the model in memory:
    all of them before the first rollout, which a comparison of log-probabilities proves, and again whenever any has
    changed. So there is no second source that could be stale. Of a plain LoRA adapter's model the base is handed over
    once, at the start, and then the adapter alone.
    """

    keyed_by_prompt = False
    takes_images = False

    def __init__(
        self, get_model: Callable[[], Any], sampling: Sampling, *, tokenizer: Any, options: VllmOptions | None = None
    ) -> None:
        self.get_model, self.sampling, self.tokenizer = get_model, sampling, tokenizer
        self.options = options or VllmOptions()
        self.asking = Asking(sampling, self.options.regex)
        self.asking.hint_filters()
        check_sendable(get_model())
        self._alone = self._sends_adapter_alone()
        _check_sleep(self.options, self._device)
        self.syncs = 0  # how often weights were handed over
        self._llm: Any = None
        self._folder = temporary_folder(self)  # stays: vLLM reads the tokenizer again when outputs are constrained
        self._sent: tuple[Any, ...] | None = None  # the fingerprint of the weights that vLLM has
        self._base: tuple[Any, ...] | None = None  # that of the weights under an adapter which is sent alone
        self._adapters = 0  # sent so far
        self._room = 0  # the rank that vLLM has made room for
        self._lora: Any = None  # that adapter, as requests name it
        self._asleep = False
        self._numbers = 0  # of requests so far
        self._end: Callable[[], Any] = lambda: None  # shuts vLLM down, at the latest with the process
        self._under_way: dict[str, int] = {}  # requests of the present rollout, with their prompts' numbers
        try:
            self._prove()
        except BaseException:
            self.close()
            raise

    @property
    def _device(self) -> torch.device:
        return next(self.get_model().parameters()).device

    # -- a rollout

    def words(self) -> str:
        """What generates, in one line."""
        return "generation by vLLM, in this process"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's group as it finishes; equal `seed` and weights, equal tokens."""
        if nothing_asked(prompts, num_generations):
            return
        try:
            llm = self._ready()
            _check_fits(llm, prompts, self.sampling.max_completion_length)
            with closing(self._run(llm, self.asking, prompts, num_generations, seed)) as answers:
                for index, completions in answers:
                    yield Group(prompt=prompts[index], completions=completions)
        finally:
            self._sleep()

    def _run(
        self, llm: Any, asking: Asking, prompts: Sequence[Prompt], count: int, seed: int
    ) -> Generator[tuple[int, list[Completion]], None, None]:
        """Each prompt's number and completions, as they finish. What is left when nobody asks on is let go of."""
        engine, waiting = llm.llm_engine, dict[str, int]()
        self._under_way = waiting
        noise, by_seeds = RolloutNoise(self._device, seed), _draws_by_seeds(engine)
        try:
            with noise.drawing():
                for index, prompt in enumerate(prompts):
                    options = asking.seeded(count, seed=seed, number=index) if by_seeds else asking.options(count)
                    waiting[self._ask(engine, prompt, options, asking.regex)] = index
            while waiting:
                done: list[Any] = []
                if self._under_way is not waiting:
                    raise EngineError(
                        f"another rollout began while {len(waiting)} of {len(prompts)} prompts of this one were not "
                        "done: vLLM generates one at a time"
                    )
                with noise.drawing():
                    while not done:
                        if not engine.has_unfinished_requests():
                            raise EngineError(f"vLLM has lost {len(waiting)} of {len(prompts)} prompts")
                        done = [answer for answer in engine.step() if answer.finished]
                for answer in done:  # outside: whoever is handed a group may draw and compute
                    yield waiting.pop(answer.request_id), _completions(answer, asking, count)
        finally:
            if self._under_way is waiting:
                self._let_go()

    def _let_go(self) -> None:
        """Of requests that nobody waits for: an error may hold on to a rollout that was never finished."""
        left, self._under_way = list(self._under_way), {}
        if left and self._llm is not None:
            self._llm.llm_engine.abort_request(left)

    def _ask(self, engine: Any, prompt: Prompt, options: dict[str, Any], regex: str | None) -> str:
        """Hand a request over; its name."""
        self._numbers += 1
        name = f"rloom-{self._numbers}"
        try:
            content = {"prompt_token_ids": list(prompt.token_ids)}
            engine.add_request(name, content, self._params(options, regex), lora_request=self._lora)
        except Exception as error:
            raise EngineError(f"vLLM refuses what it is asked: {error}") from error
        return name

    def _params(self, options: dict[str, Any], regex: str | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        return SamplingParams(
            **options,
            detokenize=bool(options["stop"]),
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if regex is None else StructuredOutputsParams(regex=regex),
        )

    # -- vLLM and its weights

    def _ready(self) -> Any:
        """vLLM, awake, with the weights that the model has now."""
        global _running
        model = self.get_model()
        if self._alone and self._llm is not None and not self._fits(model):
            self.close()
        if self._llm is None:
            other = None if _running is None else _running()
            if other is not None:
                other.close()  # it starts again if it is asked once more
            gc.collect()  # one that nobody has closed would take the new one's process groups with it later
            self._llm, self._sent = self._start_either(), None
            _running = weakref.ref(self)
        self._let_go()
        if self._asleep:
            self._llm.wake_up()
        self._asleep = False
        now = fingerprint(model)
        if now != self._sent:
            self._sent = None  # should it fail half-way
            (self._send_adapter if self._alone else self._send)(model)
            self._sent = now
            self.syncs += 1
        return self._llm

    def _send_adapter(self, model: Any, shift: float = 0.0) -> None:
        """Hand the adapter over, under a new name: what vLLM keeps of the last one is not found again. One with a
        `shift` is another."""
        from vllm.lora.request import LoRARequest

        last, self._lora = self._lora, None
        engine = self._llm.llm_engine
        with own_randomness(self._device):
            if last is not None:
                engine.remove_lora(last.lora_int_id)
            if not is_active(model):
                return
            self._adapters += 1
            path = Path(self._folder, f"adapter-{self._adapters}")
            try:
                write_adapter(model, path, self.options.dtype_for(model), shift)
                lora = LoRARequest(path.name, self._adapters, str(path))
                if not engine.add_lora(lora):
                    raise EngineError("vLLM does not take the policy's adapter")
            finally:
                shutil.rmtree(path, ignore_errors=True)
        self._lora = lora

    def _send(self, model: Any) -> None:
        with own_randomness(self._device):
            try:
                [missing] = self._llm.collective_rpc(_take, args=(model,))
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"vLLM does not take the policy's weights: {str(error)[:500]}") from error
            emptied = self._llm.reset_prefix_cache()
        if missing:
            raise EngineError(f"vLLM did not find {len(missing)} of its weights in the policy's, such as {missing[0]}")
        if not emptied:
            raise EngineError("vLLM kept keys and values of the old weights: its prefix cache could not be emptied")

    def _sleep(self) -> None:
        """Let its memory go, if it may. Weights are worth keeping where the next rollout's are not sent anyway."""
        if not self.options.sleeps or self._llm is None or self._asleep or self._under_way:
            return
        self._asleep = True
        if self._alone:
            self._llm.sleep(level=1)
            return
        self._sent = None
        self._llm.sleep(level=2)

    def close(self) -> None:
        """Let go of vLLM and its memory."""
        self._end()
        self._llm = self._sent = self._base = self._lora = None
        self._under_way, self._asleep = {}, False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _sends_adapter_alone(self) -> bool:
        model = self.get_model()
        if not is_peft_model(model):
            return False
        reason = why_folded(model)
        if reason is not None:
            hint_rounding(model, self.options.dtype_for(model), reason)
        return reason is None

    def _fits(self, model: Any) -> bool:
        """Whether the running vLLM can take the adapter as it is now: what is under it was handed over at the start."""
        self._alone = self._sends_adapter_alone()
        return self._alone and adapter_rank(model) <= self._room and base_fingerprint(model) == self._base

    def _start_either(self) -> Any:
        """vLLM with room for the adapter; where it has none for adapters on this model, without."""
        try:
            return self._start()
        except EngineError as error:
            if not self._alone or "lora" not in str(error).lower():
                raise
            self._alone = False
            model = self.get_model()
            hint_rounding(model, self.options.dtype_for(model), "vLLM has no LoRA for this model")
            return self._start()

    def _start(self) -> Any:
        model, device = self.get_model(), self._device
        with starting_vllm(), own_randomness(device):
            make = import_vllm()
            describe(model, self.tokenizer, self._folder)
            classes, theirs = remember_classes(base_of(model)), None
            grouped = torch.distributed.is_initialized()
            options = engine_options(model, self.options, device)
            if self._alone:
                self._base = base_fingerprint(model)
                self._room = room_for(largest_rank(model))
                options |= {"load_format": LOADER, "enable_lora": True, "max_loras": 1, "max_lora_rank": self._room}
            try:
                with loading_from(model) if self._alone else nullcontext():
                    llm = make(model=self._folder, **options)
                self._end = weakref.finalize(self, shut_down, llm, grouped)
                [theirs] = llm.collective_rpc(_model_of)
                return llm
            except Exception as error:
                clean_up(grouped)
                raise EngineError(
                    f"vLLM did not start: {type(error).__name__}: {str(error).rstrip('.')}. "
                    f"{in_our_words(str(error))}Its own messages are above (VLLM_LOGGING_LEVEL=INFO shows more)"
                ) from error
            finally:
                give_back_classes(classes, theirs)

    def _prove(self) -> None:
        """Have vLLM with the policy's weights draw from the policy, or raise what is wrong."""
        model, prompts = self.get_model(), proof.probe_prompts(self.get_model())
        sampling = proof.probe_sampling(self.sampling)
        llm = self._ready()
        _check_fits(llm, prompts, sampling.max_completion_length)
        groups = self._answers(llm, sampling, prompts)
        if self._lora is not None:
            self._prove_adapter(llm, sampling, prompts, groups)
        self._try_regex(llm, prompts[:1])
        self._sleep()
        own = proof.own_logprobs(model, prompts, groups, sampling.temperature)
        reason = proof.Probe(prompts=prompts, completions=groups, own=own).why_not(self.options.dtype_for(model))
        if reason is not None:
            raise EngineError(f"vLLM does not generate what the model would: {reason}")

    def _answers(self, llm: Any, sampling: Sampling, prompts: list[Prompt]) -> list[list[Completion]]:
        answers = dict(self._run(llm, Asking(sampling), prompts, proof.COMPLETIONS, proof.SEED))
        return [answers[index] for index in range(len(prompts))]

    def _prove_adapter(self, llm: Any, sampling: Sampling, prompts: list[Prompt], groups: Any) -> None:
        """Another adapter must have other answers: a new one adds nothing yet, and would not be missed."""
        model = self.get_model()
        self._send_adapter(model, shift=proof.OTHER)
        if self._answers(llm, sampling, prompts) == groups:
            raise EngineError("vLLM answers alike with two adapters that differ: it does not use them")
        self._send_adapter(model)

    def _try_regex(self, llm: Any, prompts: list[Prompt]) -> None:
        """An expression that vLLM does not understand is told at the start."""
        if self.options.regex is None:
            return
        asking = Asking(replace(self.sampling, max_completion_length=1), self.options.regex)
        try:
            list(self._run(llm, asking, prompts, 1, proof.SEED))
        except EngineError as error:
            raise EngineError(f"vllm_structured_outputs_regex={self.options.regex!r}: {error}") from error


def _draws_by_seeds(engine: Any) -> bool:
    """Whether vLLM draws by seeds of requests, whoever chose them: its newer model runner does, on GPUs. It would take
    those that are missing from numpy, which rewards may use and seed."""
    return bool(getattr(getattr(engine, "vllm_config", None), "use_v2_model_runner", False))


def _model_of(worker: Any) -> Any:
    """Runs in vLLM's worker."""
    return worker.get_model()


def _take(worker: Any, policy: Any) -> list[str]:
    """Runs in vLLM's worker: replace its weights; returns the names of those that the policy does not have.

    Reloading only warns of these. What a model's `load_weights` returns says which it took.
    """
    model, taken = worker.get_model(), []
    names = {name for name, _ in model.named_parameters()}
    own = model.load_weights

    def load_weights(weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
        taken.append(own(weights))
        return taken[-1]

    model.load_weights = load_weights
    try:
        worker.reload_weights(weights_iterator=checkpoint_weights(policy, names))
    finally:
        del model.load_weights
    if taken[0] is None:  # some models do not say; the comparison of log-probabilities remains
        return []
    return sorted(names - set(taken[0]))


def _completions(answer: Any, asking: Asking, count: int) -> list[Completion]:
    found = []
    for output in sorted(answer.outputs, key=lambda output: output.index):
        logprobs = [row[token].logprob for token, row in zip(output.token_ids, output.logprobs or (), strict=True)]
        found.append(asking.completion(output.token_ids, logprobs, output.finish_reason))
    return asking.group(found, count)


def _check_fits(llm: Any, prompts: Sequence[Prompt], most_new: int) -> None:
    check_lengths(prompts, most_new, llm.llm_engine.model_config.max_model_len, "raise vllm_max_model_length")


def _check_sleep(options: VllmOptions, device: torch.device) -> None:
    if options.sleeps and device.type != "cuda":
        raise EngineError(
            f"vllm_enable_sleep_mode=True lets GPU memory go between rollouts, and the model is on the {device.type}: "
            "vLLM keeps its memory there; set it to False"
        )
