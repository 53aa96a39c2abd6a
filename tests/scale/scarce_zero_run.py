"""Runs under DeepSpeed for test_zero_memory, in which processes run out of memory at chosen places.

    torchrun --nproc_per_node 2 scarce_zero_run.py OUTPUT "STAGE NAME" …

The runs are those of scarce_run, and a few of their own. Each process leaves what it saw in
OUTPUT/STAGE NAME/result_RANK.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from rloom.training.zero_attempts import ZeroAttempts
from tests.integration import processes_run, scarce_run
from tests.integration.processes_run import rank
from tests.integration.scarce_run import LAST, SCARCE, SMALL, Scarce, at

scarce_run.RUNS |= {
    # in what DeepSpeed does with a layer that has come ("wait"); in the first update, whose order it records; later
    "wait": ("sequence", SMALL, {1: [at(0, 0, "wait")]}),
    "later": (
        "sequence",
        {**SMALL, "max_tokens_per_micro_batch": 120},
        {0: [at(0, LAST, "forward"), at(2, 1, "backward")], 1: [at(3, LAST, "sum")]},
    ),
    # one process
    "alone never": ("sequence", {**SMALL, "max_tokens_per_micro_batch": 30}, {}),
    "alone": ("sequence", SMALL, {0: [at(0, 1, "backward")]}),
}

SMALL_PIECES: dict[str, Any] = {
    "reduce_bucket_size": 5_000, "allgather_bucket_size": 5_000,
    # Most weights are let go of after their layer, and gathered ahead of it; the smallest ones are kept.
    "stage3_param_persistence_threshold": 100, "stage3_prefetch_bucket_size": 3_000, "stage3_max_reuse_distance": 2_000,
}  # fmt: skip
"""Several buckets and gatherings in each micro-batch of the small model."""


class ZeroScarce(Scarce):
    """The same under DeepSpeed, whose collectives come by when training has begun."""

    def watch_collectives(self) -> None:
        pass


def let_deepspeed_fail() -> None:
    """DeepSpeed's collectives come by here before they are under way, and layers when they have come."""
    from deepspeed.runtime.zero import partition_parameters

    run, handles = (
        ZeroAttempts._run,
        (
            partition_parameters.AllGatherCoalescedHandle,
            partition_parameters.AllGatherHandle,
        ),
    )

    def failing(self: Any, name: str, *args: Any, **options: Any) -> Any:
        if name == "all_gather_into_tensor" and self.collectives.done:
            SCARCE[-1].come_by("gather")
        elif name in ("reduce_scatter_tensor", "all_reduce", "reduce"):
            SCARCE[-1].come_by("sum")
        return run(self, name, *args, **options)

    ZeroAttempts._run = failing  # type: ignore[method-assign]
    for handle in handles:
        handle.wait = _late(handle.wait)


def _late(wait: Any) -> Any:
    def late(self: Any, *args: Any, **options: Any) -> Any:
        if SCARCE:
            SCARCE[-1].come_by("wait")
        return wait(self, *args, **options)

    return late


def config(stage: int, how: str) -> dict[str, Any]:
    """DeepSpeed's configuration, in small pieces but for "plain:"."""
    found = processes_run.zero_config(stage)
    found["zero_optimization"] |= {} if how == "plain" else SMALL_PIECES
    if how == "overlapping":
        found["zero_optimization"] |= {"overlap_comm": True}
    if how == "offloaded":
        found["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
        # DeepSpeed's own would be compiled.
        found["zero_force_ds_cpu_optimizer"] = False
    return found


def main() -> None:
    output, *names = sys.argv[1:]
    let_deepspeed_fail()
    for name in names:
        stage, _, what = name.partition(" ")
        how, _, kind = what.partition(": ") if ": " in what else ("", "", what)
        folder = Path(output) / name
        zero = config(int(stage.removeprefix("zero")), how)
        found = scarce_run.run(folder, kind, scarce=ZeroScarce, deepspeed=zero)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(found, folder / f"result_{rank()}.pt")


if __name__ == "__main__":
    main()
