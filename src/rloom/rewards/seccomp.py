"""A filter of system calls for sandboxes, as the kernel's own little machine (classic BPF) reads it.

Limits on memory and disk bind a process's own pages and files. Memory that belongs to no process (System V segments,
memfd, attributes of files), file systems of one's own and further namespaces would be ways around them; what the kernel
counts for all processes of a user (watches of files, room in pipes) one sandbox could use up for all of them; by
locks on files that all of them see and by sockets to the machine beneath they could speak. So these calls are refused.
"""

from __future__ import annotations

import errno
import platform
import struct

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
NEW_NAMESPACES = 0x7E020000 | 0x80
"""CLONE_NEWUSER and its like, as `clone` takes them."""
X32 = 0x40000000
"""Beyond this, x86-64 numbers another set of calls."""
SHARED = {  # numbered alike on all architectures: newer than that agreement
    "pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "memfd_secret": 447, "setxattrat": 463,
}  # fmt: skip
REFUSED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "msgget": 68, "flock": 73, "ptrace": 101,
        "pivot_root": 155, "mount": 165, "umount2": 166, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
        "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "inotify_init": 253, "unshare": 272,
        "inotify_init1": 294, "perf_event_open": 298, "fanotify_init": 300, "open_by_handle_at": 304, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "inotify_init1": 26, "flock": 32, "umount2": 39, "mount": 40,
        "pivot_root": 41, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194,
        "shmctl": 195, "shmat": 196, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241,
        "fanotify_init": 262, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
FCNTL = {"x86_64": 72, "aarch64": 25}
SET_PIPE_SIZE = 1031
SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}
"""`socket` and `socketpair`."""
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
"""The sockets that there are: each sandbox has a network of its own for these, which leads nowhere."""

Line = tuple[int, int, int, int]
"""What to do, how many lines to leave out if a test holds and if not, and the number that it is about."""


def program(machine: str | None = None) -> bytes | None:
    """The filter for a machine; None where its calls are not known here.

    >>> len(program("x86_64")) % 8, program("vax")
    (0, None)
    """
    machine = machine or platform.machine()
    if machine not in REFUSED:
        return None
    refuse = REFUSE | errno.EPERM
    lines: list[Line] = [
        (LOAD, 0, 0, ARCH_AT), (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT), *_if(JUMP_AT_LEAST, X32, refuse),
        # What `clone3` is asked for lies in memory, where no filter sees it. Without it, `clone` is used.
        *_if(JUMP_EQUAL, CLONE3, REFUSE | errno.ENOSYS),
    ]  # fmt: skip
    for number in sorted({*REFUSED[machine].values(), *SHARED.values()}):
        lines += _if(JUMP_EQUAL, number, refuse)
    families = [line for family in FAMILIES.values() for line in _if(JUMP_EQUAL, family, ALLOW)]
    for number in SOCKETS[machine]:
        lines += _by_argument(number, 0, families, REFUSE | errno.EAFNOSUPPORT)
    lines += _by_argument(FCNTL[machine], 1, _if(JUMP_EQUAL, SET_PIPE_SIZE, refuse), ALLOW)
    lines += _by_argument(CLONE[machine], 0, _if(JUMP_ANY_BIT, NEW_NAMESPACES, refuse), ALLOW)
    lines += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _if(test: int, value: int, result: int) -> list[Line]:
    """An end with a result, if what was loaded last passes a test."""
    return [(test, 0, 1, value), (RETURN, 0, 0, result)]


def _by_argument(number: int, position: int, tests: list[Line], otherwise: int) -> list[Line]:
    """What becomes of one call, by tests of one of its arguments: of the lower half, which is all that the kernel reads
    of a number of 32 bits. Where it is another call, its number stays loaded."""
    lines = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * position), *tests, (RETURN, 0, 0, otherwise)]
    return [(JUMP_EQUAL, 0, len(lines), number), *lines]
