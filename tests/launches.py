"""Programs of the tests in several processes, by torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys

CONSEQUENCE = "ProcessError: another process has ended"


def torchrun(
    script: str, *arguments: str, processes: int = 2, deepspeed: bool = False, seconds: float = 480, **environment: str
) -> subprocess.CompletedProcess:
    """Run a program in several processes on the CPU, with DeepSpeed as the launcher's choice or without it."""
    own = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    if deepspeed:
        # With ACCELERATE_USE_CPU, accelerate would train without DeepSpeed, and say nothing.
        del own["ACCELERATE_USE_CPU"]
        own |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
    options = ["--nproc_per_node", str(processes), "--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"]
    line = [sys.executable, "-m", "torch.distributed.run", *options, script, *arguments]
    return subprocess.run(line, env=own | environment, capture_output=True, text=True, timeout=seconds)


def assert_done(done: subprocess.CompletedProcess) -> None:
    """All processes have ended well; else what the first of them to fail has said."""
    assert done.returncode == 0, cause(done.stderr)[-6000:]


def cause(stderr: str) -> str:
    """What processes said, without those that only noticed that another had ended.

    >>> cause(f"[rank0]: ValueError\\n[rank1]: {CONSEQUENCE}\\nready")
    '[rank0]: ValueError\\nready'
    """
    lines = stderr.splitlines()
    ranks = {rank for line in lines if CONSEQUENCE in line for rank in re.findall(r"^\[rank\d+\]", line)}
    return "\n".join(line for line in lines if not line.startswith(tuple(ranks)))
