"""What a run is, for those who read its store: options, versions, device, and what is said at its start."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from rloom.training.identity import facts_of
from rloom.version import __version__

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "bitsandbytes", "triton", "vllm")
HIDDEN = ("files", "begins")
"""What is said at the start and is of no use to others: paths."""


def description_of(trainer: Any) -> dict[str, Any]:
    """What `rloom show` says about a run and compares between runs. Options that may hold secrets are left out."""
    facts = facts_of(trainer) if trainer._facts is None else trainer._facts
    said = [(label, words) for label, words in trainer.report.start() if label not in HIDDEN]
    return {
        "about": dict(said),
        "options": facts["options"],
        "fixed": facts["fixed"],
        "environment": environment(),
        "processes": trainer.processes.count,
        "max_steps": trainer.state.max_steps,
    }


def environment() -> dict[str, str]:
    """Versions of what computes.

    >>> environment()["rloom"] == __version__
    True
    """
    found = {"rloom": __version__, "python": platform.python_version(), "system": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "gpu": torch.cuda.get_device_name()}
    return found
