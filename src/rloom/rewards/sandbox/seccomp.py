"""A filter of system calls for sandboxes, as the kernel's own little machine (classic BPF) reads it.

Limits on memory and disk bind a process's own pages and files. Memory that belongs to no process (System V segments,
memfd, attributes of files), file systems of one's own and further namespaces would be ways around them; what the kernel
counts for all processes of a user (watches of files, room in pipes) one sandbox could use up for all of them; by
`flock` on files that all of them see and by sockets to the machine beneath they could speak. So only the calls that
programs are known to need (syscalls.py) are allowed, and what nobody has thought of is refused.

What is left: locks by `fcntl`, which sqlite3 needs, can carry data between sandboxes that run at once, and descriptors
on their way over a socket are counted for all processes of a user (see docs/rewards.md).
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable

from rloom.rewards.sandbox.syscalls import ALLOWED, NEWEST

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
# CLONE_NEWUSER and its like, as `clone` takes them.
NEW_NAMESPACES = 0x7E020000 | 0x80
# Beyond this, x86-64 numbers another set of calls.
X32 = 0x40000000
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
FCNTL = {"x86_64": 72, "aarch64": 25}
# Copies, flags, owners and locks of files; asking for leases, sizes of pipes, seals. Not: setting these, and watches of
# folders (F_NOTIFY).
FCNTL_COMMANDS = (*range(12), 36, 37, 38, 1025, 1030, 1032, 1034)
# `socket` and `socketpair`.
SOCKETS = {"x86_64": (41, 53), "aarch64": (198, 199)}
# The sockets that there are: each sandbox has a network of its own for these, which leads nowhere.
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}

# An instruction: what to do, how many lines to skip if a test holds and if not, and the number that it is about.
Line = tuple[int, int, int, int]


def program(machine: str | None = None) -> bytes | None:
    """The filter for a machine; None where its calls are not known here.

    >>> len(program("x86_64")) % 8, program("vax")
    (0, None)
    """
    machine = machine or platform.machine()
    if machine not in ALLOWED:
        return None
    refuse = REFUSE | errno.EPERM
    lines: list[Line] = [
        (LOAD, 0, 0, ARCH_AT), (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT), *_if(JUMP_AT_LEAST, X32, refuse),
        # The C library does without a call that is not there, and not without one that is refused. What `clone3` is
        # asked for lies in memory, where no filter sees it: without it, `clone` is used.
        *_if(JUMP_AT_LEAST, NEWEST + 1, REFUSE | errno.ENOSYS), *_if(JUMP_EQUAL, CLONE3, REFUSE | errno.ENOSYS),
    ]  # fmt: skip
    for number in sorted(ALLOWED[machine].values()):
        lines += _if(JUMP_EQUAL, number, ALLOW)
    for number in SOCKETS[machine]:
        lines += _by_argument(number, 0, _any_of(FAMILIES.values()), REFUSE | errno.EAFNOSUPPORT)
    lines += _by_argument(FCNTL[machine], 1, _any_of(FCNTL_COMMANDS), refuse)
    lines += _by_argument(CLONE[machine], 0, _if(JUMP_ANY_BIT, NEW_NAMESPACES, refuse), ALLOW)
    lines += [(RETURN, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _any_of(values: Iterable[int]) -> list[Line]:
    return [line for value in values for line in _if(JUMP_EQUAL, value, ALLOW)]


def _if(test: int, value: int, result: int) -> list[Line]:
    """Instructions that return a result if the loaded value passes a test."""
    return [(test, 0, 1, value), (RETURN, 0, 0, result)]


def _by_argument(number: int, position: int, tests: list[Line], otherwise: int) -> list[Line]:
    """Instructions that decide one call by tests of one of its arguments. They test its lower half, which is all that
    the kernel reads of a number of 32 bits. For another call they do nothing, and its number stays loaded."""
    lines = [(LOAD, 0, 0, ARGUMENTS_AT + 8 * position), *tests, (RETURN, 0, 0, otherwise)]
    return [(JUMP_EQUAL, 0, len(lines), number), *lines]
