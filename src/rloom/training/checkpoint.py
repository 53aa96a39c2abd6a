"""Writes and reads rloom's part of a checkpoint, and detects damaged checkpoints.

`rloom_state.pt` holds what the next update depends on and transformers does not keep: rollouts in use, running
normalisers, metrics that were not logged yet, the running loss. Each is a component with a `state_dict`; a new one is
named in the trainer's `_components`. With several processes, each but the first writes a file of its own with its
number in the name. `reference.pt` holds a reference that has moved. `rloom_manifest.json` is written last. It has the
size and the checksum of every file, so that a checkpoint that was damaged since is skipped.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from rloom.errors import ConfigError, DiskError, in_words
from rloom.printable import get_logger

logger = get_logger(__name__)

STATE_FILE = "rloom_state.pt"
REFERENCE_FILE = "reference.pt"
TRAINER_STATE_FILE = "trainer_state.json"
MANIFEST_FILE = "rloom_manifest.json"
OURS = re.compile(r"rloom_state(_\d+)?\.pt")
"""State files of all processes."""
NUMBERS = (".safetensors", ".bin", ".pt", ".pth", ".distcp")
"""Suffixes of files that hold tensors."""
OTHERS = (TRAINER_STATE_FILE, ".metadata")
"""Further files that the next update depends on: the latter says what lies where, if weights were saved in parts."""
CHUNK = 1 << 24
"""Bytes that a checksum reads at a time."""

NAMED = 3
"""Checkpoints that a message names, at most."""
FORMAT = 2
"""Format version of `rloom_state.pt`. Version 1 had no number, and other names for the components."""


class Component(Protocol):
    """A part of a run that checkpoints include. Its state is plain data and tensors."""

    def state_dict(self) -> Any:
        """The state that the next update depends on."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Restore that state."""
        ...


def state_of(components: Mapping[str, Component], plan: dict[str, int]) -> dict[str, Any]:
    """The state of a process. `plan` decides which prompts a rollout holds and which updates use it."""
    states = {name: component.state_dict() for name, component in components.items()}
    return {"format": FORMAT, "plan": plan, "components": states}


def load_components(components: Mapping[str, Component], state: dict[str, Any]) -> None:
    """Restore all components. One that the state of an older version does not have begins anew."""
    for name, component in components.items():
        if name in state["components"]:
            component.load_state_dict(state["components"][name])


def _upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """A state in the present format. States of older versions are converted; newer formats are refused."""
    if state.get("format", 1) > FORMAT:
        raise ValueError(f"the checkpoint was written by a newer rloom (its format is {state['format']}): update rloom")
    if "format" in state:
        return state
    components = {
        "buffer": state["rollouts"],
        "metrics": state["metrics"],
        "table": state["completions"],
        "shaper": {"moments": state["moments"], "composition": state.get("composition", {})},
        "credit": state["credit"],
        "budget": state.get("budget", {}),
        "loop": {name: state[name] for name in ("loss", "steps", "elapsed")} | {"episodes": state.get("episodes", 0)},
    }
    return {"format": FORMAT, "plan": state["plan"], "components": components}


def save(folder: str | Path, state: dict[str, Any], reference: dict[str, Any] | None, *, rank: int = 0) -> None:
    """Write our files. They come before transformers' own, which end with `trainer_state.json`: it marks a finished
    checkpoint. Each process has rollouts of its own; the reference is the same for all."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    torch.save(state, path / _state_file(rank))
    if reference and not rank:
        torch.save(reference, path / REFERENCE_FILE)


def _state_file(rank: int) -> str:
    return STATE_FILE if not rank else f"rloom_state_{rank}.pt"


def load(folder: str | Path, *, rank: int = 0) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Our state and the reference's weights; None for what is missing (in a checkpoint of TRL, say). A process that the
    checkpoint has no file for gets the first process' state: its running statistics cover all processes."""
    path = Path(folder)
    found: list[dict[str, Any] | None] = []
    own = path / _state_file(rank)
    for file in (own if own.exists() else path / STATE_FILE, path / REFERENCE_FILE):
        found.append(torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None)
    state, reference = found
    return None if state is None else _upgraded(state), reference


DISK_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM,
}  # fmt: skip
WRITE_FAILED = re.compile(r"os error|inline_container|iostream|PytorchStreamWriter", re.IGNORECASE)
"""Matches the messages of safetensors and torch when the system refuses a write."""


@contextmanager
def writing(folder: str | Path, what: str) -> Iterator[None]:
    """Turn a failed write inside the block, to a full disk say, into a [`DiskError`] that explains it."""
    try:
        yield
    except Exception as error:
        # Errors of an upload are OSErrors too. The error number tells those of the disk apart.
        from_disk = getattr(error, "errno", None) in DISK_ERRORS or WRITE_FAILED.search(str(error))
        if not from_disk or isinstance(error, DiskError):
            raise
        raise DiskError(f"{what} cannot be written to {folder}: {_reason(error, Path(folder))}") from error


def _reason(error: Exception, folder: Path) -> str:
    """Why a write failed. torch hides the system's message, so the free space of the disk is named as well."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = f" ({shutil.disk_usage(existing).free / 2**30:.1f} GiB are free there)" if existing else ""
    if isinstance(error, OSError):
        return f"{error.strerror or error}{free}"
    return f"only a part could be written{free}: {str(error).splitlines()[0]}"


def seal(folder: str | Path) -> None:
    """Write the manifest of a checkpoint whose files are all complete and on the disk."""
    path = Path(folder)
    files = {str(file.relative_to(path)): _measured(file, sync=True) for file in _files(path)}
    new = path / f"{MANIFEST_FILE}.new"
    with new.open("w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    new.replace(path / MANIFEST_FILE)


def _files(folder: Path) -> list[Path]:
    """The files that the next update depends on. Others, such as the tokenizer's or the card, people may edit."""
    own = (file for file in folder.rglob("*") if file.suffix in NUMBERS or file.name in OTHERS)
    return sorted(file for file in own if file.is_file())


def _measured(file: Path, *, sync: bool = False) -> list[int]:
    """Size and checksum of a file. They detect damage, not malice."""
    checksum = 0
    with file.open("rb") as content:
        while part := content.read(CHUNK):
            checksum = zlib.crc32(part, checksum)
        if sync:
            os.fsync(content.fileno())
    return [file.stat().st_size, checksum]


def damage(folder: str | Path) -> str | None:
    """What is wrong with a checkpoint, None if nothing is. A checkpoint without a manifest, of an older version or of
    TRL, is accepted if it was written to its end."""
    path = Path(folder)
    if step_of(path) is None:
        return "is unfinished (the run was stopped while writing it)"
    try:
        files = json.loads((path / MANIFEST_FILE).read_text())["files"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return f"is damaged: {MANIFEST_FILE} cannot be read"
    for name, expected in files.items():
        # A run can resume without our state. It then warns about what is sampled anew.
        if OURS.fullmatch(name) and not (path / name).exists():
            continue
        try:
            if _measured(path / name) != expected:
                return f"is damaged: {name} is not what was written"
        except OSError:
            return f"is damaged: {name} is missing or cannot be read"
    return None


def step_of(folder: Path) -> int | None:
    """The number of updates that a checkpoint was written after; None for an unfinished one."""
    try:
        return int(json.loads((folder / TRAINER_STATE_FILE).read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_named(folder: str | Path, output_dir: str | Path) -> None:
    """Refuse a checkpoint that is not there, or not whole, and name those to choose from."""
    wrong = damage(folder) if Path(folder).is_dir() else "is no folder"
    if wrong is None:
        return
    whole = [str(path) for _, path in _numbered(output_dir) if step_of(path) is not None and path != Path(folder)]
    others = f"{in_words(whole[:NAMED])}" if whole else f"another ({output_dir} has none)"
    raise ConfigError(
        f'the checkpoint {folder} {wrong}: name {others}, or "auto", which goes on from the newest in output_dir that '
        "is whole, and begins anew where there is none"
    )


def newest_whole(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that is whole. Unfinished and damaged ones are skipped with a warning."""
    for _, folder in _numbered(output_dir):
        wrong = damage(folder)
        if wrong is None:
            return folder
        logger.warning("%s %s and is skipped", folder, wrong)
    return None


def _numbered(output_dir: str | Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, by their number, the newest first."""
    pattern, folders = re.compile(r"^checkpoint-(\d+)$"), Path(output_dir).glob("checkpoint-*")
    numbered = [(int(m[1]), path) for path in folders if (m := pattern.match(path.name)) and path.is_dir()]
    return sorted(numbered, reverse=True)
