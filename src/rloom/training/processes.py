"""The processes that train one policy together.

`Processes` owns everything that depends on how the model is distributed: who keeps gradients and master weights, how a
backward is run, how gradients are summed, how weights are shared, compared, saved and loaded. Here each process holds
the whole model; under FSDP2 (`sharded.py`) and DeepSpeed (`zero.py`) a part of it. `choose_processes.py` chooses, and
no other code depends on it.

Each process samples, scores and learns from groups of its own. What they must agree on is small (counts, scores,
metrics): `exchange.py`. Gradients are added up once, after the update's last backward. DistributedDataParallel would
add them up during it. It needs the same number of backwards in every process, also when one repeats an update after
running out of memory; packed micro-batches do not give that.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from rloom.errors import ConfigError, ProcessError
from rloom.models.checksums import checksums_of
from rloom.models.low_bits import Value
from rloom.models.optimizers import values_of
from rloom.training.budget import TokenBudget
from rloom.training.exchange import Exchange, explaining_lost_peers

T = TypeVar("T")

BUCKET_MEGABYTES = 25
"""Small gradients are summed together, up to this size. It is DistributedDataParallel's default."""

NO_PARTS = "checkpoints in parts (SHARDED_STATE_DICT) are FSDP2's: go on with fsdp=True, or in one process"


class Processes(Exchange):
    """This process and its part of the model. Without arguments: a process that trains alone.

    All processes must call every method in the same order, except the properties and `backward`.

    >>> alone, model = Processes(), nn.Linear(2, 2)
    >>> alone.is_sharded, alone.without_gradient(model) is model
    (False, True)
    """

    external_optimizer = False
    """Whether another library keeps gradients and master weights, and takes the optimizer's steps. Then an update
    cannot be undone, and that library decides whether its gradient is finite."""

    can_repeat = True
    """Whether what runs out of memory can be repeated in smaller micro-batches: by a process alone, or by all."""

    cannot_repeat = ""
    """Where it cannot be repeated: the beginning of a sentence that says so."""

    repeats_together = False
    """Whether all processes repeat what one of them has run out of memory in."""

    how = ""
    """How weights are held, for the lines at the start: after "2 processes"."""

    is_sharded = False
    """Whether each process holds only a part of the weights."""

    saves_parts = False
    """Whether each process writes its part of a checkpoint, instead of the main one all."""

    own_files = False
    """Whether DeepSpeed itself writes and reads the optimizer's state, a part for each process."""

    is_layered = False
    """Whether what needs no gradient runs on sharded weights, layer by layer, with all processes in step."""

    half: torch.dtype | None = None
    """The dtype in which sharded weights are gathered and run; None: their own."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        *,
        group: Any = None,
        device: torch.device | None = None,
        bucket_megabytes: int | None = None,
    ) -> None:
        super().__init__(rank, count, group=group)
        self._device = device
        self._bucket = (bucket_megabytes or BUCKET_MEGABYTES) * 2**20

    def plan(self) -> str:
        """How the model is distributed by what this process was told, which must be the same everywhere."""
        return "the whole model in each process"

    # -- tensors on the device

    @contextmanager
    def preparing(self, accelerator: Accelerator) -> Iterator[None]:
        """Keep accelerate from wrapping the model in DistributedDataParallel inside the block. It would do so for the
        one process of a launcher too."""
        # accelerate does not wrap models that it prepares for evaluation.
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        try:
            yield
        finally:
            del accelerator.prepare_model

    def backward(self, accelerator: Accelerator, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Run one micro-batch backward; `last` marks the update's last one. Gradients stay local until `add_up`."""
        with nullcontext() if last else accelerator.no_sync(model):
            accelerator.backward(loss)

    def add_up(self, parameters: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """Sum the gradients of all processes in place, and return the summed loss.

        Losses were divided by denominators that cover all processes, so the sums are what one process would have
        computed. A parameter with a gradient in one process has one in all afterwards. If no parameter has one, all get
        zeros, because the optimizer expects gradients.
        """
        if self.alone:
            return loss
        trained = [p for p in parameters if p.requires_grad]
        has_one = torch.tensor([p.grad is not None for p in trained])
        anywhere = torch.stack(self.gather(has_one)).any(0).tolist()
        summed = [p for p, somewhere in zip(trained, anywhere, strict=True) if somewhere or not any(anywhere)]
        for p in summed:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=_gradient_dtype(p))
        loss = loss.clone()
        with explaining_lost_peers():
            for bucket in _buckets([p.grad for p in summed if p.grad is not None], self._bucket):
                _sum(bucket)
            dist.all_reduce(loss)
        return loss

    def share_weights(self, model: nn.Module) -> None:
        """Copy the main process' weights to all. A script may have initialised them differently in each process."""
        if self.alone:
            return
        with explaining_lost_peers(), torch.no_grad():
            for value in (*model.parameters(), *model.buffers()):
                if value.is_floating_point() and value.numel():
                    # Mostly this is the tensor itself, without a copy.
                    sent = value.detach().to(self._device).contiguous()
                    dist.broadcast(sent, src=0)
                    value.copy_(sent)

    # -- where weights are sharded, these do something else

    def without_gradient(self, model: nn.Module) -> nn.Module:
        """The model to run where nothing is learnt: to generate, for a pass without gradient, to evaluate."""
        return model

    def uses_copy(self, release: Callable[[], None] | None, *, in_updates: bool) -> None:
        """Note what else depends on the model that runs without gradient."""

    def gather_weights(self) -> None:
        """Bring the present weights to the model that runs without gradient."""

    def after_forwards(self) -> None:
        """After forwards without gradient."""

    def choose_copy(self, model: nn.Module, device: torch.device, *, by_servers: bool) -> None:
        """Decide whether there will be a whole copy of sharded weights. `by_servers`: it is not what generates."""

    def shard(self, model: nn.Module, *, with_reference: bool) -> None:
        """Shard the model. `with_reference`: a frozen copy of it will be asked for."""

    def place_frozen(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Bring a model that is not trained to the device."""
        return model.to(device)

    def frozen_policy(self) -> nn.Module | None:
        """A frozen copy of the policy as it was given, where it cannot be copied any more."""
        return None

    def rounds(self, count: int) -> int:
        """How many micro-batches this process runs in an update in which it has `count`."""
        return count

    def micro_batch_done(self) -> None:
        """After each of the `rounds`."""

    def retrying(
        self,
        budget: TokenBudget,
        work: Callable[[], T],
        *,
        undo: Callable[[], None] | None = None,
        idle: Callable[[bool], None],
        gradient: bool = True,
    ) -> T:
        """Do some work. Out of memory, undo and repeat it; where that is not possible, explain the error.

        `idle` runs a micro-batch from which nothing is learnt, for processes that run in step. It is told whether the
        micro-batch is the last one.
        """
        return budget.retrying(work, undo, gradient=gradient) if self.can_repeat else self.only_once(budget, work)

    def only_once(self, budget: TokenBudget, work: Callable[[], T]) -> T:
        """Do some work that cannot be repeated. Out of memory, explain the error."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"{self.cannot_repeat} an update cannot be done again in smaller pieces: set "
                f"max_tokens_per_micro_batch below {budget.tokens}"
            )
            raise

    def bring_back_copy(self) -> None:
        """Before an update is repeated: what runs without gradient has been let go of, and may be needed again."""

    def in_step(self) -> AbstractContextManager[None]:
        """Around the micro-batches of an update: what another process' end looks like there is told in words."""
        return nullcontext()

    def update_was_made(self) -> bool | None:
        """Whether an external optimizer has made the last update; None where a loss scaler skips some as a matter of
        course."""
        return None

    def as_number(self, norm: Any) -> Any:
        """The norm of the gradient."""
        return norm

    def own_part(self, p: Tensor) -> Tensor:
        """What this process holds of a weight."""
        return p

    def is_part(self, p: Tensor) -> bool:
        """Whether this process holds a part of a weight alone."""
        return False

    def first_row(self, p: Tensor) -> int:
        """The row of a whole weight at which this process' part of it begins."""
        return 0

    def joined(self, p: Tensor, part: Tensor) -> Tensor:
        """A whole of the values that processes have for their parts of a weight, in the main one."""
        return part

    def whole(self, p: Tensor) -> Tensor:
        """A weight as a whole, gathered from all processes if they hold parts of it."""
        return p

    def values_of(self, optimizer: Any) -> Value:
        """What whole weights stand for to an optimizer."""
        return values_of(optimizer)

    def whole_weights(self, model: nn.Module, *, loading: bool = False) -> AbstractContextManager[None]:
        """Inside the block the model is saved, or loaded, as a whole."""
        return nullcontext()

    def whole_optimizer(self, optimizer: Any, *, loading: bool = False) -> AbstractContextManager[None]:
        """Inside the block the optimizer's state is saved, or loaded, as a whole."""
        return nullcontext()

    def schedule(self, state: dict[str, Any], *, loading: bool = False) -> dict[str, Any]:
        """A schedule's state as it is saved, or (`loading`) as it is here."""
        return state

    def save_weights(self, folder: Path) -> None:
        """Write this process' part of the weights to a checkpoint."""
        raise ConfigError(NO_PARTS)

    def save_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Write this process' part of the optimizer's state to a checkpoint."""
        raise ConfigError(NO_PARTS)

    def load_weights(self, folder: Path) -> None:
        """Read this process' part of weights that were saved in parts."""
        raise ConfigError(NO_PARTS)

    def load_optimizer(self, folder: Path, optimizer: Any) -> None:
        """Read this process' part of an optimizer's state that was saved in parts."""
        raise ConfigError(NO_PARTS)

    def check_same_weights(self, model: nn.Module) -> None:
        """Raise an error where the trained weights of processes are not equal bit by bit."""
        if self.alone:
            return
        found = self.gather(fingerprint(p for p in model.parameters() if p.requires_grad))
        if len(set(found)) > 1:
            others = [rank for rank, one in enumerate(found) if one != found[0]]
            raise ProcessError(
                f"the weights of process {', '.join(map(str, others))} are not those of process 0: they have trained "
                "apart. Does a callback, a hook or an overridden method change weights in one process alone?"
            )


ALONE = Processes()
"""Used for what a process does by itself, such as its batches of an evaluation."""


def _gradient_dtype(p: nn.Parameter) -> torch.dtype:
    return getattr(p, "grad_dtype", None) or p.dtype


def _buckets(tensors: list[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Runs of neighbouring tensors of one dtype, of at most `size` bytes each. A larger tensor is a run of its own.

    >>> [len(bucket) for bucket in _buckets([torch.zeros(2), torch.zeros(2), torch.zeros(9), torch.zeros(1)], 16)]
    [2, 1, 1]
    """
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and (filled + tensor.nbytes > size or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket


def _sum(bucket: list[Tensor]) -> None:
    """Sum the tensors over all processes, in place."""
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dist.all_reduce(bucket[0])
        return
    flat = torch.cat([tensor.flatten() for tensor in bucket])
    dist.all_reduce(flat)
    for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A hash of the tensors' checksums. It changes with any bit and with their order.

    >>> weights = torch.ones(3)
    >>> fingerprint([weights]) == fingerprint([weights.clone()]) != fingerprint([weights * (1 + 1e-7)])
    True
    """
    return hashlib.sha256(repr(checksums_of(tensors)).encode()).hexdigest()[:16]
