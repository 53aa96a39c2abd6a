"""Applies mutants one at a time, in a copy of the project, and says which of them no test notices.

    python -m tests.mutants.run [--all] [--workers 2]

Without `--all`: the mutants of files, and of tests, that differ from the branch `main` (on it: from the last commit).

Each mutant's test runs in a process of its own, forked from one that has imported the libraries but nothing of the
project. A test that fails has noticed the mutant, and so has one that does not end. A test that passes has not: the
mutant survives.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.mutants.table import MUTANTS, SOURCE, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("src", "tests", "docs", "examples", "pyproject.toml", "README.md")
SECONDS = 180
PASSED, FAILED = 0, 1  # what pytest returns
OTHER_PROJECT = 99
LIBRARIES = (
    "torch",
    "transformers.trainer",
    "accelerate",
    "datasets",
    "peft",
    "pytest",
    "torch._dynamo",
    "rich.console",
)


@dataclass
class Running:
    """A test under way."""

    mutant: Mutant
    process: Any
    folder: Path
    original: str
    log: Path
    began: float


def changed_files() -> set[str]:
    """Paths that differ from main, or from the last commit."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.split() if done.returncode == 0 else []

    base = git("merge-base", "HEAD", "main") or ["HEAD"]
    return {*git("diff", "--name-only", base[0]), *git("ls-files", "--others", "--exclude-standard")}


def chosen(everything: bool) -> list[Mutant]:
    """Which mutants to try."""
    if everything:
        return list(MUTANTS)
    changed = changed_files()
    return [m for m in MUTANTS if {f"{SOURCE}/{m.file}", m.test.split("::")[0]} & changed]


def copy_project(folder: Path) -> Path:
    """What tests need."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(folder: Path, tests: list[str], log: Path, compiles: bool) -> None:
    """In a child process: pytest on the copy. Ends the process."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder / "src")
    sys.dont_write_bytecode = not compiles
    sys.path[:] = [
        str(folder / "src"),
        str(folder),
        *(p for p in sys.path if p and not p.startswith(str(ROOT / "src"))),
    ]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "rloom")]:
        del sys.modules[name]
    found = importlib.util.find_spec("rloom")
    if found is None or not str(found.origin).startswith(str(folder)):
        os._exit(OTHER_PROJECT)
    import pytest

    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *tests])
    sys.stdout.flush()
    os._exit(int(code))


def start(mutant: Mutant, folder: Path, log: Path) -> Running:
    """Apply a mutant, and run its test."""
    path = folder / SOURCE / mutant.file
    original = path.read_text()
    path.write_text(mutant.applied(original))
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()  # which is told apart by time and size, and a mutant may have both
    return Running(mutant, fork(folder, [mutant.test], log), folder, original, log, time.monotonic())


def fork(folder: Path, tests: list[str], log: Path, *, compiles: bool = False) -> Any:
    """A child process on some tests. What it `compiles` is left for others."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, tests, log, compiles))
    process.start()
    return process


def verdict(running: Running) -> str | None:
    """ "killed", "survived" or what went wrong; None while it runs."""
    process = running.process
    if process.is_alive() and time.monotonic() - running.began > SECONDS:
        kill_all(process)
        return "killed"
    if process.is_alive():
        return None
    process.join()
    if process.exitcode in (PASSED, FAILED):
        return "survived" if process.exitcode == PASSED else "killed"
    tail = running.log.read_text()[-1500:]
    return f"an error and not a failed test (exit code {process.exitcode}):\n{tail}"


def kill_all(process: Any) -> None:
    """Kill a process and all that it has started: launchers would leave theirs behind."""
    begun = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.join()
    for one in begun:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def try_all(mutants: list[Mutant], folders: list[Path]) -> dict[Mutant, str]:
    """What became of each mutant."""
    waiting, free = list(reversed(mutants)), list(folders)
    under_way: list[Running] = []
    found: dict[Mutant, str] = {}
    while waiting or under_way:
        while waiting and free:
            folder = free.pop()
            under_way.append(start(waiting.pop(), folder, _log(folder)))
        time.sleep(0.05)
        for running in list(under_way):
            result = verdict(running)
            if result is not None:
                (running.folder / SOURCE / running.mutant.file).write_text(running.original)
                under_way.remove(running)
                free.append(running.folder)
                found[running.mutant] = result
                seconds = time.monotonic() - running.began
                print(f"{result.splitlines()[0]:10} {seconds:5.1f} s  {running.mutant}", flush=True)
    return found


def check_unchanged(mutants: list[Mutant], folders: list[Path]) -> None:
    """Tests that fail without a mutant would kill every one."""
    tests = sorted({mutant.test for mutant in mutants})
    shares = [(folder, tests[index :: len(folders)]) for index, folder in enumerate(folders)]
    begun = [(fork(folder, some, _log(folder), compiles=True), folder) for folder, some in shares if some]
    for process, _ in begun:
        process.join()
    for process, folder in begun:
        if process.exitcode != PASSED:
            said = _log(folder).read_text()[-3000:]
            sys.exit(f"tests fail without any mutant (exit code {process.exitcode}):\n{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all mutants, not only those of changed files")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    mutants = chosen(args.all)
    if not mutants:
        print("no mutants of what has changed; ALL=1 tries all")
        return
    began = time.monotonic()
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py, before anything imports triton
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as place:
        folders = [copy_project(_made(Path(place).resolve() / f"copy{index}")) for index in range(args.workers)]
        check_unchanged(mutants, folders)
        found = try_all(mutants, folders)
    wrong = {mutant: result for mutant, result in found.items() if result != "killed"}
    print(f"{len(found)} mutants, {len(found) - len(wrong)} killed, {time.monotonic() - began:.0f} s")
    for mutant, result in wrong.items():
        print(f"\n{mutant}: {result}")
    sys.exit(1 if wrong else 0)


def _log(folder: Path) -> Path:
    return folder.with_suffix(".log")


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
