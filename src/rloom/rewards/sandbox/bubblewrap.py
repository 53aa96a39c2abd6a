"""bubblewrap: whether sandboxes can be made here, and the command line that makes one.

What is inside sees a read-only /usr, a small /tmp that vanishes with it, and itself. Where bubblewrap is missing,
nothing is run: there is no way around it.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rloom.errors import SandboxError
from rloom.printable import get_logger
from rloom.rewards.pipes import close, pipes
from rloom.rewards.sandbox import seccomp
from rloom.rewards.sandbox.limits import Limits

logger = get_logger(__name__)

NOBODY = 65534
# For what makes a sandbox, whose first process a program can look at: it holds nothing of the trainer's environment.
ENVIRONMENT = {"PATH": "/usr/bin:/bin"}
# Folders that each sandbox has of its own, so that nothing of the host is seen in them.
COVERED = ("/tmp", "/dev", "/proc")
# What a program may want of /dev: bubblewrap's own has terminals too, and takes a fifth of the whole start.
DEVICES = (
    "--dir", "/dev",
    *(x for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom") for x in ("--dev-bind", path, path)),
    "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/proc/self/fd/0", "/dev/stdin",
    "--symlink", "/proc/self/fd/1", "/dev/stdout", "--symlink", "/proc/self/fd/2", "/dev/stderr",
)  # fmt: skip
MISSING = (
    "running model-written code needs bubblewrap, which was not found. Install it (Debian, Ubuntu: `apt-get install "
    "bubblewrap`; Fedora: `dnf install bubblewrap`; Arch: `pacman -S bubblewrap`). Nothing is run without it."
)


@functools.cache
def check_sandbox() -> None:
    """Find out once whether sandboxes work here; a [`SandboxError`] says what is missing, and how to get it."""
    if sys.platform != "linux":
        raise SandboxError(f"model-written code runs in bubblewrap, which needs Linux; this is {sys.platform}")
    if shutil.which("bwrap") is None:
        raise SandboxError(MISSING)
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        raise SandboxError("as root, sandboxes are started through `setpriv` (package util-linux), which was not found")
    result = run_python("print('inside')", seconds=60.0)
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


def run_python(
    code: str, *arguments: str, site_packages: Sequence[str] = (), seconds: float
) -> subprocess.CompletedProcess[str]:
    """Run Python code of our own in a sandbox, to its end."""
    with filter_fds() as fds:
        line = [*command(Limits(), site_packages, filter_fds=fds), "-c", code, *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=seconds, pass_fds=fds, env=ENVIRONMENT)


def tool(name: str) -> str:
    """The path of a host program, by the trainer's PATH, which sandboxes are started without."""
    return shutil.which(name) or name


@functools.cache
def knows_disable_userns() -> bool:
    """Whether this bubblewrap (0.8 and later) can forbid user namespaces inside, with all that they allow."""
    help_text = subprocess.run([tool("bwrap"), "--help"], capture_output=True, text=True, timeout=60)
    return "--disable-userns" in help_text.stdout + help_text.stderr


@contextmanager
def filter_fds() -> Iterator[tuple[int, ...]]:
    """The descriptor from which bubblewrap reads the filter of system calls; none on machines that have no filter."""
    filter_program = seccomp.program()
    if filter_program is None:
        yield ()
        return
    with pipes("filter") as fds:
        # The filter is smaller than what a pipe holds, so this does not block.
        os.write(fds["filter_write"], filter_program)
        close(fds, "filter_write")
        yield (fds["filter_read"],)


@functools.cache
def interpreter() -> tuple[str, str | None]:
    """A Python that the sandbox's user can read, and the folder to show in the sandbox for it (None: it is in /usr)."""
    base = Path(sys.base_prefix).resolve()
    own = base / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    if own.exists() and base.is_relative_to("/usr"):
        return str(own), None
    if own.exists() and (os.geteuid() != 0 or is_world_readable(base)):
        return str(own), str(base)
    # This Python is in root's home, say: another one must do.
    for other in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(other).resolve().is_relative_to("/usr") and os.access(other, os.X_OK):
            return other, None
    raise SandboxError(
        f"the sandbox's user cannot read this Python ({own}), and there is no other in /usr: install one there "
        "(Debian: `apt-get install python3`), or make that folder readable for everybody"
    )


def check_site_packages(folders: Sequence[str]) -> None:
    """Check that the sandbox's user can read the folders that programs should see."""
    for folder in map(Path, [folders] if isinstance(folders, str) else folders):
        if not folder.is_dir():
            raise ValueError(f"site_packages names folders of installed packages; {str(folder)!r} is none")
        if any(Path(os.path.abspath(folder)).is_relative_to(covered) for covered in COVERED):
            raise SandboxError(
                f"{str(folder)!r} of site_packages is not seen in sandboxes, which have a {' and a '.join(COVERED)} of "
                "their own: install the packages elsewhere"
            )
        if os.geteuid() == 0 and not is_world_readable(folder.resolve()):
            raise SandboxError(
                f"the sandbox's user, who is not root, cannot read {str(folder)!r} of site_packages: make that folder "
                "and those above it readable for everybody, or install the packages elsewhere"
            )


def is_world_readable(folder: Path) -> bool:
    """Whether every user can read a folder and those above it."""
    return all(part.stat().st_mode & 0o005 == 0o005 for part in (folder, *folder.parents))


def command(
    limits: Limits, site_packages: Sequence[str] = (), *, filter_fds: Sequence[int] = (), nested: bool = False
) -> list[str]:
    """bubblewrap's command line, up to and including the interpreter.

    `filter_fds` is where it reads its filter. A sandbox in which others are `nested` must be able to make namespaces,
    and runs no code but ours. Its Python is the first process: bubblewrap waits for that one alone before it ends.
    """
    python, prefix = interpreter()
    unprivileged = []
    # Limits on processes do not bind root.
    if os.geteuid() == 0:
        unprivileged = [tool("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    links = [f"/{name}" for name in ("bin", "lib", "lib64", "sbin") if os.path.islink(f"/{name}")]
    shown = [path for path in ("/lib", "/lib64") if os.path.isdir(path) and path not in links]
    shown += [path for path in (prefix, *site_packages) if path]
    return [
        *unprivileged, tool("bwrap"), "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL",
        "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--clearenv",
        "--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8",
        "--setenv", "OMP_NUM_THREADS", "1", "--setenv", "OPENBLAS_NUM_THREADS", "1",
        *(["--as-pid-1"] if nested else ["--disable-userns"] if knows_disable_userns() else []),
        *(part for fd in filter_fds for part in ("--seccomp", str(fd))),
        *(["--setenv", "PYTHONPATH", ":".join(site_packages)] if site_packages else []),
        "--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache",
        *(part for path in links for part in ("--symlink", os.readlink(path), path)),
        *(part for path in shown for part in ("--ro-bind", path, path)),
        "--proc", "/proc", *DEVICES, "--size", "65536", "--tmpfs", "/dev/shm",
        "--size", str(limits.disk_mb * 2**20), "--tmpfs", "/tmp",
        *([] if nested else ["--remount-ro", "/proc"]), "--remount-ro", "/", "--chdir", "/tmp",
        python, *(["-s", "-P"] if site_packages and sys.version_info >= (3, 11) else ["-I"]), "-S", "-B",
    ]  # fmt: skip
