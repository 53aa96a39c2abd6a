"""Runs the tests. The program's functions appear in them under their names, but run in the other sandbox.

No line of the program runs here, so it cannot read the tests, change what `assert` means, or speak in their name: all
that comes from it is plain data, as the values of calls.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
import types
from typing import Any

from rloom.rewards.inside.program import limit
from rloom.rewards.inside.wire import Peer, WireError, receive, send

OWN = "__tests__"


def may(operation: str, target: Any, args: tuple[Any, ...]) -> bool:
    """What the program may do with an object of the tests: call what it was given, and use public attributes of objects
    whose class the tests define. No way leads from there to the tests' own names."""
    if operation == "call":
        return not isinstance(target, type)
    public = bool(args) and isinstance(args[0], str) and not args[0].startswith("_")
    return operation in ("getattr", "setattr") and public and type(target).__module__ == OWN


def main(payload: dict[str, Any]) -> None:
    """Run the tests and report each on the verdict's pipe, which no other process holds."""
    limit(payload["limits"])
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    os.write(payload["ready_fd"], b"r")
    peer = Peer(payload["read_fd"], payload["write_fd"], allow=may)
    verdict = payload["verdict_fd"]
    try:
        space = namespace(peer, payload)
        for source in payload["tests"]:
            share, why = run(source, space, payload)
            send(verdict, {"share": share, "why": why})
            if share < 1.0 and not payload["partial"]:
                break
    except WireError as error:
        send(verdict, {"share": 0.0, "why": f"the program is gone: {error}"})
    send(verdict, {"done": True})


def namespace(peer: Peer, payload: dict[str, Any]) -> dict[str, Any]:
    """What the tests see: the program's names (none that hides a built-in one), and what was put there for them."""
    module = types.ModuleType(OWN)
    hello = receive(peer.read_fd)
    if not isinstance(hello, dict) or "names" not in hello:
        raise WireError(f"it did not load: {str(hello)[:300]}")
    space = module.__dict__
    space["__name__"] = OWN
    for name, value in hello["names"].items():
        if not hasattr(builtins, name) or name == payload["entry_point"]:
            space[name] = peer.unpack(value)
    for name, bases in hello.get("exceptions", {}).items():
        base = next((b for n in bases if isinstance(b := getattr(builtins, str(n), None), type)), Exception)
        if not hasattr(builtins, name) and issubclass(base, Exception):
            space[name] = peer.exceptions[name] = type(str(name), (base,), {})
    for name, module_name in hello.get("modules", {}).items():
        if module_name in sys.stdlib_module_names:  # a copy of our own: tests may rely on what the program imports
            space[name] = importlib.import_module(module_name)
    for name in modules_used(payload["tests"]):  # whatever the program calls by that name
        space[name] = importlib.import_module(name)
    if payload["entry_point"]:
        if payload["entry_point"] not in space:
            raise WireError(f"it does not define {payload['entry_point']}")
        space["candidate"] = space[payload["entry_point"]]
    space.update(row=peer.unpack(payload["row"]), program=payload["program"])
    exec(compile(payload["setup"], "<setup>", "exec"), space)
    return space


def modules_used(sources: list[str]) -> set[str]:
    """The modules of the standard library that tests use by name, as `math.isclose(…)` does.

    >>> modules_used(["assert math.isclose(f(1), g.x)"])
    {'math'}
    """
    nodes = [node for source in sources for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return {n.value.id for n in nodes if isinstance(n.value, ast.Name) and n.value.id in sys.stdlib_module_names}


def run(source: str, space: dict[str, Any], payload: dict[str, Any]) -> tuple[float, str]:
    """The share of a test that holds, and why not all of it did."""
    counts = {"run": 0, "passed": 0}
    tree = ast.parse(source)
    written = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    if payload["partial"] and written:
        tree = ast.fix_missing_locations(CountAsserts().visit(tree))
        space["__counts__"] = counts
    why = ""
    try:
        exec(compile(tree, "<tests>", "exec"), space)
        check = space.get("check")
        if payload["entry_point"] and callable(check) and not calls(tree, "check"):
            check(space["candidate"])
    except SystemExit as leave:  # unittest.main() ends so
        why = "" if not leave.code else f"exit({leave.code!r})"
    except WireError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:300]
    if not (payload["partial"] and written):
        return (0.0 if why else 1.0), why
    return counts["passed"] / max(counts["run"] + bool(why), written), why


def calls(tree: ast.Module, name: str) -> bool:
    """Whether a program calls a function by itself, at its top level.

    >>> calls(ast.parse("def check(c): pass\\ncheck(f)"), "check")
    True
    """
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
        for statement in tree.body
        if not isinstance(statement, (ast.FunctionDef, ast.ClassDef))
        for node in ast.walk(statement)
    )


class CountAsserts(ast.NodeTransformer):
    """Makes every assert count instead of ending the tests."""

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        """Count it as run, then as passed if nothing was raised."""
        template = (
            "__counts__['run'] += 1\ntry:\n    pass\nexcept Exception:\n    pass\nelse:\n    __counts__['passed'] += 1"
        )
        counted, attempt = ast.parse(template).body
        assert isinstance(attempt, ast.Try)
        attempt.body = [node]
        return [ast.copy_location(counted, node), ast.copy_location(attempt, node)]
