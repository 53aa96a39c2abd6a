"""A program for test_sharded_gpu: runs that two processes share on one GPU, or that one process makes.

RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=… python sharded_run.py FOLDER NAME…
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from tests.integration import processes_run

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "copy": ("sequence", {"bf16": False}),
    "copy half": ("half", {}),
    "freed": ("several", {"bf16": False, "keep_whole_copy": False}),
    "lora": ("lora", {"bf16": False}),
    "layered": ("layered", {"bf16": False}),
    "layered half": ("layered half", {}),
    "layered by name": ("layered by name", {"bf16": False}),
    # one process has no batch in the last round of an evaluation
    "layered evaluated": ("layered evaluated", {"bf16": False}),
    # a reference in parts that follows the policy, and lies on the host
    "layered offloaded": ("saved layered", {"bf16": False}),
}
DEEPSPEED: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("sequence", {"bf16": False}),
    "zero2": ("token", {"bf16": False}),
    "zero3": ("sequence", {"bf16": False}),
    "zero3 lora": ("lora", {"bf16": False}),
    "zero3 layered": ("layered evaluated", {"bf16": False}),
    "zero3 offloaded": ("saved layered", {"bf16": False}),
}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    several = processes_run.count() > 1
    if several:
        from tests.gpu import host_collectives

        # DeepSpeed gathers its own.
        of_deepspeed = processes_run._whole
        processes_run._whole = lambda p: of_deepspeed(p) if hasattr(p, "ds_id") else host_collectives.whole(p)
    for name in names:
        kind, options = (KINDS | DEEPSPEED)[name]
        shared: dict[str, Any] = {"fsdp": True, "ddp_backend": "gloo"}
        if name in DEEPSPEED:
            if several and not torch.distributed.is_initialized():
                # DeepSpeed would take NCCL, whatever `ddp_backend` says.
                torch.distributed.init_process_group("gloo")
            shared = {"deepspeed": processes_run.zero_config(int(name[4])), "ddp_backend": "gloo"}
        alone: dict[str, Any] = {"ds3_gather_for_generation": True, "keep_whole_copy": None}
        changes = options | (shared if several else alone)
        found = processes_run.run(folder / name, kind, use_cpu=not torch.cuda.is_available(), **changes)
        kept = {key: found[key] for key in ("weights", "history", "parts", "drawn", "reference_on", "wrapped")}
        torch.save(kept, folder / name / f"result_{processes_run.rank()}.pt")


if __name__ == "__main__":
    main()
