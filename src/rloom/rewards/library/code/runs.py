"""Running a program against tests, in sandboxes.

The program runs in one sandbox, the tests in another, and only plain data passes between them. Tests of the form
`assert f(1, 2) == 3` need no second sandbox: the call is made in the program's, and the answer is compared here. Either
way the expected values never come near the program, and nothing that it says about itself is believed.
"""

from __future__ import annotations

import ast
import functools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rloom.errors import RewardError, SandboxError
from rloom.rewards.library.code.compare import equals, shown
from rloom.rewards.library.code.problems import CHECKS_NOTHING, Tests, refuse, safe_repr
from rloom.rewards.pipes import close, pipes
from rloom.rewards.sandbox.cpu_deadline import CpuDeadline
from rloom.rewards.sandbox.fork_server import start_sandbox
from rloom.rewards.sandbox.inside.light_json import dumps
from rloom.rewards.sandbox.inside.wire import WireError, encode, receive, send
from rloom.rewards.sandbox.limits import Limits
from rloom.rewards.sandbox.sandbox import Sandbox

# Bytes of calls that are sent before the answers to earlier ones are read. A pipe holds more, so nobody waits for room.
AHEAD_BYTES = 2**14


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The share of the tests that a program passed, and in words why not all."""

    share: float
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a function with plain data, and what it should return."""

    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """A program, its tests, and what its sandboxes may use. Without `partial` the share of a verdict is 1 or 0."""

    program: str
    tests: Tests
    limits: Limits
    partial: bool
    site_packages: Sequence[str]

    def verdict(self) -> Verdict:
        """Run the program against its tests, in sandboxes made for it alone."""
        try:
            verdict = self._tested()
        except TimeoutError:
            return Verdict(share=0.0, why=f"not done after {self.limits.seconds:g} seconds")
        except (RewardError, SandboxError):
            # The tests' fault, or the machine's.
            raise
        except Exception as error:
            # Whatever is wrong with what came out of a sandbox is the program's doing.
            return Verdict(share=0.0, why=f"the program is gone: {type(error).__name__}: {error}"[:300])
        return verdict if self.partial else replace(verdict, share=float(verdict.share == 1.0))

    def _tested(self) -> Verdict:
        if self.tests.cases:
            return self._by_cases()
        calls = [call for source in self.tests.sources if (call := simple_call(source)) is not None]
        if len(calls) == len(self.tests.sources) and self.tests.row is None:
            return self._by_calls(calls)
        return self._by_harness()

    def _sandbox(self, role: str, payload: dict[str, Any], **fds: int) -> Sandbox:
        return start_sandbox(role, payload, self.limits, fds=fds, site_packages=self.site_packages)

    def _tally(self, failures: Iterator[str], count: int) -> Verdict:
        """The share of tests that did not fail. Without `partial` the first failure ends them."""
        passed, why = 0, ""
        for failure in failures:
            passed += not failure
            why = why or failure
            if failure and not self.partial:
                break
        return Verdict(share=passed / count, why=why)

    # -- calls

    def _by_calls(self, calls: list[Call]) -> Verdict:
        """Make each call in the program's sandbox and compare the answer here. No code of anybody's runs here."""
        with (
            pipes("ask", "answer") as fds,
            self._sandbox(
                "program", {"program": self.program}, read_fd=fds["ask_read"], write_fd=fds["answer_write"]
            ) as sandbox,
        ):
            # Only the program holds these ends now, so that its end is seen as the end of the pipe.
            close(fds, "ask_read", "answer_write")
            sandbox.wait_ready()
            deadline = CpuDeadline(self.limits.seconds, sandbox)
            os.set_blocking(fds["ask_write"], False)
            hello = receive(fds["answer_read"], deadline.read)
            if not isinstance(hello, dict) or not isinstance(hello.get("names"), dict):
                return Verdict(share=0.0, why=f"the program did not load: {_told(hello, 'failed')}")
            return self._tally(_failures_of_calls(calls, hello["names"], fds, deadline), len(calls))

    # -- inputs and outputs

    def _by_cases(self) -> Verdict:
        """Run the program once for each input and compare what it prints here."""
        inputs = [case[0] for case in self.tests.cases]
        payload = {"program": self.program, "inputs": inputs, "max_output": self.limits.output_kb * 1024}
        with (
            pipes("answer") as fds,
            self._sandbox("program", payload, write_fd=fds["answer_write"]) as sandbox,
        ):
            close(fds, "answer_write")
            sandbox.wait_ready()
            deadline = CpuDeadline(self.limits.seconds, sandbox)
            expected = [case[1] for case in self.tests.cases]
            return self._tally(_failures_of_cases(expected, fds["answer_read"], deadline), len(expected))

    # -- test programs

    def _by_harness(self) -> Verdict:
        """Run the tests in a sandbox of their own, whose report alone counts."""
        tests = self.tests
        payload = {"tests": tests.sources, "setup": tests.setup, "entry_point": tests.entry_point,
                   "partial": self.partial, "row": encode(tests.row, refuse),
                   "program": self.program if tests.row is not None else ""}  # fmt: skip
        role = "tests with pytest" if any("pytest" in text for text in (*tests.sources, tests.setup)) else "tests"
        with (
            pipes("ask", "answer", "verdict") as fds,
            self._sandbox(
                role, payload, read_fd=fds["answer_read"], write_fd=fds["ask_write"], verdict_fd=fds["verdict_write"]
            ) as harness,
            self._sandbox(
                "program", {"program": self.program}, read_fd=fds["ask_read"], write_fd=fds["answer_write"]
            ) as sandbox,
        ):
            close(fds, "ask_read", "ask_write", "answer_read", "answer_write", "verdict_write")
            harness.wait_ready()
            sandbox.wait_ready()
            return _reported(fds["verdict_read"], tests.sources, CpuDeadline(self.limits.seconds, harness, sandbox))


# Cached, since the completions of a group have their tests in common.
@functools.lru_cache(maxsize=4096)
def simple_call(source: str) -> Call | None:
    """`assert f(1, 2) == 3` as a call, if the test is of that form and all values are literals.

    >>> simple_call("assert f([1], k=2) == 3")
    Call(function='f', args=([1],), kwargs={'k': 2}, expected=3)
    >>> simple_call("assert math.isclose(f(1), 2)") is None
    True
    """
    match ast.parse(source.strip()).body:
        case [ast.Assert(ast.Compare(ast.Call(ast.Name(function)) as call, [ast.Eq()], [expected]))]:
            pass
        case _:
            return None
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    try:
        return Call(
            function=function,
            args=tuple(ast.literal_eval(arg) for arg in call.args),
            kwargs={str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords},
            expected=ast.literal_eval(expected),
        )
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _failures_of_calls(
    calls: list[Call], names: dict[str, Any], fds: dict[str, int], deadline: CpuDeadline
) -> Iterator[str]:
    """Why each call failed, empty where it did not. Some are sent ahead, so that the program need not wait for them."""
    uncallable = [_uncallable(call, names) for call in calls]
    requests = deque(_request(call, names) for call, why in zip(calls, uncallable, strict=True) if not why)
    # Sizes of the requests that are not answered yet.
    unanswered: deque[int] = deque()
    for call, why in zip(calls, uncallable, strict=True):
        if why:
            yield why
            continue
        try:
            # Beyond this size a request might not fit into the pipe, while the program waits for its answer to be read.
            while requests and (not unanswered or sum(unanswered) + len(dumps(requests[0])) <= AHEAD_BYTES):
                unanswered.append(send(fds["ask_write"], requests.popleft(), deadline.write))
            answer = receive(fds["answer_read"], deadline.read)
            unanswered.popleft()
        except (TimeoutError, WireError, BrokenPipeError) as error:
            # What follows cannot pass either.
            yield f"{call.function}: {_cut_off(error, deadline)}"
            return
        yield _failure(call, answer)


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


def _failure(call: Call, answer: Any) -> str:
    """Why an answer is not what it should be; empty if it is."""
    if not isinstance(answer, dict) or "error" in answer:
        return f"{call.function} raised {_told(answer, 'error')}"
    if equals(answer.get("value"), call.expected):
        return ""
    return f"{call.function} returned {shown(answer.get('value'))}, not {safe_repr(call.expected)}"


def _told(answer: Any, name: str) -> str:
    """An exception as the program's side describes it, which may say anything.

    >>> _told({"error": [["ValueError", "Exception"], "no such key"]}, "error"), _told(7, "error")
    ('ValueError: no such key', '7')
    """
    match answer.get(name) if isinstance(answer, dict) else None:
        case [[str(kind), *_], str(message)]:
            return f"{kind}: {message}"[:200]
    return shown(answer)


def _cut_off(error: Exception, deadline: CpuDeadline) -> str:
    """Why there was no answer, in words."""
    late = isinstance(error, TimeoutError) or deadline.over
    return "TimeoutError: out of time" if late else f"{type(error).__name__}: {error}"


def _failures_of_cases(expected: list[str], fd: int, deadline: CpuDeadline) -> Iterator[str]:
    """Why the program failed on each input, empty where it did not."""
    for number, output in enumerate(expected):
        try:
            failure = _misprinted(receive(fd, deadline.read), output)
        except (TimeoutError, WireError) as error:
            yield f"input {number}: {_cut_off(error, deadline)}"
            return
        yield failure and f"input {number}: {failure}"


def _misprinted(answer: Any, expected: str) -> str:
    """What is wrong with how a program ended and with what it printed; empty if nothing is."""
    output, failed, how = (
        (answer.get(name) for name in ("output", "failed", "how")) if isinstance(answer, dict) else (None, None, None)
    )
    if failed:
        return how[:200] if isinstance(how, str) and how else "it failed"
    if isinstance(output, str) and _lines(output) == _lines(expected):
        return ""
    return f"printed {shown(output)}, not {expected[:100]!r}"


def _lines(text: str) -> list[str]:
    """Lines without the blanks at their ends, and without empty ones at the end: what judges of programs compare."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _reported(fd: int, sources: Sequence[str], deadline: CpuDeadline) -> Verdict:
    """The tests' own report, as far as it came."""
    expected = len(sources)
    total, count, why = 0.0, 0, ""
    try:
        while "done" not in (report := receive(fd, deadline.read)):
            # A line of setup among the tests has no share.
            if report["share"] is None:
                expected -= 1
                continue
            total, count = total + float(report["share"]), count + 1
            why = why or str(report["why"])
    except (TimeoutError, WireError) as error:
        late = isinstance(error, TimeoutError) or deadline.over
        why = why or ("out of time" if late else "the tests' own process ended early")
    if expected <= 0:
        raise RewardError(f"{CHECKS_NOTHING}: {sources!r:.100}")
    return Verdict(share=min(total / expected, 1.0) if count <= expected else 0.0, why=why)
