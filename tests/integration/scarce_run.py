"""Sharded runs for test_sharded_memory, in which processes run out of memory at chosen places.

    torchrun --nproc_per_node 2 scarce_run.py OUTPUT NAME …

The runs are those of processes_run. Each process leaves what it saw in OUTPUT/NAME/result_RANK.pt.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from rloom.training import attempts, sharded_attempts
from tests.integration import processes_run
from tests.integration.processes_run import rank

LAST = -1
BY_HAND = "by hand: "

Failure = tuple[str, int, int, str]
"""In an "update" or a "pass" without gradient: the attempt (all of the run are counted), its micro-batch, the place.

Places are in the order in which a micro-batch comes by: before its forward ("make"), in FSDP2's own memory for a layer
("gather"), in a layer ("forward"), before the backward ("loss"), in it, when later layers have their gradients
("backward"), in FSDP2's memory for their sum ("sum"), after it ("end")."""


def at(attempt: int, batch: int, place: str, what: str = "update") -> Failure:
    return what, attempt, batch, place


SMALL: dict[str, Any] = {"max_tokens_per_micro_batch": 60, "max_steps": 2}
DRAWN: dict[str, Any] = {**SMALL, "save_strategy": "no"}
KEPT: dict[str, Any] = {"fsdp_config": {"reshard_after_forward": False}}

RUNS: dict[str, tuple[str, dict[str, Any], dict[int, list[Failure]]]] = {
    "never": ("sequence", {**SMALL, "max_tokens_per_micro_batch": 30}, {}),
    # from the first micro-batch to the last, in either process
    "make": ("sequence", SMALL, {1: [at(0, 0, "make")]}),
    "gather": ("sequence", SMALL, {0: [at(0, 0, "gather")]}),
    "forward": ("sequence", SMALL, {1: [at(0, 1, "forward")]}),
    "loss": ("sequence", SMALL, {0: [at(0, 1, "loss")]}),
    "backward": ("sequence", SMALL, {1: [at(0, 1, "backward")]}),
    "sum": ("sequence", SMALL, {1: [at(0, LAST, "sum")]}),
    "end": ("sequence", SMALL, {0: [at(0, LAST, "end")]}),
    # in both at other places; again at once, and in the next update
    "both": ("sequence", SMALL, {0: [at(0, 0, "backward")], 1: [at(0, LAST, "forward")]}),
    "again": (
        "token",
        {"max_tokens_per_micro_batch": 200, "max_steps": 2},
        {0: [at(0, 0, "forward"), at(3, 0, "loss")], 1: [at(1, LAST, "backward")]},
    ),
    "hopeless": ("sequence", SMALL, {1: [at(attempt, 0, "backward") for attempt in range(9)]}),
    "worst case": (
        "sequence",
        {**SMALL, "max_tokens_per_micro_batch": 120},
        {1: [at(0, 0, "backward")], 0: [at(1, 0, "forward")]},
    ),
    # kinds of models and ways to run them
    "kept": ("sequence", {**SMALL, **KEPT}, {0: [at(0, 1, "backward")], 1: [at(1, 0, "loss")]}),
    "lora": ("lora with biases", SMALL, {0: [at(0, 1, "backward")], 1: [at(1, 0, "forward")]}),
    "head": ("lora on the head", SMALL, {0: [at(0, 1, "loss")], 1: [at(1, 0, "sum")]}),
    "checkpointed": ("checkpointed", SMALL, {0: [at(0, 1, "backward")], 1: [at(1, 0, "forward")]}),
    "kept checkpointed": ("checkpointed", {**SMALL, **KEPT}, {0: [at(0, 1, "backward")], 1: [at(1, 0, "sum")]}),
    "exact": ("exact", SMALL, {0: [at(0, 1, "backward")], 1: [at(1, 0, "loss")]}),
    "half": ("half", {"max_tokens_per_micro_batch": 60}, {1: [at(0, 0, "backward")]}),
    "several": ("several", {"max_tokens_per_micro_batch": 60}, {1: [at(0, 0, "backward"), at(4, 0, "sum")]}),
    # groups of four no longer fit, so that a first pass is run, on the copy that was let go of
    "freed": ("sequence", {**SMALL, "keep_whole_copy": False}, {1: [at(0, 0, "backward"), at(1, 0, "loss")]}),
    # what is drawn is drawn again
    "dropout never": ("dropout", {**DRAWN, "max_tokens_per_micro_batch": 30}, {}),
    "dropout": ("dropout", DRAWN, {0: [at(0, LAST, "backward")]}),
    # layer by layer: in the reference's and the first pass, and in an update
    "layered never": ("layered lora", {}, {}),
    "layered": ("layered lora", {}, {0: [at(0, 0, "forward", "pass")], 1: [at(2, LAST, "gather", "pass")]}),
    "layered update": ("layered lora", {}, {1: [at(0, 1, "backward"), at(1, 0, "forward")]}),
    "layered unequal never": ("layered", {}, {}),
    "layered unequal": ("layered", {}, {0: [at(1, 1, "forward", "pass")], 1: [at(2, 1, "forward", "pass")]}),
    # in an evaluation, also in a process that idles along
    "layered evaluated never": ("layered evaluated", {}, {}),
    "layered evaluated": (
        "layered evaluated",
        {},
        {0: [at(4, 0, "loss", "pass")], 1: [at(7, 0, "forward", "pass"), at(9, 0, "make", "pass")]},
    ),
    "layered kept": ("layered lora", KEPT, {1: [at(0, 0, "forward", "pass"), at(0, 1, "loss")]}),
}


class Scarce:
    """Lets this process run out of memory at chosen places, and notes the collectives of each micro-batch."""

    def __init__(self, trainer: Any, failures: list[Failure]) -> None:
        self.due = list(failures)
        self.what, self.batch, self.rounds = "", -1, 0
        self.attempts: Counter[str] = Counter()
        self.sequences: list[list[tuple[str, int]]] = []
        self.processes, learner = trainer.processes, trainer.learner
        self.budget, self.worst = learner.budget, 0
        rounds, done = self.processes.rounds, self.processes.micro_batch_done

        def begin(count: int) -> int:
            self.what, self.batch, self.rounds = "update" if torch.is_grad_enabled() else "pass", -1, rounds(count)
            self.attempts[self.what] += 1
            return self.rounds

        self.processes.rounds, self.processes.micro_batch_done = begin, self.before("end", done, after=True)
        learner.batcher.make = self.before("make", learner.batcher.make)
        learner.loss = self.before("loss", learner.loss, after=True)
        layers = [module for module in trainer.model.modules() if type(module).__name__.endswith("DecoderLayer")]
        layers[-1].register_forward_pre_hook(lambda *_: self.come_by("forward"))
        layers[0].register_forward_hook(self._watch_backward)
        self.watch_collectives()

    def watch_collectives(self) -> None:
        collectives = self.processes._attempts.collectives
        collectives.run = self._noting(collectives.run)

    def before(self, place: str, function: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
        def failing(*args: Any, **options: Any) -> Any:
            if not after:
                self.come_by(place)
            result = function(*args, **options)
            if after:
                self.come_by(place)
            return result

        return failing

    def _watch_backward(self, module: Any, inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.come_by("backward"))

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(collective: Any, output: Any) -> Any:
            if self.what == "update":
                self.sequences[-1].append((collective.__qualname__.split(".")[0], output.numel()))
            return run(collective, output)

        return noting

    def come_by(self, place: str) -> None:
        """Run out of memory here, if it is time."""
        if place == "make":
            self.batch += 1
            self.sequences.append([])
        for due in self.due:
            what, attempt, batch, where = due
            number = self.rounds - 1 if batch == LAST else batch
            if (what, attempt + 1, number, where) == (self.what, self.attempts[self.what], self.batch, place):
                self.due.remove(due)
                raise torch.OutOfMemoryError(f"injected: {place}\nand more lines")


SCARCE: list[Scarce] = []


def let_memory_of_collectives_fail() -> None:
    """The second gathering of a micro-batch, and its first sum, come by here when they want memory."""

    def failing(place: str, first: int) -> Any:
        def allocate(self: Any, *args: Any, **options: Any) -> Any:
            if SCARCE and self.collectives.done >= first:
                SCARCE[-1].come_by(place)
            return sharded_attempts._Allocating.allocate(self, *args, **options)

        return allocate

    sharded_attempts._Gather.allocate, sharded_attempts._Sum.allocate = failing("gather", 1), failing("sum", 0)


def run(output: Path, name: str, *, scarce: type[Scarce] = Scarce, **sharding: Any) -> dict[str, Any]:
    """One run, or the error that it ended with. `sharding`: how weights are sharded."""
    kind, options, failures = RUNS[name]
    lines: list[str] = []
    made = processes_run.make_trainer

    def make_scarce(*args: Any, **changes: Any) -> Any:
        trainer = made(*args, **changes)
        SCARCE.append(scarce(trainer, failures.get(rank(), [])))
        if name == "worst case":
            SCARCE[-1].worst = trainer.learner.try_worst_case(trainer.model, prompt=20, completion=6, k=2)
            assert all(p.grad is None for p in trainer.model.parameters())
        return trainer

    said = logging.Handler()
    said.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    attempts.logger.addHandler(said)
    processes_run.make_trainer = make_scarce
    try:
        found = processes_run.run(output, kind, **(sharding or {"fsdp": True}), **options)
    except torch.OutOfMemoryError as error:
        found = {"world": processes_run.count(), "error": str(error)}
    finally:
        processes_run.make_trainer = made
        attempts.logger.removeHandler(said)
    last = SCARCE.pop()
    return {
        **found, "said": lines, "due": last.due, "attempts": dict(last.attempts), "sequences": last.sequences,
        "budget": last.budget.size(), "worst": last.worst,
    }  # fmt: skip


def main() -> None:
    output, *names = sys.argv[1:]
    torch_forgets = sharded_attempts.FORGETS
    let_memory_of_collectives_fail()
    for name in names:
        folder = Path(output) / name
        # As with versions of torch that cannot be asked to forget a micro-batch.
        sharded_attempts.FORGETS = torch_forgets and not name.startswith(BY_HAND)
        found = run(folder, name.removeprefix(BY_HAND))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(found, folder / f"result_{rank()}.pt")


if __name__ == "__main__":
    main()
