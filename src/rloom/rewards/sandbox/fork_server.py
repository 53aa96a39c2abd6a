"""A fork server: Python is started once, in a sandbox, and forks a sandbox of its own for each program.

Starting bubblewrap and Python is most of what a short program costs. A fork server has done so before. What it forks
has namespaces, files, limits and a filter of its own, so that a program is as far from the fork server and from other
programs as with bubblewrap alone (see `inside/fork_server.py`). Where that cannot be made, every program gets
bubblewrap.
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
from rloom.rewards.pipes import Deadline, close, pipes
from rloom.rewards.sandbox import seccomp
from rloom.rewards.sandbox.bubblewrap import command
from rloom.rewards.sandbox.cgroups import ControlGroup
from rloom.rewards.sandbox.inside.wire import WireError, receive
from rloom.rewards.sandbox.limits import Limits
from rloom.rewards.sandbox.sandbox import ANY_VERSION, PROGRAM, ROLES, START_SECONDS, Sandbox, boot, content

logger = get_logger(__name__)

# As in inside/fork_server.py.
MADE = b"made"
END_SECONDS = 1.0
# A program that says what it sees of its own sandbox.
PROBE = """
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
# No capabilities, no new privileges, a filter; two processes, empty folders, no namespaces within; of descriptors those
# that it was given (two pipes, and what it is asked) and four that lead nowhere.
EXPECTED = {
    "said": ["0" * 16] * 5 + ["1", "2"],
    "seen": [["1", "2"], [], [], "0"],
    "held": ["/dev/null"] * 5 + ["pipe"] * 2,
}


class ForkServer:
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
            self.process = boot("fork server", payload, line, fds={"control_fd": theirs.fileno()})
        self.close = weakref.finalize(self, _end, self.process, self.control)
        self.failed = False
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    @property
    def lost(self) -> bool:
        """Whether it has ended, or could not do what it is for."""
        return self.failed or self.process.poll() is not None

    def fork(
        self,
        role: str,
        payload: dict[str, Any],
        limits: Limits,
        *,
        fds: dict[str, int],
        group: ControlGroup | None = None,
    ) -> ForkedProcess:
        """A sandbox with a role in it; `OSError` or [`SandboxError`] where there can be none."""
        modules = [name for name in ROLES[role] if name not in PROGRAM]
        data = content(modules, payload, main=ROLES[role][-1])
        with pipes("content", "go") as ends:
            theirs = {**fds, "content_fd": ends["content_read"], "go_fd": ends["go_read"]}
            forked = self._first_process(theirs, limits)
            try:
                if group is not None:
                    group.processes.write_text(str(forked.pid))
            except OSError:
                forked.kill()
                forked.wait()
                raise
            # It waits for this: it must be in its control group before it starts the program.
            close(ends, "go_write", "content_read")
            # Where the process is gone already, who waits for it will see that.
            with contextlib.suppress(BrokenPipeError), open(ends.pop("content_write"), "wb") as file:
                file.write(data)
        return forked

    def _first_process(self, fds: dict[str, int], limits: Limits) -> ForkedProcess:
        """Have the first process of a sandbox made."""
        request = {"names": list(fds), "disk": limits.disk_mb * 2**20, "limits": limits.as_rlimits()}
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds.values()))
        # Until the reply has come: it would be taken for the reply to the next request.
        self.failed = True
        self.control.sendmsg([marshal.dumps(request, ANY_VERSION)], [rights])
        forked = ForkedProcess(*self._receive())
        self.failed = False
        return forked

    def _receive(self) -> list[int]:
        """The descriptors that come with its reply."""
        said, fds, _, _ = socket.recv_fds(self.control, 1024, 1)
        if said != MADE:
            raise SandboxError(f"no sandbox can be forked here: {said.decode(errors='replace') or 'it ended'}")
        return fds


class ForkedProcess:
    """The first process of a forked sandbox, by a handle (pidfd) that never means another process."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    @property
    def pid(self) -> int:
        """Its number, as this process sees it."""
        with open(f"/proc/self/fdinfo/{self.handle}") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))

    def kill(self) -> None:
        """End it. The kernel ends every process of its tree with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait until the whole tree is gone."""
        poll = select.poll()
        poll.register(self.handle, select.POLLIN)
        poll.poll(seconds * 1000)
        os.close(self.handle)

    def poll(self) -> int | None:
        """Its exit code, which is not known: it is another process's child."""
        return None


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Hang up, so that a fork server ends by itself. Killed, bubblewrap leaves its child to process 1, which in a
    container may be the trainer, and that looks after no children but its own."""
    # It may be gone already. `shutdown` reaches it also where a process that was forked of this one holds the socket.
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)
    control.close()
    try:
        if process.poll() is None:
            # `process.wait` would look every few milliseconds.
            ForkedProcess(os.pidfd_open(process.pid)).wait(END_SECONDS)
    finally:
        process.kill()
        process.wait()


# -- which of them a thread uses


class _ThreadLocal(threading.local):
    """The fork servers of a thread, by the packages that programs see; None in threads that use none."""

    servers: dict[tuple[str, ...], ForkServer] | None = None


_local = _ThreadLocal()


def use_fork_servers() -> None:
    """Have this thread fork sandboxes from now on. Its fork servers end with the thread."""
    if _local.servers is None:
        _local.servers = {}


@contextlib.contextmanager
def fork_servers() -> Iterator[None]:
    """Have this thread fork sandboxes within the context, where it does not do so anyway."""
    if _local.servers is not None:
        yield
        return
    servers: dict[tuple[str, ...], ForkServer] = {}
    _local.servers = servers
    try:
        yield
    finally:
        _local.servers = None
        for server in servers.values():
            server.close()


def start_sandbox(
    role: str, payload: dict[str, Any], limits: Limits, *, fds: dict[str, int], site_packages: Sequence[str] = ()
) -> Sandbox:
    """A sandbox with a role in it: forked where this thread does so and it can be, else by bubblewrap."""
    server = _server_of_thread(tuple(site_packages))
    if server is not None and not server.lost:
        try:
            return Sandbox(role, payload, limits, fds=fds, fork=server.fork)
        except (OSError, SandboxError) as error:
            # The fork server was killed, say, or there are too many namespaces. It is not closed yet: another sandbox
            # of it may be in use.
            logger.info("a sandbox could not be forked, and bubblewrap starts one: %s", error)
            server.failed = True
    return Sandbox(role, payload, limits, fds=fds, site_packages=site_packages)


def _server_of_thread(packages: tuple[str, ...]) -> ForkServer | None:
    if _local.servers is None or not works():
        return None
    if packages not in _local.servers:
        try:
            _local.servers[packages] = ForkServer(packages)
        except (OSError, SandboxError) as error:
            logger.info("the fork server of sandboxes does not start: %s", error)
            return None
    return _local.servers[packages]


def close_lost() -> bool:
    """Close the fork servers of this thread that have ended, and their sandboxes with them; whether there were any.
    The next sandbox is forked of a new one."""
    servers = _local.servers or {}
    lost = [packages for packages, server in servers.items() if server.lost]
    for packages in lost:
        servers.pop(packages).close()
    return bool(lost)


@functools.cache
def works() -> bool:
    """Whether sandboxes can be forked here, found out once: by a program that says what it sees of its own."""
    try:
        found = _probe()
    except (OSError, SandboxError, WireError) as error:
        logger.info("sandboxes cannot be forked here, so each is started by bubblewrap: %s", error)
        return False
    if found != EXPECTED:
        logger.warning("forked sandboxes are not what they should be, so each is started by bubblewrap: %s", found)
    return found == EXPECTED


def _probe() -> dict[str, Any]:
    server = ForkServer()
    try:
        # The probe is asked nothing, so what it reads requests from is /dev/null.
        with pipes("answer") as ends, open(os.devnull) as nothing:
            fds = {"write_fd": ends["answer_write"], "read_fd": nothing.fileno()}
            with Sandbox("program", {"program": PROBE}, Limits(), fds=fds, fork=server.fork):
                close(ends, "answer_write")
                names = receive(ends["answer_read"], Deadline(START_SECONDS).read).get("names", {})
                return {name: names.get(name) for name in EXPECTED}
    finally:
        server.close()
