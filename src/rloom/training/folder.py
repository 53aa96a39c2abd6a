"""One run, one folder: a lock while it trains, and what an earlier run left there is moved aside, never written over.

What a run has saved into its folder is written down (`_run.json`), so that the user's own files, whatever their names,
are known from the run's and stay. Names begin with an underscore because transformers uploads all others to the hub.
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
from rloom.observe.store import FOLDER as STORE
from rloom.printable import get_logger
from rloom.training.checkpoint import step_of

try:
    import fcntl
except ImportError:  # not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

logger = get_logger(__name__)

LOCK_FILE = "_lock"
RECORD_FILE = "_run.json"
PREVIOUS = "_previous"
OF_RUNS = re.compile(rf"checkpoint-\d+|{STORE}(-\d+)?")
OF_MODELS = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*", "adapter_model.bin", "training_args.bin",
    "config.json", "*_config.json", "tokenizer.*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "spiece.model", "chat_template.*", "README.md", "trainer_state.json", "*_results.json", "merged",
)  # fmt: skip
"""What saving a model, a state or metrics may write; other files that change meanwhile, such as a log, are not ours."""
TRAINERS_OWN = "training_args.bin"
"""Only trainers write it: where no record is, of an older version or of TRL, it says that a model is a run's."""


_locks: set[int] = set()
"""Open files that are locked. A forked process has them too, and would hold them when this one is gone."""


def _let_go() -> None:
    while _locks:
        os.close(_locks.pop())


if fcntl is not None:
    os.register_at_fork(after_in_child=_let_go)


class OutputFolder:
    """A trainer's output folder. `hold` it while training; `begin` a new run there, or `go_on` with the one it has.

    Of several processes the main one alone takes notes of what is written.
    """

    def __init__(self, path: str | Path, *, main: bool = True) -> None:
        self.path, self.main = Path(path), main
        self.written: set[str] = set()  # names that this run has written, beside checkpoints and store
        self.run = uuid.uuid4().hex  # by which the folder's record is known to be ours
        self._begun = False

    # -- one at a time

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Meanwhile no other run trains into it. The lock ends with the process, however that ends."""
        lock = self._lock()
        try:
            yield
        finally:
            if lock is not None:
                _locks.discard(lock)
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing it is not enough where a process was forked meanwhile
                os.close(lock)

    def _lock(self) -> int | None:
        if fcntl is None:
            return None
        file = self.path / LOCK_FILE
        while True:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            except OSError as error:  # a run that saves nothing may train where nothing can be written
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
            except OSError as error:  # some network file systems have no locks
                os.close(fd)
                logger.warning("%s cannot be locked against a second run: %s", self.path, error)
                return None
            os.close(fd)  # somebody removed the file in between

    # -- which run's it is

    def begin(self, *, keep: Iterable[str | Path] = (), delete: bool = False) -> None:
        """A run starts from nothing. What an earlier one left is moved, or deleted if that was asked for and it is sure
        to be that run's; what is at the paths to `keep` stays: the run itself is made from it."""
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
        """A run goes on with what it has here, after so many updates. Later checkpoints are of a branch that is left:
        the next restart must not take one of them for the newest."""
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
        """A checkpoint of this very folder that a run is made from would be rotated away, or written over, by it."""
        for path in map(Path, keep):
            inside = path.resolve().parent == self.path.resolve()
            if inside and path.is_dir() and re.fullmatch(r"checkpoint-\d+", path.name):
                raise ConfigError(
                    f"this run is made from {path}, and its own checkpoints would take that place: give it another "
                    "output_dir, or resume_from_checkpoint to go on with the run that wrote it"
                )

    def _left_by_others(self, keep: list[Path]) -> list[Path]:
        """In the order of their names; nothing that this trainer wrote before its training began."""
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

    # -- what is written

    @contextmanager
    def writing(self, where: str | Path | None = None) -> Iterator[None]:
        """Note what is saved into it meanwhile."""
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
        """What this run has written, and what is still there of an earlier one's."""
        if not self.main:
            return
        names = self.written | {name for name in _recorded(self.path) if (self.path / name).exists()}
        new = self.path / f"{RECORD_FILE}.new"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps({"run": self.run, "written": sorted(names)}, indent=1))
            new.replace(self.path / RECORD_FILE)
        except OSError as error:
            logger.warning("what this run has saved could not be written down in %s: %s", self.path, error)


def _taken(fd: int, file: Path) -> bool:
    """Take the lock, and say whose it is; False where the file is no longer the one that others would open."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        if os.fstat(fd).st_ino != file.stat().st_ino:
            return False
    except FileNotFoundError:
        return False
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps(holder).encode(), 0)
    return True


def _holder(fd: int) -> str:
    try:
        told = json.loads(os.pread(fd, 1000, 0))
        return f"process {told['pid']} on {told['host']}, since {told['since']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _recorded(folder: Path) -> list[str]:
    """What the last run has written there, where it wrote that down."""
    names = _record(folder).get("written")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _record(folder: Path) -> dict[str, Any]:
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
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # gone in between
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
