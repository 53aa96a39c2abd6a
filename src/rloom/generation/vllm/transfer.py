"""Weights from the trainer's memory into a server's, by vLLM's own transfer protocol.

A server says which way it was started for (`--weight-transfer-config '{"backend": "ipc"}'`): `ipc` on the same GPU,
`nccl` between GPUs, `gloo` between CPUs (by `gloo_worker.py`). Over HTTP an update is four calls, the same since 0.22:
init once, then start, update and finish. Beside the third the weights themselves are handed over. vLLM's classes for
trainers changed at 0.28; none of them is used here.
"""

from __future__ import annotations

import base64
import pickle
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from rloom.errors import EngineError
from rloom.generation.vllm.client import Client, ServerError

Weights = Iterator[tuple[str, torch.Tensor]]

# Between two looks at whether a server has taken what was sent.
POLL_SECONDS = 0.002
# Broadcasts that are under way before that is looked at. A stream takes about a thousand; after these the host waits in
# the driver, where nothing can be called off.
BROADCASTS_AT_ONCE = 64


class Transfer(ABC):
    """A way into one server's memory."""

    piece_bytes: int | None = None
    """Bytes that are sent at a time; None: all. Where weights are gathered on their way, there is no memory for all."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def send(self, weights: Weights) -> None:
        """Replace all of the server's weights. What takes memory comes before the server is told to begin, if it all
        fits: one that is left in the middle can only be started again."""
        pieces = _split(((name, self._prepared(tensor)) for name, tensor in weights), self.piece_bytes)
        named = next(pieces)
        try:
            self.client.developer("POST", "/start_weight_update", {})
        except ServerError as error:
            raise EngineError(
                f"{error}. If an earlier run has left the server in the middle of an update, start it again"
            ) from error
        self._update(named)
        if self.piece_bytes is not None:
            # Their memory is free before the next ones are gathered.
            named.clear()
        for named in pieces:
            self._update(named)
            named.clear()
        # What was sent is kept until here: the server may read it up to its answer.
        self.client.developer("POST", "/finish_weight_update", {})

    def _prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as it is sent."""
        return weight.detach().contiguous()

    @abstractmethod
    def _update(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """The third of the four calls, and the weights beside it."""

    def _tell_update(self, named: list[tuple[str, torch.Tensor]], **more: Any) -> None:
        info = {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            **more,
        }
        self.client.developer("POST", "/update_weights", {"update_info": info})

    def close(self) -> None:
        """Let go of what connects the two."""
        return


class IpcTransfer(Transfer):
    """CUDA IPC: the server, on the same GPU, reads the trainer's memory. What is sent are handles."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        if not torch.cuda.is_available():
            raise EngineError(
                f"the vLLM server at {client.address} takes weights by CUDA IPC, and the trainer has no GPU: start the "
                "server with `--transfer folder`"
            )
        client.developer("POST", "/init_weight_transfer_engine", {"init_info": {}})

    def _update(self, named: list[tuple[str, torch.Tensor]]) -> None:
        from torch.multiprocessing.reductions import reduce_tensor

        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        handles = [{gpu: reduce_tensor(tensor)[1]} for _, tensor in named]
        torch.cuda.synchronize()
        self._tell_update(named, ipc_handles_pickled=base64.b64encode(pickle.dumps(handles)).decode())

    def send(self, weights: Weights) -> None:
        """As by any way; then torch lets go of what it had kept for the server."""
        super().send(weights)
        torch.cuda.ipc_collect()

    def _prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """A copy: torch keeps a record of each time that memory was shared for as long as that memory lives, and a
        weight lives as long as the run."""
        return weight.detach().cuda().clone()


class BroadcastTransfer(Transfer):
    """A group of the trainer (rank 0) and the server's workers, over which each weight is broadcast."""

    def __init__(self, client: Client, port: int, listen: Callable[[str, int, int], Any], device: str) -> None:
        super().__init__(client)
        self._device = device
        world = 1 + int(client.developer("GET", "/get_world_size")["world_size"])
        address = _own_address(client)
        try:
            self._group = listen(address, port, world)
        except RuntimeError as error:
            raise EngineError(
                f"the trainer cannot listen at {address}:{port} for vLLM servers: {error}. Another run may use that "
                "port: set vllm_group_port to another one, or to 0 for any that is free"
            ) from error
        info = {"master_address": address, "master_port": self._group.port, "rank_offset": 1, "world_size": world}
        # The server's workers wait for the trainer in there, and the trainer for them.
        with _beside(lambda: client.developer("POST", "/init_weight_transfer_engine", {"init_info": info})):
            try:
                self._group.join()
            except RuntimeError as error:
                raise EngineError(
                    f"the vLLM server at {client.address} did not come to {address}:{self._group.port}, where the "
                    f"trainer has weights for it: {error}. vllm_group_port has to be one that it can reach"
                ) from error

    def _prepared(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().to(self._device).contiguous()

    def _update(self, named: list[tuple[str, torch.Tensor]]) -> None:
        with _beside(lambda: self._tell_update(named)) as call:
            for first in range(0, len(named), BROADCASTS_AT_ONCE):
                for _, tensor in named[first : first + BROADCASTS_AT_ONCE]:
                    # A server that has refused will receive nothing.
                    if call.failed:
                        return
                    self._group.broadcast(tensor)
                self._group.wait(lambda: call.failed)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class GlooGroup:
    """A group over gloo that is not the process' own; also what the server's side uses. Rank 0 listens at `port`, or
    at a free one if that is 0."""

    def __init__(self, address: str, port: int, rank: int, world: int, seconds: float = 240.0) -> None:
        self._rank, self._world, self._patience = rank, world, timedelta(seconds=seconds)
        # What the group is found by: it lives as long.
        self._store: Any = torch.distributed.TCPStore(
            address, port, world, is_master=rank == 0, timeout=self._patience, wait_for_workers=False
        )
        self._group: Any = None
        self.port = int(self._store.port)

    def join(self) -> GlooGroup:
        """Wait for all others."""
        self._group = torch.distributed.ProcessGroupGloo(self._store, self._rank, self._world, self._patience)
        return self

    def close(self) -> None:
        """Leave, and free the port."""
        self._group = self._store = None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """From rank 0 into `tensor` at all others."""
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise EngineError(f"a vLLM server or the trainer left while weights were sent: {error}") from error

    def wait(self, is_lost: Callable[[], bool]) -> None:
        """Until all that was broadcast has been taken. Each broadcast has waited for that."""


class NcclGroup:
    """vLLM's own NCCL communicator, which is what its workers speak. Two ranks on one GPU are refused by NCCL.

    NCCL waits without a limit of time for a server that is gone. So weights are sent on a stream of their own, which
    can be called off, and not on the model's.
    """

    def __init__(self, address: str, port: int, world: int) -> None:
        try:
            from vllm.distributed.device_communicators import pynccl
            from vllm.distributed.utils import StatelessProcessGroup
        except ImportError as error:
            raise EngineError(
                "weights go to this vLLM server by NCCL, for which the trainer needs vLLM too: pip install "
                '"rloom[vllm]", or start the server with `--transfer folder`'
            ) from error
        try:
            self.port = _free_port(address, port)
        except OSError as error:
            raise RuntimeError(error) from error
        self._meet = lambda: StatelessProcessGroup.create(host=address, port=self.port, rank=0, world_size=world)
        self._connect: Callable[..., Any] = pynccl.PyNcclCommunicator
        self._communicator: Any = None
        self._stream: Any = None

    def join(self) -> NcclGroup:
        """Listen, and wait for the server's workers."""
        self._communicator = self._connect(self._meet(), device=torch.cuda.current_device())
        self._stream = torch.cuda.Stream()
        return self

    def close(self) -> None:
        """Leave. What is still being sent is called off."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.destroy()

    def broadcast(self, tensor: torch.Tensor) -> None:
        """To all workers, beside what the device does next."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._communicator.broadcast(tensor, src=0, stream=self._stream)
        # Its memory is not used for anything else before that.
        tensor.record_stream(self._stream)

    def wait(self, is_lost: Callable[[], bool]) -> None:
        """Until all that was broadcast has been taken, or until the server is lost, who will not take it."""
        sent = self._stream.record_event()
        while not sent.query():
            if is_lost():
                self.close()
                return
            time.sleep(POLL_SECONDS)
        torch.cuda.current_stream().wait_stream(self._stream)


def _split(weights: Weights, size: int | None) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Lists of weights of at least `size` bytes each, but for the last; None: one list.

    >>> four = [(name, torch.zeros(2)) for name in "abcd"]
    >>> [[name for name, _ in some] for some in _split(iter(four), 9)]
    [['a', 'b'], ['c', 'd']]
    >>> [len(some) for some in _split(iter(four), None)]
    [4]
    """
    some: list[tuple[str, torch.Tensor]] = []
    filled = 0
    for name, tensor in weights:
        some.append((name, tensor))
        filled += tensor.nbytes
        if size is not None and filled >= size:
            yield some
            some, filled = [], 0
    if some:
        yield some


def transfer_of(backend: str | None, client: Client, port: int) -> Transfer | None:
    """The way that a server was started for; None for a folder."""
    if backend is None:
        return None
    if backend == "ipc":
        return IpcTransfer(client)
    if backend == "gloo":
        seconds = client.timeout
        return BroadcastTransfer(client, port, lambda where, at, n: GlooGroup(where, at, 0, n, seconds), "cpu")
    if backend == "nccl":
        return BroadcastTransfer(client, port, NcclGroup, "cuda")
    raise EngineError(
        f"the vLLM server at {client.address} was started to take weights by {backend!r}: rloom knows ipc, nccl and "
        "gloo; without --weight-transfer-config they go through a folder"
    )


def _own_address(client: Client) -> str:
    """This machine's address, as the server sees it."""
    parts = urlsplit(client.address)
    try:
        [(family, *_, place), *_] = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
        # Nothing is sent: a datagram's socket only looks up the way.
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineError(f"there is no way to the vLLM server at {client.address}: {error}") from error


def _free_port(address: str, port: int = 0) -> int:
    """This port, or any if it is 0, at which nobody listens; an OSError if somebody does."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        # One that an earlier run has just left will do.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])


class _beside:
    """Runs a call in a thread of its own while the block runs; what it raised is raised after the block."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rloom-vllm-transfer", daemon=True)

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether the call has raised."""
        return self._error is not None

    def __enter__(self) -> _beside:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # Of two errors the first is the cause.
        was_first = error is not None and self._error is None
        # After an error of ours the server may never answer: it waits for what is not sent.
        self._thread.join(None if error is None else 5.0)
        # Not kept here: the error's frames hold this object, and with it ports until the collector comes.
        found, self._error = self._error, None
        if found is not None and not was_first:
            raise found from error
