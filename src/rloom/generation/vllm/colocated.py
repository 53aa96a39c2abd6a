"""vLLM in this process: with its own copy of the weights, replaced by the policy's whenever those have changed."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from rloom.errors import EngineError
from rloom.generation.base import Sampling, nothing_asked
from rloom.generation.vllm import proof
from rloom.generation.vllm.loader import LOADER, loading_from
from rloom.generation.vllm.lora import (
    adapter_rank,
    base_fingerprint,
    is_active,
    largest_rank,
    reserved_rank,
    why_merged,
    write_adapter,
)
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.requests import RequestFormat, check_lengths
from rloom.generation.vllm.shared import Answers, VllmBase
from rloom.generation.vllm.starting import (
    clean_up,
    engine_options,
    import_vllm,
    option_hint,
    shut_down,
    write_config,
)
from rloom.generation.vllm.surroundings import (
    RolloutNoise,
    own_randomness,
    remember_classes,
    restore_classes,
    starting_vllm,
    temporary_folder,
)
from rloom.generation.vllm.weights import base_of, check_taken, checkpoint_weights, fingerprint, hint_rounding
from rloom.models.load import is_peft_model
from rloom.types import Completion, Group, Prompt

_running: weakref.ref[VllmEngine] | None = None
"""vLLM keeps its process groups in globals, so that two of it in one process break each other."""


class VllmEngine(VllmBase):
    """Generates with vLLM in the trainer's process (`vllm_mode="colocate"`).

    vLLM is started without weights, from the model's config and tokenizer alone. The weights come from the model in
    memory: all of them before the first rollout, and again whenever any has changed. A comparison of log-probabilities
    proves that they have arrived. There is no second source that could be stale. If the model is a base under a plain
    LoRA adapter, the base is sent once, at the start, and then the adapter alone.
    """

    def __init__(
        self, get_model: Callable[[], Any], sampling: Sampling, *, tokenizer: Any, options: VllmOptions | None = None
    ) -> None:
        super().__init__(get_model, sampling, options or VllmOptions())
        self.tokenizer = tokenizer
        self._adapter_only = self._sends_adapter_only()
        _check_sleep(self.options, self._device)
        self._llm: Any = None
        self._folder = temporary_folder(self)  # stays: vLLM reads the tokenizer again when outputs are constrained
        self._base: tuple[Any, ...] | None = None  # the fingerprint of the weights under an adapter which is sent alone
        self._adapters = 0  # sent so far
        self._max_rank = 0  # of an adapter that vLLM can take
        self._lora: Any = None  # the adapter that vLLM has, as requests name it
        self._asleep = False
        self._requests = 0  # made so far
        self._end: Callable[[], Any] = lambda: None  # shuts vLLM down, at the latest with the process
        self._pending: dict[str, int] = {}  # requests of the present rollout, with their prompts' numbers
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
            self._ready()
            self._check_fits(prompts, self.sampling.max_completion_length)
            yield from self._groups(prompts, num_generations, seed)
        finally:
            self._sleep()

    def _run(self, request_format: RequestFormat, prompts: Sequence[Prompt], count: int, seed: int) -> Answers:
        """Each prompt's number and completions, as they finish. When it is closed, what is left is aborted."""
        engine, waiting = self._llm.llm_engine, dict[str, int]()
        self._pending = waiting
        noise, by_seeds = RolloutNoise(self._device, seed), _draws_by_seeds(engine)
        try:
            with noise.drawing():
                for index, prompt in enumerate(prompts):
                    options = (
                        request_format.seeded(count, seed=seed, number=index)
                        if by_seeds
                        else request_format.options(count)
                    )
                    waiting[self._ask(engine, prompt, options, request_format.regex)] = index
            while waiting:
                done: list[Any] = []
                if self._pending is not waiting:
                    raise EngineError(
                        f"another rollout began while {len(waiting)} of {len(prompts)} prompts of this one were not "
                        "done: vLLM generates one at a time"
                    )
                with noise.drawing():
                    while not done:
                        if not engine.has_unfinished_requests():
                            raise EngineError(f"vLLM has lost {len(waiting)} of {len(prompts)} prompts")
                        done = [answer for answer in engine.step() if answer.finished]
                # Outside of this rollout's noise: whoever is handed a group may draw and compute.
                for answer in done:
                    yield waiting.pop(answer.request_id), _completions(answer, request_format, count)
        finally:
            if self._pending is waiting:
                self._abort_pending()

    def _abort_pending(self) -> None:
        """Abort requests that nobody waits for: an error may hold on to a rollout that was never finished."""
        left, self._pending = list(self._pending), {}
        if left and self._llm is not None:
            self._llm.llm_engine.abort_request(left)

    def _ask(self, engine: Any, prompt: Prompt, options: dict[str, Any], regex: str | None) -> str:
        """Make a request; returns its name."""
        self._requests += 1
        name = f"rloom-{self._requests}"
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

    def _ready(self) -> None:
        """Have vLLM, awake, with the weights that the model has now."""
        global _running
        model = self.get_model()
        if self._adapter_only and self._llm is not None and not self._fits(model):
            self.close()
        if self._llm is None:
            other = None if _running is None else _running()
            # The other one starts again if it is asked once more.
            if other is not None:
                other.close()
            # One that nobody has closed would take the new one's process groups with it later.
            gc.collect()
            self._llm, self._sent = self._start_either(), None
            _running = weakref.ref(self)
        self._abort_pending()
        if self._asleep:
            self._llm.wake_up()
        self._asleep = False
        now = fingerprint(model)
        if now != self._sent:
            # Should it fail half-way, nothing is known to be there.
            self._sent = None
            (self._send_adapter if self._adapter_only else self._send)(model)
            self._sent = now
            self.syncs += 1

    def _send_adapter(self, model: Any, shift: float = 0.0) -> None:
        """Send the adapter under a new name, so that keys and values of the last one are not used again. With a
        `shift` it is another adapter."""
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
                self._llm.collective_rpc(_replace_weights, args=(model,))
            except EngineError:
                raise
            except Exception as error:
                raise EngineError(f"vLLM does not take the policy's weights: {str(error)[:500]}") from error
            emptied = self._llm.reset_prefix_cache()
        if not emptied:
            raise EngineError("vLLM kept keys and values of the old weights: its prefix cache could not be emptied")

    def _sleep(self) -> None:
        """Free vLLM's memory between rollouts, if it may sleep. Weights are kept only where not all are sent again."""
        if not self.options.sleeps or self._llm is None or self._asleep or self._pending:
            return
        self._asleep = True
        if not self._adapter_only:
            self._sent = None
        self._llm.sleep(level=1 if self._adapter_only else 2)

    def close(self) -> None:
        """Shut vLLM down, and free its memory."""
        self._end()
        self._llm = self._sent = self._base = self._lora = None
        self._pending, self._asleep = {}, False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _sends_adapter_only(self) -> bool:
        model = self.get_model()
        if not is_peft_model(model):
            return False
        reason = why_merged(model)
        if reason is not None:
            hint_rounding(model, self.options.dtype_for(model), reason)
        return reason is None

    def _fits(self, model: Any) -> bool:
        """Whether the running vLLM can take the adapter as it is now. The base was sent at the start: it must be the
        same."""
        self._adapter_only = self._sends_adapter_only()
        return self._adapter_only and adapter_rank(model) <= self._max_rank and base_fingerprint(model) == self._base

    def _start_either(self) -> Any:
        """vLLM that takes adapters alone; where it has no LoRA for this model, one that takes all weights."""
        try:
            return self._start()
        except EngineError as error:
            if not self._adapter_only or "lora" not in str(error).lower():
                raise
            self._adapter_only = False
            model = self.get_model()
            hint_rounding(model, self.options.dtype_for(model), "vLLM has no LoRA for this model")
            return self._start()

    def _start(self) -> Any:
        model, device = self.get_model(), self._device
        with starting_vllm(), own_randomness(device):
            make = import_vllm()
            write_config(model, self.tokenizer, self._folder)
            classes, theirs = remember_classes(base_of(model)), None
            grouped = torch.distributed.is_initialized()
            options = engine_options(model, self.options, device)
            if self._adapter_only:
                self._base = base_fingerprint(model)
                self._max_rank = reserved_rank(largest_rank(model))
                options |= {"load_format": LOADER, "enable_lora": True, "max_loras": 1, "max_lora_rank": self._max_rank}
            try:
                with loading_from(model) if self._adapter_only else nullcontext():
                    llm = make(model=self._folder, **options)
                self._end = weakref.finalize(self, shut_down, llm, grouped)
                [theirs] = llm.collective_rpc(_model_of)
                return llm
            except Exception as error:
                clean_up(grouped)
                raise EngineError(
                    f"vLLM did not start: {type(error).__name__}: {str(error).rstrip('.')}. "
                    f"{option_hint(str(error))}Its own messages are above (VLLM_LOGGING_LEVEL=INFO shows more)"
                ) from error
            finally:
                restore_classes(classes, theirs)

    def _prove(self) -> None:
        """Have vLLM with the policy's weights draw from the policy, or raise what is wrong."""
        model = self.get_model()
        self._ready()
        self._check_fits(proof.probe_prompts(model), proof.TOKENS)
        groups = self._probe_groups(model)
        if self._lora is not None:
            self._prove_adapter(model, groups)
        self._try_regex(model)
        self._sleep()
        reason = self._compared(model, groups).why_not(self.options.dtype_for(model))
        if reason is not None:
            raise EngineError(f"vLLM does not generate what the model would: {reason}")

    def _prove_adapter(self, model: Any, groups: list[list[Completion]]) -> None:
        """Another adapter must have other answers: a new one adds nothing yet, and would not be missed."""
        self._send_adapter(model, shift=proof.OTHER)
        if self._probe_groups(model) == groups:
            raise EngineError("vLLM answers alike with two adapters that differ: it does not use them")
        self._send_adapter(model)

    def _check_fits(self, prompts: Sequence[Prompt], most_new: int) -> None:
        limit = self._llm.llm_engine.model_config.max_model_len
        check_lengths(prompts, most_new, limit, "raise vllm_max_model_length")


def _draws_by_seeds(engine: Any) -> bool:
    """Whether vLLM draws by seeds of requests, whoever chose them: its newer model runner does, on GPUs. It would take
    those that are missing from numpy, which rewards may use and seed."""
    return bool(getattr(getattr(engine, "vllm_config", None), "use_v2_model_runner", False))


def _model_of(worker: Any) -> Any:
    """Runs in vLLM's worker."""
    return worker.get_model()


def _replace_weights(worker: Any, policy: Any) -> None:
    """Runs in vLLM's worker: replace its weights. Reloading only warns of those that it does not find in the policy;
    what a model's `load_weights` returns says which it took."""
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
    check_taken(names, taken[0])


def _completions(answer: Any, request_format: RequestFormat, count: int) -> list[Completion]:
    found = []
    for output in sorted(answer.outputs, key=lambda output: output.index):
        logprobs = [row[token].logprob for token, row in zip(output.token_ids, output.logprobs or (), strict=True)]
        found.append(request_format.completion(output.token_ids, logprobs, output.finish_reason))
    return request_format.group(found, count)


def _check_sleep(options: VllmOptions, device: torch.device) -> None:
    if options.sleeps and device.type != "cuda":
        raise EngineError(
            f"vllm_enable_sleep_mode=True lets GPU memory go between rollouts, and the model is on the {device.type}: "
            "vLLM keeps its memory there; set it to False"
        )
