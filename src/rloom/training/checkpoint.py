"""What rloom adds to a transformers checkpoint, and which checkpoints are whole.

`rloom_state.pt` holds what the next update depends on and transformers does not keep: rollouts in use, running
normalisers, metrics that were not logged yet, the running loss. Each is a component with a `state_dict`; whoever adds
one names it in the trainer's `_components`. Of several processes, each but the first has a file of its own, with its
number in the name. `reference.pt` holds a reference that has moved. `rloom_manifest.json`, which is written last, has
the size and the checksum of every file: a checkpoint that was damaged since is passed over.
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

from rloom.errors import DiskError
from rloom.printable import get_logger

logger = get_logger(__name__)

STATE_FILE = "rloom_state.pt"
REFERENCE_FILE = "reference.pt"
TRAINER_STATE_FILE = "trainer_state.json"
MANIFEST_FILE = "rloom_manifest.json"
OURS = re.compile(r"rloom_state(_\d+)?\.pt")
NUMBERS = (".safetensors", ".bin", ".pt", ".pth")
CHUNK = 1 << 24

FORMAT = 2
"""Of `rloom_state.pt`. 1 had no number, and the states of components under other names."""


class Component(Protocol):
    """A part of a run that a checkpoint holds. What it returns is plain data and tensors."""

    def state_dict(self) -> Any:
        """What the next update depends on."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        ...


def state_of(components: Mapping[str, Component], plan: dict[str, int]) -> dict[str, Any]:
    """The state of a process. `plan` decides which prompts a rollout holds and which updates use it."""
    states = {name: component.state_dict() for name, component in components.items()}
    return {"format": FORMAT, "plan": plan, "components": states}


def load_components(components: Mapping[str, Component], state: dict[str, Any]) -> None:
    """Go on from a state. A component that it does not know, of an older version's run, begins anew."""
    for name, component in components.items():
        if name in state["components"]:
            component.load_state_dict(state["components"][name])


def _upgraded(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an older version's checkpoint in today's form."""
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
    """Write our files. They come first: transformers writes `trainer_state.json` last, so that it marks the end. Each
    process has rollouts of its own; the reference is the same for all."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    torch.save(state, path / _state_file(rank))
    if reference and not rank:
        torch.save(reference, path / REFERENCE_FILE)


def _state_file(rank: int) -> str:
    return STATE_FILE if not rank else f"rloom_state_{rank}.pt"


def load(folder: str | Path, *, rank: int = 0) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Our state and the reference's weights; None for what is not there (a checkpoint of TRL's, say). A process that
    the checkpoint does not know gets the first one's state, whose running statistics are those of all."""
    path = Path(folder)
    found: list[dict[str, Any] | None] = []
    own = path / _state_file(rank)
    for file in (own if own.exists() else path / STATE_FILE, path / REFERENCE_FILE):
        found.append(torch.load(file, map_location="cpu", weights_only=True) if file.exists() else None)
    state, reference = found
    return None if state is None else _upgraded(state), reference


OF_DISKS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM,
}  # fmt: skip
NO_ROOM = re.compile(r"os error|inline_container|iostream|PytorchStreamWriter", re.IGNORECASE)
"""What safetensors and torch say where the system does not take what they write."""


@contextmanager
def writing(folder: str | Path, what: str) -> Iterator[None]:
    """Meanwhile what cannot be written, to a full disk say, is told in a sentence."""
    try:
        yield
    except Exception as error:
        # An upload's errors are OSErrors too: the disk's are known by their numbers.
        by_the_disk = getattr(error, "errno", None) in OF_DISKS or NO_ROOM.search(str(error))
        if not by_the_disk or isinstance(error, DiskError):
            raise
        raise DiskError(f"{what} cannot be written to {folder}: {_reason(error, Path(folder))}") from error


def _reason(error: Exception, folder: Path) -> str:
    """torch does not say what the system said; mostly that nothing was left."""
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    free = f" ({shutil.disk_usage(existing).free / 2**30:.1f} GiB are free there)" if existing else ""
    if isinstance(error, OSError):
        return f"{error.strerror or error}{free}"
    return f"the disk took a part of it only{free}: {str(error).splitlines()[0]}"


def seal(folder: str | Path) -> None:
    """Write down what a checkpoint consists of, when all of it is there and on the disk."""
    path = Path(folder)
    files = {str(file.relative_to(path)): _measured(file, sync=True) for file in _files(path)}
    new = path / f"{MANIFEST_FILE}.new"
    with new.open("w") as out:
        json.dump({"files": files}, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    new.replace(path / MANIFEST_FILE)


def _files(folder: Path) -> list[Path]:
    """Those that the next update depends on: others, a tokenizer's or a card, people may edit."""
    own = (file for file in folder.rglob("*") if file.suffix in NUMBERS or file.name == TRAINER_STATE_FILE)
    return sorted(file for file in own if file.is_file())


def _measured(file: Path, *, sync: bool = False) -> list[int]:
    """Size and checksum of a file: against damage, not against malice."""
    checksum = 0
    with file.open("rb") as content:
        while part := content.read(CHUNK):
            checksum = zlib.crc32(part, checksum)
        if sync:
            os.fsync(content.fileno())
    return [file.stat().st_size, checksum]


def damage(folder: str | Path) -> str | None:
    """What is wrong with a checkpoint, None if nothing is. One without a manifest (an older version's, TRL's) is taken
    as it is, if it was written to its end."""
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
        if OURS.fullmatch(name) and not (path / name).exists():
            continue  # a run goes on without it, and says what is sampled anew
        try:
            if _measured(path / name) != expected:
                return f"is damaged: {name} is not what was written"
        except OSError:
            return f"is damaged: {name} is missing or cannot be read"
    return None


def step_of(folder: Path) -> int | None:
    """The number of updates that a checkpoint was written after; None for one that is not whole."""
    try:
        return int(json.loads((folder / TRAINER_STATE_FILE).read_text())["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def newest_whole(output_dir: str | Path) -> Path | None:
    """The newest checkpoint that is whole; one that is unfinished, left by a kill in mid-write, or damaged is named and
    passed over."""
    pattern = re.compile(r"^checkpoint-(\d+)$")
    root = Path(output_dir)
    numbered = [(int(m[1]), p) for p in root.glob("checkpoint-*") if (m := pattern.match(p.name)) and p.is_dir()]
    for _, folder in sorted(numbered, reverse=True):
        wrong = damage(folder)
        if wrong is None:
            return folder
        logger.warning("%s %s and is passed over", folder, wrong)
    return None
