"""Model-written programs against tests, as a reward. What is protected, and how, is said in docs/rewards.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from rloom.errors import SandboxError, checks_options
from rloom.rewards.calling.call_options import named_reward
from rloom.rewards.completion_text import text_of, without_surrogates
from rloom.rewards.library.code.extraction import program_of
from rloom.rewards.library.code.imports import check_imports
from rloom.rewards.library.code.problems import Tests, imports_of, names_called, num_statements, read_tests
from rloom.rewards.library.code.runs import ProgramRun, Verdict
from rloom.rewards.sandbox.bubblewrap import check_sandbox, check_site_packages
from rloom.rewards.sandbox.fork_server import close_lost, fork_servers, use_fork_servers
from rloom.rewards.sandbox.limits import Limits


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

        with fork_servers() if len(completions) > 1 else nullcontext():
            verdicts = [verdict(index) for index in range(len(completions))]
        if log_extra is not None:
            log_extra("tests", [v.why or "passed" if v else None for v in verdicts])
        return [None if v is None else v.share for v in verdicts]

    options = {"streaming": True, "per_sample": True, "threads": True, "at_start": use_fork_servers}
    return named_reward(code_execution_reward, "code_execution", **options)


def judge_program(
    program: str, tests: Tests, limits: Limits, *, partial: bool = False, site_packages: Sequence[str] = ()
) -> Verdict:
    """Run a program against its tests. Where the fork server of its sandboxes was killed meanwhile (a machine that is
    short of memory does so), that is not the program's fault, and it is run again."""
    run = ProgramRun(
        program=without_surrogates(program), tests=tests, limits=limits, partial=partial, site_packages=site_packages
    )
    try:
        verdict = run.verdict()
    except SandboxError:
        if not close_lost():
            raise
        return run.verdict()
    return run.verdict() if close_lost() else verdict
