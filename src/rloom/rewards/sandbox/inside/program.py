"""Runs the model's program. Everything in this process is in the program's hands, so nothing in it is worth having.

It knows no test and no expected value: it is asked to call functions, or given text on its standard input, and its
answers are judged elsewhere.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import resource
import sys
import types

from rloom.rewards.sandbox.inside.remote import Peer, describe
from rloom.rewards.sandbox.inside.wire import WireError, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Bytes that are kept of what a program says about its end.
MAX_WORDS = 300
# Files that hold back what is written to them.
WRITTEN = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
# The file that a program is told it stands in. No such file is there.
FILE = "/tmp/program.py"


def limit(limits: dict[str, int]) -> None:
    """Set resource limits of this process and its children. They cannot be raised again."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (bound, bound))


def begin(payload: dict[str, Any]) -> None:
    """What every process in a sandbox does first: set limits, silence the standard streams, say that it is ready."""
    limit(payload["limits"])
    silence()
    # These come from `site`, which is not imported here.
    vars(builtins).update(exit=leave, quit=leave)
    os.write(payload["ready_fd"], b"r")


def silence() -> None:
    """Have the standard streams lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)


def leave(code: Any = None) -> None:
    """`exit` and `quit`, as in a program that is run by itself."""
    raise SystemExit(code)


def main(payload: dict[str, Any]) -> None:
    """Run the program as a module whose functions are called, or once per text on its standard input."""
    begin(payload)
    if "inputs" in payload:
        answer_inputs(payload)
    else:
        serve_functions(payload)


def serve_functions(payload: dict[str, Any]) -> None:
    """Load the program, say what it defines, and do what is asked until the other side hangs up."""
    peer = Peer(payload["read_fd"], payload["write_fd"], allow=lambda *request: True)
    module = named("solution")
    # `import __main__` finds the program too, and not what started it.
    sys.modules["__main__"] = module
    try:
        load(payload["program"], module)
        send(peer.write_fd, contents(peer, module))
    except BaseException as error:
        send(peer.write_fd, {"failed": describe(error)})
        return
    while True:
        try:
            request = receive(peer.read_fd)
        except WireError:
            return
        peer.serve(request)


def named(name: str) -> types.ModuleType:
    """The module that a program runs as, where dataclasses and pickle look it up."""
    module = types.ModuleType(name)
    module.__dict__.update(__file__=FILE, __builtins__=builtins)
    sys.modules[name] = module
    return module


def load(program: str, module: types.ModuleType) -> None:
    """Run a program for what it defines, which is there also where it leaves at its end, as scripts do."""
    try:
        exec(compile(program, "<program>", "exec"), module.__dict__)
    except SystemExit as left:
        if left.code:
            raise


def contents(peer: Peer, module: types.ModuleType) -> dict[str, Any]:
    """The names that the program defines. Exceptions come with what they are derived from, modules by name."""
    names, exceptions, modules = {}, {}, {}
    for name, value in list(module.__dict__.items()):
        if name.startswith("__"):
            continue
        if isinstance(value, types.ModuleType):
            modules[name] = value.__name__
            continue
        if isinstance(value, type) and issubclass(value, Exception):
            exceptions[name] = [base.__name__ for base in value.__mro__[1:]]
            continue
        try:
            packed = peer.pack(value)
            # What is large stays here, and is asked for when it is used.
            names[name] = packed if len(str(packed)) < 10_000 else peer.keep(value)
        except Exception:
            # Some data cannot travel (a list that contains itself).
            continue
    return {"names": names, "exceptions": exceptions, "modules": modules}


def answer_inputs(payload: dict[str, Any]) -> None:
    """Run the program once for each input, in a process of its own, and send what it printed and how it ended."""
    for text in payload["inputs"]:
        read_out, read_how, pid = start(payload["program"], text)
        printed = b""
        while len(printed) <= payload["max_output"] and (part := os.read(read_out, 65536)):
            printed += part
        # A program that goes on writing is killed by this.
        os.close(read_out)
        _, status = os.waitpid(pid, 0)
        output = printed.decode("utf-8", "replace") if len(printed) <= payload["max_output"] else None
        how = said(read_how) or (f"killed by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")
        send(payload["write_fd"], {"output": output, "failed": bool(status), "how": how})


def said(fd: int) -> str:
    """The words that a process left in a pipe, which another may still hold open."""
    os.set_blocking(fd, False)
    try:
        return os.read(fd, MAX_WORDS).decode("utf-8", "replace")
    except BlockingIOError:
        return ""
    finally:
        os.close(fd)


def start(program: str, text: str) -> tuple[int, int, int]:
    """The program in a child process, with `text` on its standard input and a pipe on its standard output; a second
    pipe, on which it says why it ended."""
    name = "/tmp/.input"
    with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(text)
    read_in = os.open(name, os.O_RDONLY)
    os.unlink(name)
    read_out, write_out = os.pipe()
    read_how, write_how = os.pipe()
    pid = os.fork()
    if pid:
        for fd in (read_in, write_out, write_how):
            os.close(fd)
        return read_out, read_how, pid
    os.dup2(read_in, 0)
    os.dup2(write_out, 1)
    for fd in (read_in, read_out, write_out, read_how):
        os.close(fd)
    run(program, write_how)
    raise AssertionError("it has left")


def run(program: str, how_fd: int) -> None:
    """The program as Python runs one, to the end of this process."""
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", errors="replace", closefd=False)  # type: ignore[misc]
    code, how = 1, ""
    try:
        exec(compile(program, "<program>", "exec"), named("__main__").__dict__)
        code = 0
    except SystemExit as left:
        code, how = int(bool(left.code)), f"left with {left.code!r}"
    except BaseException as error:
        (kind, *_), message = describe(error)
        how = f"{kind}: {message}"
    finally:
        try:
            say(how_fd, how if code else "")
            finish()
        finally:
            os._exit(code)


def say(fd: int, words: str) -> None:
    """Leave words in a pipe, unless the program has closed all descriptors that it does not know."""
    try:
        os.write(fd, words.encode("utf-8", "replace")[:MAX_WORDS])
        os.close(fd)
    except OSError:
        pass


def finish() -> None:
    """What an interpreter does at its end: threads that nobody has joined end, then what was asked for at exit is done,
    what was printed is written, also to files that the program kept, and its objects may print their last."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    flush(sys.stdout)
    # Files in reference cycles may be closed before they are flushed.
    for file in [x for x in gc.get_objects() if type(x) in WRITTEN]:
        flush(file)
    sys.stdout = sys.__stdout__
    sys.modules.pop("__main__", None)
    gc.collect()
    flush(sys.stdout)


def flush(file: Any) -> None:
    """Write what a file holds back, whatever the program has made of it."""
    try:  # noqa: SIM105  (every program would wait for the import of `contextlib`)
        file.flush()
    except Exception:
        pass
