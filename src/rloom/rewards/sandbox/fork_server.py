"""Sandboxes for one program after another: Python is started once, in a sandbox, and forks one for each of them.

Starting bubblewrap and Python is most of what a short program costs. A nursery has done so before; what it forks has
namespaces, files, limits and a filter of its own, so that a program is as far from the nursery and from other programs
as with bubblewrap alone (see `inside/nursery.py`). Where that cannot be made, every program gets bubblewrap.
"""

from __future__ import annotations

import array
import contextlib
import functools
import marshal
import os
import platform
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from rloom.errors import SandboxError
from rloom.printable import get_logger
from rloom.rewards.sandbox import seccomp
from rloom.rewards.sandbox.cgroups import Group
from rloom.rewards.sandbox.inside.wire import WireError, receive
from rloom.rewards.sandbox.sandbox import (
    ANY_VERSION,
    PROGRAM,
    ROLES,
    START_SECONDS,
    Limits,
    Sandboxed,
    TimeLeft,
    boot,
    command,
    content,
)

logger = get_logger(__name__)

MADE = b"made"  # as in inside/nursery.py
END_SECONDS = 1.0
PROOF = """
import os
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file)
said = [status[name].strip() for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")]
seen = [sorted(name for name in os.listdir("/proc") if name.isdigit()), os.listdir("/tmp"), os.listdir("/dev/shm")]
with open("/proc/sys/user/max_user_namespaces") as file:
    seen.append(file.read().strip())
held = []
for fd in os.listdir("/proc/self/fd"):
    try: held.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    except OSError: pass  # of the listing itself
held.sort()
"""
PROVEN = {
    "said": ["0" * 16] * 5 + ["1", "2"],
    "seen": [["1", "2"], [], [], "0"],
    "held": ["/dev/null"] * 5 + ["pipe"] * 2,
}
"""No capabilities, no new privileges, a filter; two processes, empty folders, no namespaces within; of descriptors
those that it was given (two pipes, and what it is asked) and four that lead nowhere."""


class Nursery:
    """A sandbox that forks others. It is for one thread, and ends with it at the latest (--die-with-parent)."""

    def __init__(self, site_packages: Sequence[str] = ()) -> None:
        filter_program = seccomp.program()
        if filter_program is None or not hasattr(signal, "pidfd_send_signal"):
            raise SandboxError("there is no filter of system calls for this machine, or no handle of processes")
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(START_SECONDS)
        payload = {"filter": filter_program.hex(), "clone": seccomp.CLONE[platform.machine()]}
        line = command(Limits(), site_packages, nested=True)
        with theirs:
            self.process = boot("nursery", payload, line, fds={"control_fd": theirs.fileno()})
        self.close = weakref.finalize(self, _end, self.process, self.control)
        self.failed = False
        try:
            self._hear()
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """Whether it is over, or could not do what it is for."""
        return self.failed or self.process.poll() is not None

    def fork(
        self,
        role: str,
        payload: dict[str, Any],
        limits: Limits,
        *,
        fds: dict[str, int],
        bound: Group | None = None,
    ) -> Forked:
        """A sandbox with a role in it; `OSError` or [`SandboxError`] where there can be none."""
        modules = [name for name in ROLES[role] if name not in PROGRAM]
        data = content(modules, payload, main=ROLES[role][-1])
        read, write = os.pipe()
        try:
            forked = self._bounded({**fds, "content_fd": read}, limits, bound)
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        with contextlib.suppress(BrokenPipeError), open(write, "wb") as file:  # who waits for it sees that it is gone
            file.write(data)
        return forked

    def _bounded(self, fds: dict[str, int], limits: Limits, bound: Group | None) -> Forked:
        """The first process of a sandbox, in its control group before it starts the program's."""
        read, write = os.pipe()
        try:
            forked = self._forked({**fds, "go_fd": read}, limits)
            try:
                if bound is not None:
                    bound.processes.write_text(str(forked.pid))
            except OSError:
                forked.kill()
                forked.wait()
                raise
            return forked
        finally:
            os.close(read)
            os.close(write)  # which it waits for

    def _forked(self, fds: dict[str, int], limits: Limits) -> Forked:
        request = {"names": list(fds), "disk": limits.disk_mb * 2**20, "limits": limits.inside()}
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))
        self.failed = True  # until its answer was heard: who is interrupted before leaves it to the next request
        self.control.sendmsg([marshal.dumps(request, ANY_VERSION)], [rights])
        forked = Forked(*self._hear())
        self.failed = False
        return forked

    def _hear(self) -> list[int]:
        """Its answer: the descriptors that came with it."""
        said, fds, _, _ = socket.recv_fds(self.control, 1024, 1)
        if said != MADE:
            raise SandboxError(f"no sandbox can be forked here: {said.decode(errors='replace') or 'it ended'}")
        return fds


class Forked:
    """What a nursery made: the first process of a tree, by a handle that never means another one."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @property
    def pid(self) -> int:
        """Its number, as this process sees it."""
        with open(f"/proc/self/fdinfo/{self.handle}") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))

    def kill(self) -> None:
        """End it, and with it every process of its tree: the kernel sees to that."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Until all of the tree is gone."""
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        poll.poll(seconds * 1000)
        os.close(self.handle)

    def poll(self) -> int | None:
        """Not known: it is another's child."""
        return None


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Hang up, so that it ends by itself. Killed, bubblewrap leaves its child to process 1, which in a container may be
    the trainer, and that looks after no children but its own."""
    with contextlib.suppress(OSError):  # it is gone already
        control.shutdown(socket.SHUT_RDWR)  # also where a process that was forked of this one holds it
    control.close()
    try:
        if process.poll() is None:
            Forked(os.pidfd_open(process.pid)).wait(END_SECONDS)  # `process.wait` would look every few milliseconds
    finally:
        process.kill()
        process.wait()


# -- which of them a thread uses


class _Here(threading.local):
    """Of each thread, by the packages that programs see; None in threads that keep none."""

    kept: dict[tuple[str, ...], Nursery] | None = None


_here = _Here()


def keep() -> None:
    """Have this thread fork sandboxes from now on. What they are forked of ends with the thread."""
    if _here.kept is None:
        _here.kept = {}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Have this thread fork sandboxes for a while."""
    if _here.kept is not None:
        yield
        return
    nurseries: dict[tuple[str, ...], Nursery] = {}
    _here.kept = nurseries
    try:
        yield
    finally:
        _here.kept = None
        for nursery in nurseries.values():
            nursery.close()


def sandboxed(
    role: str, payload: dict[str, Any], limits: Limits, *, fds: dict[str, int], site_packages: Sequence[str] = ()
) -> Sandboxed:
    """A sandbox with a role in it: forked where this thread does so and it can be, else by bubblewrap."""
    nursery = _nursery(tuple(site_packages))
    if nursery is not None and not nursery.lost:
        try:
            return Sandboxed(role, payload, limits, fds=fds, fork=nursery.fork)
        except (OSError, SandboxError) as error:  # it was killed, say, or there are too many namespaces
            logger.info("a sandbox could not be forked, and is made anew: %s", error)
            nursery.failed = True  # not closed yet: another sandbox of it may be in use
    return Sandboxed(role, payload, limits, fds=fds, site_packages=site_packages)


def _nursery(packages: tuple[str, ...]) -> Nursery | None:
    if _here.kept is None or not works():
        return None
    if packages not in _here.kept:
        try:
            _here.kept[packages] = Nursery(packages)
        except (OSError, SandboxError) as error:
            logger.info("what sandboxes are forked of does not start: %s", error)
            return None
    return _here.kept[packages]


def lost() -> bool:
    """Whether what this thread forked sandboxes of came to an end, and they with it. The next one forks of another."""
    gone = [packages for packages, nursery in (_here.kept or {}).items() if nursery.lost]
    for packages in gone:
        assert _here.kept is not None
        _here.kept.pop(packages).close()
    return bool(gone)


@functools.cache
def works() -> bool:
    """Whether sandboxes can be forked here, found out once: by a program that says what it sees of its own."""
    try:
        said = _proof()
    except (OSError, SandboxError, WireError) as error:
        logger.info("sandboxes cannot be forked here, so each is started by bubblewrap: %s", error)
        return False
    if said != PROVEN:
        logger.warning("forked sandboxes are not what they should be, so each is started by bubblewrap: %s", said)
    return bool(said == PROVEN)


def _proof() -> Any:
    nursery = Nursery()
    read, write = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)  # is what it is asked
    fds = {"write_fd": write, "read_fd": nothing}
    try:
        with Sandboxed("program", {"program": PROOF}, Limits(), fds=fds, fork=nursery.fork):
            os.close(fds.pop("write_fd"))
            names = receive(read, TimeLeft(START_SECONDS).read).get("names", {})
            return {name: names.get(name) for name in PROVEN}
    finally:
        for fd in (read, *fds.values()):
            os.close(fd)
        nursery.close()
