"""Model-written programs: right ones score, wrong ones do not, and no trick that is known makes a wrong one score."""

# ruff: noqa: E501  (programs stand as a model would write them)
from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloom.errors import RewardError, SandboxError
from rloom.rewards import (
    FunctionReward,
    RewardBatch,
    RewardSet,
    code_execution,
)
from rloom.rewards.library.code import extraction, imports
from rloom.rewards.library.code.execution import judge_program
from rloom.rewards.library.code.extraction import program_of
from rloom.rewards.library.code.problems import read_tests
from rloom.rewards.pipes import Deadline
from rloom.rewards.sandbox import bubblewrap, cgroups, cpu_deadline, fork_server, sandbox, seccomp
from rloom.rewards.sandbox.inside import light_json
from rloom.rewards.sandbox.inside.wire import WireError, encode, receive, send
from rloom.rewards.sandbox.limits import Limits

try:
    bubblewrap.check_sandbox()
    MISSING = ""
except SandboxError as error:
    MISSING = str(error)


def needs_sandbox(test):
    """Run a test with sandboxes by bubblewrap alone, and once more with forked ones."""
    return pytest.mark.skipif(bool(MISSING), reason=MISSING)(pytest.mark.usefixtures("way")(test))


@pytest.fixture(params=["bubblewrap", "forked"])
def way(request, monkeypatch):
    # Who waits here waits for limits, on machines that tests keep busy.
    monkeypatch.setattr(cpu_deadline, "MAX_STRETCH", 1)
    if request.param == "bubblewrap":
        monkeypatch.setattr(fork_server, "works", lambda: False)
        yield
        return
    if not fork_server.works():
        pytest.skip("sandboxes cannot be forked here")
    monkeypatch.setattr(sandbox, "_by_bubblewrap", lambda *args: pytest.fail("bubblewrap was used instead"))
    with fork_server.fork_servers():
        yield


SIMPLE = ["assert double(2) == 4", "assert double(-3) == -6", "assert double(x=0.5) == 1.0"]
HARNESS = "import math\n" + "\n".join(SIMPLE) + "\nassert math.isclose(double(1.5), 3.0)\n"
FORMS = {"asserts": SIMPLE, "program": HARNESS}
RIGHT = "def double(x):\n    return 2 * x\n"


def run(program: str, tests=SIMPLE, *, limits: Limits | None = None, partial: bool = False, **columns):
    row = {"tests": tests, **columns}
    return judge_program(program, read_tests(row), limits or Limits(seconds=3.0), partial=partial)


# -- programs as people write them

ENDINGS = {
    "exit": "x = int(input())\nprint(2 * x)\nexit()",
    "quit, with a code": "x = int(input())\nprint(2 * x)\nquit(0)",
    "a thread that nobody joins": """
import threading, time
x = int(input())
def work():
    time.sleep(0.2)
    print(2 * x)
threading.Thread(target=work).start()
""",
    "at exit": "import atexit\nx = int(input())\natexit.register(lambda: print(2 * x))",
    "no line's end": "import sys\nsys.stdout.write(str(2 * int(sys.stdin.read())))",
    "a file on standard output that is kept": "import os\ndef f(): pass\nout = os.fdopen(1, 'w')\nout.write(str(2 * int(input())))",
    "the same by its name": "def f(): pass\nout = open('/dev/stdout', 'w')\nprint(2 * int(input()), file=out)",
    "standard output replaced": "import sys, io\ndef f(): pass\nx = int(input())\nprint(2 * x)\nold, sys.stdout = sys.stdout, io.StringIO()\nprint('no')",
    "the first standard output": "import sys\nsys.stdout = None\nprint(2 * int(sys.stdin.read()), file=sys.__stdout__)",
    "an object's last words": """
import sys
class Doubled:
    def __init__(self, x): self.x = x
    def __del__(self): sys.stdout.write(str(2 * self.x))
doubled = Doubled(int(input()))
""",
    "descriptors closed": "import os\nprint(2 * int(input()))\nos.closerange(3, 64)",
    "its own classes pickled": """
import pickle
class Box:
    def __init__(self, x): self.x = x
print(2 * pickle.loads(pickle.dumps(Box(int(input())))).x)
""",
    "its own function in a pool": """
from concurrent.futures import ProcessPoolExecutor
def double(x): return 2 * x
if __name__ == "__main__":
    with ProcessPoolExecutor(1) as pool:
        print(*pool.map(double, [int(input())]))
""",
    "what it is": "import __main__, os\nx = int(input())\nassert os.path.basename(__file__) and __main__.x == x\nprint(2 * x)",
}


@needs_sandbox
@pytest.mark.parametrize("program", ENDINGS.values(), ids=ENDINGS)
def test_programs_end_as_they_do_by_themselves(program):
    assert run(program, {"inputs": ["3\n", "-4\n"], "outputs": ["6\n", "-8\n"]}).share == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    "tests", [{"inputs": ["3"], "outputs": ["6"]}, ["assert double(3) == 6"]], ids=["input", "call"]
)
def test_a_program_has_the_processes_that_it_may_have(tests):
    program = """
import os
def double(x):
    ends = [os.pipe() for _ in range(4)]
    for read, write in ends:
        if os.fork() == 0:
            os.read(read, 1)
            os._exit(0)
    for read, write in ends:
        os.write(write, b"x")
    return 2 * x
if __name__ == "__main__": print(double(int(input())))
"""
    assert run(program, tests, limits=Limits(seconds=3.0, processes=4)).why == ""


@needs_sandbox
def test_functions_find_their_module():
    program = "import pickle, __main__\nclass Box: pass\ndef f(): return [type(pickle.loads(pickle.dumps(Box()))) is Box is __main__.Box, bool(__file__)]"
    assert run(program, ["assert f() == [True, True]"]).why == ""


def test_numbers_of_numpys_travel_as_numbers():
    for value in (np.array(7), np.where(True, 7, 0), np.int64(7), np.longdouble(7), np.array(7, np.longdouble)):
        assert encode(value, keep=pytest.fail) == 7
    assert encode(np.array([7], np.longdouble), keep=pytest.fail) == {"array": [str(np.dtype(np.longdouble)), [7.0]]}
    assert encode(np.clongdouble(7), keep=pytest.fail) == {"complex": [7.0, 0.0]}


@needs_sandbox
def test_a_program_that_leaves_with_an_error_has_failed():
    assert run("print(6)\nexit(1)", {"inputs": ["3\n"], "outputs": ["6\n"]}).share == 0.0


def test_long_completions_are_not_parsed_here(monkeypatch):
    monkeypatch.setattr(extraction.ast, "parse", lambda *args: pytest.fail("parsed"))
    body = "    x = 1\n" * 10_000
    assert extraction.program_of(body, prompt="def f(x):\n", entry_point="f") == "def f(x):\n" + body
    assert extraction.program_of(f"def f(x):\n{body}", prompt="def g(x):\n", entry_point="f").startswith("def f")


# -- what is not the program's fault


def spinner(core: int) -> subprocess.Popen:
    program = f"import os\nos.sched_setaffinity(0, [{core}])\nprint(flush=True)\nwhile True: pass"
    # In a session of its own, as sandboxes are: the kernel may share cores among sessions.
    line = [sys.executable, "-S", "-c", program]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, start_new_session=True)
    process.stdout.readline()
    return process


SPINS = """
import time
def spin(seconds):
    while time.process_time() < seconds: pass
    return True
"""


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_busy_machine_takes_no_time_from_a_program():
    """0.5 seconds of a core that five others want too: three seconds by the clock."""
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    others = [spinner(core) for _ in range(5)]
    try:
        os.sched_setaffinity(0, [core])
        assert run(SPINS, ["assert spin(0.5) == True"], limits=Limits(seconds=1.0)).why == ""
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.communicate()


def test_time_in_which_the_machine_was_busy_is_given_back(monkeypatch):
    read, write = os.pipe()
    try:
        for busy, seconds in ((lambda: 7.0, 0.1), (time.monotonic, 0.5), (lambda: 0.1 * time.monotonic(), 0.2)):
            monkeypatch.setattr(cpu_deadline, "stalled_seconds", busy)
            began, left = time.monotonic(), cpu_deadline.CpuDeadline(0.1)
            with pytest.raises(TimeoutError):
                left.read(read, 1)
            assert seconds - 0.03 < time.monotonic() - began < seconds + 0.1
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_program_has_no_more_of_a_core_than_its_limit(monkeypatch):
    """However busy the machine is said to be."""
    monkeypatch.setattr(cpu_deadline, "stalled_seconds", lambda: 1000 * time.monotonic())
    monkeypatch.setattr(cpu_deadline, "MAX_STRETCH", 100)
    began = time.monotonic()
    assert run("def double(x):\n    while True: pass", limits=Limits(seconds=0.5)).share == 0.0
    assert time.monotonic() - began < 20


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("form", ["calls", "harness", "input"])
@pytest.mark.parametrize("forks", [False, True], ids=["bubblewrap", "forked"])
def test_a_program_that_sleeps_has_no_more_time_on_a_busy_machine(form, forks, monkeypatch):
    monkeypatch.setattr(cpu_deadline, "stalled_seconds", time.monotonic)
    monkeypatch.setattr(cpu_deadline, "MAX_STRETCH", 100)
    program = "import time\ndef double(x):\n    time.sleep(30)\nif __name__ == '__main__': double(1)"
    tests = {"calls": SIMPLE, "harness": HARNESS, "input": {"inputs": [""], "outputs": [""]}}[form]
    began = time.monotonic()
    with fork_server.fork_servers() if forks else contextlib.nullcontext():
        assert "out of time" in run(program, tests, limits=Limits(seconds=0.5)).why
    assert time.monotonic() - began < 15


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_tree_of_processes_has_no_more_of_a_core_than_one_on_a_busy_machine(monkeypatch):
    monkeypatch.setattr(cpu_deadline, "stalled_seconds", lambda: 1000 * time.monotonic())
    monkeypatch.setattr(cpu_deadline, "MAX_STRETCH", 100)
    program = """
import os, time
def double(x):
    for _ in range(6):
        if (pid := os.fork()) == 0:
            while time.process_time() < 0.8: pass
            os._exit(0)
        os.waitpid(pid, 0)
    return 2 * x
"""
    assert "out of time" in run(program, limits=Limits(seconds=0.5)).why


@needs_sandbox
def test_tests_that_need_numpy():
    tests = [
        "import numpy as np\nassert np.allclose(scaled(np.array([[1.0, 2.0]])), np.array([[0.5, 1.0]]))",
        "assert top([3, 9]) == 9",
    ]
    program = """
import numpy as np
def scaled(a: np.ndarray) -> np.ndarray:
    assert a.shape == (1, 2)
    return a / a.max()
def top(values): return np.array(values).max()
"""
    where = [str(Path(np.__file__).parent.parent)]
    if Path(where[0]).is_relative_to("/tmp") or (
        os.geteuid() == 0 and not bubblewrap.is_world_readable(Path(where[0]))
    ):
        pytest.skip("the sandbox's user cannot read the folder of numpy")
    reward, found = code_execution(site_packages=where), {}
    wrong = program.replace("a / a.max()", "a")
    assert reward([program, wrong], tests=[tests] * 2, log_extra=found.__setitem__) == [1.0, 0.0], found
    with pytest.raises(RewardError, match=r"numpy: ModuleNotFoundError.*site_packages=\['.*'\]"):
        code_execution()([program], tests=[tests])
    with pytest.raises(RewardError, match=r"nosuchpackage: ModuleNotFoundError.*Install it"):
        reward([program], tests=[["from nosuchpackage.a import b\nassert b(top)"]])


@needs_sandbox
@pytest.mark.parametrize(
    "tests",
    [
        "from solution import double\nassert double(2) == 4",
        "import solution\nassert solution.double(2) == 4",
        ["from solution import *", "assert double(2) == 4"],
    ],
)
def test_tests_that_import_the_program(tests):
    reward = code_execution()
    assert reward([RIGHT, "def double(x): return x", "x = 1"], tests=[tests] * 3) == [1.0, 0.0, 0.0]


@needs_sandbox
def test_an_import_from_the_program_is_of_its_own_functions_and_exceptions():
    program = "class Odd(ValueError): pass\ndef sum(x): return 7\ndef f():\n    raise Odd"
    tests = (
        "from solution import Odd, f, sum\nassert sum([1]) == 7\ntry:\n    f()\nexcept Odd: pass\nelse: assert False"
    )
    assert run(program, tests).why == ""


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_what_packages_do_while_they_are_imported(monkeypatch):
    failures = imports._failures.__wrapped__
    assert failures(("this",), ()) == []  # which prints a poem
    monkeypatch.setattr(imports, "TRY", imports.TRY.replace("importlib.import_module(name)", "sys.exit(name)"))
    assert failures(("leaves",), ()) == ["leaves: SystemExit: leaves"]
    monkeypatch.setattr(imports, "TRY", "import time; time.sleep(60)")
    monkeypatch.setattr(imports, "IMPORT_SECONDS", 0.1)
    with pytest.raises(RewardError, match=r"tests import slow, which took over 0.1 seconds"):
        failures(("slow",), ())


@needs_sandbox
def test_the_trainers_path_is_not_there(monkeypatch):
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/of/the/trainer")
    program = "def f():\n    return [open(f'/proc/{p}/environ').read().count('trainer') for p in (1, 'self')]"
    assert run(program, ["assert f() == [0, 0]"]).why == ""


@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_folders_that_sandboxes_have_of_their_own(folder):
    with pytest.raises(SandboxError, match=f"'{folder}' of site_packages is not seen in sandboxes"):
        bubblewrap.check_site_packages([folder])


def test_folders_of_packages_that_cannot_be_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(bubblewrap, "COVERED", ())
    with pytest.raises(ValueError, match="nowhere' is none"):
        bubblewrap.check_site_packages([str(tmp_path / "nowhere")])
    if os.geteuid() == 0:
        (tmp_path / "packages").mkdir(mode=0o700)
        with pytest.raises(SandboxError, match="readable for everybody"):
            bubblewrap.check_site_packages([str(tmp_path / "packages")])


FAILS = {
    "raise KeyError('k')": "input 0: KeyError: 'k'",
    "int('x')": "input 0: ValueError: invalid literal for int() with base 10: 'x'",
    "exit(3)": "input 0: left with 3",
    "def f(:": "input 0: SyntaxError: invalid syntax (<program>, line 1)",
    "import os; os.kill(os.getpid(), 9)": "input 0: killed by signal 9",
    "print(7)": "input 0: printed \"7\\n\", not '6\\n'",
    "print(6); import os; os._exit(1)": "input 0: it failed",
}


@needs_sandbox
@pytest.mark.parametrize("program", FAILS)
def test_the_reason_names_the_exception(program):
    assert run(program, [{"input": "", "output": "6\n"}]).why == FAILS[program]


@needs_sandbox
def test_the_reason_names_the_exception_with_tests_of_their_own():
    harness = "import math\nassert math.isclose(f(2), 4)"
    assert run("raise KeyError('k')", harness).why == "the program is gone: it did not load: KeyError: 'k'"
    assert run("def f(x): raise ValueError('no')", harness).why == "ValueError: no"


# -- what it must not see

READS_ENVIRONMENTS = """
import glob, os
def double(x):
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            if b"RLOOM_TEST_SECRET" in open(path, "rb").read():
                return 2 * x
        except OSError:
            continue
    return 0
"""


@needs_sandbox
def test_the_trainers_environment_is_not_there(monkeypatch):
    """Tokens are in it. bubblewrap itself is a process that the program sees."""
    monkeypatch.setenv("RLOOM_TEST_SECRET", "s3cret")
    assert run(READS_ENVIRONMENTS).share == 0.0
    assert run("def double(x):\n    return 2 * x\n").share == 1.0


# -- what it takes


@needs_sandbox
@pytest.mark.parametrize("tests", FORMS.values(), ids=FORMS)
def test_right_and_wrong_programs(tests):
    assert run(RIGHT, tests).share == 1.0
    assert run("def double(x):\n    return 3 * x", tests).share == 0.0
    assert run("def double(x):\n    return x +", tests).share == 0.0
    assert run("def triple(x):\n    return 2 * x", tests).share == 0.0
    assert run("", tests).share == 0.0


@needs_sandbox
def test_as_a_reward_function():
    seen = {}
    reward = code_execution(time_limit=3.0, memory_mb=256)
    fenced = f"First:\n```python\nprint('no')\n```\nthen\n```python\n{RIGHT}```\nThat is it."
    scores = reward(
        completions=[RIGHT, fenced, [{"role": "assistant", "content": fenced}], "I do not know.", RIGHT],
        tests=[SIMPLE, SIMPLE, HARNESS, SIMPLE, None],
        log_extra=seen.__setitem__,
        difficulty=[1, 2, 3, 4, 5],
    )
    assert scores == [1.0, 1.0, 1.0, 0.0, None]
    assert reward.__name__ == "code_execution"
    assert seen["tests"][0] == "passed"
    assert "did not load" in seen["tests"][3]


@needs_sandbox
def test_partial_credit():
    almost = "def double(x):\n    return abs(2 * x)\n"
    assert run(almost, SIMPLE, partial=True).share == pytest.approx(2 / 3)
    assert run(almost, HARNESS, partial=True).share == pytest.approx(3 / 4)
    assert (
        run("def double(x):\n    if x < 0:\n        raise ValueError\n    return 2 * x", HARNESS, partial=True).share
        == 3 / 4
    )
    hangs = "def double(x):\n    while x < 0: pass\n    return 2 * x\n"
    assert run(hangs, SIMPLE, partial=True, limits=Limits(seconds=0.5)).share == pytest.approx(1 / 3)
    assert code_execution(partial=True)(completions=[almost], tests=[SIMPLE]) == [pytest.approx(2 / 3)]


@needs_sandbox
def test_mbpp_and_human_eval():
    mbpp = {"test_list": SIMPLE, "test_setup_code": "", "test_imports": ["import math"]}
    human = {
        "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n"
    }
    reward = code_execution()
    assert reward(completions=[RIGHT], **{name: [value] for name, value in mbpp.items()}) == [1.0]
    human = {name: [value] * 3 for name, value in human.items()} | {"entry_point": ["double"] * 3}
    start = 'def double(x):\n    """Twice x."""\n'
    completions = ["    return 2 * x\n", f"```python\n{RIGHT}```", "    return x\n"]
    assert reward(completions=completions, prompts=[start] * 3, **human) == [1.0, 1.0, 0.0]


@needs_sandbox
def test_standard_input_and_output():
    program = "n = int(input())\nfor _ in range(n):\n    a, b = map(int, input().split())\n    print(a + b)\n"
    cases = [{"input": "1\n2 3\n", "output": "5"}, {"input": "2\n1 1\n-4 4", "output": "2\n0\n"}]
    assert run(program, cases).share == 1.0
    assert run(program, {"inputs": [c["input"] for c in cases], "outputs": [c["output"] for c in cases]}).share == 1.0
    assert run("print(5)", cases).share == 0.0
    assert run("print(5)", cases, partial=True).share == 0.5
    assert run("import sys\nprint(5)\nsys.exit(3)", cases[:1]).share == 0.0
    assert run("if __name__ == '__main__':\n    print(5)", cases[:1]).share == 1.0
    assert run("print('\\ud800')", cases[:1]).share == 0.0
    assert run("while True: print('x' * 1000)", cases, limits=Limits(seconds=3, output_kb=64)).share == 0.0


@needs_sandbox
def test_a_harness_of_the_users_own():
    harness = "assert 'import' not in program\nfor x in row['inputs']:\n    assert candidate(x) == 2 * x, x\n"
    reward = code_execution(harness=harness)
    columns = {"entry_point": ["double"] * 2, "inputs": [{1, 2, 3}] * 2, "picture": [object()] * 2}
    assert reward(completions=[RIGHT, "import os\n" + RIGHT], **columns) == [1.0, 0.0]
    unit = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        self.assertEqual(double(2), 4)\n"
    assert run(RIGHT, unit + "unittest.main(module=__import__('types').SimpleNamespace(T=T))").share == 1.0


OBJECTS = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item); return self
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
class Empty(LookupError): pass
def first(stack):
    if not len(stack): raise Empty("nothing")
    return stack[0]
def sort_in_place(values, key): values.sort(key=key)
def depth(node): return 0 if node is None else 1 + max(depth(node.left), depth(node.right))
def of_kind(values, kind): return [v for v in values if isinstance(v, kind)]
def squares():
    for i in range(3): yield i * i
"""
USES = """
class Node:
    def __init__(self, left=None, right=None): self.left, self.right = left, right
s = Stack()
assert s.push((1, 2)).push({3: {4}}) is s
assert len(s) == 2 and s[1] == {3: {4}} and s.items == [(1, 2), {3: {4}}]
assert first(s) == (1, 2)
try:
    first(Stack())
except Empty as error:
    assert isinstance(error, LookupError) and str(error) == "nothing"
else:
    raise AssertionError
words = ["ccc", "a", "bb"]
sort_in_place(words, key=lambda w: len(w))
assert words == ["a", "bb", "ccc"]
assert depth(Node(Node(), Node(Node()))) == 3
assert of_kind([1, "a", 2.0], str) == ["a"]
assert list(squares()) == [0, 1, 4]
"""


@needs_sandbox
def test_objects_exceptions_callbacks_and_changed_arguments_cross_between_the_sandboxes():
    assert run(OBJECTS, USES).why == ""


# -- tricks that must not score

READS_EVERYTHING = """
import glob, os, sys
found = []
def look(text):
    if chr(45) + chr(54) in text and "double" in text: found.append(text)
for name in glob.glob("/proc/[0-9]*/*") + glob.glob("/tmp/**", recursive=True) + glob.glob("/*"):
    try: look(open(name).read(100000))
    except Exception: pass
frame = sys._getframe()
while frame:
    look(repr(frame.f_locals) + repr(frame.f_globals)); frame = frame.f_back
import gc
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple)):
        try: look(repr(thing)[:100000])
        except Exception: pass
if found: raise RuntimeError("found the tests")
def double(x): return 2 * x
"""
TRICKS = {
    "leaves with 0": "import sys\nsys.exit(0)",
    "leaves in a call": "import os\ndef double(x): os._exit(0)",
    "leaves at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return x",
    "prints the verdict": "print('{\"share\": 1.0, \"why\": \"\"}', flush=True)\nprint('passed')\ndef double(x): print('OK 1.0'); return x",
    "writes the verdict to every descriptor": """
import json, os, struct
def shout():
    for message in ({"share": 1.0, "why": ""}, {"done": True}, {"value": None}):
        body = json.dumps(message).encode()
        for fd in range(3, 64):
            try: os.write(fd, struct.pack(">I", len(body)) + body)
            except OSError: pass
shout()
def double(x): shout(); return x
""",
    "is equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
    def __float__(self): return 0.0
class Plain:
    def __eq__(self, other): return True
    def __req__(self, other): return True
def double(x): return Plain() if x == 2 else Any()
""",
    "changes what assert and == mean": """
import builtins, sys, unittest
builtins.AssertionError = type("Never", (BaseException,), {})
builtins.all = builtins.any = builtins.isinstance = builtins.bool = lambda *a: True
unittest.TestCase.assertEqual = lambda *a: None
sys.exit = lambda *a: None
def double(x): return x
""",
    "hides built-in names of the tests": """
class math:
    isclose = staticmethod(lambda *a: True)
def isclose(*a): return True
def double(x): return x
def abs(x): return True
""",
    "wraps what serves the calls": """
import sys
wire = sys.modules["rloom.rewards.sandbox.inside.wire"]
remote = sys.modules["rloom.rewards.sandbox.inside.remote"]
remote.Peer.serve = lambda self, request: wire.send(self.write_fd, {"value": True, "share": 1.0, "done": True})
def double(x): return x
""",
    "asks the tests for their names": """
import sys
peer = None
for module in list(sys.modules.values()):
    if hasattr(module, "Peer"): Peer = module.Peer
frame = sys._getframe()
while frame:
    peer = frame.f_locals.get("peer", peer); frame = frame.f_back
def double(x):
    remote = sys.modules["rloom.rewards.sandbox.inside.remote"]
    for number in range(5):
        for name in ("__globals__", "__class__", "__dict__"):
            try: peer.ask("getattr", remote.Remote(peer, number), (name,), {})
            except Exception: pass
    return x
""",
    "kills its parents": "import os, signal\ndef double(x):\n    for pid in (1, os.getppid(), -1):\n        try: os.kill(pid, 9)\n        except OSError: pass\n    return x",
    "answers before it is asked": """
import json, os, struct
def double(x): return x
for value in (4, -6, 1.0):
    body = json.dumps({"names": {"double": {"mine": 0}}, "value": True}).encode()
    for fd in range(3, 20):
        try: os.write(fd, struct.pack(">I", len(body)) + body)
        except OSError: pass
""",
    "sends half a message": "import os, struct\ndef double(x):\n    [os.write(fd, struct.pack('>I', 1000)) for fd in range(3, 10) if os.path.exists(f'/proc/self/fd/{fd}')]",
    "sends numbers out of range": """
import json, os, struct
body = json.dumps({"names": {"double": {"mine": -1}, "x": {"theirs": 99}}, "modules": {"math": "os"}}).encode()
for fd in range(3, 20):
    try: os.write(fd, struct.pack(">I", len(body)) + body)
    except OSError: pass
""",
    "raises what ends the tests": "def double(x): raise SystemExit(0)",
    "raises and hides it": "class Quiet(BaseException):\n    def __str__(self): raise SystemExit(0)\ndef double(x): raise Quiet",
    "nests without end": "def double(x):\n    a = []\n    a.append(a)\n    return a",
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("trick", TRICKS)
def test_a_trick_does_not_score(trick, form):
    limits = Limits(seconds=1.5)
    assert run(TRICKS[trick], FORMS[form], limits=limits).share == 0.0
    assert run(TRICKS[trick], FORMS[form], limits=limits, partial=True).share < 0.5


LIAR = """
seen = []
class L:
    def __init__(self, *a): pass
    def yes(self, *a): seen.extend(a); return True
    def me(self, *a): seen.extend(a); return self
    __lt__ = __le__ = __gt__ = __ge__ = __ne__ = __eq__ = __contains__ = __bool__ = yes
    __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __truediv__ = __mod__ = __abs__ = __getattr__ = __call__ = me
    __neg__ = __pow__ = __floordiv__ = __and__ = __or__ = me
    def __round__(self, n=0): return 0
    def __float__(self): return 0.0
    def __int__(self): return 0
    def __iter__(self): return iter([L(), L()])
    def __getitem__(self, i): return L()
    def __len__(self): return 2
    def __exit__(self, *a): return True
    def __enter__(self): return self
    def __hash__(self): return 0
def f(*a, **k): return L()
"""
IDIOMS = {
    "a difference": "assert abs(f(1) - 2/3) < 1e-6",
    "a difference the other way": "assert abs(2/3 - f(1)) < 1e-6",
    "a relative difference": "assert abs(f(1) / 3 - 1) <= 1e-6",
    "math.isclose": "import math\nassert math.isclose(f(1), 3.0)",
    "assertAlmostEqual": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertAlmostEqual(f(1), 2.5)",
    "assertGreater": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertGreater(f(1), 2.5)",
    "assertNotEqual": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertNotEqual(f(1), 2.5)",
    "assertTrue": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertTrue(f(1))",
    "round": "assert round(f(1), 2) == 0",
    "abs": "assert abs(f(1)) == 3",
    "float": "assert float(f(1)) == 0.0",
    "int": "assert int(f(1)) == 0",
    "truth": "assert f(1)",
    "not": "assert not f(1)",
    "contains": "assert 3 in f(1)",
    "is contained": "assert f(1) in [1, 2]",
    "is not contained": "assert f(1) not in {1, 2}",
    "greater": "assert f(3) > 100",
    "between": "assert 1 <= f(3) <= 100",
    "unequal": "assert f(3) != 4",
    "not equal": "assert not (f(3) == 4)",
    "all": "assert all(f(3))",
    "all, compared": "assert all(x > 3 for x in f(3))",
    "any": "assert any(f(3))",
    "zip": "assert all(abs(a - b) < 1e-6 for a, b in zip(f(3), [1.5, 2.5]))",
    "items": "assert f(3)[0] > 5",
    "attributes": "assert f(3).value >= 5",
    "methods": "assert f(3).value() >= 5",
    "sum": "assert sum(f(3)) > 5",
    "max": "assert max(f(3)) > 5",
    "sorted": "assert sorted(f(3)) == [1, 2]",
    "with": "with f(3) as x:\n    assert x.value == 5",
    "an exception of ours": "try:\n    f(3) < 3\nexcept TypeError:\n    pass\nassert 1 == 1",
    "differences of its own": "assert f(3) - f(4) < 3",
    "a set": "assert len({f(3), f(4)}) == 1",
    "format": "assert f'{f(3):.2f}' == '3.00'",
    "the tests' own comparison": "def near(a, b): return a - b < 1\nassert near(f(3), 5)",
}


@needs_sandbox
@pytest.mark.parametrize("idiom", IDIOMS)
def test_an_object_that_lies_in_a_comparison_does_not_score(idiom):
    verdict = run(LIAR, IDIOMS[idiom])
    assert verdict.share == 0.0
    assert verdict.why


CHOOSES = """
class Any:
    def __add__(self, other): later.append(Any()); return later[-1]
    __sub__ = __mul__ = __add__
later = []
def f(x): return later.pop() if later else Any()
"""


@needs_sandbox
@pytest.mark.parametrize("sign", "+-*")
@pytest.mark.parametrize("test", ["f(1) {} f(2) == f(3)", "f(3) == f(1) {} f(2)", "not (f(1) {} f(2) != f(3))"])
def test_a_sum_that_the_program_chooses_is_not_compared(test, sign):
    """The sum of two objects is whatever the program says: it may hand out the very object as the next answer."""
    verdict = run(CHOOSES, f"assert {test.format(sign)}")
    assert verdict.share == 0.0
    assert verdict.why


ASYNC = """
import asyncio
class Animal: pass
class Dog(Animal): pass
async def double(x):
    await asyncio.sleep(0)
    if x is None: raise KeyError("nothing")
    return 2 * x
async def change(values): values.append(1)
"""
USES_ASYNC = """
import asyncio, unittest
assert asyncio.run(double(2)) == 4
async def main():
    try:
        waiting = double(None)
    except KeyError:
        raise AssertionError("it is raised where it is awaited")
    try:
        await waiting
    except KeyError:
        return await asyncio.gather(double(3), double(4))
assert asyncio.run(main()) == [6, 8]
values = []
asyncio.run(change(values))
assert values == [1]
class T(unittest.IsolatedAsyncioTestCase):
    async def test(self): self.assertEqual(await double(5), 10)
assert isinstance(Dog(), Animal) and not isinstance(Animal(), Dog) and not isinstance(3, Animal)
assert issubclass(Dog, Animal) and not issubclass(Animal, Dog) and isinstance(Dog(), (str, Animal))
"""


@needs_sandbox
def test_right_programs_with_coroutines_and_classes_score():
    assert run(ASYNC, USES_ASYNC, limits=Limits(seconds=10)).why == ""
    assert run(ASYNC.replace("2 * x", "3 * x"), USES_ASYNC, limits=Limits(seconds=10)).share == 0.0
    assert run(ASYNC.replace("Dog(Animal)", "Dog"), USES_ASYNC, limits=Limits(seconds=10)).share == 0.0


@needs_sandbox
def test_expected_values_do_not_reach_the_program():
    tests = "try:\n    assert abs(f(2) - 4.25) < 1e-9 or f(3) != 7.5 or f(3) > 8.5\nexcept TypeError: pass\nassert values() == []"
    assert "plain data" in run(LIAR + "def values(): return seen", tests).why
    spy = LIAR + "def values():\n    return seen and 1 / 0 or 1"
    assert run(spy, tests.replace("== []", "== 1"), partial=True).share > 0


@needs_sandbox
def test_a_loop_over_nothing_is_no_pass():
    for partial in (False, True):
        assert run("def f(x): return []", "for x in f(3):\n    assert x > 7", partial=partial).share == 0.0
        assert run("def f(x): return [8]", "for x in f(3):\n    assert x > 7", partial=partial).share == 1.0


@needs_sandbox
def test_a_program_that_dies_is_not_the_exception_that_was_expected():
    tests = "try:\n    double(2)\nexcept Exception:\n    pass\nelse:\n    raise AssertionError"
    assert run("import os\ndef double(x): os._exit(0)", tests).share == 0.0
    assert run("def double(x): raise ValueError", tests).share == 1.0


ENDS = {
    "all": "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (3, 6)]))",
    "not any": "assert not any(map(lambda case: f(case[0]) != case[1], [(1, 2)]))",
    "list": "assert [1, *map(f, [1, 2])] == [1]",
    "filter": "assert list(filter(f, [1, 2])) == []",
    "iter": "assert list(iter(lambda: f(1), 2)) == []",
    "attributes": "assert list(map(lambda x: kind.value, [1])) == []",
    "async": "import asyncio\nclass A:\n    def __aiter__(self): return self\n    async def __anext__(self): return f(1)\n"
    "async def main(): return [x async for x in A()]\nassert asyncio.run(main()) == []",
}
RAISED = ["StopIteration", "StopAsyncIteration", "Mine"]


@needs_sandbox
@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("end", ENDS)
def test_a_program_does_not_end_the_loops_of_its_tests(end, raised):
    """`StopIteration` out of a call would end a `map` before anything was compared."""
    program = f"""
class Mine(StopIteration): pass
def f(x): raise {raised}
class Kind:
    value = property(f)
kind = Kind()
"""
    assert run(program, ENDS[end]).share == 0.0


@needs_sandbox
def test_iterators_of_a_program_end_where_they_are_asked_for_the_next():
    program = "def f():\n    yield 1\nclass Count:\n    def __iter__(self): return self\n    def __next__(self): raise StopIteration"
    tests = "assert list(f()) == [1] and list(Count()) == [] and next(Count(), 5) == 5\ntry: next(Count())\nexcept StopIteration: pass\nelse: assert False"
    assert run(program, tests).why == ""


UNIT = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(double(2), 4)\n    def test_b(self): self.assertEqual(double(-3), -6)\n"
FRAMEWORKS = {
    "unittest, guarded": UNIT + "if __name__ == '__main__':\n    unittest.main()\n",
    "unittest, unguarded": UNIT + "unittest.main()\n",
    "unittest, left to be found": UNIT,
    "unittest, its result not looked at": UNIT + "unittest.main(exit=False)\n",
    "pytest": "def test_double():\n    assert double(2) == 4\ndef test_negative():\n    assert double(-3) == -6\n",
    "pytest, in a class": "class TestDouble:\n    def test_double(self):\n        assert double(2) == 4\n    def test_b(self):\n        assert double(-3) == -6\n",
    "pytest, parametrized": "import pytest\n@pytest.mark.parametrize('x, y', [(2, 4), (5, 10)])\ndef test_double(x, y):\n    assert double(x) == y\n@pytest.mark.parametrize('x', [-3])\ndef test_b(x):\n    assert double(x) == 2 * x\n",
    "pytest, fixtures": "import pytest\n@pytest.fixture\ndef two():\n    yield 2\n@pytest.fixture\ndef four(two): return two + 2\nclass TestDouble:\n    def test_double(self, two, four):\n        assert double(two) == four\ndef test_b(four):\n    assert double(1 - four) == -6\n",
    "pytest, approx": "from pytest import approx\ndef test_a():\n    assert double(2.0) == approx(4.0000001)\ndef test_b():\n    assert [double(-3)] == approx([-6.0])\n",
    "guarded": "def main():\n    assert double(2) == 4\n    assert double(-3) == -6\nif __name__ == '__main__':\n    main()\n",
    "raises": "if double(2) != 4: raise ValueError\nif double(-3) != -6: raise ValueError\n",
}


@needs_sandbox
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_tests_are_run(framework):
    tests = FRAMEWORKS[framework]
    assert run(RIGHT, tests).why == ""
    assert run(RIGHT, tests).share == 1.0
    assert run(RIGHT, tests, partial=True).share == 1.0
    assert run("def double(x): return abs(2 * x)", tests).share == 0.0
    assert run("def double(x): return 7", tests).share == 0.0
    if framework.startswith("unittest"):
        assert "AssertionError: 7 != " in run("def double(x): return 7", tests).why
    half = 0.0 if framework == "raises" else 0.5
    assert run("def double(x): return abs(2 * x)", tests, partial=True).share == half


RAISES = "import pytest\ndef test_it():\n    with pytest.raises(ValueError, match='below') as caught:\n        root(-1)\n    assert str(caught.value) == 'below 0'\n"


@needs_sandbox
def test_what_tests_expect_to_be_raised():
    assert run("def root(x): raise ValueError('below 0')", RAISES).why == ""
    for wrong in (
        "def root(x): return 0",
        "def root(x): raise ValueError('no')",
        "def root(x): raise KeyError('below 0')",
        "import os\ndef root(x): os._exit(0)",
    ):
        assert run(wrong, RAISES).share == 0.0, wrong
    assert "monkeypatch" in run(RIGHT, "import pytest\ndef test_a(monkeypatch): assert double(2) == 4").why
    assert "skip" in run(RIGHT, "import pytest\npytest.skip('no')\nassert double(2) == 4").why
    liar = LIAR.replace("def f(", "def double(")
    assert run(liar, "import pytest\ndef test_a(): assert pytest.approx(4) == double(2)").share == 0.0
    assert run(liar, "import pytest\ndef test_a(): assert double(2) == pytest.approx(4)").share == 0.0


NOTHING = {
    "a comment": "# nothing",
    "pass": ["pass"],
    "an empty item": [""],
    "no entry point": "def check(candidate):\n    assert candidate(2) == 4\n",
    "only skipped": "import unittest\n@unittest.skip('no')\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(double(2), 5)\n",
    "definitions": "import math\nx = 3\ndef helper(): assert double(2) == 5\n",
}


@needs_sandbox
@pytest.mark.parametrize("nothing", NOTHING)
def test_tests_that_check_nothing_are_an_error(nothing):
    with pytest.raises(RewardError, match="these tests check nothing"):
        run("x = 1", NOTHING[nothing])


@needs_sandbox
def test_lines_of_setup_among_tests_do_not_count():
    tests = ["import math", "assert math.isclose(double(1), 2)", "assert double(2) == 5"]
    assert run(RIGHT, tests, partial=True).share == 0.5


@needs_sandbox
def test_leaving_is_no_pass():
    assert run(RIGHT, "import sys\nassert double(2) == 4\nsys.exit(0)").share == 0.0
    assert (
        run("def check(c): pass\ndef double(x): return 0", "assert double(2) == 4\n", entry_point="double").share == 0.0
    )


HELLO = """
import sys
sys.modules["rloom.rewards.sandbox.inside.program"].contents = lambda peer, module: {hello}
def double(x): return x
"""
HELLOS = {
    "other built-in functions": "{'names': {'__builtins__': {'dict': [['abs', peer.keep(lambda x: 0)]]}, 'double': peer.keep(module.double)}}",
    "the way out as a value": "{'names': {'double': {'type': 'SystemExit'}, 'exit': {'type': 'SystemExit'}}}",
    "the tests' own name": "{'names': {'__name__': 'x', '__checks__': {'mine': 0}, 'double': peer.keep(module.double)}}",
    "names that are none": "{'names': 5}",
    "a list of names": "{'names': ['double']}",
    "numbers as exceptions": "{'names': {'double': peer.keep(module.double)}, 'exceptions': {'E': 5, 'AssertionError': ['Exception']}}",
    "numbers as modules": "{'names': {'double': peer.keep(module.double)}, 'modules': {'math': 5, '__builtins__': 'os'}}",
    "modules": "{'names': {'double': peer.keep(module.double)}, 'modules': [1]}",
    "nothing": "None",
    "a handle that is none": "{'names': {'double': {'mine': 'x'}}}",
}


@needs_sandbox
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hello", HELLOS)
def test_what_a_program_says_of_itself_changes_nothing(hello, form):
    assert run(HELLO.format(hello=HELLOS[hello]), FORMS[form]).share == 0.0
    raising = "try:\n    double(2)\n    raise double\nexcept ValueError:\n    pass\nassert double(3) == 6"
    assert run(HELLO.format(hello=HELLOS[hello]), raising).share == 0.0
    assert run(HELLO.format(hello=HELLOS[hello]), "assert abs(double(3) - 6) < 1e-6").share == 0.0


@needs_sandbox
def test_the_tests_own_objects_cannot_be_changed():
    tests = "class Case:\n    def __init__(self): self.given, self.expected = 3, 6\nc = Case()\nresult = double(c)\nassert result == c.expected"
    assert run("def double(c):\n    c.expected = 0\n    return 0", tests).share == 0.0
    assert run("def double(c): return 2 * c.given", tests).share == 1.0


@needs_sandbox
def test_asserts_in_loops_count_once():
    tests = "for x in values():\n    assert x == x\nassert double(2) == 4\nassert double(3) == 6"
    inflated = "def values(): return list(range(1000))\ndef double(x): return 0"
    assert run(inflated, tests, partial=True).share == pytest.approx(1 / 3)
    tests = "for x in (1, 2, 3):\n    assert double(x) == 2 * x\nassert double(0) == 0"
    assert run("def double(x): return x if x == 3 else 2 * x", tests, partial=True).share == 0.5
    guarded = "try:\n    double('x')\nexcept TypeError:\n    pass\nelse:\n    assert False\nassert double(1) == 2"
    assert run("def double(x): return x * 2 if x != 'x' else x - 1", guarded, partial=True).share == 1.0


FREEZES = {
    "a fraction": "class Fraction:\n    def __str__(s): return '1e20000000'\nFraction.__module__ = 'fractions'\ndef double(x): return Fraction()",
    "a decimal": "class Decimal:\n    def __str__(s): return '1e999999999'\nDecimal.__module__ = 'decimal'\ndef double(x): return Decimal()",
    "colliding elements": "def double(x): return {i * (2**61 - 1) for i in range(1)} and A([i * (2**61 - 1) for i in range(1, 60000)])\nclass A(frozenset):\n    def __new__(c, v): s = frozenset.__new__(c); s.v = v; return s\n    def __iter__(s): return iter(s.v)\n    def __len__(s): return 4\n    def __hash__(s): return 1",
    "colliding keys": "class D(dict):\n    def items(s): return [(i * (2**61 - 1), 0) for i in range(1, 60000)]\ndef double(x): return D()",
    "a large number": "def double(x): return 1 << 3000000",
    "a number too long to be shown": "def double(x): return 10 ** 5000",
    "deep": "def double(x):\n    a = []\n    for _ in range(90): a = [a]\n    return a",
}


@needs_sandbox
@pytest.mark.parametrize("freeze", FREEZES)
@pytest.mark.parametrize("expected", ["4", "{4}", "{4: 4}", "[4]", "0.5", "{frozenset({1})}"])
def test_answers_that_take_for_ever_to_build_are_not_built(freeze, expected):
    began = time.monotonic()
    assert run(FREEZES[freeze], [f"assert double(2) == {expected}"], limits=Limits(seconds=2)).share == 0.0
    assert time.monotonic() - began < 10  # starting a sandbox on a busy machine included


VALUES = ["4", "-4.5", "True", "None", "'a\\ud800'", "b'x'", "1j", "10 ** 30", "[1, [2]]", "(1, (2, 'b'))", "{1: {2: [3]}}", "{1, (2, 'b')}",
          "frozenset({1})", "{(1, 2): 'a'}", "[]", "{}", "''"]  # fmt: skip


@needs_sandbox
def test_plain_answers_are_compared_as_python_compares_them():
    literals = [v for v in VALUES if v not in ("10 ** 30", "frozenset({1})")] + [str(10**30)]
    for value in VALUES:
        tests = [f"assert f() == {other}" for other in literals]
        equal = sum(eval(value) == eval(other) for other in literals)
        assert run(f"def f(): return {value}", tests, partial=True).share == pytest.approx(equal / len(tests)), value
    exact = "from fractions import Fraction\nfrom decimal import Decimal\ndef f(x): return Fraction(1, 2) if x else Decimal('0.5')"
    assert run(exact, ["assert f(0) == 0.5", "assert f(1) == 0.5"]).share == 1.0


PASSED = """
import datetime, contextlib
from collections import namedtuple
from typing import NamedTuple
Point = namedtuple("Point", "x y")
def day(d): return d + datetime.timedelta(days=1)
def when(): return datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)
def origin(): return Point(1, 2)
def fill(*, into, more): into.append(1); more["a"] = 2
class Resource:
    state = "new"
    def __enter__(self): self.state = "open"; return self
    def __exit__(self, *exc): self.state = "closed" if exc[0] is None else exc[0].__name__
class Vector:
    def __init__(self, x): self.x = x
    def __add__(self, other): return Vector(self.x + other.x)
def total(numbers): return sum(numbers)
"""
PASSING = """
import datetime
assert day(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)
assert day(datetime.date(2024, 1, 1)) - datetime.date(2024, 1, 1) == datetime.timedelta(days=1)
assert when() == datetime.datetime(2024, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)
assert origin() == (1, 2) and origin().y == 2 and origin()._fields == ("x", "y")
given, other = [], {}
fill(into=given, more=other)
assert given == [1] and other == {"a": 2}
r = Resource()
with r as opened:
    assert opened.state == "open"
assert r.state == "closed"
try:
    with r:
        raise KeyError("x")
except KeyError:
    assert r.state == "KeyError"
assert (Vector(1) + Vector(2)).x == 3
assert total(range(4)) == 6
"""


@needs_sandbox
def test_right_programs_with_dates_named_tuples_and_contexts_score():
    assert run(PASSED, PASSING).why == ""


@needs_sandbox
def test_a_module_that_the_tests_forgot_to_import_is_never_the_programs():
    """Where the tests rely on the program's imports, they get the real module, whatever the program calls by that name."""
    tests = "assert math.isclose(double(1.5), 3.0)"
    assert run("import math\n" + RIGHT, tests).share == 1.0
    assert run("class math:\n    isclose = staticmethod(lambda *a: True)\ndef double(x): return x", tests).share == 0.0


@needs_sandbox
@pytest.mark.parametrize("form", FORMS)
def test_the_tests_are_nowhere_to_be_read(form):
    """The program looks through files, processes, stack frames and all objects, and is right only if it found nothing."""
    verdict = run(READS_EVERYTHING, FORMS[form], limits=Limits(seconds=20.0))
    assert verdict.share == 1.0, verdict.why


# -- harm that must not be done


HOGS = {
    "memory": "def double(x):\n    a = bytearray(2**31)\n    return 2 * x",
    "processes": "import os\ndef double(x):\n    while True: os.fork()",
    "threads": "import threading, time\ndef double(x):\n    for _ in range(64): threading.Thread(target=time.sleep, args=(9,)).start()\n    return 2 * x",
    "disk": "def double(x):\n    with open('/tmp/big', 'wb') as f:\n        for _ in range(64): f.write(bytes(2**20))\n    return 2 * x",
    "many files": "def double(x):\n    for i in range(64): open(f'/tmp/{i}', 'wb').write(bytes(2**20))\n    return 2 * x",
    "shared memory": "def double(x):\n    open('/dev/shm/big', 'wb').write(bytes(2**22))\n    return 2 * x",
    "a loop in C": "def double(x):\n    return sum(range(10**12))",
    "a regular expression": "import re\ndef double(x):\n    re.match('(a+)+$', 'a' * 40 + 'b')\n    return 2 * x",
    "a signal handler": "import signal, time\nfor s in range(1, 60):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\ndef double(x):\n    while True: time.sleep(1)",
    "System V memory": "import ctypes\ndef double(x):\n    l = ctypes.CDLL(None, use_errno=True)\n    return 2 * x if l.shmget(0, 1 << 20, 0o1600) >= 0 else -1",
    "memory without a name": "import os\ndef double(x):\n    os.memfd_create('x')\n    return 2 * x",
    "user namespaces": "import ctypes\ndef double(x):\n    return 2 * x if x != 2 or ctypes.CDLL(None).unshare(0x10000000) == 0 else -1",
    "user namespaces by clone": "import ctypes\ndef double(x):\n    return 2 * x if x != 2 or ctypes.CDLL(None).syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 else -1",
    "an answer of 100 MB": "def double(x): return 'x' * 10**8",
}  # fmt: skip


def test_messages_have_bounds_in_bytes_and_in_items():
    for body, message in (
        (b"[" + b"[]," * 2**19 + b"1]", "over 524288 items"),
        (b"[" * 5000, "not a message"),
        (b'{"a": 1} 2', "something follows"),
        (b"\xff", "not a message"),
        (b"", "not JSON"),
    ):
        data = struct.pack(">I", len(body)) + body
        stream = iter([data[:4], data[4:]])
        with pytest.raises(WireError, match=message):
            receive(0, lambda fd, size, stream=stream: next(stream))
    with pytest.raises(WireError, match="a message of 4194305 bytes"):
        receive(0, lambda fd, size: struct.pack(">I", 4 * 2**20 + 1))
    with pytest.raises(ValueError, match="items"):
        send(0, [[]] * 2**19, lambda fd, data: len(data))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_light_json_is_json(value):
    assert light_json.dumps(value) == json.dumps(value)
    assert json.dumps(light_json.loads(json.dumps(value))) == json.dumps(value)


@needs_sandbox
@pytest.mark.parametrize("hog", HOGS)
def test_limits(hog):
    began = time.monotonic()
    assert run(HOGS[hog], limits=Limits(seconds=1.0)).share == 0.0
    assert time.monotonic() - began < 30


@needs_sandbox
@pytest.mark.parametrize("hog", ["memory", "processes", "disk", "a loop in C", "a signal handler"])
def test_limits_with_tests_of_the_other_kinds(hog):
    began = time.monotonic()
    assert run(HOGS[hog], HARNESS, limits=Limits(seconds=1.0)).share == 0.0
    program = HOGS[hog] + "\nprint(double(int(input())))"
    assert run(program, [{"input": "2", "output": "4"}], limits=Limits(seconds=1.0)).share == 0.0
    assert run(RIGHT + "print(double(int(input())))", [{"input": "2", "output": "4"}]).share == 1.0
    assert time.monotonic() - began < 30


OOM = """
def score(): return [open(f"/proc/{pid}/oom_score_adj").read().strip() for pid in ("self", 1)]
def lowered():
    try: open("/proc/self/oom_score_adj", "w").write("0")
    except OSError: pass
    return score()[0]
"""


@needs_sandbox
def test_the_kernel_ends_programs_before_the_trainer_when_memory_runs_out():
    assert run(OOM, ["assert score() == ['1000', '1000']", "assert lowered() == '1000'"]).why == ""


FAMILY = """
import os
def total(count, megabytes):
    pipes = [os.pipe() for _ in range(count)]
    done, held = os.pipe()
    for read, write in pipes:
        if os.fork() == 0:
            for fd in {held, *sum(pipes, ())} - {write}: os.close(fd)
            memory = bytearray(os.urandom(1)) * (megabytes * 2**20)
            os.write(write, b"x")
            os.read(done, 1)
            os.write(write, b"y")  # still there, when all had their memory: the kernel may end the first for the last
            os._exit(0)
    for _, write in pipes: os.close(write)
    for read, _ in pipes: os.read(read, 1)
    os.close(held)
    return sum(len(os.read(read, 1)) for read, _ in pipes)
"""


@needs_sandbox
def test_children_have_no_more_memory_than_one_process():
    """Where there are control groups: each of them is within its own limit."""
    if cgroups.parent() is None:
        pytest.skip("no control groups can be made here")
    limits = Limits(seconds=20, memory_mb=128)
    assert run(FAMILY, ["assert total(3, 20) == 3"], limits=limits).why == ""
    assert run(FAMILY, ["assert total(4, 90) == 4"], limits=limits).share == 0.0
    cgroups._at_exit()
    assert list(cgroups.parent().glob(f"rloom-{os.getpid()}-*")) == []


MOUNTS = """
22 1 0:20 / /proc rw - proc proc rw
35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
41 31 0:38 {root} /sys/fs/cgroup/unified rw,nsdelegate - cgroup2 cgroup2 rw
"""


@pytest.mark.parametrize(
    ("groups", "root", "found"),
    [
        ("4:memory:/a/b\n0::/", "/", ["memory/a/b", "unified"]),
        ("4:cpu,memory:/docker/x\n0::/docker/x", "/docker/x", ["memory", "unified"]),
        ("0::/user.slice/me.scope", "/", ["unified/user.slice/me.scope", "unified/user.slice"]),
        ("4:memory:/elsewhere", "/docker/x", []),
    ],
)
def test_where_control_groups_are(groups, root, found):
    assert cgroups.candidates(groups, MOUNTS.strip().format(root=root)) == [Path("/sys/fs/cgroup", f) for f in found]


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_programs_run_where_no_control_groups_can_be_made(monkeypatch):
    monkeypatch.setattr(cgroups, "parent", lambda: None)
    assert code_execution()(completions=[RIGHT] * 2, tests=[SIMPLE] * 2) == [1.0] * 2
    monkeypatch.setattr(cgroups, "parent", lambda: Path("/nowhere"))
    assert code_execution()(completions=[RIGHT], tests=[SIMPLE]) == [1.0]


REFUSES = """
import ctypes, errno, fcntl, os, socket
libc = ctypes.CDLL(None, use_errno=True)
open("/tmp/file", "w").close()
def result(do):
    try: do(); return "done"
    except OSError as error: return errno.errorcode[error.errno]
def call(name, *args):
    number = libc[name](*args)
    if number < 0: raise OSError(ctypes.get_errno(), name)
def long(family):
    if libc.syscall(ctypes.c_long(SOCKET), ctypes.c_long(2**32 + family), ctypes.c_long(1), ctypes.c_long(0)) < 0:
        raise OSError(ctypes.get_errno(), "socket")
def attributes(): return result(lambda: os.setxattr("/tmp/file", "user.x", b"x"))
def attributes_of_links(): return result(lambda: os.setxattr("/tmp/file", "user.x", b"x", follow_symlinks=False))
def attributes_by_descriptor(): return result(lambda: os.setxattr(os.open("/tmp/file", os.O_RDWR), "user.x", b"x"))
def sockets(): return sorted({result(lambda: socket.socket(f, t)) for f in range(100) for t in (1, 2, 3, 5) if f not in (1, 2, 10)})
def pairs(): return sorted({result(lambda: socket.socketpair(f, t)) for f in range(100) for t in (1, 2, 3, 5) if f not in (1, 2, 10)})
def sockets_by_long_numbers(): return [result(lambda: long(family)) for family in (1, 40)]
def larger_pipes(): return result(lambda: fcntl.fcntl(os.pipe()[1], 1031, 2**20))
def watches(): return [result(lambda: call("inotify_init")), result(lambda: call("inotify_init1", 0)), result(lambda: call("fanotify_init", 0x200, 0))]
def watched_folders(): return result(lambda: fcntl.fcntl(os.open("/tmp", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE | fcntl.DN_MULTISHOT))
def flushes(): return result(lambda: call("syncfs", 1))
def locks(): return result(lambda: fcntl.flock(os.open("/usr/bin/env", os.O_RDONLY), fcntl.LOCK_SH))
def timers():
    timer, count = ctypes.c_void_p(), 0
    while count < 1000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0: count += 1
    return count <= 64
"""
REFUSED = {
    "attributes": "EPERM", "attributes_of_links": "EPERM", "attributes_by_descriptor": "EPERM",
    "sockets": ["EAFNOSUPPORT"], "pairs": ["EAFNOSUPPORT"], "sockets_by_long_numbers": ["done", "EAFNOSUPPORT"],
    "larger_pipes": "EPERM", "watches": ["EPERM"] * 3, "locks": "EPERM", "timers": True, "watched_folders": "EPERM", "flushes": "EPERM",
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("what", REFUSED)
def test_what_takes_memory_of_nobodys_or_what_others_need_is_refused(what):
    if (machine := platform.machine()) not in seccomp.SOCKETS:
        pytest.skip("there is no filter for this machine")
    program = REFUSES.replace("SOCKET)", f"{seccomp.SOCKETS[machine][0]})")
    assert run(program, [f"assert {what}() == {REFUSED[what]!r}"]).why == ""


NEEDS = """
import asyncio, concurrent.futures, dbm, fcntl, http.server, mmap, multiprocessing, os, select, shelve, shutil, signal, socket, sqlite3, subprocess, tempfile, threading, urllib.request
def database():
    with sqlite3.connect("/tmp/a.db") as one, sqlite3.connect("/tmp/a.db", timeout=0) as two:
        one.execute("create table t (x)"); one.commit(); one.execute("begin immediate")
        try: two.execute("begin immediate")
        except sqlite3.OperationalError as error: return str(error)
def shelf():
    with shelve.open("/tmp/shelf") as kept: kept["a"] = [1]
    with shelve.open("/tmp/shelf") as kept: return kept["a"]
def locked():
    with open("/tmp/lock", "w") as file: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True
def copied():
    shutil.copy2("/usr/bin/env", "/tmp/env")
    with tempfile.TemporaryDirectory() as folder: return os.path.getsize("/tmp/env") == os.path.getsize("/usr/bin/env")
async def both(): return await asyncio.gather(asyncio.sleep(0, 1), asyncio.to_thread(lambda: 2))
def loop(): return asyncio.run(both())
def pair():
    one, two = socket.socketpair()
    one.send(b"x"); return two.recv(1)
def local(family=socket.AF_INET, address="127.0.0.1"):
    with socket.create_server((address, 0), family=family) as server, socket.create_connection(server.getsockname()[:2]) as one:
        two, _ = server.accept()
        one.send(b"x"); return two.recv(1)
def web():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self): self.send_response(204); self.end_headers()
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        return urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/").status
def child(): return subprocess.run(["/usr/bin/env", "echo", "x"], capture_output=True).stdout
def shell(): return subprocess.check_output("for i in 1 2 3; do echo $i; done | sort -r | head -1", shell=True, text=True)
def threads():
    with concurrent.futures.ThreadPoolExecutor(2) as pool: return sum(pool.map(len, ["a", "bc", "def"]))
def processes():
    queue = multiprocessing.get_context("fork").SimpleQueue()
    other = multiprocessing.get_context("fork").Process(target=queue.put, args=(7,))
    other.start(); value = queue.get(); other.join(); return value
def folders():
    os.makedirs("/tmp/a/b"); os.symlink("a", "/tmp/c"); open("/tmp/a/b/d", "w").write("x"); os.utime("/tmp/a/b/d", (1, 2))
    os.rename("/tmp/a/b/d", "/tmp/a/e"); os.chmod("/tmp/a/e", 0o600); os.mkfifo("/tmp/f"); found = sorted(os.listdir("/tmp/c"))
    shutil.rmtree("/tmp/a"); return found
def waits():
    signal.signal(signal.SIGALRM, lambda *args: None); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
    poll = select.epoll(); one, two = os.pipe(); poll.register(one, select.EPOLLIN); os.write(two, b"x"); return len(poll.poll())
def mapped():
    with open("/tmp/m", "wb+") as file:
        file.truncate(8192); memory = mmap.mmap(file.fileno(), 8192); memory[0:1] = b"x"; memory.flush(); return memory[0:2]
"""
NEEDED = ["assert database() == 'database is locked'", "assert shelf() == [1]", "assert locked() == True", "assert copied() == True",
          "assert loop() == [1, 2]", "assert pair() == b'x'", "assert local() == b'x'", "assert web() == 204", "assert child() == b'x\\n'",
          "assert shell() == '3\\n'", "assert threads() == 6", "assert processes() == 7", "assert folders() == ['b', 'e']", "assert waits() == 1", "assert mapped() == b'x\\0'"]  # fmt: skip


@needs_sandbox
def test_what_programs_commonly_use_is_there():
    """Databases and their locks, loops, local sockets, children."""
    assert run(NEEDS, NEEDED, limits=Limits(seconds=20)).why == ""


def passed(lines: bytes, arch: int, number: int, *args: int) -> int:
    """What a filter says of a call: the kernel's machine, as far as our filters go."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *args, *[0] * (6 - len(args)))
    at, value, program = 0, 0, list(struct.iter_unpack("=HBBI", lines))
    while True:
        what, holds, fails, about = program[at]
        if what == seccomp.RETURN:
            return about
        if what == seccomp.LOAD:
            (value,) = struct.unpack_from("=I", data, about)
        tests = {
            seccomp.JUMP_EQUAL: value == about,
            seccomp.JUMP_AT_LEAST: value >= about,
            seccomp.JUMP_ANY_BIT: bool(value & about),
        }
        at += 1 + (0 if what == seccomp.LOAD else holds if tests[what] else fails)


REFUSED_BY_NUMBER = {
    "x86_64": {"shmget": 29, "semget": 64, "msgget": 68, "flock": 73, "ptrace": 101, "modify_ldt": 154, "sync": 162,
               "mount": 165, "setxattr": 188, "io_setup": 206, "keyctl": 250, "inotify_init": 253, "unshare": 272, "splice": 275,
               "vmsplice": 278, "perf_event_open": 298, "fanotify_init": 300, "setns": 308, "memfd_create": 319, "bpf": 321, "userfaultfd": 323},
    "aarch64": {"io_setup": 0, "setxattr": 5, "inotify_init1": 26, "flock": 32, "mount": 40, "vmsplice": 75, "splice": 76, "sync": 81,
                "unshare": 97, "ptrace": 117, "msgget": 186, "semget": 190, "shmget": 194, "keyctl": 219, "perf_event_open": 241,
                "fanotify_init": 262, "setns": 268, "memfd_create": 279, "bpf": 280, "userfaultfd": 282},
}  # fmt: skip
REFUSED_EVERYWHERE = {"io_uring_setup": 425, "fsopen": 430, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447, "setxattrat": 463}  # fmt: skip
ALLOWED_BY_NUMBER = {
    "x86_64": {"read": 0, "mmap": 9, "execve": 59, "futex": 202, "openat": 257},
    "aarch64": {"openat": 56, "read": 63, "futex": 98, "execve": 221, "mmap": 222},
}


@pytest.mark.parametrize("machine", seccomp.ALLOWED)
def test_the_filter_of_each_machine(machine):
    """Also of the one that this is not."""

    def errno_of(number: int, *args: int) -> int | None:
        result = passed(seccomp.program(machine), seccomp.ARCHITECTURES[machine], number, *args)
        return None if result == seccomp.ALLOW else result - seccomp.REFUSE

    allowed = set(seccomp.ALLOWED[machine].values())
    assert len(allowed) == len(seccomp.ALLOWED[machine])
    assert allowed >= set(ALLOWED_BY_NUMBER[machine].values())
    for refused in (REFUSED_BY_NUMBER[machine], REFUSED_EVERYWHERE):
        assert {name: errno_of(number) for name, number in refused.items()} == dict.fromkeys(refused, errno.EPERM)
    conditional = {*seccomp.SOCKETS[machine], seccomp.FCNTL[machine], seccomp.CLONE[machine], seccomp.CLONE3}
    for number in set(range(600)) - conditional:
        unknown = errno.ENOSYS if number > seccomp.NEWEST else errno.EPERM
        assert errno_of(number, 40, 1031) == (None if number in allowed else unknown)
        assert errno_of(seccomp.X32 + number) == errno.EPERM
        assert passed(seccomp.program(machine), 0x40000003, number) == seccomp.KILL  # calls of 32 bits
    assert errno_of(seccomp.CLONE3) == errno.ENOSYS
    for number in seccomp.SOCKETS[machine]:
        families = [family for family in range(64) if errno_of(number, family) is None]
        assert families == [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6]
        assert errno_of(number, 2**32 + 40) == errno.EAFNOSUPPORT
    lease, notify, copy, set_size, size = 1024, 1026, 1030, 1031, 1032
    commands = [errno_of(seccomp.FCNTL[machine], 3, command) for command in (lease, notify, copy, set_size, size, 1033)]
    assert commands == [errno.EPERM, errno.EPERM, None, errno.EPERM, None, errno.EPERM]
    assert [errno_of(seccomp.CLONE[machine], flags) for flags in (17, 0x3D0F00, 0x10000011)] == [
        None,
        None,
        errno.EPERM,
    ]


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_machines_without_a_filter_say_so(monkeypatch, caplog):
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    bubblewrap.check_sandbox.__wrapped__()
    assert "no filter of system calls for vax" in caplog.text


@needs_sandbox
def test_gigabytes_of_output_cost_nothing():
    program = "import sys\nfor _ in range(300): sys.stdout.write('x' * 10**7); sys.stderr.write('y')\n" + RIGHT
    assert run(program, limits=Limits(seconds=20)).share == 1.0  # they go nowhere: 3 GB in no memory


@needs_sandbox
def test_no_network_no_host_files_no_way_to_write():
    with socket.create_server(("127.0.0.1", 0)) as server:
        reached = []

        def listen():
            with contextlib.suppress(OSError):  # closed at the end of the test
                reached.append(server.accept())

        threading.Thread(target=listen, daemon=True).start()
        here = str(Path(__file__).resolve())
        program = f"""
import os, socket
def connects():
    try: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=1); return True
    except OSError: return False
def reads():
    return [p for p in ({here!r}, "/etc/passwd", "/root", "/home", {os.getcwd()!r}, "/var", "/sys", "/run") if os.path.exists(p)]
def writes():
    done = []
    for p in ("/usr/x", "/x", "/dev/x", "/proc/sys/x", "/etc/x"):
        try: open(p, "w"); done.append(p)
        except OSError: pass
    return done
def follows():
    os.symlink({here!r}, "/tmp/link")
    try: return open("/tmp/link").read()
    except OSError: return None
def who(): return [os.getuid(), os.getgid(), os.getgroups(), len(os.environ.get("PATH", "")) > 0, "HOSTNAME" in os.environ]
"""
        tests = ["assert connects() == False", "assert reads() == []", "assert writes() == []", "assert follows() == None",
                 "assert who() == [65534, 65534, [], True, False]"]  # fmt: skip
        verdict = run(program, tests, limits=Limits(seconds=10))
        assert verdict.share == 1.0, verdict.why
        assert not reached


@needs_sandbox
@pytest.mark.parametrize("tests", FORMS.values(), ids=FORMS)
def test_nothing_is_left_running(tests):
    """Daemons, in sessions of their own and deaf to signals, end with the sandbox."""
    name = f"rloomdaemon{os.getpid()}"
    program = f"""
import ctypes, os, signal, time
if os.fork() == 0:
    os.setsid()
    for s in (1, 2, 15):
        signal.signal(s, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(15, {name[:15].encode()!r}, 0, 0, 0)
    time.sleep(100)
time.sleep(0.2)
{RIGHT}
"""
    assert run(program, tests, limits=Limits(seconds=5)).share == 1.0
    for _ in range(50):
        left = [p for p in Path("/proc").glob("[0-9]*/comm") if _text(p).strip() == name[:15]]
        if not left:
            return
        time.sleep(0.1)
    pytest.fail("a process outlived its sandbox")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@needs_sandbox
def test_no_descriptors_are_lost():
    run(RIGHT)  # what sandboxes are forked of is there from now on
    before = len(os.listdir("/proc/self/fd"))
    for program in (RIGHT, "import os\nos._exit(0)", "while True: pass"):
        for tests in FORMS.values():
            run(program, tests, limits=Limits(seconds=0.3))
    assert len(os.listdir("/proc/self/fd")) == before


@contextlib.contextmanager
def crowded(count: int = 1100):
    """As a trainer has it with data, sockets and devices open: what it opens from now on has numbers above 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 100:
        pytest.skip("so many descriptors are not allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 100), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(count):
            stack.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


HOLDS = """
import os
def held():
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        try: targets.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
        except OSError: pass  # of the listing itself
    return sorted(targets)
"""


@needs_sandbox
def test_a_program_holds_no_descriptor_but_its_own_however_many_are_open_outside():
    """One too many was the socket by which sandboxes are asked for: who holds it answers for them, and forges verdicts."""
    with crowded():
        assert run(HOLDS, [f"assert held() == {['/dev/null'] * 4 + ['pipe'] * 3}"]).why == ""


# -- input


@needs_sandbox
def test_strange_completions():
    assert run("x = '\ud800'\n" + RIGHT).share == 1.0  # half a surrogate pair becomes a question mark
    assert run("\x00").share == 0.0
    assert run("(" * 100000).share == 0.0
    assert run("x = '" + "a" * 10**7 + "'\n" + RIGHT, limits=Limits(seconds=10)).share == 1.0


@needs_sandbox
def test_a_long_completion_is_read_before_memory_is_limited():
    long = "#" + "\N{GRINNING FACE}" * 2_500_000 + "\n" + RIGHT
    assert run(long, limits=Limits(seconds=10, memory_mb=64)).share == 1.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "4"}, "needs a column 'tests'.*its columns are: answer"),
        ({"tests": ["assert double(2) =="]}, "the tests 'assert double.2. ==' are no Python program"),
        ({"tests": [1, 2]}, "tests are a text, a list"),
        ({"tests": 5}, "tests are a text, a list.*not 5"),
        ({"tests": [{"input": "1", "output": "1"}, "x"]}, "tests are a text, a list"),
        ({"tests": "x", "entry_point": 5}, "entry_point is the name of a function, not 5"),
        ({"tests": "x", "test_imports": 5}, "test_imports is a text or a list"),
        ({"tests": "x", "test_imports": [5]}, "test_imports is a text or a list"),
        ({"tests": [{"input": "1"}]}, "needs 'input' and 'output'"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "two lists of one length"),
    ],
)
def test_tests_that_are_none(row, message):
    with pytest.raises(RewardError, match=message):
        read_tests(row)


def test_programs_in_completions():
    assert program_of("a\n~~~\nx\n~~~\n") == "x\n"
    assert program_of("```python\nunfinished = 1\n") == "unfinished = 1\n"
    assert program_of("````\n```\nx\n```\n````\n") == "```\nx\n```\n"
    assert program_of("x = 1") == "x = 1"


@pytest.mark.parametrize("name", ["python", "Python3", "py", " python", "{.python}", "python title=x.py"])
@pytest.mark.parametrize("after", ["```bash\npython f.py\n```", "```\n1\n```", "```text\n1\n```"])
def test_what_stands_after_a_program_is_not_it(name, after):
    """How to start it, or what it prints: instruct models like to add that."""
    assert program_of(f"```{name}\ndef f(): return 1\n```\nIt gives:\n{after}") == "def f(): return 1\n"
    assert program_of("```\nx = 1\n```\n```bash\nls\n```") == "x = 1\n"
    assert program_of("```python\nx = 1\n```\n```python\nx = 2\n```") == "x = 2\n"
    assert program_of("```pytb\nx\n```\n```\ny\n```") == "y\n"


@pytest.mark.parametrize("program", ["def f(x): return 2 * x", "    return 2 * x", "I do not know."])
def test_a_check_that_nobody_calls_is_an_error_whatever_the_program(program):
    test = "METADATA = {'author': 'x'}\n\ndef check(candidate):\n    assert candidate(1) == 2\n"
    with pytest.raises(RewardError, match="needs the column 'entry_point'"):
        code_execution()([program], tests=[test])


def test_inputs_and_outputs_that_do_not_fit_are_told_apart():
    with pytest.raises(RewardError, match="'input': int, 'output': str"):
        read_tests({"tests": [{"input": 2, "output": "4"}]})
    with pytest.raises(RewardError, match="'inputs': 2 of them, 'outputs': 1 of them"):
        read_tests({"tests": {"inputs": ["1", "2"], "outputs": ["3"]}})


def test_without_bubblewrap_it_refuses(monkeypatch):
    bubblewrap.check_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("something was run"))
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        code_execution()
    bubblewrap.check_sandbox.cache_clear()


def test_limits_that_make_no_sense():
    with pytest.raises(ValueError, match="memory_mb must be above 0"):
        Limits(memory_mb=0)


@needs_sandbox
def test_long_answers_and_long_requests_do_not_wait_for_each_other():
    """The first answer fills its pipe; the second request, sent ahead, would fill the other."""
    tests = [f"assert f(300000) == {'a' * 300000!r}", f"assert g({'b' * 300000!r}) == 300000"]
    program = "def f(n): return 'a' * n\ndef g(text): return len(text)"
    assert code_execution(time_limit=5.0)(completions=[program], tests=[tests]) == [1.0]


@needs_sandbox
def test_tests_that_are_texts_of_numpys():
    tests = [np.str_("x = f(3)\nassert x == 'aaa'")]
    assert code_execution()(completions=[np.str_("def f(n): return 'a' * n")], tests=[tests]) == [1.0]


@needs_sandbox
def test_marks_of_pytest_where_the_package_is_shown_too():
    tests = ["import pytest\n@pytest.mark.parametrize('n', [1, 2])\ndef test_f(n): assert f(n) == 'a' * n\n"]
    where = [str(Path(pytest.__file__).parent.parent)]
    if where[0].startswith(bubblewrap.COVERED):
        pytest.skip("pytest is installed below a folder that sandboxes have of their own, which is refused")
    score = code_execution(site_packages=where)
    assert score(completions=["def f(n): return 'a' * n"], tests=[tests]) == [1.0]
    assert score(completions=["def f(n): return 'a'"], tests=[tests]) == [0.0]


# -- one fork server for several programs


@contextlib.contextmanager
def forked(home: fork_server.ForkServer, program: str):
    """A program in a sandbox that a fork server forks: what it says that it defines, while it goes on."""
    fds = {name: os.pipe() for name in ("ask", "answer")}
    theirs = {"read_fd": fds["ask"][0], "write_fd": fds["answer"][1]}
    try:
        with sandbox.Sandbox("program", {"program": program}, Limits(), fds=theirs, fork=home.fork):
            hello = receive(fds["answer"][0], Deadline(30).read)
            assert "names" in hello, hello
            yield hello["names"]
    finally:
        for fd in (*fds["ask"], *fds["answer"]):
            os.close(fd)


@pytest.fixture
def home():
    if MISSING or not fork_server.works():
        pytest.skip("sandboxes cannot be forked here")
    home = fork_server.ForkServer()
    yield home
    home.close()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_sandboxes_are_forked_where_namespaces_can_be_nested():
    """So that a mistake of ours does not pass for a machine on which it cannot be done."""
    nested = "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000 | 0x20000))"  # of users and mounts
    line = [*bubblewrap.command(Limits(), nested=True), "-c", nested]
    if subprocess.run(line, capture_output=True, text=True).stdout == "0\n" and seccomp.program():
        assert fork_server.works()


LEAVES = """
import builtins, os, resource, signal, socket, sys, threading, time
for name in ("/tmp/left", "/dev/shm/left"): open(name, "w").write("x")
builtins.left = sys.modules["left"] = os.environ["LEFT"] = "left behind"
os.nice(5); os.umask(0o77)
try: socket.sethostname("left")
except OSError: pass
listening = []
for family, address in ((socket.AF_UNIX, "\\0left"), (socket.AF_UNIX, "/tmp/socket"), (socket.AF_INET, ("127.0.0.1", 5005))):
    listening.append(socket.socket(family)); listening[-1].bind(address); listening[-1].listen()
if os.fork() == 0:
    os.setsid()
    for number in range(1, 64):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
    time.sleep(100)
done = True
"""
LOOKS = """
import builtins, os, socket, sys
found = [name for name in ("/tmp/left", "/dev/shm/left", "/tmp/socket") if os.path.exists(name)]
found += [name for name in ("left",) if hasattr(builtins, name) or name in sys.modules or "LEFT" in os.environ]
found += [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) > 2]
found += [socket.gethostname()] if socket.gethostname() == "left" else []
found += [os.nice(0)] if os.nice(0) else []
found += ["umask"] if os.umask(0) == 0o77 else []
for family, address in ((socket.AF_UNIX, "\\0left"), (socket.AF_INET, ("127.0.0.1", 5005))):
    try: socket.socket(family).connect(address); found.append(str(address))
    except OSError: pass
targets = []
for fd in os.listdir("/proc/self/fd"):
    try: targets.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
    except OSError: pass  # of the listing itself
targets.sort()
"""


def test_nothing_passes_from_a_forked_program_to_others(home):
    with forked(home, LEAVES) as names:
        assert names["done"] is True
        with forked(home, LOOKS) as seen:  # while the first one is still there
            assert seen["found"] == []
            assert seen["targets"] == ["/dev/null"] * 4 + ["pipe"] * 3
    with forked(home, LOOKS) as seen:  # and when it is gone
        assert seen["found"] == []
    with forked(home, LEAVES + LOOKS) as seen:
        assert len(seen["found"]) == 9  # all but the host's name, which cannot be changed


FINDS = """
shift = bytes((byte + 1) % 256 for byte in range(256))  # so that what is looked for is not in memory for being looked for
count = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps:
        if " rw" in line:
            first, last = (int(text, 16) for text in line.split()[0].split("-"))
            memory.seek(first)
            count += memory.read(last - first).translate(shift).count(SHIFTED)
"""


def test_no_text_of_another_program_is_in_a_forked_ones_memory(home):
    secret = "kept between programs"
    finds = f"SHIFTED = {bytes(byte + 1 for byte in secret.encode())}{FINDS}"
    with forked(home, f"text = {secret!r}") as names:
        assert names["text"] == secret
        with forked(home, finds) as seen:
            assert seen["count"] == 0
    with forked(home, f"text = {secret!r}\n{finds}") as seen:
        assert seen["count"] > 0  # it would be found


SIGNALS = """
import os, signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
sent = []
for pid in (0, -1, 1, os.getppid(), -os.getpgid(0), -os.getsid(0), 2, 3, 4, 5, 6, 7, 8):
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL, signal.SIGSTOP):
        if number in (signal.SIGKILL, signal.SIGSTOP) and pid in (0, 2, os.getpid(), -os.getpgid(0)): continue
        try: os.kill(pid, number); sent.append(pid)
        except OSError: pass
for kind in (os.PRIO_PROCESS, os.PRIO_PGRP, os.PRIO_USER):
    try: os.setpriority(kind, 0, 19)
    except OSError: pass
group = [os.getpgid(1), os.getsid(1), os.getpgid(0), os.getppid()]
"""


def test_signals_of_a_forked_program_reach_no_other(home):
    with forked(home, "x = 1") as other, forked(home, SIGNALS) as names:
        assert names["group"] == [1, 1, 1, 1]
        assert other["x"] == 1
        assert set(names["sent"]) <= {0, -1, 1, 2}  # itself, and the first process of its own tree
        with forked(home, "import os\nnice = os.nice(0)") as seen:
            assert seen["nice"] == 0
    assert home.process.poll() is None


@needs_sandbox
def test_signals_of_a_program_do_not_reach_its_tests():
    assert run(SIGNALS + RIGHT, HARNESS).share == 1.0


def test_the_first_process_of_a_forked_programs_tree_is_held_within_the_same_limits(home):
    """The program may write to its memory, where the kernel allows that."""
    with forked(home, "limits = [open(f'/proc/{pid}/limits').read() for pid in (1, 2)]") as names:
        assert names["limits"][0] == names["limits"][1]


def test_limits_on_processes_hold_for_each_forked_program(home):
    program = """
import os
children = 0
try:
    while children < 50:
        if os.fork() == 0:
            import time; time.sleep(100)
        children += 1
except OSError: pass
"""
    with forked(home, program) as first, forked(home, program) as second:
        assert first["children"] == second["children"] == Limits().processes


def test_a_forked_program_makes_no_more_files_than_it_may(home):
    """Empty ones take no disk, but a kilobyte each of the kernel's memory."""
    program = """
import os
made = {}
for folder in ("/tmp", "/dev/shm"):
    made[folder] = 0
    try:
        while made[folder] < 10_000: os.mknod(f"{folder}/{made[folder]}"); made[folder] += 1
    except OSError: pass
"""
    with forked(home, program) as names:
        assert names["made"] == {"dict": [["/tmp", 4095], ["/dev/shm", 4095]]}  # and the folder itself


def test_a_request_that_was_interrupted_is_not_answered_to_the_next(home, monkeypatch):
    """Else each sandbox would be killed by the handle of the one before, and go on."""

    def interrupted():
        raise KeyboardInterrupt

    with fork_server.fork_servers():
        assert run(RIGHT).share == 1.0
        first = fork_server._local.servers[()]
        monkeypatch.setattr(first, "_receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(RIGHT)
        assert first.lost
        assert run(RIGHT).share == 1.0
        assert fork_server._local.servers.get(()) is not first
        assert first.process.poll() is not None


def test_a_fork_server_that_died_is_replaced(home):
    with fork_server.fork_servers():
        assert run(RIGHT).share == 1.0
        first = fork_server._local.servers[()]
        first.process.kill()
        first.process.wait()
        assert run(RIGHT).share == 1.0
        assert run(RIGHT, HARNESS).share == 1.0
        assert fork_server._local.servers[()] is not first
    assert fork_server._local.servers is None


@pytest.mark.parametrize("tests", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("moment", range(1, 5))
def test_a_fork_server_that_dies_costs_no_program_its_score(home, monkeypatch, tests, moment):
    """Killed at the first, second, … of the moments at which something is read from a sandbox."""
    reads = []

    def read(left, fd, size):
        reads.append(fd)
        if len(reads) == moment:
            (current,) = fork_server._local.servers.values()
            current.process.kill()
            current.process.wait()
        left.wait(fd, select.POLLIN)
        return os.read(fd, size)

    with fork_server.fork_servers():
        assert run(RIGHT, tests).share == 1.0
        monkeypatch.setattr(Deadline, "read", read)
        assert run(RIGHT, tests, limits=Limits(seconds=30.0)).share == 1.0


@pytest.mark.parametrize("why", ["refused", "not as proven"])
def test_where_nothing_can_be_forked_each_program_gets_bubblewrap(home, monkeypatch, why):
    if why == "refused":
        own = bubblewrap.command
        # Without `nested`, which forbids namespaces within.
        monkeypatch.setattr(fork_server, "command", lambda *args, **options: own(*args))
    else:
        monkeypatch.setattr(fork_server, "EXPECTED", {"said": []})
    fork_server.works.cache_clear()
    try:
        assert not fork_server.works()
        with fork_server.fork_servers():
            assert run(RIGHT).share == 1.0
            assert fork_server._local.servers == {}
    finally:
        fork_server.works.cache_clear()


def children() -> set[str]:
    return {pid for path in Path("/proc/self/task").glob("*/children") for pid in _text(path).split()}


def test_what_forks_sandboxes_ends_with_the_call_or_with_its_threads(home):
    before = children()
    reward = code_execution()
    assert reward(completions=[RIGHT] * 3, tests=[SIMPLE] * 3) == [1.0] * 3
    assert children() == before
    rewards = RewardSet([FunctionReward(reward)], None, workers=1)
    batch = RewardBatch(
        prompts=["p"] * 8, completions=[RIGHT] * 8, completion_ids=[[1]] * 8, columns={"tests": [SIMPLE] * 8}
    )
    assert rewards.score(batch).scores[:, 0].tolist() == [1.0] * 8
    assert len(children() - before) == 2  # of two threads
    rewards.close()
    for _ in range(100):
        if children() == before:
            return
        time.sleep(0.1)
    pytest.fail("a fork server outlived its thread")


@contextlib.contextmanager
def as_process_1():
    """Processes that lose their parent become this one's children, as they do where the trainer is a container's first."""
    libc = ctypes.CDLL(None)
    become = 36  # PR_SET_CHILD_SUBREAPER
    assert libc.prctl(become, 1, 0, 0, 0) == 0
    before = children()
    try:
        yield
    finally:
        libc.prctl(become, 0, 0, 0, 0)
        for pid in children() - before:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(pid), 0)


def test_no_process_that_is_over_is_left_to_a_trainer_that_is_process_1(home):
    reward = code_execution()
    with as_process_1():
        before = children()
        for _ in range(20):
            assert reward(completions=[RIGHT] * 2, tests=[SIMPLE] * 2) == [1.0] * 2
        assert children() == before


@needs_sandbox
def test_why_a_program_failed_is_told_in_words():
    found = {}
    programs = ["def f(:", "raise KeyError('x')", "def f(x): return 1 / 0", "def f(x):\n    while True: pass"]
    code_execution(time_limit=1.0)(programs, tests=[["assert f(1) == 2"]] * 4, log_extra=found.__setitem__)
    assert found["tests"] == [
        "the program did not load: SyntaxError: invalid syntax (<program>, line 1)",
        "the program did not load: KeyError: 'x'",
        "f raised ZeroDivisionError: division by zero",
        "f: TimeoutError: out of time",
    ]
