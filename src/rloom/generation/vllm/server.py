"""Generation by running vLLM servers: token ids there and back, groups as they finish, whichever server has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from rloom.errors import EngineError
from rloom.generation.base import InStep, Sampling, nothing_asked
from rloom.generation.vllm.client import PATIENT_SECONDS, Client, UnreachableError
from rloom.generation.vllm.dispatch import REQUESTS_PER_SERVER, Dispatch, Reply, requests_per_server
from rloom.generation.vllm.following import Following, said
from rloom.generation.vllm.options import VllmOptions
from rloom.generation.vllm.outgoing import Outgoing, version_of
from rloom.generation.vllm.remote import RemoteServer
from rloom.generation.vllm.requests import RequestFormat, check_lengths, reader
from rloom.generation.vllm.shared import Answers, VllmBase
from rloom.generation.vllm.surroundings import temporary_folder
from rloom.generation.vllm.weights import fingerprint, unties_embeddings
from rloom.printable import get_logger
from rloom.types import Group, Prompt

logger = get_logger(__name__)


# Between two looks at whether servers answer.
POLL_SECONDS = 0.1


class VllmServerEngine(VllmBase):
    """Generates with running vLLM servers (`vllm_mode="server"`).

    The requests of a rollout are spread over all servers. One that is lost is left out, and what it had not answered is
    asked of the others; when it is back, it is proved and used again. A prompt's noise follows from the seed and the
    prompt's number, so which server has drawn changes nothing but rounding.

    Several processes each ask for the completions of their own prompts. The main process alone sends weights. Their
    version is a hash of their bits, which all processes have: the others wait until servers name that version. Where
    each process holds a part of the weights (`in_step`), the others take part in what the main one sends and compares.
    """

    main_sends_weights = True

    def __init__(
        self,
        get_model: Callable[[], Any],
        sampling: Sampling,
        *,
        options: VllmOptions,
        in_step: InStep | None = None,
    ) -> None:
        super().__init__(get_model, sampling, options)
        self.in_step = in_step
        if unties_embeddings(get_model()):
            raise EngineError(
                "an adapter on one of two tied embeddings does not reach a server; vllm_mode='colocate' does"
            )
        self.folder = Path(options.weights_dir or temporary_folder(self)).absolute()
        ports = [options.group_port and options.group_port + index for index in range(len(options.servers))]
        self.servers = [
            RemoteServer(address, sampling, options, group_port=port, in_step=in_step)
            for port, address in zip(ports, options.servers, strict=True)
        ]
        if requests_per_server(len(self.servers)) < REQUESTS_PER_SERVER:
            logger.warning(
                "at most %d requests at a time at each vLLM server: this process may not open more files (ulimit -n)",
                requests_per_server(len(self.servers)),
            )
        self._following = Following(self.servers, options.timeout)
        self._calls: Generator[Reply, None, None] | None = None  # the requests of the present rollout
        self._lead(self._begin_all)

    @property
    def usable(self) -> list[RemoteServer]:
        """The servers that have the policy's weights."""
        return [server for server in self.servers if server.usable]

    # -- a rollout

    def words(self) -> str:
        """What generates, in one line."""
        servers = "a vLLM server" if len(self.servers) == 1 else f"{len(self.servers)} vLLM servers"
        return f"generation by {servers}"

    def generate(self, prompts: Sequence[Prompt], num_generations: int, *, seed: int) -> Iterator[Group]:
        """Yield each prompt's group as it finishes; equal `seed` and weights, equal tokens."""
        # Before the look at whether anything is asked: other processes wait for what the main one sends here.
        self._ready()
        if nothing_asked(prompts, num_generations):
            return
        limit = min(server.served.max_model_length for server in self.usable if server.served is not None)
        change = "start the server with a larger --max-model-len"
        check_lengths(prompts, self.sampling.max_completion_length, limit, change)
        yield from self._groups(prompts, num_generations, seed)

    def _run(self, request_format: RequestFormat, prompts: Sequence[Prompt], count: int, seed: int) -> Answers:
        """Each prompt's number and completions, as they finish."""
        by_client = {server.client: server for server in self.usable}

        def content(client: Client, number: int) -> dict[str, Any]:
            return by_client[client].request(request_format, prompts[number], count, seed, number)

        dispatch = Dispatch(
            list(by_client),
            "/v1/completions",
            content,
            len(prompts),
            read=reader(request_format, count),
            patience=self.options.timeout,
            confirm=lambda client, seconds: by_client[client].confirm(seconds),
        )
        self._abort_pending()
        self._calls, left = dispatch.replies(), len(prompts)
        calls, answered = self._calls, set[Client]()
        try:
            for reply in calls:
                left -= 1
                answered.add(reply.client)
                yield reply.number, reply.answer
        finally:
            calls.close()
        if left:
            raise EngineError(
                f"another rollout began while {left} of {len(prompts)} prompts of this one were not done: the vLLM "
                "server generates one at a time"
            )
        for client in answered:
            is_lost = client not in dispatch.clients
            _check_unchanged(by_client[client], self.get_model(), self.options.timeout, is_lost=is_lost)

    def _abort_pending(self) -> None:
        """Abort requests that nobody waits for: an error may hold on to a rollout that was never finished."""
        if self._calls is not None:
            self._calls.close()

    # -- weights

    def _ready(self) -> None:
        """Have all servers that are up draw from the weights that the model has now."""
        self._abort_pending()
        weights = self._lead(self._send_all)
        if not self.options.sends:
            self._following.wait(self.get_model(), version_of(weights))

    def _lead(self, work: Callable[[tuple[Any, ...]], None]) -> tuple[Any, ...]:
        """Have the main process do some work with the weights, whose fingerprint is returned in all processes."""
        model = self.get_model()
        if self.in_step is None:
            weights = fingerprint(model)
            if self.options.sends:
                work(weights)
            return weights
        weights = tuple(self.in_step.gather(fingerprint(model, self.in_step.own_parts())))
        self.in_step.lead(lambda: work(weights))
        return weights

    def _begin_all(self, weights: tuple[Any, ...]) -> None:
        model = self.get_model()
        with Outgoing(self.folder, weights) as outgoing:
            try:
                for server in self.servers:
                    server.begin(model, outgoing)
            except BaseException:
                # Ports of those that were begun with are free again.
                for server in self.servers:
                    server.end()
                raise
        self.syncs += 1
        self._try_regex(model)

    def _send_all(self, weights: tuple[Any, ...]) -> None:
        model, up = self.get_model(), self._up()
        for server in self.servers:
            if server not in up:
                self._leave_out(server)
        sent, errors = False, []
        with Outgoing(self.folder, weights) as outgoing:
            for server in up:
                try:
                    sent |= self._send(server, model, outgoing)
                except EngineError as error:
                    # One that has died over it, or does not answer, is left out.
                    if not isinstance(error, UnreachableError) and server.client.is_up():
                        raise
                    self._leave_out(server)
                    errors.append(error)
        if not self.usable:
            raise errors[0]
        self.syncs += sent

    def _up(self) -> list[RemoteServer]:
        """The servers that answer; if none does, those that do first within `timeout`."""
        if len(self.servers) == 1:
            self.servers[0].client.wait(self.options.timeout)
            return self.servers
        began, told = time.monotonic(), False
        clients = [server.client for server in self.servers]
        while not (up := [server for server in self.servers if server.client.is_up()]):
            waited = time.monotonic() - began
            if waited >= self.options.timeout:
                raise EngineError(
                    f"none of {len(clients)} vLLM servers has answered for {self.options.timeout:g} s "
                    f"(vllm_server_timeout): {said(clients)}"
                )
            if not told and waited > PATIENT_SECONDS:
                told = True
                logger.warning("waiting, up to %g s (vllm_server_timeout): %s", self.options.timeout, said(clients))
            time.sleep(POLL_SECONDS)
        return up

    def _send(self, server: RemoteServer, model: Any, outgoing: Outgoing) -> bool:
        """Have a server draw from the policy; whether weights had to be sent."""
        is_back = not server.usable
        sent = server.refresh(model, outgoing)
        if is_back:
            logger.warning("the vLLM server at %s is back and has the policy's weights", server.client.address)
        return sent

    def _leave_out(self, server: RemoteServer) -> None:
        if server.usable:
            logger.warning("the vLLM server at %s does not answer: left out until it does", server.client.address)
        server.leave_out()


def _check_unchanged(server: RemoteServer, model: Any, patience: float, *, is_lost: bool) -> None:
    """Refuse a rollout for which a server that cannot say which weights it has may have drawn from others."""
    if server.tells_its_weights:
        return
    address = server.client.address
    if is_lost or not server.client.is_up(patience):
        raise EngineError(
            f"the vLLM server at {address} was lost after it had answered, and is too old (before 0.32) to have said "
            "which weights it had then: go on with resume_from_checkpoint='auto'"
        )
    if not server.still_has(model):
        raise EngineError(
            f"the vLLM server at {address} was started again or given other weights while it generated: use one server "
            "for one run"
        )
