"""vLLM behind HTTP: token ids there and back, weights through a folder that trainer and server both see."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rloom.errors import EngineError
from rloom.generation.base import Sampling, nothing_asked
from rloom.generation.vllm import proof
from rloom.generation.vllm.client import HOW_TO_START, Client, ServerError
from rloom.generation.vllm.lora import adapter_rank, is_active, why_merged, write_adapter
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.requests import RequestFormat, check_lengths
from rloom.generation.vllm.shared import Answers, VllmBase
from rloom.generation.vllm.surroundings import temporary_folder
from rloom.generation.vllm.weights import (
    base_of,
    checkpoint_weights,
    fingerprint,
    hint_rounding,
    unties_embeddings,
)
from rloom.models.load import is_peft_model
from rloom.printable import get_logger
from rloom.types import Completion, Group, Prompt

logger = get_logger(__name__)

# The checksum of weights that vLLM keeps in a layout of its own, as it does with linear layers on a CPU.
EMPTY = hashlib.sha256(b"").hexdigest()
FOR_ADAPTERS = "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank RANK"
ANSWERS = "answers"
# For requests that were aborted to end.
ENDING_SECONDS = 30.0
# A change of a log-probability that cannot be rounding in float32.
MOVED = 1e-4


class VllmServerEngine(VllmBase):
    """Generates with a running vLLM server (`vllm_mode="server"`).

    Before a rollout in which weights have changed they are written to a folder, and the server reads them: all of
    them, or a LoRA adapter alone where the server was started for that. That it has taken them all is found out at the
    start (each of its weights must change when each of ours does), that it has taken these by a few log-probabilities
    after each time, and that it still has them by the version it was told, or the adapter's name. A server older than
    0.32 has no versions and no checksums: there the log-probabilities are the proof.
    """

    def __init__(
        self, get_model: Callable[[], Any], sampling: Sampling, *, tokenizer: Any = None, options: VllmOptions
    ) -> None:
        super().__init__(get_model, sampling, options)
        if unties_embeddings(get_model()):
            raise EngineError(
                "an adapter on one of two tied embeddings does not reach a server; vllm_mode='colocate' does"
            )
        self.client = Client(options.server, options.timeout)
        self.client.wait(options.timeout)
        self.model_name, self.max_model_length, self.dtype, max_rank = self._look()
        self._adapter_only = self._sends_adapter_only(max_rank)
        self._versions = self._has_versions()
        self.folder = Path(options.weights_dir or temporary_folder(self)).absolute()
        self._version = ""
        self._names: list[str] = []  # the server's own, of its weights
        self._probe: proof.Probe | None = None
        self._calls: Generator[tuple[int, Any], None, None] | None = None  # the requests of the present rollout
        self._prove()

    # -- a rollout

    def words(self) -> str:
        """What generates, in one line."""
        return "generation by a vLLM server"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's group as it finishes; equal `seed` and weights, equal tokens."""
        if nothing_asked(prompts, num_generations):
            return
        change = "start the server with a larger --max-model-len"
        check_lengths(prompts, self.sampling.max_completion_length, self.max_model_length, change)
        self._ready()
        yield from self._groups(prompts, num_generations, seed)
        if not self._still_has():
            raise EngineError(
                "the vLLM server was restarted or given other weights while it generated: use one server for one run"
            )

    def _run(self, request_format: RequestFormat, prompts: Sequence[Prompt], count: int, seed: int) -> Answers:
        """Each prompt's number and completions, as they finish."""
        requests = [self._request(request_format, prompt, count, seed, index) for index, prompt in enumerate(prompts)]
        calls = self.client.post_all("/v1/completions", requests, patience=self.options.timeout)
        self._abort_pending()
        self._calls, left = calls, len(prompts)
        try:
            for index, answer in calls:
                left -= 1
                yield index, self._completions(answer, request_format, count)
        finally:
            calls.close()
        if left:
            raise EngineError(
                f"another rollout began while {left} of {len(prompts)} prompts of this one were not done: the vLLM "
                "server generates one at a time"
            )

    def _abort_pending(self) -> None:
        """Abort requests that nobody waits for: an error may hold on to a rollout that was never finished."""
        if self._calls is not None:
            self._calls.close()

    def _request(
        self, request_format: RequestFormat, prompt: Prompt, count: int, seed: int, number: int
    ) -> dict[str, Any]:
        request = {
            "model": self._version if self._adapter_only and self._version else self.model_name,
            "prompt": list(prompt.token_ids),
            "return_token_ids": True,
            **request_format.seeded(count, seed=seed, number=number),
        }
        if request_format.regex is not None:
            request["structured_outputs"] = {"regex": request_format.regex}
        return request

    def _completions(self, answer: dict[str, Any], request_format: RequestFormat, count: int) -> list[Completion]:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if any(choice.get("token_ids") is None for choice in choices):
            raise EngineError(f"the vLLM server returns no token ids; it is older than 0.22: {HOW_TO_START}")
        found = [
            request_format.completion(
                choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
            )
            for choice in choices
        ]
        return request_format.group(found, count)

    # -- the server and its weights

    def _look(self) -> tuple[str, int, torch.dtype, int]:
        """The server's model, its context length, its dtype, and the largest rank that it takes of an adapter."""
        config = self.client.developer("GET", "/server_info?config_format=json")["vllm_config"]
        info = config["model_config"]
        mode = info.get("logprobs_mode")
        if mode != "processed_logprobs":
            raise EngineError(
                f"the vLLM server reports log-probabilities as {mode}, before temperature: {HOW_TO_START}"
            )
        dtype = getattr(torch, str(info["dtype"]).removeprefix("torch."))
        wanted = self.options.dtype_for(self.get_model())
        if dtype != wanted:
            logger.warning(
                "the vLLM server computes in %s and the trainer in %s: `mismatch` will show it", dtype, wanted
            )
        max_rank = int((config.get("lora_config") or {}).get("max_lora_rank", 0))
        return self._models()[0], int(info["max_model_len"]), dtype, max_rank

    def _models(self) -> list[str]:
        return [entry["id"] for entry in self.client.get("/v1/models")["data"]]

    def _sends_adapter_only(self, max_rank: int) -> bool:
        """Whether the server is sent the adapter alone; `max_rank` is what it was started for, 0 for no adapters."""
        model = self.get_model()
        if not is_peft_model(model):
            if max_rank:
                raise EngineError("a vLLM server with --enable-lora takes adapters alone, and the policy has none")
            return False
        reason = why_merged(model)
        if reason is None and not max_rank:
            reason = f"the server was not started for adapters: {FOR_ADAPTERS}"
        elif reason is None and max_rank < adapter_rank(model):
            reason = f"the server was started for adapters of rank {max_rank}, and ours has {adapter_rank(model)}"
        if reason is not None and max_rank:
            raise EngineError(f"{reason}; a vLLM server with --enable-lora takes no other weights")
        if reason is not None:
            hint_rounding(model, self.dtype, reason)
        return reason is None

    def _has_versions(self) -> bool:
        """Whether the server knows versions and checksums of its weights: since 0.32."""
        try:
            self.client.get("/weight_info", self.client.timeout)
        except ServerError as error:
            if not error.unknown:
                raise
            return False
        return True

    def _ready(self) -> None:
        """Have the server draw from the weights that the model has now."""
        self._abort_pending()
        model = self.get_model()
        now = fingerprint(model)
        if now == self._sent and self._still_has():
            return
        self._sent = None
        if self._adapter_only:
            self._send_adapter(model)
        else:
            self._send(checkpoint_weights(model, self._names))
        self._check_probe(model)
        self._sent = now

    def _still_has(self) -> bool:
        """Whether the server has the weights that it was sent last."""
        if self._adapter_only:
            return not self._version or self._version in self._models()
        if self._versions:
            return self._served_version() == self._version
        return self._ask_probe(self.get_model())[1] is None

    def _send_adapter(self, model: Any, shift: float = 0.0) -> None:
        """Send the adapter under a new name, so that keys and values of the last one are not used again."""
        last, self._version = self._version, ""
        if last in self._models():
            self.client.tell("/v1/unload_lora_adapter", {"lora_name": last})
        if not is_active(model):
            return
        name = f"rloom-{uuid.uuid4().hex[:12]}"
        path = self.folder / name
        try:
            write_adapter(model, path, self.dtype, shift)
            self.client.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except ServerError as error:
            raise EngineError(f"{error}. {FOR_ADAPTERS}, and have it see the folder {path.parent}") from error
        finally:
            shutil.rmtree(path, ignore_errors=True)
        self._version = name
        self.syncs += 1

    def _send(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._version = f"rloom-{uuid.uuid4().hex[:12]}"
        with _written(self.folder / self._version, weights, self.dtype) as path:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
            try:
                self.client.developer("POST", "/collective_rpc", call)
            except ServerError as error:
                raise EngineError(
                    f"{error}. The server must see the folder {path} (vllm_weights_dir names another) and serve the "
                    "model that is trained; its own messages say which of the two it is. Start it again: it may have "
                    "taken half of the weights"
                ) from error
        self._empty_cache()
        if self._versions:
            self.client.developer("POST", "/update_weight_version", {"new_version": self._version})
        self.syncs += 1

    def _empty_cache(self) -> None:
        """Have the server forget keys and values of the old weights; requests that were called off may still end."""
        # One without versions does not say whether it has: what is under way is begun anew.
        if not self._versions:
            self.client.tell("/reset_prefix_cache?reset_running_requests=true", {})
            return
        end = time.monotonic() + min(ENDING_SECONDS, self.options.timeout)
        while not self.client.developer("POST", "/reset_prefix_cache")["success"]:
            if time.monotonic() > end:
                raise EngineError(
                    "the vLLM server kept keys and values of the old weights: requests are under way that are not of "
                    "this run. Use one server for one run"
                )
            time.sleep(0.1)

    def _served_version(self) -> str:
        return str(self.client.developer("GET", "/weight_info")["weight_version"])

    def _prove(self) -> None:
        """Have the server draw from the policy, or raise what is wrong."""
        model = self.get_model()
        if self._adapter_only:
            self._prove_adapter(model)
        else:
            # A server that began with files of another format reads ours.
            overrides = {"load_config": {"load_format": "safetensors"}}
            call = {"method": "update_config", "kwargs": {"overrides": overrides}}
            self.client.developer("POST", "/collective_rpc", call)
            self._prove_weights(model)
        self._check_probe(model)
        self._try_regex(model)
        self._sent = fingerprint(model)

    def _prove_weights(self, model: Any) -> None:
        """Send other numbers, then the policy's: what stays the same was never taken.

        vLLM only warns, in its own log, of weights that it does not find among those it reads.
        """
        self._names = list(self._checksums()) if self._versions else []
        self._send((name, tensor + 1) for name, tensor in checkpoint_weights(model, self._names))
        before = self._state(model)
        self._send(checkpoint_weights(model, self._names))
        after = self._state(model)
        same = sorted(name for name in after if after[name] == before.get(name) and after[name] != EMPTY)
        if same == [ANSWERS]:
            raise EngineError("the vLLM server answers alike with two models that differ: it does not take our weights")
        if same:
            raise EngineError(f"the vLLM server does not take {len(same)} of its weights from ours, such as {same[0]}")

    def _state(self, model: Any) -> dict[str, Any]:
        """What moves with the server's weights: their checksums, or else what it answers, which is one for all."""
        if self._versions:
            return self._checksums()
        try:
            return {ANSWERS: self._probe_groups(model)}
        # Weights that are far off may answer with what is no number.
        except ServerError:
            return {}

    def _prove_adapter(self, model: Any) -> None:
        """Send another adapter, then the policy's: a new one adds nothing yet, and would not be missed."""
        if is_active(model):
            self._send_adapter(model, shift=proof.OTHER)
            other = self._probe_groups(model)
            self._send_adapter(model)
            if self._probe_groups(model) == other:
                raise EngineError("the vLLM server answers alike with two adapters that differ: it does not use them")

    def _checksums(self) -> dict[str, str]:
        return dict(self.client.developer("POST", "/weight_checker", {"action": "checksum"})["checksums"])

    def _ask_probe(self, model: Any) -> tuple[proof.Probe, str | None]:
        """What the server answers now, and why that is not drawn from the policy; None if it is."""
        probe = self._compared(model, self._probe_groups(model))
        return probe, probe.why_not(torch.float32 if self._is_exact(model) else torch.bfloat16)

    def _is_exact(self, model: Any) -> bool:
        return {self.dtype, self.options.dtype_for(model), next(model.parameters()).dtype} == {torch.float32}

    def _check_probe(self, model: Any) -> None:
        probe, reason = self._ask_probe(model)
        if reason is not None:
            raise EngineError(f"the vLLM server does not draw from the policy: {reason}. {_hint(model)}")
        if self._is_exact(model) and self._probe is not None and _stands_still(self._probe, probe):
            raise EngineError(
                "the vLLM server answers as it did before the last weights were sent: it did not take them"
            )
        self._probe = probe


def _stands_still(last: proof.Probe, now: proof.Probe) -> bool:
    """Whether the server says bit for bit what it said before, while the policy has moved."""
    moved = max((abs(a - b) for a, b in zip(last.own, now.own, strict=True)), default=0.0) > MOVED
    return moved and last.tokens == now.tokens and last.theirs == now.theirs


def _hint(model: Any) -> str:
    if getattr(base_of(model).config.get_text_config(), "tie_word_embeddings", False):
        return (
            "Its output layer may keep what it made of older embeddings, to which it is tied: start it with "
            """--load-format dummy --hf-overrides '{"tie_word_embeddings": false}'"""
        )
    return "Does it serve this model?"


def _apart(weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """On the host, as the server computes; none shares its memory with another, which a file cannot express."""
    found: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in weights:
        here = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
        found[name] = here.clone() if here.data_ptr() in taken else here
        taken.add(here.data_ptr())
    return found


@contextmanager
def _written(path: Path, weights: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[Path]:
    """Weights as a checkpoint that is there whole or not at all, and gone when the server has read it."""
    making = path.with_name(path.name + ".part")
    try:
        making.mkdir(parents=True)
        save_file(_apart(weights, dtype), making / "model.safetensors", metadata={"format": "pt"})
        # Only its owner may read such a file, and the server may be another user's.
        os.chmod(making / "model.safetensors", making.stat().st_mode & 0o666)
        os.rename(making, path)
        yield path
    finally:
        for folder in (making, path):
            shutil.rmtree(folder, ignore_errors=True)
