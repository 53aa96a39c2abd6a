"""Runs the tests. The program's functions appear in them under their names, but run in the other sandbox.

No line of the program runs here, so it cannot read the tests, change what `assert` means, or speak in their name: all
that comes from it is plain data, as the values of calls.

What is reported is what was checked: asserts that ran and held, unittest's tests that ran and passed. Tests that came
to their end without checking anything are no pass.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import io
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rloom.rewards.sandbox.inside.program import begin
from rloom.rewards.sandbox.inside.remote import Peer, RestrictedRemote
from rloom.rewards.sandbox.inside.wire import WireError, receive, send

if TYPE_CHECKING:
    import unittest

OWN = "__main__"
MAX_NAMES = 10_000


def may(operation: str, target: Any, args: tuple[Any, ...]) -> bool:
    """What the program may do with an object of the tests: call what it was given, and read public attributes of an
    object whose class the tests define. No way leads from there to the tests' own names, or to change anything."""
    if operation == "call":
        return not isinstance(target, type)
    public = bool(args) and isinstance(args[0], str) and not args[0].startswith("_")
    return operation == "getattr" and public and type(target).__module__ == OWN


def main(payload: dict[str, Any]) -> None:
    """Run the tests and report each on the verdict's pipe, which no other process holds."""
    begin(payload)
    peer = Peer(payload["read_fd"], payload["write_fd"], allow=may, remote_type=RestrictedRemote)
    verdict = payload["verdict_fd"]
    if (like_pytest := pytest_here()) is not None:
        like_pytest.install()
    try:
        space = namespace(peer, payload)
        for source in payload["tests"]:
            share, why = Run(source, space, payload, peer).verdict()
            send(verdict, {"share": share, "why": why})
            if share is not None and share < 1.0 and not payload["partial"]:
                break
    except WireError as error:
        send(verdict, {"share": 0.0, "why": f"the program is gone: {error}"})
    send(verdict, {"done": True})


def pytest_here() -> Any:
    """Our stand-in for pytest (like_pytest.py); None for tests that do not name pytest, and need not wait for it."""
    return sys.modules.get("rloom.rewards.sandbox.inside.like_pytest")


# -- what the tests see


def namespace(peer: Peer, payload: dict[str, Any]) -> dict[str, Any]:
    """What the tests see: the program's names (none that hides a built-in one), and what was put there for them."""
    hello = receive(peer.read_fd)
    if not isinstance(hello, dict) or "names" not in hello:
        raise WireError(f"it did not load: {told(hello)}")
    # Under this name tests begin with `if __name__ == "__main__"`, and unittest finds them.
    module = types.ModuleType(OWN)
    payload["bootstrap"], sys.modules[OWN] = sys.modules.get(OWN), module
    sys.argv = ["tests"]
    space = module.__dict__
    add_program(space, hello, peer, payload["entry_point"])
    add_modules(space, hello, modules_used(payload["tests"]))
    if payload["entry_point"]:
        if payload["entry_point"] not in space:
            raise WireError(f"it does not define {payload['entry_point']}")
        space["candidate"] = space[payload["entry_point"]]
    space.update(row=peer.unpack(payload["row"]), program=payload["program"])
    # Last, so that nothing that the program said overrides them.
    space.update(__name__=OWN, __builtins__=builtins)
    exec(compile(payload["setup"], "<setup>", "exec"), space)
    return space


def add_program(space: dict[str, Any], hello: dict[str, Any], peer: Peer, entry_point: str | None) -> None:
    """The program's functions, data and exceptions; also as a module, for tests that import them from it."""
    solution = sys.modules["solution"] = types.ModuleType("solution")
    for name, value in named(hello, "names").items():
        setattr(solution, name, peer.unpack(value))
        if not hasattr(builtins, name) or name == entry_point:
            space[name] = getattr(solution, name)
    for name, bases in named(hello, "exceptions").items():
        if not hasattr(builtins, name) and isinstance(bases, list):
            space[name] = peer.exceptions[name] = type(name, (nearest_base(bases),), {})
            setattr(solution, name, space[name])


def add_modules(space: dict[str, Any], hello: dict[str, Any], used: set[str]) -> None:
    """The modules that the tests use without importing them."""
    for name, module_name in named(hello, "modules").items():
        # A copy of our own: tests may rely on what the program imports, under the name that it gave it.
        if name in used and module_name in sys.stdlib_module_names and not str(module_name).startswith("_"):
            space[name] = importlib.import_module(module_name)
    # The real module, whatever the program calls by that name.
    for name in used & sys.stdlib_module_names:
        space[name] = importlib.import_module(name)


def told(hello: Any) -> str:
    """Why a program did not load, as its side says it.

    >>> told({"failed": [["KeyError", "LookupError"], "'x'"]}), told(7)
    ("KeyError: 'x'", '7')
    """
    try:
        (kind, *_), message = hello["failed"]
        return f"{kind}: {message}"[:300]
    except (KeyError, TypeError, ValueError):
        return str(hello)[:300]


def named(hello: dict[str, Any], kind: str) -> dict[str, Any]:
    """What the program calls by names that may appear in tests; Python's own (`__…`) are not the program's to give."""
    entries = hello.get(kind, {})
    if not isinstance(entries, dict) or len(entries) > MAX_NAMES:
        raise WireError(f"it sent {kind} that are none")
    return {name: value for name, value in entries.items() if name.isidentifier() and not name.startswith("__")}


def nearest_base(names: list[Any]) -> type[Exception]:
    """The first built-in exception among the names of base classes."""
    found = (getattr(builtins, name, None) for name in names if isinstance(name, str))
    return next((b for b in found if isinstance(b, type) and issubclass(b, Exception)), Exception)


def modules_used(sources: list[str]) -> set[str]:
    """The names whose attributes tests use, as of modules in `math.isclose(…)`.

    >>> sorted(modules_used(["assert math.isclose(f(1), g.x)"]))
    ['g', 'math']
    """
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {n.value.id for n in nodes if isinstance(n.value, ast.Name)}


# -- running them


class Run:
    """One test program: runs it, then what it defines and does not run itself, and counts what was checked."""

    def __init__(self, source: str, space: dict[str, Any], payload: dict[str, Any], peer: Peer) -> None:
        self.tree = ast.parse(source)
        self.space, self.peer, self.partial, self.entry_point = space, peer, payload["partial"], payload["entry_point"]
        self.checks = Checks()
        self.uses_unittest = any("unittest" in text for text in (*payload["tests"], payload["setup"]))
        self.why = ""
        self.raised = 0

    def verdict(self) -> tuple[float | None, str]:
        """The share of its checks that hold, and why not all; None where it checks nothing."""
        asked = self.peer.asked
        self.peer.trouble = ""
        counting = CountAsserts(keep_on=self.partial)
        tree = ast.fix_missing_locations(counting.visit(self.tree))
        self.space["__checks__"] = self.checks
        with counted(self.checks) if self.uses_unittest else nullcontext():
            self._attempt(lambda: exec(compile(tree, "<tests>", "exec"), self.space))
            for rest in self._left():
                if self.partial or not self.why:
                    self._attempt(rest)
        # It counts also where the tests caught the exception.
        if self.peer.trouble:
            self.raised += 1
            self.why = self.why or self.peer.trouble
        return self._share(counting, self.peer.asked > asked)

    def _share(self, counting: CountAsserts, asked: bool) -> tuple[float | None, str]:
        ran = self.checks.asserts or self.checks.units or asked or self.why
        # Nothing was checked, and the program has no part in it.
        if not ran and not counting.at_top:
            return None, ""
        held, failed = self.checks.counts(counting.expected)
        if failed and not self.why:
            self.why = self.checks.why or "an assert was never reached"
        if not self.partial or not held + failed:
            return (0.0 if self.why else 1.0), self.why
        return held / (held + failed + self.raised), self.why

    def _attempt(self, step: Callable[[], Any]) -> None:
        """Run a part of the tests; what it raises is a failure of the program."""
        try:
            step()
        except SystemExit as leave:
            # unittest.main() ends so. Its tests were counted as they ran.
            if leave.code or not self.checks.units:
                self.why = self.why or (self.checks.units and self.checks.why) or ""
                self._failed(f"exit({leave.code!r})")
        except WireError as error:
            self._failed(f"the program is gone: {error}")
        except Exception as error:
            self._failed(f"{type(error).__name__}: {error}"[:300])

    def _failed(self, why: str) -> None:
        # The tests of unittest count one by one, and not once more for the exit.
        self.raised += not (self.checks.units and why.startswith("exit("))
        self.why = self.why or why

    def _left(self) -> list[Callable[[], Any]]:
        """What the tests define but do not run: HumanEval's `check`, pytest's `test_…`, unittest's classes."""
        left: list[Callable[[], Any]] = []
        used = names_used(self.tree)
        for node in self.tree.body:
            name = getattr(node, "name", "")
            found = self.space.get(name)
            if isinstance(node, ast.FunctionDef) and name.startswith("test") and name not in used:
                left.append(functools.partial(run_test, found, self.space))
            elif isinstance(node, ast.FunctionDef) and name == "check" and self.entry_point and name not in used:
                left.append(lambda: self.space["check"](self.space["candidate"]))
            elif isinstance(node, ast.ClassDef) and is_unittest(found):
                if found not in self.checks.classes:
                    left.append(functools.partial(run_class, found))  # type: ignore[arg-type]
            elif isinstance(node, ast.ClassDef) and name.startswith("Test") and isinstance(found, type):
                methods = [m for m in vars(found) if m.startswith("test")]
                left += [functools.partial(run_method, found, m, self.space) for m in methods]
        return left


def is_unittest(kind: Any) -> bool:
    """Whether a class is one of unittest's tests; it is not imported for that, since that takes its time."""
    module = sys.modules.get("unittest")
    return module is not None and isinstance(kind, type) and issubclass(kind, module.TestCase)


def run_class(case: type[unittest.TestCase]) -> None:
    """Run the tests of a class of unittest's kind."""
    import unittest

    unittest.TextTestRunner(stream=io.StringIO()).run(unittest.defaultTestLoader.loadTestsFromTestCase(case))


def run_test(test: Any, space: dict[str, Any]) -> None:
    """Run a test of pytest's kind."""
    like_pytest = pytest_here()
    test() if like_pytest is None else like_pytest.run_test(test, space)


def run_method(kind: type, method: str, space: dict[str, Any]) -> None:
    """Run a test of pytest's kind that is a method."""
    run_test(getattr(kind(), method), space)


def names_used(tree: ast.Module) -> set[str]:
    """The names that a program uses at its top level, so outside the functions and classes that it defines.

    >>> sorted(names_used(ast.parse("def check(c): help(c)\\ncheck(f)")))
    ['check', 'f']
    """
    statements = [s for s in tree.body if not isinstance(s, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    return {node.id for s in statements for node in ast.walk(s) if isinstance(node, ast.Name)}


# -- counting


class Checks:
    """What was checked, and how it went. An assert counts once, however often it runs, and holds if it always did."""

    def __init__(self) -> None:
        self.asserts: dict[int, bool] = {}
        self.units: dict[str, bool] = {}
        self.classes: set[type] = set()
        self.why = ""

    def note(self, number: int, error: BaseException | None) -> None:
        """Note that an assert ran."""
        self.asserts[number] = self.asserts.get(number, True) and error is None
        if error is not None:
            self.why = self.why or f"{type(error).__name__}: {error}"[:300]

    def counts(self, expected: set[int]) -> tuple[int, int]:
        """How many held and how many did not; an assert that should have run and was never reached did not."""
        results = [*self.asserts.values(), *self.units.values(), *(False for n in expected - self.asserts.keys())]
        return sum(results), len(results) - sum(results)


@contextmanager
def counted(checks: Checks) -> Iterator[None]:
    """Counts unittest's tests where they run, whoever runs them and whatever is made of the result."""
    import unittest

    original = unittest.TestCase.run

    def run(case: unittest.TestCase, result: unittest.TestResult | None = None) -> Any:
        result = case.defaultTestResult() if result is None else result
        before, skipped = num_failed(result), len(result.skipped)
        done = original(case, result)
        checks.classes.add(type(case))
        if len(result.skipped) == skipped:
            good = num_failed(result) == before
            checks.units[case.id()] = checks.units.get(case.id(), True) and good
            if not good:
                bad = (result.failures + result.errors)[-1:]
                checks.why = checks.why or f"{case.id()}: {bad[0][1][-200:] if bad else 'unexpected success'}"
        return done

    unittest.TestCase.run = run  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        unittest.TestCase.run = original  # type: ignore[method-assign]


def num_failed(result: unittest.TestResult) -> int:
    """How many tests have not gone as they should."""
    return len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)


class CountAsserts(ast.NodeTransformer):
    """Makes every assert say how it went; with `keep_on`, instead of ending the tests.

    `expected` are those that must run: not those in a branch that need not be taken, or that are there to fail.
    """

    def __init__(self, *, keep_on: bool) -> None:
        self.keep_on = keep_on
        self.count = 0
        self.expected: set[int] = set()
        # Whether one of the expected asserts is in no function.
        self.at_top = False
        self._may_be_skipped = self._functions = 0

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """`try: assert …` with a note of either end."""
        number, self.count = self.count, self.count + 1
        if not self._may_be_skipped and not (isinstance(node.test, ast.Constant) and not node.test.value):
            self.expected.add(number)
            self.at_top = self.at_top or not self._functions
        source = (
            f"try:\n    pass\nexcept Exception as __error__:\n    __checks__.note({number}, __error__)\n"
            f"    {'pass' if self.keep_on else 'raise'}\nelse:\n    __checks__.note({number}, None)"
        )
        attempt = ast.parse(source).body[0]
        assert isinstance(attempt, ast.Try)
        attempt.body = [node]
        return ast.copy_location(attempt, node)

    def _in_a_branch(self, node: ast.AST) -> ast.AST:
        self._may_be_skipped += 1
        self.generic_visit(node)
        self._may_be_skipped -= 1
        return node

    visit_If = visit_While = visit_ExceptHandler = visit_Match = visit_AsyncFunctionDef = _in_a_branch

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Helpers may not be needed; tests are."""
        self._functions += 1
        visited = self.generic_visit(node) if node.name.startswith(("test", "check")) else self._in_a_branch(node)
        self._functions -= 1
        return visited

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """`else` is where what should have been raised was not."""
        node.body = [self.visit(s) for s in node.body]
        node.finalbody = [self.visit(s) for s in node.finalbody]
        self._may_be_skipped += 1
        node.handlers = [self.visit(h) for h in node.handlers]
        node.orelse = [self.visit(s) for s in node.orelse]
        self._may_be_skipped -= 1
        return node
