"""Whether what tests import is there in sandboxes, said before a right program scores nothing for it."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

from rloom.errors import RewardError, SandboxError
from rloom.rewards.sandbox.bubblewrap import interpreter, run_python

TRY = """
import importlib, os, sys
said = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what packages print is not about what is missing
for name in sys.argv[1:]:
    try: importlib.import_module(name)
    except BaseException as error: print(f"{name}: {type(error).__name__}: {error}"[:300].splitlines()[0], file=said)
said.close()
"""
IMPORT_SECONDS = 300.0


def check_imports(names: tuple[str, ...], site_packages: tuple[str, ...]) -> None:
    """Import packages in a sandbox, once for all tests that need the same; a [`RewardError`] names what is missing."""
    if names and (said := _failures(names, site_packages)):
        missing = [line.split(":")[0] for line in said]
        raise RewardError(f"tests import what sandboxes do not have: {'; '.join(said)}. {_way(missing)}")


@functools.lru_cache(maxsize=256)
def _failures(names: tuple[str, ...], site_packages: tuple[str, ...]) -> list[str]:
    try:
        result = run_python(TRY, *names, site_packages=site_packages, seconds=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        raise RewardError(
            f"tests import {', '.join(names)}, which took over {IMPORT_SECONDS:g} seconds in a sandbox"
        ) from None
    if result.returncode != 0:
        raise SandboxError(f"the sandbox's Python ended while importing {', '.join(names)}: {result.stderr[-300:]}")
    return result.stdout.splitlines()


def _way(missing: list[str]) -> str:
    """How to make the missing packages visible in sandboxes."""
    folders = sorted({folder for name in missing if (folder := _folder(name))})
    if not folders:
        return "Install it, and name its folder: code_execution(site_packages=[…])"
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"code_execution(site_packages={folders}) shows sandboxes what is installed for this Python ({own}); theirs is "
        f"{interpreter()[0]}, whose version must be the same"
    )


def _folder(name: str) -> str | None:
    """The folder in which this Python has a package."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return str(origin.parent.parent if origin.name == "__init__.py" else origin.parent)
