"""One vLLM server: what it serves, the weights that it is sent, and the proof that it draws from them."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from rloom.errors import EngineError
from rloom.generation.base import InStep, Sampling
from rloom.generation.vllm import proof
from rloom.generation.vllm.client import (
    HEALTH_SECONDS,
    BeingSent,
    Client,
    LostWeights,
    OtherWeights,
    ServerError,
    SilentError,
    UnreachableError,
)
from rloom.generation.vllm.dispatch import Dispatch
from rloom.generation.vllm.lora import is_active
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.outgoing import NAME, OTHER, Outgoing
from rloom.generation.vllm.requests import RequestFormat, reader
from rloom.generation.vllm.served import FOR_ADAPTERS, Served, look_at, models_of
from rloom.generation.vllm.shared import compare_probe, probe_requests
from rloom.generation.vllm.transfer import Transfer, transfer_of
from rloom.generation.vllm.weights import base_of, checkpoint_weights
from rloom.printable import get_logger
from rloom.types import Completion, Prompt

logger = get_logger(__name__)

# The checksum of weights that vLLM keeps in a layout of its own, as it does with linear layers on a CPU.
EMPTY = hashlib.sha256(b"").hexdigest()
ANSWERS = "answers"
# What the version of weights begins with that are on their way.
SENDING = "sending-"
# What vLLM calls the weights that it began with.
FRESH = "default"
# For requests that were aborted to end.
ENDING_SECONDS = 30.0
# A change of a log-probability that cannot be rounding in float32.
MOVED = 1e-4
# Bytes that are gathered and sent at a time, where no process has memory for all weights.
PIECE_BYTES = 2**30


class RemoteServer:
    """A running vLLM server, seen from the trainer.

    Before a rollout in which weights have changed it is sent all of them, or a LoRA adapter alone where it was started
    for that. That it has taken them all is found out at the start (each of its weights must change when each of ours
    does), that it has taken these by a few log-probabilities after each time, and that it still has them by the version
    it was told, or the adapter's name. A server older than 0.32 has no versions and no checksums: there the
    log-probabilities are the proof.
    """

    def __init__(
        self,
        address: str,
        sampling: Sampling,
        options: VllmOptions,
        *,
        group_port: int = 0,
        in_step: InStep | None = None,
    ) -> None:
        self._whole = None if in_step is None else in_step.whole
        self.client = Client(address, options.timeout)
        self.sampling, self.options, self._group_port = sampling, options, group_port
        self.served: Served | None = None  # None: it has not been begun with, or it was lost
        self._silent = False  # it did not answer when it was last looked for
        self._transfer: Transfer | None = None
        self._names: list[str] = []  # the server's own, of its weights
        self._sent: tuple[Any, ...] | None = None  # the fingerprint of the weights that it has
        self._probe: proof.Probe | None = None

    # -- requests

    def request(
        self, request_format: RequestFormat, prompt: Prompt, count: int, seed: int, number: int
    ) -> dict[str, Any]:
        """What is sent to /v1/completions for the prompt with this number."""
        request = {
            "model": self._known.name,
            "prompt": list(prompt.token_ids),
            "return_token_ids": True,
            **request_format.seeded(count, seed=seed, number=number),
        }
        if request_format.regex is not None:
            request["structured_outputs"] = {"regex": request_format.regex}
        return request

    def answers(
        self, request_format: RequestFormat, prompts: Sequence[Prompt], count: int, seed: int
    ) -> Generator[tuple[int, list[Completion]], None, None]:
        """Each prompt's number and completions, of this server alone."""

        def content(client: Client, number: int) -> dict[str, Any]:
            return self.request(request_format, prompts[number], count, seed, number)

        read = reader(request_format, count)
        patience = self.options.timeout
        calls = Dispatch(
            [self.client], "/v1/completions", content, len(prompts), read=read, patience=patience
        ).replies()
        with closing(calls):
            for reply in calls:
                yield reply.number, reply.answer

    @property
    def _known(self) -> Served:
        assert self.served is not None, "the server is asked before it was begun with"
        return self.served

    @property
    def tells_its_weights(self) -> bool:
        """Whether the server says which weights it has. One that is older than 0.32 says which adapter at most."""
        return self.served is not None and (self.served.versions or self.served.adapter_only)

    @property
    def usable(self) -> bool:
        """Whether it answers, and has the policy's weights."""
        return self.served is not None and not self._silent

    # -- the server and its weights

    def begin(self, model: Any, outgoing: Outgoing) -> None:
        """Wait for the server, look at what it serves, and have it draw from the policy, or raise what is wrong."""
        self.client.wait(self.options.timeout)
        self.end()
        self.served = look_at(self.client, self.options, model)
        if self._whole is not None and not self.tells_its_weights:
            raise EngineError(_without_versions(self.client.address))
        try:
            if not self._known.adapter_only:
                self._transfer = transfer_of(self._known.backend, self.client, self._group_port)
                if self._transfer is not None and self._whole is not None:
                    self._transfer.piece_bytes = PIECE_BYTES
            self._prove(model, outgoing)
        except BaseException:
            # Ports are free again for whoever comes next.
            self.end()
            raise

    def end(self) -> None:
        """Let go of a server that is lost. It is begun with anew when it is back."""
        self.served = self._sent = self._probe = None
        self._silent = False
        if self._transfer is not None:
            self._transfer.close()
        self._transfer = None

    def leave_out(self) -> None:
        """Ask it for nothing until it answers again.

        It may have been there all the time, and other processes may be drawing from it. So it keeps the weights that it
        says it has: beginning anew would send it other numbers. Where sending had begun, nobody knows what it has.
        """
        if self._sent is not None and self.tells_its_weights:
            self._silent = True
        else:
            self.end()

    def refresh(self, model: Any, outgoing: Outgoing) -> bool:
        """Have the server draw from the policy; whether weights had to be sent."""
        sent = self._refresh(model, outgoing)
        self._silent = False
        return sent

    def _refresh(self, model: Any, outgoing: Outgoing) -> bool:
        if self.served is not None and self.tells_its_weights:
            try:
                # One that was silent the last time is not waited for as long again.
                self.confirm(HEALTH_SECONDS if self._silent else None)
            except LostWeights as error:
                logger.warning("between two rollouts: %s. It is sent all weights, and proved", error)
                self.end()
        if self.served is None:
            # It was lost, or started again: what it was told at the start is gone.
            self.begin(model, outgoing)
            return True
        if outgoing.fingerprint == self._sent and (self.tells_its_weights or self.still_has(model)):
            return False
        self._sent = None
        try:
            if self._known.adapter_only:
                self._send_adapter(model, outgoing)
            else:
                self._send(self._weights(model), outgoing)
        except (UnreachableError, ServerError) as error:
            if isinstance(error, SilentError) or not self.client.is_up():
                raise
            # A connection has broken, or the group in which weights are sent. A new one may do.
            logger.warning("%s. The server is begun with anew", error)
            self.begin(model, outgoing)
            return True
        self._check_probe(model)
        self._sent = outgoing.fingerprint
        return True

    def _weights(self, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return checkpoint_weights(model, self._names, whole=self._whole)

    def follow(self, model: Any, version: str) -> bool:
        """Whether another process has sent the server these weights. Then it can be asked here too.

        Raises `BeingSent` while it does.
        """
        if self.served is None:
            self.served = look_at(self.client, self.options, model)
        if not self.tells_its_weights:
            # What it answers tells weights of two updates apart only where they differ by much.
            raise EngineError(_without_versions(self.client.address))
        adapted = not self._known.adapter_only or is_active(model)
        self.served = replace(self._known, version=version if adapted else "")
        try:
            # It is looked at again, or another is asked.
            self.confirm(HEALTH_SECONDS)
        except BeingSent:
            raise
        except LostWeights:
            return False
        return True

    def still_has(self, model: Any) -> bool:
        """Whether the server has the weights that it was sent last."""
        if not self.tells_its_weights:
            return self._ask_probe(model)[1] is None
        try:
            self.confirm()
        except LostWeights:
            return False
        return True

    def confirm(self, seconds: float | None = None) -> None:
        """Raise `LostWeights` where the server says that it does not have the weights that it was sent last. It may
        take `seconds` to say so, or else the time-out. One that does not say which it has is believed."""
        served = self._known
        if served.adapter_only:
            has = {name for name in models_of(self.client, seconds) if name.startswith(NAME)}
        elif served.versions:
            has = {self._served_version(seconds)} - {FRESH}
        else:
            return
        # No adapter is in use: requests name the base.
        if served.version in has or (served.adapter_only and not served.version):
            return
        if not has:
            raise LostWeights(f"the vLLM server at {self.client.address} was started again")
        # The main process proves one that was started again, while others may still ask it.
        if all(name.startswith(SENDING) or name.endswith(OTHER) for name in has):
            raise BeingSent(self.client.address, frozenset(has))
        raise OtherWeights(
            f"the vLLM server at {self.client.address} was given weights by somebody else: use one server for one run"
        )

    def _send_adapter(self, model: Any, outgoing: Outgoing, shift: float = 0.0) -> None:
        """Send the adapter under a new name, so that keys and values of the last one are not used again."""
        self.served = replace(self._known, version="")
        # Ours, of this run and of earlier ones: vLLM refuses a name that it knows.
        for last in models_of(self.client):
            if last.startswith(NAME):
                self.client.tell("/v1/unload_lora_adapter", {"lora_name": last})
        if not is_active(model):
            return
        name, path = outgoing.adapter(model, self._known.dtype, shift, self._whole)
        try:
            self.client.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        except ServerError as error:
            raise EngineError(f"{error}. {FOR_ADAPTERS}, and have it see the folder {path.parent}") from error
        self.served = replace(self._known, version=name)

    def _send(self, weights: Iterator[tuple[str, torch.Tensor]], outgoing: Outgoing, other: bool = False) -> None:
        """Send all weights. `other` are numbers that prove something and are none of the policy's."""
        dtype = self._known.dtype
        # Until it has all of them, the server names nothing that anybody waits for or had.
        self._tell_version(f"{SENDING}{uuid.uuid4().hex[:12]}")
        if self._transfer is not None:
            self._transfer.send((name, _as(tensor, dtype)) for name, tensor in weights)
        else:
            self._reload(weights, outgoing, other)
        self._empty_cache()
        self._tell_version(outgoing.version(other))

    def _tell_version(self, version: str) -> None:
        self.served = replace(self._known, version=version)
        if self._known.versions:
            self.client.developer("POST", "/update_weight_version", {"new_version": version}, twice=True)

    def _reload(self, weights: Iterator[tuple[str, torch.Tensor]], outgoing: Outgoing, other: bool) -> None:
        """Through a folder that both see."""
        path = outgoing.weights(weights, self._known.dtype, tuple(self._names), other)
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        try:
            self.client.developer("POST", "/collective_rpc", call)
        except ServerError as error:
            raise EngineError(
                f"{error}. The server must see the folder {path} (vllm_weights_dir names another) and serve the "
                "model that is trained; its own messages say which of the two it is. Start it again: it may have "
                "taken half of the weights"
            ) from error

    def _empty_cache(self) -> None:
        """Have the server forget keys and values of the old weights; requests that were called off may still end."""
        # One without versions does not say whether it has: what is under way is begun anew.
        if not self._known.versions:
            self.client.tell("/reset_prefix_cache?reset_running_requests=true", {})
            return
        end = time.monotonic() + min(ENDING_SECONDS, self.options.timeout)
        while not self._has_emptied_cache():
            if time.monotonic() > end:
                raise EngineError(
                    "the vLLM server kept keys and values of the old weights: requests are under way that are not of "
                    "this run. Use one server for one run"
                )
            time.sleep(0.1)

    def _has_emptied_cache(self) -> bool:
        answer = self.client.developer("POST", "/reset_prefix_cache")
        with self.client.reading("/reset_prefix_cache", answer):
            return bool(answer["success"])

    def _served_version(self, seconds: float | None) -> str:
        answer = self.client.developer("GET", "/weight_info", seconds=seconds)
        with self.client.reading("/weight_info", answer):
            return str(answer["weight_version"])

    # -- the proof

    def _prove(self, model: Any, outgoing: Outgoing) -> None:
        """Have the server draw from the policy, or raise what is wrong."""
        if self._known.adapter_only:
            self._prove_adapter(model, outgoing)
        else:
            # A server that began with files of another format reads ours.
            overrides = {"load_config": {"load_format": "safetensors"}}
            call = {"method": "update_config", "kwargs": {"overrides": overrides}}
            self.client.developer("POST", "/collective_rpc", call)
            self._prove_weights(model, outgoing)
        self._check_probe(model)
        self._sent = outgoing.fingerprint

    def _prove_weights(self, model: Any, outgoing: Outgoing) -> None:
        """Send other numbers, then the policy's: what stays the same was never taken.

        vLLM only warns, in its own log, of weights that it does not find among those it reads.
        """
        self._names = list(self._checksums()) if self._known.versions else []
        other = ((name, tensor + 1) for name, tensor in self._weights(model))
        self._send(other, outgoing, other=True)
        before = self._state(model)
        self._send(self._weights(model), outgoing)
        after = self._state(model)
        same = sorted(name for name in after if after[name] == before.get(name) and after[name] != EMPTY)
        if same == [ANSWERS]:
            raise EngineError("the vLLM server answers alike with two models that differ: it does not take our weights")
        if same:
            raise EngineError(f"the vLLM server does not take {len(same)} of its weights from ours, such as {same[0]}")

    def _state(self, model: Any) -> dict[str, Any]:
        """What moves with the server's weights: their checksums, or else what it answers, which is one for all."""
        if self._known.versions:
            return self._checksums()
        try:
            return {ANSWERS: self._probe_groups(model)}
        # Weights that are far off may answer with what is no number.
        except ServerError:
            return {}

    def _prove_adapter(self, model: Any, outgoing: Outgoing) -> None:
        """Send another adapter, then the policy's: a new one adds nothing yet, and would not be missed."""
        if is_active(model):
            self._send_adapter(model, outgoing, shift=proof.OTHER)
            other = self._probe_groups(model)
            self._send_adapter(model, outgoing)
            if self._probe_groups(model) == other:
                raise EngineError("the vLLM server answers alike with two adapters that differ: it does not use them")

    def _checksums(self) -> dict[str, str]:
        try:
            answer = self.client.developer("POST", "/weight_checker", {"action": "checksum"})
        except ServerError as error:
            raise EngineError(
                f"{error}. An earlier run may have left it with a part of the weights: start it again"
            ) from error
        with self.client.reading("/weight_checker", answer):
            return dict(answer["checksums"])

    def _probe_groups(self, model: Any) -> list[list[Completion]]:
        return probe_requests(model, self.sampling, self.answers)

    def _ask_probe(self, model: Any) -> tuple[proof.Probe, str | None]:
        """What the server answers now, and why that is not drawn from the policy; None if it is."""
        probe = compare_probe(model, self.sampling, self._probe_groups(model))
        return probe, probe.why_not(torch.float32 if self._is_exact(model) else torch.bfloat16)

    def _is_exact(self, model: Any) -> bool:
        return {self._known.dtype, self.options.dtype_for(model), next(model.parameters()).dtype} == {torch.float32}

    def _check_probe(self, model: Any) -> None:
        probe, reason = self._ask_probe(model)
        if reason is not None:
            raise EngineError(
                f"the vLLM server at {self.client.address} does not draw from the policy: {reason}. {_hint(model)}"
            )
        if self._is_exact(model) and self._probe is not None and _stands_still(self._probe, probe):
            raise EngineError(
                "the vLLM server answers as it did before the last weights were sent: it did not take them"
            )
        self._probe = probe


def _without_versions(address: str) -> str:
    return (
        f"the vLLM server at {address} is older than 0.32 and does not say which weights it has: several processes "
        "need one that does, or one process"
    )


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


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
