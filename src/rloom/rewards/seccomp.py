"""A filter of system calls for sandboxes, as the kernel's own little machine (classic BPF) reads it.

Limits on memory and disk bind a process's own pages and files. Memory that belongs to no process (System V segments,
memfd), file systems of one's own and further namespaces would be ways around them, so these calls are refused.
"""

from __future__ import annotations

import errno
import platform
import struct

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCH_AT, FIRST_ARGUMENT_AT = 0, 4, 16
NEW_NAMESPACES = 0x7E020000 | 0x80
"""CLONE_NEWUSER and its like, as `clone` takes them."""
X32 = 0x40000000
"""Beyond this, x86-64 numbers another set of calls."""
SHARED = {  # numbered alike on all architectures: newer than that agreement
    "pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "memfd_secret": 447,
}  # fmt: skip
REFUSED = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "msgget": 68, "ptrace": 101, "pivot_root": 155,
        "mount": 165, "umount2": 166, "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
        "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "memfd_create": 319, "bpf": 321, "userfaultfd": 323,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "unshare": 97, "ptrace": 117, "mq_open": 180, "msgget": 186,
        "semget": 190, "shmget": 194, "shmctl": 195, "shmat": 196, "add_key": 217, "request_key": 218, "keyctl": 219,
        "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "memfd_create": 279, "bpf": 280, "userfaultfd": 282,
    },
}  # fmt: skip
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435


def program(machine: str | None = None) -> bytes | None:
    """The filter for a machine; None where its calls are not known here.

    >>> len(program("x86_64")) % 8, program("vax")
    (0, None)
    """
    machine = machine or platform.machine()
    if machine not in REFUSED:
        return None
    refuse, missing = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    lines = [
        (LOAD, 0, 0, ARCH_AT), (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT), (JUMP_AT_LEAST, 0, 1, X32), (RETURN, 0, 0, refuse),
        # What `clone3` is asked for lies in memory, where no filter sees it. Without it, `clone` is used.
        (JUMP_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, missing),
    ]  # fmt: skip
    for number in sorted({*REFUSED[machine].values(), *SHARED.values()}):
        lines += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, refuse)]
    lines += [(JUMP_EQUAL, 0, 3, CLONE[machine]), (LOAD, 0, 0, FIRST_ARGUMENT_AT)]
    lines += [(JUMP_ANY_BIT, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, refuse), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
