"""DeepSpeed's engine, which runs backwards, sums gradients and takes the optimizer's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from rloom.errors import ConfigError
from rloom.training.budget import TokenBudget
from rloom.training.exchange import explaining_lost_peers
from rloom.training.processes import T
from rloom.training.zero_attempts import can_be_left, drop_gradients
from rloom.training.zero_checkpoint import WholeCheckpoints


class UnderDeepSpeed(WholeCheckpoints):
    """Processes whose updates DeepSpeed makes."""

    how = " under DeepSpeed"
    external_optimizer = True
    can_repeat = False
    cannot_repeat = "under DeepSpeed"

    _engine: Any = None
    """What DeepSpeed has made of the model; None until training begins."""

    @contextmanager
    def preparing(self, accelerator: Accelerator) -> Iterator[None]:
        """Let accelerate hand the model to DeepSpeed."""
        try:
            with super().preparing(accelerator):
                yield
        except ModuleNotFoundError as error:
            # Without a launcher's environment it looks for MPI's.
            if error.name != "mpi4py":
                raise
            raise ConfigError(
                "DeepSpeed wants a launcher, for one process too: `torchrun --nproc_per_node 1 script.py` (of a "
                "command: `torchrun --nproc_per_node 1 -m rloom train …`), or leave deepspeed out"
            ) from error
        self._engine = accelerator.deepspeed_engine_wrapped.engine
        self.can_repeat = can_be_left(self._engine)

    def backward(self, accelerator: Accelerator, model: nn.Module, loss: Tensor, *, last: bool) -> None:
        """Run a micro-batch backward. DeepSpeed takes the mean of the processes' gradients: the loss is scaled so that
        it is their sum.

        accelerate would take the optimizer's step after the last one. A step cannot be undone, so it has to wait until
        no process has run out of memory (`add_up`).
        """
        accelerator.sync_gradients = last
        self._engine.set_gradient_accumulation_boundary(is_boundary=last)
        self._engine.backward(loss * self.count, scale_wrt_gas=False)

    def add_up(self, parameters: Iterable[nn.Parameter], loss: Tensor) -> Tensor:
        """The summed loss. DeepSpeed, which has summed the gradients, takes the optimizer's step."""
        loss = super().add_up(parameters, loss)
        with explaining_lost_peers():
            self._engine.step()
        return loss

    def update_was_made(self) -> bool | None:
        """DeepSpeed skips an update whose gradient is not finite. Under fp16 that is how it finds its loss scale."""
        return None if self._engine.fp16_enabled() else bool(self._engine.was_step_applied())


class DeepSpeedProcess(UnderDeepSpeed):
    """One process under DeepSpeed (ZeRO-1, ZeRO-2), which keeps gradients and float32 weights in buffers of its own."""

    def share_weights(self, model: nn.Module) -> None:
        """Bring the model to the device. transformers leaves it on the host for DeepSpeed; it is run before that."""
        model.to(self._device)

    def retrying(
        self, budget: TokenBudget, work: Callable[[], T], *, undo: Callable[[], None] | None = None, **options: Any
    ) -> T:
        """Do some work. Out of memory, undo and repeat it; DeepSpeed's gradients are dropped too."""

        def undo_all() -> None:
            drop_gradients(self._engine)
            if undo is not None:
                undo()

        return super().retrying(budget, work, undo=undo_all, **options)
