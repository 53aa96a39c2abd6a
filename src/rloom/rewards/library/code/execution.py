"""Model-written programs against tests, in sandboxes. What is protected, and how, is said in docs/rewards.md.

The program runs in one sandbox, the tests in another, and only plain data passes between them. Tests of the form
`assert f(1, 2) == 3` need no second sandbox: the call is made in the program's, the answer compared here. Either way
the expected values never come near the program, and nothing that it says about itself is believed.
"""

from __future__ import annotations

import ast
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from rloom.errors import RewardError, SandboxError, checks_options
from rloom.printable import get_logger
from rloom.rewards.calling.call_options import mark
from rloom.rewards.completion_text import text_of, without_surrogates
from rloom.rewards.library.code.compare import equals, shown
from rloom.rewards.library.code.imports import check_imports
from rloom.rewards.library.code.problems import (
    CHECKS_NOTHING,
    Tests,
    imports_of,
    names_called,
    num_statements,
    program_of,
    read_tests,
    refuse,
    safe_repr,
)
from rloom.rewards.sandbox.fork_server import keep, kept, lost, sandboxed
from rloom.rewards.sandbox.inside.light_json import dumps
from rloom.rewards.sandbox.inside.wire import WireError, encode, receive, send
from rloom.rewards.sandbox.sandbox import CoreTime, Limits, check_sandbox, check_site_packages

logger = get_logger(__name__)

AHEAD_BYTES = 2**14
"""Of calls that are sent before the answers to earlier ones are read; a pipe holds more, so nobody waits for room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The share of the tests that a program passed, and in words why not all."""

    share: float
    why: str = ""


@checks_options
def code_execution(
    *,
    time_limit: float = 5.0,
    memory_mb: int = 512,
    partial: bool = False,
    harness: str | None = None,
    disk_mb: int = 16,
    processes: int = 4,
    output_kb: int = 1024,
    site_packages: Sequence[str] = (),
) -> Callable[..., list[float | None]]:
    """Make a reward function that runs completions as Python programs against tests.

    The program is the last fenced block of a completion, or the whole text. The tests come from the columns `tests`
    (a list of assert lines; a program that raises on failure; or inputs and outputs, as `[{"input": …, "output":
    …}]`), or by the names of MBPP (`test_list`, `test_setup_code`, `test_imports`) or HumanEval (`test`,
    `entry_point`). A row without tests scores None. 1.0 if all pass, else 0.0; with `partial` the share that passed.

    Args:
        time_limit: seconds for the program and all of its tests, and up to five times as many where it wants a core of
            a busy machine; of a core's time each process has one more than these at most, rounded up.
        memory_mb: memory of each process, on either side; where control groups can be made, of all of a sandbox's.
        partial: give the share of tests passed: of a list its items, of a program its asserts.
        harness: a test program for every row instead of a column. It sees the program's functions by name, the row's
            columns as `row`, and the program's text as `program`.
        disk_mb, processes, output_kb: room in /tmp; processes and threads of the program; what it may print.
        site_packages: folders of installed packages that programs and tests may import; none by default. Tests that
            import what is not there are an error.

    ```python
    reward = code_execution(time_limit=2.0)
    reward(completions=["def double(x): return 2 * x"], tests=[["assert double(2) == 4"]])  # [1.0]
    ```
    """
    limits = Limits(seconds=time_limit, memory_mb=memory_mb, disk_mb=disk_mb, processes=processes, output_kb=output_kb)
    if harness is not None:
        num_statements(harness, "the harness")
    check_sandbox()
    check_site_packages(site_packages)

    def code_execution_reward(
        completions: list[Any], prompts: list[Any] | None = None, log_extra: Any = None, **columns: Any
    ) -> list[float | None]:
        names = [n for n, v in columns.items() if isinstance(v, (list, tuple)) and len(v) == len(completions)]

        def verdict(index: int) -> Verdict | None:
            tests = read_tests({name: columns[name][index] for name in names}, harness)
            if tests is None:
                return None
            check_imports(imports_of((tests.setup, *tests.sources)), tuple(site_packages))
            prompt, called = prompts[index] if prompts else None, names_called(tests.sources)
            program = program_of(text_of(completions[index]), prompt, tests.entry_point, called)
            return judge_program(program, tests, limits, partial=partial, site_packages=site_packages)

        with kept() if len(completions) > 1 else nullcontext():
            verdicts = [verdict(index) for index in range(len(completions))]
        if log_extra is not None:
            log_extra("tests", [v.why or "passed" if v else None for v in verdicts])
        return [None if v is None else v.share for v in verdicts]

    code_execution_reward.__name__ = "code_execution"
    return mark(code_execution_reward, streaming=True, per_sample=True, threads=True, at_start=keep)


# -- what to run


def judge_program(
    program: str, tests: Tests, limits: Limits, *, partial: bool = False, site_packages: Sequence[str] = ()
) -> Verdict:
    """Run a program against its tests, in sandboxes made for it alone. Without `partial` the share is 1 or 0."""
    program = without_surrogates(program)
    try:
        verdict = _verdict(program, tests, limits, partial, site_packages)
    except SandboxError:
        if not lost():
            raise
        return _verdict(program, tests, limits, partial, site_packages)
    # What its sandboxes were forked of may have been killed, by a machine that is short of memory: not its fault.
    return _verdict(program, tests, limits, partial, site_packages) if lost() else verdict


def _verdict(program: str, tests: Tests, limits: Limits, partial: bool, packages: Sequence[str]) -> Verdict:
    try:
        verdict = _judged(program, tests, limits, partial, packages)
    except TimeoutError:
        return Verdict(share=0.0, why=f"not done after {limits.seconds:g} seconds")
    except (RewardError, SandboxError):  # the tests' fault, or the machine's
        raise
    except Exception as error:  # whatever is wrong with what came out of a sandbox is the program's doing
        return Verdict(share=0.0, why=f"the program is gone: {type(error).__name__}: {error}"[:300])
    return verdict if partial else replace(verdict, share=float(verdict.share == 1.0))


def _judged(program: str, tests: Tests, limits: Limits, partial: bool, packages: Sequence[str]) -> Verdict:
    if tests.cases:
        return _by_cases(program, tests, limits, partial, packages)
    calls = [simple_call(source) for source in tests.sources]
    if all(calls) and tests.row is None:
        return _by_calls(program, [c for c in calls if c], limits, partial, packages)
    return _by_harness(program, tests, limits, partial, packages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a function with plain data, and what it should return."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any


@functools.lru_cache(maxsize=4096)  # the completions of a group have their tests in common
def simple_call(source: str) -> Call | None:
    """`assert f(1, 2) == 3` as a call, if the test is of that form and all values are literals.

    >>> simple_call("assert f([1], k=2) == 3")
    Call(function='f', args=([1],), kwargs={'k': 2}, expected=3)
    >>> simple_call("assert math.isclose(f(1), 2)") is None
    True
    """
    body = ast.parse(source.strip()).body
    if len(body) != 1 or not isinstance(body[0], ast.Assert) or not isinstance(body[0].test, ast.Compare):
        return None
    test = body[0].test
    call = test.left
    if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq) or not isinstance(call, ast.Call):
        return None
    if not isinstance(call.func, ast.Name) or any(keyword.arg is None for keyword in call.keywords):
        return None
    try:
        return Call(
            function=call.func.id,
            args=tuple(ast.literal_eval(arg) for arg in call.args),
            kwargs={str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords},
            expected=ast.literal_eval(test.comparators[0]),
        )
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


@contextmanager
def _pipes(*names: str) -> Iterator[dict[str, int]]:
    """Pairs of descriptors, `NAME_read` and `NAME_write`; whatever is left open is closed at the end."""
    fds: dict[str, int] = {}
    try:
        for name in names:
            fds[f"{name}_read"], fds[f"{name}_write"] = os.pipe()
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


def _by_calls(program: str, calls: list[Call], limits: Limits, partial: bool, packages: Sequence[str]) -> Verdict:
    """Make each call in the program's sandbox and compare the answer here. No code of anybody's runs here."""
    with _pipes("ask", "answer") as fds:
        theirs = {"read_fd": fds["ask_read"], "write_fd": fds["answer_write"]}
        with sandboxed("program", {"program": program}, limits, fds=theirs, site_packages=packages) as sandbox:
            for name in ("ask_read", "answer_write"):  # so that the end of the program is seen as the end of the pipe
                os.close(fds.pop(name))
            sandbox.wait_ready()
            left = CoreTime(limits.seconds, sandbox)
            os.set_blocking(fds["ask_write"], False)
            hello = receive(fds["answer_read"], left.read)
            if not isinstance(hello, dict) or not isinstance(hello.get("names"), dict):
                return Verdict(share=0.0, why=f"the program did not load: {_told(hello, 'failed')}")
            return _asked(calls, hello["names"], fds, left, partial)


def _asked(calls: list[Call], names: dict[str, Any], fds: dict[str, int], left: CoreTime, partial: bool) -> Verdict:
    """Make the calls and compare the answers. Some are sent ahead, so that the program need not wait for the next."""
    passed, why, sent = 0, "", 0
    ahead: deque[int] = deque()  # sizes of requests that are not answered yet
    for call in calls:
        failure = _uncallable(call, names)
        try:
            while sent < len(calls):
                if not _uncallable(calls[sent], names):
                    request = _request(calls[sent], names)
                    if ahead and sum(ahead) + len(dumps(request)) > AHEAD_BYTES:
                        break  # it might not fit into the pipe, while the program waits for its answer to be read
                    ahead.append(send(fds["ask_write"], request, left.write))
                sent += 1
            if not failure:
                failure = _failure(call, receive(fds["answer_read"], left.read))
                ahead.popleft()
        except (TimeoutError, WireError, BrokenPipeError) as error:
            why = why or f"{call.function}: {_cut_off(error, left)}"
            break  # what follows cannot pass either
        passed += not failure
        why = why or failure
        if failure and not partial:
            break
    return Verdict(share=passed / len(calls), why=why)


def _cut_off(error: Exception, left: CoreTime) -> str:
    """Why there was no answer, in words."""
    late = isinstance(error, TimeoutError) or left.over
    return "TimeoutError: out of time" if late else f"{type(error).__name__}: {error}"


def _uncallable(call: Call, names: dict[str, Any]) -> str:
    """Why a call cannot be made at all; empty if it can."""
    if call.function not in names:
        return f"the program does not define {call.function}"
    target = names[call.function]
    return "" if isinstance(target, dict) and "mine" in target else f"{call.function} is no function"


def _request(call: Call, names: dict[str, Any]) -> dict[str, Any]:
    return {"do": "call", "with": {"theirs": names[call.function]["mine"]},
            "args": [encode(a, refuse) for a in call.args],
            "kwargs": {k: encode(v, refuse) for k, v in call.kwargs.items()}}  # fmt: skip


def _told(answer: Any, name: str) -> str:
    """An exception as the program's side describes it, which may say anything.

    >>> _told({"error": [["ValueError", "Exception"], "no such key"]}, "error"), _told(7, "error")
    ('ValueError: no such key', '7')
    """
    match answer.get(name) if isinstance(answer, dict) else None:
        case [[str(kind), *_], str(message)]:
            return f"{kind}: {message}"[:200]
    return shown(answer)


def _failure(call: Call, answer: Any) -> str:
    """Why an answer is not what it should be; empty if it is."""
    if not isinstance(answer, dict) or "error" in answer:
        return f"{call.function} raised {_told(answer, 'error')}"
    if equals(answer.get("value"), call.expected):
        return ""
    return f"{call.function} returned {shown(answer.get('value'))}, not {safe_repr(call.expected)}"


def _by_cases(program: str, tests: Tests, limits: Limits, partial: bool, packages: Sequence[str]) -> Verdict:
    """Run the program once for each input and compare what it prints here."""
    payload = {"program": program, "inputs": [case[0] for case in tests.cases], "max_output": limits.output_kb * 1024}
    passed, why = 0, ""
    with _pipes("answer") as fds:
        theirs = {"write_fd": fds["answer_write"]}
        with sandboxed("program", payload, limits, fds=theirs, site_packages=packages) as sandbox:
            os.close(fds.pop("answer_write"))
            sandbox.wait_ready()
            left = CoreTime(limits.seconds, sandbox)
            for number, (_, expected) in enumerate(tests.cases):
                try:
                    answer = receive(fds["answer_read"], left.read)
                except (TimeoutError, WireError) as error:
                    why = why or f"input {number}: {_cut_off(error, left)}"
                    break
                output = answer.get("output") if isinstance(answer, dict) else None
                good = isinstance(output, str) and not answer.get("failed") and _lines(output) == _lines(expected)
                passed += good
                if not good:
                    why = (
                        why or f"input {number}: {_ended(answer) or f'printed {shown(output)}, not {expected[:100]!r}'}"
                    )
                    if not partial:
                        break
    return Verdict(share=passed / len(tests.cases), why=why)


def _ended(answer: Any) -> str:
    """How a program that failed came to its end, in words of its side; empty where it did not fail."""
    failed, how = (answer.get("failed"), answer.get("how")) if isinstance(answer, dict) else (None, None)
    return (how[:200] if isinstance(how, str) and how else "it failed") if failed else ""


def _lines(text: str) -> list[str]:
    """Lines without the blanks at their ends, and without empty ones at the end: what judges of programs compare."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _by_harness(program: str, tests: Tests, limits: Limits, partial: bool, packages: Sequence[str]) -> Verdict:
    """Run the tests in a sandbox of their own, whose verdict alone counts."""
    payload = {"tests": tests.sources, "setup": tests.setup, "entry_point": tests.entry_point, "partial": partial,
               "row": encode(tests.row, refuse), "program": program if tests.row is not None else ""}  # fmt: skip
    role = "tests with pytest" if any("pytest" in text for text in (*tests.sources, tests.setup)) else "tests"
    with _pipes("ask", "answer", "verdict") as fds:
        ours = {"read_fd": fds["answer_read"], "write_fd": fds["ask_write"], "verdict_fd": fds["verdict_write"]}
        theirs = {"read_fd": fds["ask_read"], "write_fd": fds["answer_write"]}
        with (
            sandboxed(role, payload, limits, fds=ours, site_packages=packages) as harness,
            sandboxed("program", {"program": program}, limits, fds=theirs, site_packages=packages) as sandbox,
        ):
            for name in ("ask_read", "ask_write", "answer_read", "answer_write", "verdict_write"):
                os.close(fds.pop(name))
            harness.wait_ready()
            sandbox.wait_ready()
            return _reported(fds["verdict_read"], tests.sources, CoreTime(limits.seconds, harness, sandbox))


def _reported(fd: int, sources: Sequence[str], left: CoreTime) -> Verdict:
    """The tests' own report, as far as it came."""
    expected = len(sources)
    total, count, why = 0.0, 0, ""
    try:
        while "done" not in (report := receive(fd, left.read)):
            if report["share"] is None:  # a line of setup among the tests
                expected -= 1
                continue
            total, count = total + float(report["share"]), count + 1
            why = why or str(report["why"])
    except (TimeoutError, WireError) as error:
        late = isinstance(error, TimeoutError) or left.over
        why = why or ("out of time" if late else "the tests' own process ended early")
    if expected <= 0:
        raise RewardError(f"{CHECKS_NOTHING}: {sources!r:.100}")
    return Verdict(share=min(total / expected, 1.0) if count <= expected else 0.0, why=why)
