"""Forks sandboxes: Python is started here once, and every program gets a copy of it in namespaces of its own.

This process is in a sandbox itself, and all that it ever holds is ours: what a program is given is read by the
program's own process. A program runs where bubblewrap would have put it: as an unprivileged user with no capabilities,
as process 2 of a tree of its own, in a network of its own, with /tmp, /dev/shm and /proc of its own over a file system
that is read-only already, behind the same filter of system calls.
"""

from __future__ import annotations

# `signal` takes longer to import than all that is here.
import _signal  # type: ignore[import-not-found]
import _socket
import ctypes
import fcntl
import gc
import marshal
import os
import struct
import sys

from rloom.rewards.sandbox.inside.program import limit, silence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Mounts, System V and message queues, users, processes, network. Host name and control groups need capabilities.
NEW_NAMESPACES = 0x20000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
READ_ONLY, NOSUID, NODEV, NOEXEC, REMOUNT, OF_THIS_MOUNT = 1, 2, 4, 8, 32, 4096
MADE = b"made"
MAX_REQUEST = 4096
MAX_FDS = 16
# In /tmp and /dev/shm each: the kernel keeps a kilobyte for every file, which counts as nobody's memory or disk.
MAX_FILES = 4096
SET_INTERFACE_FLAGS, UP = 0x8914, 1
DROP_FROM_BOUNDS, SET_FILTER, NO_NEW_PRIVILEGES = 24, 22, 38
CAPABILITIES_VERSION_3 = 0x20080522
# The descriptor of the socket that requests come by, whatever number it had in the process that they come from.
CONTROL = 3

# Keeps Python's lock in calls: there is no other thread, and a copy made while it was let go might wait for it.
libc = ctypes.PyDLL(None, use_errno=True)


def main(payload: dict[str, Any]) -> None:
    """Fork a sandbox whenever one is asked for, until the other side hangs up."""
    silence()
    os.dup2(payload["control_fd"], CONTROL)
    close_all_but(CONTROL)
    control = _socket.socket(fileno=CONTROL)
    payload["filter"] = bytes.fromhex(payload["filter"])
    # What is here stays: garbage collections in the copies need not touch it, which would copy its memory.
    gc.freeze()
    control.send(MADE)
    while True:
        request, fds = receive(control)
        if not request:
            # At once: someone waits for it, and there is nothing to clean up.
            os._exit(0)
        fork_sandbox(control, marshal.loads(request), fds, payload)
        for fd in fds:
            os.close(fd)
        reap_children()


def receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    """A request, and the descriptors that came with it."""
    data, extra, _, _ = control.recvmsg(MAX_REQUEST, _socket.CMSG_SPACE(4 * MAX_FDS))
    fds = [fd for _, kind, part in extra if kind == _socket.SCM_RIGHTS for (fd,) in struct.iter_unpack("i", part)]
    return data, fds


def fork_sandbox(control: _socket.socket, request: dict[str, Any], fds: list[int], payload: dict[str, Any]) -> None:
    """Fork a sandbox and send its pidfd, by which it can be killed; an error where it cannot be made."""
    made_read, made = os.pipe()
    pid = libc.syscall(*(ctypes.c_long(x) for x in (payload["clone"], NEW_NAMESPACES | _signal.SIGCHLD, 0, 0, 0, 0)))
    if pid == 0:
        in_child(request, fds, made, payload)
    os.close(made)
    failure = os.read(made_read, 300) if pid > 0 else os.strerror(ctypes.get_errno()).encode()
    os.close(made_read)
    if failure != MADE:
        control.send(b"no: " + failure)
        return
    handle = os.pidfd_open(pid)
    control.sendmsg([MADE], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("i", handle))])
    os.close(handle)


def reap_children() -> None:
    """Wait for child processes that have ended, so that none stays a zombie."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


# -- in the child


def in_child(request: dict[str, Any], fds: list[int], made: int, payload: dict[str, Any]) -> None:
    """All that the child does. It never returns to the loop of the fork server."""
    try:
        first_process(request, fds, made, payload)
    except BaseException as error:
        os.write(made, repr(error)[:300].encode())
    finally:
        os._exit(1)


def first_process(request: dict[str, Any], fds: list[int], made: int, payload: dict[str, Any]) -> None:
    """Process 1 of the new tree: makes the sandbox, starts the program and waits for all that there is. With it, all
    ends. It gives up what the program must not have before there is a program."""
    named = dict(zip(request["names"], fds, strict=True))
    close_all_but(*fds, made)
    # A signal to its process group would else reach others, whatever tree they are in.
    os.setsid()
    set_up_namespaces(request["disk"])
    drop_privileges(payload["filter"])
    os.write(made, MADE)
    os.close(made)
    go = named.pop("go_fd")
    # Wait for the end of the pipe: then the process is in its control group.
    os.read(go, 1)
    os.close(go)
    until, held = os.pipe()
    if os.fork() == 0:
        os.close(held)
        second_process(named, until)
    # The kernel keeps signals without a handler from a first process, so it is deaf to this one too.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    close_all_but(held)
    # The limits hold here too, and from before there is a program, which may write to this process's memory.
    limit(request["limits"])
    os.close(held)
    try:
        while True:
            os.waitpid(-1, 0)
    except ChildProcessError:
        os._exit(0)


def second_process(fds: dict[str, int], until: int) -> None:
    """Process 2: the program, as soon as the first process is ready for it."""
    try:
        os.read(until, 1)
        os.close(until)
        program(fds)
    finally:
        os._exit(1)


def close_all_but(*fds: int) -> None:
    """Close everything but some descriptors, and the first three, which lead nowhere."""
    # Those that are open, since no number is too high to be a descriptor.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in fds:
            # Unlike `close` it ignores the descriptor of the listing itself, which is closed by now.
            os.closerange(fd, fd + 1)


def set_up_namespaces(disk: int) -> None:
    """Map the user, mount new /proc, /dev/shm and /tmp over the old ones, and bring the network's loopback up."""
    user, group = os.getuid(), os.getgid()
    write_file("/proc/self/uid_map", f"{user} {user} 1")
    # The kernel lets a group be mapped only after this.
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/gid_map", f"{group} {group} 1")
    mount("proc", "/proc", NOSUID | NODEV | NOEXEC)
    mount("tmpfs", "/dev/shm", NOSUID | NODEV, f"mode=755,size=65536,nr_inodes={MAX_FILES}")
    mount("tmpfs", "/tmp", NOSUID | NODEV, f"mode=755,size={disk},nr_inodes={MAX_FILES}")
    os.chdir("/tmp")
    write_file("/proc/sys/user/max_user_namespaces", "0")
    mount("proc", "/proc", REMOUNT | OF_THIS_MOUNT | READ_ONLY | NOSUID | NODEV | NOEXEC)
    network = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    fcntl.ioctl(network.fileno(), SET_INTERFACE_FLAGS, struct.pack("16sh22x", b"lo", UP))
    network.close()


def write_file(path: str, text: str) -> None:
    """Write to one of the kernel's own files, in one call."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


def mount(kind: str, where: str, flags: int, options: str = "") -> None:
    """Mount a new file system of some kind."""
    check_result(libc.mount(kind.encode(), where.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()))


def drop_privileges(filter_program: bytes) -> None:
    """Give up all capabilities, for good, and the system calls that the filter refuses."""
    number = 0
    # Until the kernel knows no capability of that number.
    while prctl(DROP_FROM_BOUNDS, number) == 0:
        number += 1
    check_result(libc.capset((ctypes.c_uint32 * 2)(CAPABILITIES_VERSION_3, 0), (ctypes.c_uint32 * 6)()))
    check_result(prctl(NO_NEW_PRIVILEGES, 1))
    lines = ctypes.create_string_buffer(filter_program, len(filter_program))
    header = struct.pack("HxxxxxxP", len(filter_program) // 8, ctypes.addressof(lines))
    header_buffer = ctypes.create_string_buffer(header, len(header))
    check_result(prctl(SET_FILTER, 2, ctypes.addressof(header_buffer)))


def prctl(what: int, *arguments: int) -> int:
    """`prctl`, with all five arguments."""
    numbers = [ctypes.c_ulong(number) for number in (*arguments, 0, 0, 0, 0)[:4]]
    result: int = libc.prctl(ctypes.c_int(what), *numbers)
    return result


def check_result(result: int) -> None:
    """Raise the error that a system call's result stands for, if it is one."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def program(fds: dict[str, int]) -> None:
    """Read what is to be run, and run it. Limits come in between (`begin`), as they do with bubblewrap: what reading a
    long text takes is not the program's."""
    with open(fds.pop("content_fd"), "rb") as file:
        data = marshal.loads(file.read())
    for name, code in data["modules"]:
        module = sys.modules["rloom.rewards.sandbox.inside." + name] = type(sys)("rloom.rewards.sandbox.inside." + name)
        exec(marshal.loads(code), module.__dict__)
    sys.modules["rloom.rewards.sandbox.inside." + data["main"]].main({**data["payload"], **fds})
