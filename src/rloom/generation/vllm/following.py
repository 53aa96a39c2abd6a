"""How a process that sends no weights waits until the main process has sent them to servers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum
from typing import Any

from rloom.errors import EngineError
from rloom.generation.vllm.client import (
    HEALTH_SECONDS,
    PATIENT_SECONDS,
    STARTING,
    BeingSent,
    Client,
    ServerError,
    UnreachableError,
)
from rloom.generation.vllm.remote import RemoteServer
from rloom.printable import get_logger

logger = get_logger(__name__)

# Between two looks at servers: the first pause, and the longest.
POLL_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
# How long those that have weights wait for the next server to be sent them.
GRACE_SECONDS = 30.0


class State(Enum):
    """What a server has of the weights that are waited for."""

    HAS = "all of them"
    COMING = "some of them"
    NOT_YET = "others"
    DOWN = "nothing: it does not answer"


class Following:
    """Waits for servers to have this process' weights. The main process sends them to one server after the other, and
    leaves out those that it does not reach; nobody says which."""

    def __init__(self, servers: Sequence[RemoteServer], timeout: float) -> None:
        self._servers, self._timeout = servers, timeout
        # What servers called weights that were on their way and never came.
        self._given_up: dict[RemoteServer, frozenset[str]] = {}

    def wait(self, model: Any, version: str) -> None:
        """Until all servers that answer have the weights, or those that have them have waited for long enough for the
        others, which are let go of."""
        wait = _Wait(self._servers, self._timeout)
        while True:
            for server in wait.without():
                wait.note(server, *self._look(server, model, version))
            if wait.is_over():
                break
            wait.tell()
            wait.pause()
        for server in wait.without():
            if wait.states[server] is not State.DOWN or server.usable:
                logger.warning(
                    "the vLLM server at %s has not the weights of this process: asked for nothing in this rollout",
                    server.client.address,
                )
            self._given_up[server] = wait.names.get(server, frozenset())
            server.end()

    def _look(self, server: RemoteServer, model: Any, version: str) -> tuple[State, frozenset[str]]:
        """What a server has now, and what it calls weights that are on their way."""
        try:
            if not server.client.is_up():
                return State.DOWN, frozenset()
            return State.HAS if server.follow(model, version) else State.NOT_YET, frozenset()
        except BeingSent as error:
            # The main process may have left it out in the middle of that.
            is_old = error.names == self._given_up.get(server)
            return State.NOT_YET if is_old else State.COMING, error.names
        except UnreachableError:
            return State.DOWN, frozenset()
        except ServerError as error:
            # A proxy before one that has died says so.
            if error.status not in STARTING:
                raise
            return State.DOWN, frozenset()


class _Wait:
    """One wait for servers, and what was found out in it."""

    def __init__(self, servers: Sequence[RemoteServer], timeout: float) -> None:
        self._timeout, self._told, self._pause = timeout, False, POLL_SECONDS
        self._began = self._progress = time.monotonic()
        self.states = dict.fromkeys(servers, State.NOT_YET)
        self.names: dict[RemoteServer, frozenset[str]] = {}

    def without(self) -> list[RemoteServer]:
        """The servers that have not the weights yet."""
        return [server for server, state in self.states.items() if state is not State.HAS]

    def note(self, server: RemoteServer, state: State, names: frozenset[str]) -> None:
        """Note what was found at a server. What is new there is progress."""
        is_new = state is State.HAS or (state is State.COMING and names != self.names.get(server))
        if is_new:
            self._progress = time.monotonic()
        self.states[server], self.names[server] = state, names

    def is_over(self) -> bool:
        """Whether to wait no more. An error where no server has the weights after twice the time-out: the main process
        may itself wait for a server for as long, and then has to send."""
        found = set(self.states.values())
        waited = time.monotonic() - self._progress
        if State.HAS in found:
            rest = found - {State.HAS, State.DOWN}
            return not rest or waited > (self._timeout if State.COMING in rest else GRACE_SECONDS)
        if waited <= 2 * self._timeout:
            return False
        raise EngineError(
            f"no vLLM server has the weights of this process after {2 * self._timeout:.0f} s (twice "
            "vllm_server_timeout): the main process, which sends them, has not, or has others; "
            f"{said([server.client for server in self.without()])}"
        )

    def tell(self) -> None:
        """Say once what is waited for."""
        if not self._told and time.monotonic() - self._began > PATIENT_SECONDS:
            self._told = True
            logger.warning(
                "waiting until the main process has sent weights to servers: %s",
                said([server.client for server in self.without()]),
            )

    def pause(self) -> None:
        """Between two looks."""
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)


def said(clients: Sequence[Client]) -> str:
    """What servers say of themselves now, in words."""
    found = []
    for client in clients:
        try:
            client.check_health(HEALTH_SECONDS)
            found.append(f"the vLLM server at {client.address} is well")
        except EngineError as error:
            found.append(str(error))
    return "; ".join(found)
