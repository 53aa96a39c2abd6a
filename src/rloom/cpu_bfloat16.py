"""bfloat16 on CPUs that promise more than they keep.

Some virtual machines advertise AMX, which their host does not permit: there every bfloat16 product ends the process
with an illegal instruction, in plain torch too. Whether this is such a machine is found out in a process of its own,
and oneDNN, which torch multiplies with, is told to do without.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

from rloom.printable import get_logger

logger = get_logger(__name__)

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = ("AVX512_CORE_BF16", "AVX512_CORE")
"""Instruction sets that oneDNN may be held to, the best one first."""

PRODUCT = (
    "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); "
    "torch.nn.functional.linear(x, x); torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])"
)


@functools.cache
def make_bfloat16_safe() -> None:
    """Hold oneDNN to instructions that work here; to be called before the first bfloat16 product on a CPU.

    Processes that are started later inherit the setting. Nothing happens on a CPU without AMX, or where the variable
    is set already.

    >>> make_bfloat16_safe()
    """
    if VARIABLE in os.environ or not _advertises_amx() or not _dies({}):
        return
    for instructions in WITHOUT_AMX:
        if not _dies({VARIABLE: instructions}):
            os.environ[VARIABLE] = instructions
            logger.warning(
                "this CPU advertises AMX and does not permit it: bfloat16 products would end the process. They run "
                "without it now (%s=%s)", VARIABLE, instructions,
            )  # fmt: skip
            return
    logger.warning("bfloat16 products end a process with an illegal instruction on this CPU: use float32")


def _advertises_amx(info: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        return "amx_" in info.read_text()
    except OSError:
        # No Linux: nothing is known of such machines there.
        return False


def _dies(environment: dict[str, str]) -> bool:
    """Whether a process that multiplies in bfloat16 is killed for an illegal instruction."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT], env={**os.environ, **environment}, capture_output=True, check=False
    )
    return done.returncode in (-signal.SIGILL, 128 + signal.SIGILL)
