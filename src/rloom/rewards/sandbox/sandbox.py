"""Processes that can do no harm: an unprivileged user, no network, no host files, limits on the rest.

A sandbox is started by bubblewrap, or forked of one that has started already (fork_server.py).
"""

from __future__ import annotations

import functools
import json
import marshal
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloom.errors import SandboxError
from rloom.rewards.pipes import Deadline
from rloom.rewards.sandbox.bubblewrap import ENVIRONMENT, command, filter_fds, interpreter
from rloom.rewards.sandbox.cgroups import JOIN, ControlGroup, new_group
from rloom.rewards.sandbox.limits import Limits

if TYPE_CHECKING:
    from rloom.rewards.sandbox.fork_server import ForkedProcess

INSIDE = Path(__file__).with_name("inside")
START_SECONDS = 60.0
BOOTSTRAP = """
import marshal, sys
data = marshal.loads(sys.stdin.buffer.read())
Module = type(sys)
package = "rloom.rewards.sandbox.inside"
for name in ("rloom", "rloom.rewards", "rloom.rewards.sandbox", package):
    sys.modules[name] = Module(name)
for name, code in data["modules"]:
    module = sys.modules[f"{package}.{name}"] = Module(f"{package}.{name}")
    exec(marshal.loads(code), module.__dict__)
module.main(data["payload"])
"""
COMPILE = """
import marshal, sys
sys.stdout.buffer.write(marshal.dumps(compile(sys.stdin.buffer.read(), sys.argv[1], "exec")))
"""
# When memory runs out, the kernel ends what is in a sandbox before anything else (oom_score_adj). All that comes of a
# process inherits that; /proc is read-only inside, so that no program can take it back.
START = f"""
exec 2>/dev/null
echo 1000 >/proc/self/oom_score_adj
[ -z "$1" ] || {JOIN} || exit 1
shift
exec "$@"
"""
# The version of marshal's format that every Python reads: the one in the sandbox may not be the one out here.
ANY_VERSION = 2
PROGRAM = ("light_json", "wire", "remote", "program")
# What runs in a sandbox, and the modules of ours that it needs there; the last has its `main`.
ROLES = {
    "program": PROGRAM,
    "tests": (*PROGRAM, "harness"),
    "tests with pytest": (*PROGRAM, "like_pytest", "harness"),
    "fork server": (*PROGRAM, "fork_server"),
}


class Sandbox(AbstractContextManager["Sandbox"]):
    """One sandbox with a role ("program", "tests") in it, ready to begin. Leaving the context kills all of it.

    `fork` makes it of one that has started already (see fork_server.py); without it bubblewrap starts a new one.
    """

    def __init__(
        self,
        role: str,
        payload: dict[str, Any],
        limits: Limits,
        *,
        fds: dict[str, int],
        site_packages: Sequence[str] = (),
        fork: Callable[..., ForkedProcess] | None = None,
    ) -> None:
        self.role = role
        self.group = new_group(limits.total_bytes)
        self.ready_fd, ready = os.pipe()
        # With inputs there is one more process of ours: each input has one of its own.
        ours = 3 if "inputs" in payload else 2
        payload, fds = {**payload, "limits": limits.as_rlimits(ours)}, {**fds, "ready_fd": ready}
        self.process: subprocess.Popen[bytes] | ForkedProcess
        try:
            if fork is not None:
                self.process = fork(role, payload, limits, fds=fds, group=self.group)
            else:
                self.process = _by_bubblewrap(role, payload, limits, fds, site_packages, self.group)
        except BaseException:
            self._clean_up()
            raise
        finally:
            os.close(ready)

    def wait_ready(self) -> None:
        """Wait until it is about to run what it was given: what starting takes is not the program's time."""
        try:
            began = Deadline(START_SECONDS).read(self.ready_fd, 1) == b"r"
        except TimeoutError:
            began = False
        if not began:
            raise SandboxError(f"the sandbox for the {self.role} did not start (exit code {self.process.poll()})")

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait()
        self._clean_up()

    def _clean_up(self) -> None:
        os.close(self.ready_fd)
        if self.group is not None:
            self.group.close()


def _by_bubblewrap(
    role: str,
    payload: dict[str, Any],
    limits: Limits,
    fds: dict[str, int],
    site_packages: Sequence[str],
    group: ControlGroup | None,
) -> subprocess.Popen[bytes]:
    """A new sandbox. Killing bubblewrap kills everything inside (--die-with-parent)."""
    with filter_fds() as more_fds:
        line = command(limits, site_packages, filter_fds=more_fds)
        return boot(role, payload, line, fds=fds, more_fds=more_fds, group=group)


def boot(
    role: str,
    payload: dict[str, Any],
    line: Sequence[str],
    *,
    fds: dict[str, int],
    more_fds: Sequence[int] = (),
    group: ControlGroup | None = None,
) -> subprocess.Popen[bytes]:
    """Start a role by bubblewrap's command line. The role gets `fds` by their names; `more_fds` are for bubblewrap."""
    data = content(ROLES[role], {**payload, **fds})
    process = subprocess.Popen(
        ["sh", "-c", START, "sh", str(group.processes) if group else "", *line, "-c", BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(*fds.values(), *more_fds),
        cwd="/",
        # Ctrl-C is for the run, which finishes its update, and not for what it waits for.
        start_new_session=True,
        # bubblewrap clears what the program gets, and is the first process that the program sees in /proc itself.
        env=ENVIRONMENT,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(data)
        process.stdin.close()
    except BrokenPipeError:
        # It is gone already. Who waits for it will say so.
        pass
    return process


def content(modules: Sequence[str], payload: dict[str, Any], **more: Any) -> bytes:
    """What is read inside: modules of ours, and the payload of their `main`."""
    # Through JSON first: marshal would take numpy's strings for bytes.
    payload = json.loads(json.dumps(payload))
    code = [(name, _compiled(name)) for name in modules]
    return marshal.dumps({"modules": code, "payload": payload, **more}, ANY_VERSION)


@functools.cache
def _compiled(name: str) -> bytes:
    """A module of ours, compiled once by the interpreter that sandboxes use, and not anew in each of them."""
    source = (INSIDE / f"{name}.py").read_bytes()
    line = [interpreter()[0], "-I", "-S", "-B", "-c", COMPILE, f"{name}.py"]
    result = subprocess.run(line, input=source, capture_output=True, timeout=60)
    if result.returncode != 0:
        raise SandboxError(f"the sandbox's Python does not run: {result.stderr.decode(errors='replace')[-300:]}")
    return result.stdout
