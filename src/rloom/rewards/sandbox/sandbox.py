"""Processes that can do no harm: bubblewrap, an unprivileged user, no network, no host files, limits on the rest.

What is inside sees a read-only /usr, a small /tmp that vanishes with it, and itself. Where bubblewrap is missing,
nothing is run: there is no way around it.
"""

from __future__ import annotations

import functools
import json
import marshal
import math
import os
import platform
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rloom.errors import SandboxError
from rloom.printable import get_logger
from rloom.rewards.sandbox import seccomp
from rloom.rewards.sandbox.cgroups import JOIN, Group, group
from rloom.rewards.sandbox.process_tree import look

logger = get_logger(__name__)

INSIDE = Path(__file__).with_name("inside")
NOBODY = 65534
ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
"""Of what makes a sandbox, whose first process a program can look at: nothing of the trainer's."""
COVERED = ("/tmp", "/dev", "/proc")
"""Folders that each sandbox has of its own, so that nothing of the host is seen in them."""
START_SECONDS = 60.0
OVERHEAD_MB = 64
LOOSE = 5
"""Times its limit, what a program may take by the clock where cores are busy."""
WORTH_WAITING = 0.005
LOOK_SECONDS = 0.05
"""How often it is looked at what a program that takes its time is doing."""
BOOTSTRAP = """
import marshal, sys
data = marshal.loads(sys.stdin.buffer.read())
Module = type(sys)
for name in ("rloom", "rloom.rewards", "rloom.rewards.sandbox", "rloom.rewards.sandbox.inside"):
    sys.modules[name] = Module(name)
for name, code in data["modules"]:
    module = sys.modules["rloom.rewards.sandbox.inside." + name] = Module("rloom.rewards.sandbox.inside." + name)
    exec(marshal.loads(code), module.__dict__)
module.main(data["payload"])
"""
COMPILE = """
import marshal, sys
sys.stdout.buffer.write(marshal.dumps(compile(sys.stdin.buffer.read(), sys.argv[1], "exec")))
"""
START = f"""
exec 2>/dev/null
echo 1000 >/proc/self/oom_score_adj
[ -z "$1" ] || {JOIN} || exit 1
shift
exec "$@"
"""
"""When memory runs out, the kernel ends what is in a sandbox before anything else. All that comes of a process inherits
that; /proc is read-only inside, so that no program can take it back."""
ANY_VERSION = 2
"""Of marshal's format, as every Python reads it: the one in the sandbox may not be the one out here."""
DEVICES = (
    "--dir", "/dev",
    *(x for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom") for x in ("--dev-bind", path, path)),
    "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin",
    "--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr",
)  # fmt: skip
"""What a program may want of /dev: bubblewrap's own has terminals too, and takes a fifth of the whole start."""
PROGRAM = ("light_json", "wire", "program")
ROLES = {
    "program": PROGRAM,
    "tests": (*PROGRAM, "harness"),
    "tests with pytest": (*PROGRAM, "like_pytest", "harness"),
    "nursery": (*PROGRAM, "fork_server"),
}
"""What runs in a sandbox, and the modules of ours that it needs there; the last has its `main`."""
MISSING = (
    "running model-written code needs bubblewrap, which was not found. Install it (Debian, Ubuntu: `apt-get install "
    "bubblewrap`; Fedora: `dnf install bubblewrap`; Arch: `pacman -S bubblewrap`). Nothing is run without it."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a sandbox may use. Memory is per process, and for all of them where there are control groups; `processes`
    counts threads too."""

    seconds: float = 5.0
    memory_mb: int = 512
    disk_mb: int = 16
    processes: int = 4
    output_kb: int = 1024

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def total_bytes(self) -> int:
        """Of memory, for the sandbox as a whole: /tmp is memory too, and the kernel has some for each process."""
        return (self.memory_mb + self.disk_mb + OVERHEAD_MB) * 2**20

    def inside(self, ours: int = 2) -> dict[str, int]:
        """As the limits that a process sets itself before it runs what it was given. Of the processes, some are `ours`:
        the sandbox's first, and the one that runs the program or waits for it."""
        return {
            "RLIMIT_AS": self.memory_mb * 2**20,
            "RLIMIT_CPU": math.ceil(self.seconds) + 1,  # Python has taken some of the first before
            "RLIMIT_FSIZE": self.disk_mb * 2**20,
            "RLIMIT_NPROC": self.processes + ours,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
            "RLIMIT_SIGPENDING": 64,  # and timers: the kernel counts those of all that a user runs
        }


@functools.cache
def check_sandbox() -> None:
    """Find out once whether sandboxes work here; a [`SandboxError`] says what is missing, and how to get it."""
    if sys.platform != "linux":
        raise SandboxError(f"model-written code runs in bubblewrap, which needs Linux; this is {sys.platform}")
    if shutil.which("bwrap") is None:
        raise SandboxError(MISSING)
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        raise SandboxError("as root, sandboxes are started through `setpriv` (package util-linux), which was not found")
    with seccomp_fd() as fd:
        line = [*command(Limits(), filter_fd=fd), "-c", "print('inside')"]
        result = subprocess.run(
            line, capture_output=True, text=True, timeout=60, pass_fds=[f for f in [fd] if f >= 0], env=ENVIRONMENT
        )
    if result.stdout != "inside\n":
        raise SandboxError(
            f"bubblewrap is there but cannot make a sandbox: {result.stderr.strip()[-300:] or 'no output'}. In a "
            "container, user namespaces must be allowed (Docker: --security-opt seccomp=unconfined, or a profile that "
            "allows them; hosts: sysctl kernel.unprivileged_userns_clone=1, and on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    if seccomp.program() is None:
        logger.warning(
            "there is no filter of system calls for %s (only for %s): programs run in bubblewrap alone, whose limits "
            "some system calls lead around. See docs/rewards.md",
            *(platform.machine(), " and ".join(seccomp.ALLOWED)),
        )


def tool(name: str) -> str:
    """Where a program of the host's is, by the trainer's PATH, which sandboxes are started without."""
    return shutil.which(name) or name


@functools.cache
def knows_disable_userns() -> bool:
    """Whether this bubblewrap (0.8 and later) can forbid user namespaces inside, with all that they allow."""
    help_text = subprocess.run([tool("bwrap"), "--help"], capture_output=True, text=True, timeout=60)
    return "--disable-userns" in help_text.stdout + help_text.stderr


@contextmanager
def seccomp_fd() -> Iterator[int]:
    """A descriptor that bubblewrap can read the filter of system calls from; -1 on machines that have none."""
    filter_program = seccomp.program()
    if filter_program is None:
        yield -1
        return
    read, write = os.pipe()
    try:
        os.write(write, filter_program)  # less than a pipe holds
        os.close(write)
        yield read
    finally:
        os.close(read)


@functools.cache
def interpreter() -> tuple[str, str | None]:
    """A Python that the sandbox's user can read, and the folder to show in the sandbox for it (None: it is in /usr)."""
    base = Path(sys.base_prefix).resolve()
    own = base / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if own.exists() and base.is_relative_to("/usr"):
        return str(own), None
    if own.exists() and (os.geteuid() != 0 or _world_readable(base)):
        return str(own), str(base)
    for other in ("/usr/bin/python3", "/usr/local/bin/python3"):  # ours is in root's home, say
        if Path(other).resolve().is_relative_to("/usr") and os.access(other, os.X_OK):
            return other, None
    raise SandboxError(
        f"the sandbox's user cannot read this Python ({own}), and there is no other in /usr: install one there "
        "(Debian: `apt-get install python3`), or make that folder readable for everybody"
    )


def check_site_packages(folders: Sequence[str]) -> None:
    """Whether the sandbox's user can read the folders that programs should see."""
    for folder in map(Path, [folders] if isinstance(folders, str) else folders):
        if not folder.is_dir():
            raise ValueError(f"site_packages names folders of installed packages; {str(folder)!r} is none")
        if any(Path(os.path.abspath(folder)).is_relative_to(covered) for covered in COVERED):
            raise SandboxError(
                f"{str(folder)!r} of site_packages is not seen in sandboxes, which have a {' and a '.join(COVERED)} of "
                "their own: install the packages elsewhere"
            )
        if os.geteuid() == 0 and not _world_readable(folder.resolve()):
            raise SandboxError(
                f"the sandbox's user, who is not root, cannot read {str(folder)!r} of site_packages: make that folder "
                "and those above it readable for everybody, or install the packages elsewhere"
            )


def _world_readable(folder: Path) -> bool:
    return all(part.stat().st_mode & 0o005 == 0o005 for part in (folder, *folder.parents))


def command(
    limits: Limits, site_packages: Sequence[str] = (), *, filter_fd: int = -1, nested: bool = False
) -> list[str]:
    """bubblewrap's command line, up to and including the interpreter. `filter_fd` is where it reads its filter; where
    further sandboxes are `nested` in this one, it must be able to make namespaces, and runs no code but ours: as the
    first process, since bubblewrap waits for that before it ends itself, and for no other."""
    python, prefix = interpreter()
    unprivileged = []
    if os.geteuid() == 0:  # limits on processes do not bind root
        unprivileged = [tool("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    links = [
        (f"/{name}", os.readlink(f"/{name}")) for name in ("bin", "lib", "lib64", "sbin") if os.path.islink(f"/{name}")
    ]
    shown = [f"/{name}" for name in ("lib", "lib64") if os.path.isdir(f"/{name}") and not os.path.islink(f"/{name}")]
    shown += [path for path in (prefix, *site_packages) if path]
    return [
        *unprivileged, tool("bwrap"), "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL",
        "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--clearenv",
        "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8",
        "--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1",
        *(["--as-pid-1"] if nested else ["--disable-userns"] if knows_disable_userns() else []),
        *(["--seccomp", str(filter_fd)] if filter_fd >= 0 else []),
        *(["--setenv", "PYTHONPATH", ":".join(site_packages)] if site_packages else []),
        "--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        *(part for name, target in links for part in ("--symlink", target, name)),
        *(part for path in shown for part in ("--ro-bind", path, path)),
        "--proc", "/proc", *DEVICES, "--size", "65536", "--tmpfs", "/dev/shm",
        "--size", str(limits.disk_mb * 2**20), "--tmpfs", "/tmp",
        *([] if nested else ["--remount-ro", "/proc"]), "--remount-ro", "/", "--chdir", "/tmp",
        python, *(["-s", "-P"] if site_packages and sys.version_info >= (3, 11) else ["-I"]), "-S", "-B",
    ]  # fmt: skip


class Started(Protocol):
    """What was started in a sandbox: killed, it takes all that is inside with it."""

    @property
    def pid(self) -> int:
        """Its number, as this process sees it."""

    def kill(self) -> None:
        """End it."""

    def wait(self) -> Any:
        """Until it is over."""

    def poll(self) -> int | None:
        """Its exit code, where there is one."""


def boot(
    role: str,
    payload: dict[str, Any],
    line: Sequence[str],
    *,
    fds: dict[str, int],
    more_fds: Sequence[int] = (),
    bound: Group | None = None,
) -> subprocess.Popen[bytes]:
    """Start a role by bubblewrap's command line. It gets `fds` by their names, `more_fds` are for bubblewrap."""
    data = content(ROLES[role], {**payload, **fds})
    process = subprocess.Popen(
        ["sh", "-c", START, "sh", str(bound.processes) if bound else "", *line, "-c", BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(*fds.values(), *more_fds),
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the run, which finishes its update, and not for what it waits for
        # bubblewrap clears what the program gets, and is the first process that the program sees in /proc itself.
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        process.stdin.close()
    except BrokenPipeError:  # it is gone already: who waits for it says so
        pass
    return process


def content(modules: Sequence[str], payload: dict[str, Any], **more: Any) -> bytes:
    """What is read inside: modules of ours, and what their `main` is given."""
    payload = json.loads(json.dumps(payload))  # marshal would take a text of numpy's for bytes
    code = [(name, _code(name)) for name in modules]
    return marshal.dumps({"modules": code, "payload": payload, **more}, ANY_VERSION)


class Sandboxed:
    """One sandbox with a role ("program", "tests") in it, ready to begin. Leaving the context kills all of it.

    `fork` makes it of one that has started already, where there is one (see nursery.py); else it is made anew.
    """

    def __init__(
        self,
        role: str,
        payload: dict[str, Any],
        limits: Limits,
        *,
        fds: dict[str, int],
        site_packages: Sequence[str] = (),
        fork: Callable[..., Started] | None = None,
    ) -> None:
        self.role = role
        self.bound = group(limits.total_bytes)
        self.ready_fd, ready = os.pipe()
        ours = 3 if "inputs" in payload else 2  # there each input has a process of its own
        payload, fds = {**payload, "limits": limits.inside(ours)}, {**fds, "ready_fd": ready}
        try:
            if fork is not None:
                self.process = fork(role, payload, limits, fds=fds, bound=self.bound)
            else:
                self.process = _anew(role, payload, limits, fds, site_packages, self.bound)
        except BaseException:
            self._put_away()
            raise
        finally:
            os.close(ready)

    def wait_ready(self) -> None:
        """Until it is about to run what it was given; what starting takes is not the program's time."""
        try:
            began = TimeLeft(START_SECONDS).read(self.ready_fd, 1) == b"r"
        except TimeoutError:
            began = False
        if not began:
            raise SandboxError(f"the sandbox for the {self.role} did not start (exit code {self.process.poll()})")

    def __enter__(self) -> Sandboxed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        self._put_away()

    def _put_away(self) -> None:
        os.close(self.ready_fd)
        if self.bound is not None:
            self.bound.close()


def _anew(
    role: str,
    payload: dict[str, Any],
    limits: Limits,
    fds: dict[str, int],
    site_packages: Sequence[str],
    bound: Group | None,
) -> Started:
    with seccomp_fd() as fd:
        line = command(limits, site_packages, filter_fd=fd)
        # --die-with-parent: killing bubblewrap kills everything inside
        return boot(role, payload, line, fds=fds, more_fds=[f for f in [fd] if f >= 0], bound=bound)


@functools.cache
def _code(name: str) -> bytes:
    """A module of ours, compiled once by the interpreter that sandboxes use, and not anew in each of them."""
    source = (INSIDE / f"{name}.py").read_bytes()
    line = [interpreter()[0], "-I", "-S", "-B", "-c", COMPILE, f"{name}.py"]
    result = subprocess.run(line, input=source, capture_output=True, timeout=60)
    if result.returncode != 0:
        raise SandboxError(f"the sandbox's Python does not run: {result.stderr.decode(errors='replace')[-300:]}")
    return result.stdout


class TimeLeft:
    """A deadline for what is read from and written to pipes whose other end cannot be trusted to go on."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def wait(self, fd: int, event: int) -> None:
        """Until a pipe can be read or written; `TimeoutError` when the time is over first."""
        if not _ready(fd, event, self.end - time.monotonic()):
            raise TimeoutError

    def read(self, fd: int, size: int) -> bytes:
        """Some bytes, at most `size`."""
        self.wait(fd, select.POLLIN)
        return os.read(fd, size)

    def write(self, fd: int, data: memoryview) -> int:
        """Write what the pipe takes; the descriptor must not block."""
        self.wait(fd, select.POLLOUT)
        return os.write(fd, data)


def _ready(fd: int, event: int, seconds: float) -> bool:
    """Whether a pipe can be read or written before some seconds are over."""
    poll = select.poll()  # select() knows no descriptors above 1023, which a training process may have
    poll.register(fd, event)
    return seconds > 0 and bool(poll.poll(seconds * 1000))


class CoreTime(TimeLeft):
    """A deadline for programs. For each second in which processes of the machine waited for a core, and one of the
    program's sandboxes was not asleep, there are `LOOSE` more, so that a busy machine fails no right program; up to
    `LOOSE` times the limit in all, and until its processes together have used the limit, and one second, of a core."""

    def __init__(self, seconds: float, *sandboxes: Sandboxed) -> None:
        super().__init__(seconds)
        self.seconds, self.sandboxes = seconds, sandboxes
        self.began = self.looked = time.monotonic()
        self.stalled, self.waited = stalled_seconds(), 0.0

    @property
    def over(self) -> bool:
        """Whether so many seconds have passed by the clock: what ends then met its limit on a core's time."""
        return time.monotonic() - self.began >= self.seconds

    def wait(self, fd: int, event: int) -> None:
        """Until a pipe can be read or written."""
        while not _ready(fd, event, min(self.end - time.monotonic(), LOOK_SECONDS)):
            if not self._extended():
                raise TimeoutError

    def _extended(self) -> bool:
        """Whether there is time left, with what the machine's other work has taken since this was asked last."""
        now, stalled = time.monotonic(), stalled_seconds()
        wants, used = self._look()
        if wants:
            known = stalled is not None and self.stalled is not None
            self.waited += stalled - self.stalled if known else _crowded(now - self.looked)  # type: ignore[operator]
        self.looked, self.stalled = now, stalled
        more = LOOSE * self.waited if used < self.seconds + 1 else 0.0
        self.end = self.began + min(self.seconds + more, LOOSE * self.seconds)
        return self.end > now + WORTH_WAITING

    def _look(self) -> tuple[bool, float]:
        return look(sandbox.process.pid for sandbox in self.sandboxes) if self.sandboxes else (True, 0.0)


def stalled_seconds() -> float | None:
    """Since the machine started: when processes waited for a core, on the mean of its cores. None where the kernel
    does not count it."""
    try:
        with open("/proc/pressure/cpu") as file:
            return int(file.readline().rsplit("total=", 1)[1]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


def _crowded(seconds: float) -> float:
    """The same of the last seconds, from what is known anywhere."""
    return seconds if os.getloadavg()[0] > (os.cpu_count() or 1) else 0.0
