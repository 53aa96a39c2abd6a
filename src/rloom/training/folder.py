"""Guards a run's output folder: one run at a time, earlier files moved aside.

A lock keeps a second run out while one trains. Files of an earlier run are moved to `_previous`, never overwritten.
`_run.json` records what a run has saved, so that the user's own files, whatever their names, are not touched. These
names begin with an underscore because transformers uploads all others to the hub.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloom.errors import ConfigError
from rloom.generation.vllm.options import ON_THEIR_WAY
from rloom.observe.store import FOLDER as STORE
from rloom.printable import get_logger
from rloom.training.checkpoint import step_of

try:
    import fcntl
except ImportError:
    # Windows has no fcntl. Nothing is locked there.
    fcntl = None  # type: ignore[assignment]

logger = get_logger(__name__)

LOCK_FILE = "_lock"
RECORD_FILE = "_run.json"
PREVIOUS = "_previous"
OF_RUNS = re.compile(rf"checkpoint-\d+|{STORE}(-\d+)?")
"""Names that only runs use: checkpoints, and the store of completions."""
OF_MODELS = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model.bin", "training_args.bin",
    "config.json", "*_config.json", "tokenizer.*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "spiece.model", "chat_template.*", "README.md", "trainer_state.json", "*_results.json", "merged",
)  # fmt: skip
"""Files that saving a model, a state or metrics may write. Other files that change meanwhile, such as a log, are not
ours."""
TRAINERS_OWN = "training_args.bin"
"""Only trainers write this file. Without a record, in a folder of an older version or of TRL, it shows that a model
belongs to a run."""


_locks: set[int] = set()
"""Open lock files. A forked process inherits them, and would keep the lock after this process has ended."""


def _close_inherited_locks() -> None:
    while _locks:
        os.close(_locks.pop())


if fcntl is not None:
    os.register_at_fork(after_in_child=_close_inherited_locks)


class OutputFolder:
    """A trainer's output folder. `hold` it while training; `begin` a new run there, or `go_on` with the one it has.

    With several processes, only the main one (`main=True`) records what is written.
    """

    def __init__(self, path: str | Path, *, main: bool = True) -> None:
        self.path, self.main = Path(path), main
        # Names that this run has written, except checkpoints and the store.
        self.written: set[str] = set()
        # This id in the folder's record says that the record is ours.
        self.run = uuid.uuid4().hex
        self._begun = False

    # -- one at a time

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other runs out of the folder inside the block. The lock ends with the process, however that ends."""
        lock = self._lock()
        if lock is not None:
            # Left by a run that was killed while it sent them: as large as the model.
            shutil.rmtree(self.path / ON_THEIR_WAY, ignore_errors=True)
        try:
            yield
        finally:
            if lock is not None:
                _locks.discard(lock)
                # Closing the file does not unlock it while a forked process still has it open.
                fcntl.flock(lock, fcntl.LOCK_UN)
                os.close(lock)

    def _lock(self) -> int | None:
        """Lock the folder. None if it cannot be locked; an error if another run holds the lock."""
        if fcntl is None:
            return None
        file = self.path / LOCK_FILE
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:
                # A run that saves nothing may train in a folder that it cannot write to.
                logger.warning("%s cannot be locked against a second run: %s", self.path, error)
                return None
            try:
                if _taken(fd, file):
                    _locks.add(fd)
                    return fd
            except BlockingIOError:
                who = _holder(fd)
                os.close(fd)
                raise ConfigError(
                    f"{self.path} is in use: {who} is training there. Give this run another output_dir, or let that "
                    "one end first"
                ) from None
            except OSError as error:
                # Some network file systems have no locks.
                os.close(fd)
                logger.warning("%s cannot be locked against a second run: %s", self.path, error)
                return None
            # The file was removed between opening and locking it: try again.
            os.close(fd)

    # -- which run the files belong to

    def begin(self, *, keep: Iterable[str | Path] = (), delete: bool = False) -> None:
        """Start a new run. Files of an earlier run are moved. With `delete` they are deleted where they certainly
        belong to that run. Paths in `keep` stay: this run is made from them."""
        if self._begun and self._is_ours():
            return
        self._check_made_from(keep)
        left = self._left_by_others([Path(path).resolve() for path in keep])
        if left and delete:
            known = set(_recorded(self.path))
            certain = [item for item in left if item.name in known or OF_RUNS.fullmatch(item.name)]
            for item in certain:
                _delete(item)
            _say(f"deleted what an earlier run left in {self.path}: {_listed(certain)} (overwrite_output_dir)")
            left = [item for item in left if item not in certain]
        if left:
            _say(f"what an earlier run left in {self.path} is now in {self._moved(left)}: {_listed(left)}")
        if not self._is_ours():
            self.written = set()
        if _record(self.path) or left:
            self._write_down()
        self._begun = True

    def _is_ours(self) -> bool:
        """Whether no other run has begun here since."""
        return _record(self.path).get("run", self.run) == self.run

    def go_on(self, *, after: int) -> None:
        """Resume the run of this folder after update `after`. Later checkpoints are moved, so that the next restart
        does not take one of them for the newest."""
        self.written |= set(_recorded(self.path))
        self.run = _record(self.path).get("run", self.run)
        later = [item for item in self._checkpoints() if int(item.name.split("-")[1]) > after and step_of(item)]
        if later:
            _say(f"later checkpoints in {self.path} are now in {self._moved(later)}: {_listed(later)}")
        self._write_down()
        self._begun = True

    def _checkpoints(self) -> list[Path]:
        return sorted(item for item in self.path.glob("checkpoint-*") if OF_RUNS.fullmatch(item.name))

    def _check_made_from(self, keep: Iterable[str | Path]) -> None:
        """Refuse a run made from a checkpoint in its own folder: it would delete or overwrite that checkpoint."""
        for path in map(Path, keep):
            inside = path.resolve().parent == self.path.resolve()
            if inside and path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name):
                raise ConfigError(
                    f"this run is made from {path}, and its own checkpoints would take that place: give it another "
                    "output_dir, or resume_from_checkpoint to go on with the run that wrote it"
                )

    def _left_by_others(self, keep: list[Path]) -> list[Path]:
        """Files of earlier runs, sorted by name. Files that this trainer wrote before training are left out."""
        try:
            there = sorted(self.path.iterdir())
        except OSError:
            return []
        models = set(_recorded(self.path))
        if TRAINERS_OWN not in models:
            models |= set(_models_among([item.name for item in there]))
        if self.path.resolve() in keep:
            models = set()
        own = self.written if self._is_ours() else set()
        found = [i for i in there if (OF_RUNS.fullmatch(i.name) or i.name in models) and i.name not in own]
        return [item for item in found if not any(path.is_relative_to(item.resolve()) for path in keep)]

    def _moved(self, items: Iterable[Path]) -> Path:
        """Move items to a new folder in `_previous`, and return that folder."""
        numbers = [int(p.name) for p in (self.path / PREVIOUS).glob("*") if p.name.isdigit()]
        target = self.path / PREVIOUS / str(max(numbers, default=0) + 1)
        try:
            target.mkdir(parents=True)
            for item in items:
                item.rename(target / item.name)
        except OSError as error:
            raise ConfigError(
                f"{self.path} has what an earlier run left, and that cannot be moved to {target}: {error}. Give this "
                "run another output_dir"
            ) from error
        return target

    # -- recording what is written

    @contextmanager
    def writing(self, where: str | Path | None = None) -> Iterator[None]:
        """Record what is saved into the folder inside the block."""
        elsewhere = where is not None and Path(where).resolve() != self.path.resolve()
        if elsewhere or not self.main:
            yield
            return
        before = _stamps(self.path)
        try:
            yield
        finally:
            after = _stamps(self.path)
            new = {name for name, stamp in after.items() if before.get(name) != stamp and _is_of_models(name)}
            if new - self.written:
                self.written |= new
                self._write_down()

    def _write_down(self) -> None:
        """Record what this run has written, and which files of an earlier run are still there."""
        if not self.main:
            return
        names = self.written | {name for name in _recorded(self.path) if (self.path / name).exists()}
        new = self.path / f"{RECORD_FILE}.new"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"run": self.run, "written": sorted(names)}, indent=1))
            new.replace(self.path / RECORD_FILE)
        except OSError as error:
            logger.warning(
                "the names of the files that this run has saved could not be recorded in %s: %s", self.path, error
            )


def _taken(fd: int, file: Path) -> bool:
    """Take the lock, and write its holder into the file. Returns False if the file was replaced since it was opened."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        if os.fstat(fd).st_ino != file.stat().st_ino:
            return False
    except FileNotFoundError:
        return False
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    # On a full disk the name of the holder is missing; the lock holds all the same.
    with contextlib.suppress(OSError):
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
    return True


def _holder(fd: int) -> str:
    """Who holds the lock, for the error message."""
    try:
        holder = json.loads(os.pread(fd, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _recorded(folder: Path) -> list[str]:
    """Names that the last run recorded in the folder."""
    names = _record(folder).get("written")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _record(folder: Path) -> dict[str, Any]:
    """The record of the folder's last run; empty if it is missing or unreadable."""
    try:
        found = json.loads((folder / RECORD_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _models_among(names: list[str]) -> list[str]:
    return [name for name in names if _is_of_models(name)] if TRAINERS_OWN in names else []


def _is_of_models(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in OF_MODELS)


def _stamps(folder: Path) -> dict[str, Any]:
    """Modification time and inode of each file in a folder, to see what has changed."""
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            # The file may have been removed since the folder was listed.
            with contextlib.suppress(OSError):
                stat = entry.stat(follow_symlinks=False)
                found[entry.name] = (stat.st_mtime_ns, stat.st_ino)
    return found


def _delete(item: Path) -> None:
    try:
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()
    except OSError as error:
        raise ConfigError(f"overwrite_output_dir=True: {item} cannot be deleted: {error}") from error


def _listed(items: list[Path]) -> str:
    names = [item.name for item in items]
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"and {len(names) - 5} others"])


def _say(line: str) -> None:
    print(f"rloom: {line}", file=sys.stderr, flush=True)
