"""Reward functions in worker processes, in threads and per group: what hangs, dies or throws costs its sample alone."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import rloom
from rloom.errors import RewardError, UnknownOptionError
from rloom.rewards import FunctionReward, RewardBatch, RewardSet, format, math_accuracy
from rloom.rewards.calling.call_options import call_options_of
from rloom.rewards.calling.worker_pool import WorkerPool
from rloom.rewards.calling.worker_process import WorkerGone

nan = float("nan")


def batch(count=4, **changes) -> RewardBatch:
    options = {
        "prompts": [f"p{i}" for i in range(count)],
        "completions": ["x" * (i + 1) for i in range(count)],
        "completion_ids": [[i] for i in range(count)],
        "columns": {"answer": list(range(count))},
    }
    return RewardBatch(**(options | changes))


def score(*functions, data=None, **options):
    rewards = RewardSet([FunctionReward(f) for f in functions], None, **({"workers": 2} | options))
    try:
        scored = rewards.score(data or batch())
        return scored.scores, dict(scored.costs)
    finally:
        rewards.close()


def same(result, expected):
    return torch.equal(result.nan_to_num(-9), torch.tensor(expected, dtype=torch.float32).nan_to_num(-9))


# -- workers


def test_closures_lambdas_and_partials():
    offset = 10

    def closure(completions, answer):
        return [len(c) + offset + a for c, a in zip(completions, answer, strict=True)]

    functions = [
        rloom.reward(closure, isolated=True),
        rloom.reward(lambda completions: [len(c) for c in completions], isolated=True),
        rloom.reward(functools.partial(lambda completions, k: [k] * len(completions), k=3), isolated=True),
    ]
    result, report = score(*functions)
    assert same(result, [[11, 1, 3], [13, 2, 3], [15, 3, 3], [17, 4, 3]])
    assert report["rewards/closure/time"] > 0


SCRIPT = """
import rloom
from rloom.rewards import FunctionReward, RewardBatch, RewardSet

SHIFT = 2
print("main script runs")

def helper(text):
    return len(text) + SHIFT

@rloom.reward(isolated=True)
def mine(completions, **kwargs):
    return [helper(text) for text in completions]

rewards = RewardSet([FunctionReward(mine)], None, workers=1)
batch = RewardBatch(prompts=["p"], completions=["four"], completion_ids=[[1]])
print("score", rewards.score(batch).scores.tolist())
rewards.close()
"""


def test_functions_of_the_main_script_without_a_guard(tmp_path):
    """The script is not imported again: it prints once, though nothing stands under `if __name__ == "__main__"`."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "main script runs\nscore [[6.0]]\n", done.stderr


HANGS = {
    "in Python": "while True: pass",
    "in C": "sum(range(10**12))",
    "in a regular expression": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "deaf to signals": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
    "in a child process": "import subprocess; subprocess.run(['sleep', '1000'])",
}


@pytest.mark.parametrize("where", HANGS)
def test_a_hang_costs_one_sample(where, caplog):
    code = HANGS[where]

    @rloom.reward(isolated=True, time_limit=0.5)
    def hangs(completions, answer):
        if answer[0] == 1:
            exec(code)
        return [1.0]

    result, report = score(hangs)
    assert same(result, [[1], [nan], [1], [1]])
    assert report["rewards/hangs/timeouts"] == 1
    assert report["rewards/hangs/none_ratio"] == 0.25
    assert "'hangs' was not done after 0.5 seconds and was cut off on sample 1" in caplog.text
    assert "p1" in caplog.text


@pytest.mark.parametrize("how", ["os._exit(3)", "os.kill(os.getpid(), 11)", "os.close(int(__import__('sys').argv[2]))"])
def test_a_crash_of_a_worker_is_survived(how, caplog):
    @rloom.reward(isolated=True, time_limit=5.0)
    def dies(completions, answer):
        if answer[0] in (0, 2):
            exec("import os; " + how)
        return [1.0]

    result, report = score(dies)
    assert same(result, [[nan], [1], [nan], [1]])
    assert report.get("rewards/dies/crashes", 0) + report.get("rewards/dies/timeouts", 0) == 2
    assert "took its worker process with it" in caplog.text


def test_a_value_instead_of_a_hang():
    @rloom.reward(isolated=True, time_limit=0.3)
    def hangs(completions, answer):
        while answer[0] == 1:
            pass
        return [1.0]

    result, _ = score(hangs, on_error=-1.0)
    assert same(result, [[1], [-1], [1], [1]])


def test_exceptions_in_workers_are_told_with_their_traceback():
    @rloom.reward(isolated=True)
    def throws(completions):
        raise KeyError("no such thing")

    with pytest.raises(RewardError, match=r"(?s)KeyError: 'no such thing'.*in a worker process.*in throws") as caught:
        score(throws)
    assert "sample 0: its prompt begins 'p0'" in caught.value.__notes__[0]
    assert "in the reward 'throws', on 4 completions" in caught.value.__notes__[1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[1.0, 2.0]", "returned 2 rewards, but 1 were expected"),
        ("'1.0'", "returned str '1.0'"),
        ("['1.0']", "returned str '1.0' for sample"),
        ("[float('nan')]", "returned NaN for sample"),
        ("[float('inf')]", "returned infinity for sample"),
        ("None", "is a `return` missing"),
        ("{1: 2}", "returned dict"),
        ("[object()]", "returned object '<object"),
    ],
)
def test_nonsense_from_a_worker(value, message):
    def bad(completions):
        return eval(value)

    with pytest.raises(RewardError, match=message):
        score(rloom.reward(bad, isolated=True))
    result, report = score(bad, on_error="none")
    assert result.isnan().all()
    assert report["rewards/bad/errors"] == 4


def test_what_a_worker_gets_and_logs():
    state = type("State", (), {})()
    state.global_step, state.log_history = 7, [object()]

    @rloom.reward(isolated=True)
    async def full(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        log_extra("twice", [answer[0] * 2])
        log_metric("mine", answer[0])
        return [trainer_state.global_step + completion_ids[0][0]]

    rewards = RewardSet([FunctionReward(full)], None, workers=2)
    scored = rewards.score(batch(trainer_state=state))
    rewards.close()
    assert same(scored.scores, [[7], [8], [9], [10]])
    assert scored.extra == {"twice": [0, 2, 4, 6]}
    assert scored.logged == [("mine", i) for i in range(4)]


def test_what_a_worker_must_not_log():
    def refuse(name, value):
        raise RewardError(f"not {name}")

    with pytest.raises(RewardError, match="not reward"):
        score(rloom.reward(lambda log_metric: log_metric("reward", 1.0) or [0.0], isolated=True), check_metric=refuse)
    with pytest.raises(RewardError, match="2 values for 1 completions"):
        score(rloom.reward(lambda log_extra: log_extra("x", [1, 2]) or [0.0], isolated=True))


def test_arguments_by_position():
    assert same(
        score(rloom.reward(lambda completions, /: [len(completions[0])], isolated=True))[0], [[1], [2], [3], [4]]
    )


def test_a_function_that_cannot_travel():
    lock = threading.Lock()

    def locked(completions):
        with lock:
            return [0.0]

    with pytest.raises(RewardError, match="'locked' cannot be sent to a worker process"):
        score(rloom.reward(locked, isolated=True))


def test_gigabytes_of_output_and_a_10_mb_completion(capfd):
    @rloom.reward(isolated=True, time_limit=60.0)
    def loud(completions):
        for _ in range(100):
            print("x" * 10**7)
        return [float(len(completions[0]))]

    with open(os.devnull, "w") as nowhere:  # what workers print goes where the trainer's errors go
        before, sys.stderr = sys.stderr, nowhere
        try:
            result, _ = score(loud, data=batch(1, completions=["\ud800" + "y" * 10**7]))
        finally:
            sys.stderr = before
    assert result.item() == 10**7 + 1


def test_the_time_limits_of_math_verify_work_in_workers(monkeypatch):
    """They are set by signals, which only a process' main thread may do: in a thread of ours they would be off."""

    @rloom.reward(isolated=True, time_limit=30.0)
    def probe(completions):
        from rloom.rewards.library.accuracy import _timeouts

        return [float(sum(_timeouts()))]

    assert score(probe)[0].unique().tolist() == [15.0]
    hard = r"\boxed{" + "9" * 12 + "^{" + "9" * 12 + "}}"
    result, report = score(
        math_accuracy, data=batch(2, completions=[hard, r"\boxed{2}"], columns={"answer": ["2"] * 2})
    )
    assert result.tolist() == [[0.0], [1.0]]
    assert "rewards/math_accuracy/timeouts" not in report


def test_a_built_in_reward_that_hangs_is_cut():
    evil = rloom.reward(format("(a+)+b"), time_limit=0.5)
    result, report = score(evil, data=batch(2, completions=["a" * 60, "ab"]))
    assert same(result, [[nan], [1]])
    assert report["rewards/format/timeouts"] == 1


def test_workers_end_with_the_pool_and_with_the_trainer(tmp_path):
    with WorkerPool(2) as pool:
        key = pool.register(lambda completions: [__import__("os").getpid()], "pid")
        pids = {pool.submit(key, [{"completions": ["a"]}], 30.0)[0].result()["value"][0] for _ in range(8)}
    assert pids
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    script = textwrap.dedent("""
        import os
        from rloom.rewards.calling.worker_pool import WorkerPool
        pool = WorkerPool(1)
        sleep = pool.register(lambda: __import__("time").sleep(100), "sleeps")
        pid = pool.register(lambda: __import__("os").getpid(), "pid")
        print(pool.submit(pid, [{}], 30.0)[0].result()["value"], flush=True)
        pool.submit(sleep, [{}], 100.0)
        os.kill(os.getpid(), 9)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    pid = int(re.findall(r"\d+", done.stdout)[0])
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.05)
    pytest.fail("a worker outlived the trainer")


def test_a_worker_that_dies_while_idle_is_replaced():
    with WorkerPool(1) as pool:
        key = pool.register(lambda completions: [__import__("os").getpid()], "pid")
        first = pool.submit(key, [{"completions": ["a"]}], 30.0)[0].result()["value"][0]
        os.kill(first, 9)
        time.sleep(0.3)
        try:
            second = pool.submit(key, [{"completions": ["a"]}], 30.0)[0].result()["value"][0]
        except WorkerGone:  # it was still dying
            second = pool.submit(key, [{"completions": ["a"]}], 30.0)[0].result()["value"][0]
        assert second != first


def killed_at_first(path):
    """Kills its process when it is first called, as whoever runs out of memory might."""
    if not os.path.exists(path):
        open(path, "w").close()
        os.kill(os.getpid(), 9)


def test_a_worker_that_is_killed_while_loading_is_started_again(tmp_path):
    with WorkerPool(1) as pool:
        key = pool.register(lambda completions: [1.0], "one", functools.partial(killed_at_first, tmp_path / "once"))
        answer = pool.submit(key, [{"completions": ["a"]}], 30.0)[0].result()
        assert answer["value"] == [1.0]
        assert pool.restarts == 1


def test_a_function_that_no_worker_can_load_is_told(tmp_path):
    with WorkerPool(1) as pool:
        key = pool.register(lambda completions: [1.0], "one", functools.partial(os._exit, 3))
        for starts in (2, 3):  # the first time it is tried three times, then no more than once
            with pytest.raises(RewardError, match="loading a reward function ended: exit code 3"):
                pool.submit(key, [{"completions": ["a"]}], 30.0)[0].result()
            assert pool.restarts == starts


def test_a_sample_whose_worker_is_killed_is_scored_by_another(tmp_path):
    def reward(completions):
        killed_at_first(tmp_path / "once")
        return [1.0]

    with WorkerPool(1) as pool:
        key = pool.register(reward, "one")
        assert pool.submit(key, [{"completions": ["a"]}], 30.0)[0].result()["value"] == [1.0]


# -- errors


def sometimes(completions, answer):
    if 2 in answer:
        raise ValueError("not the 2")
    return [1.0] * len(completions)


def test_on_error(caplog):
    with pytest.raises(ValueError, match="not the 2"):
        score(sometimes)
    result, report = score(sometimes, on_error="none")
    assert result.isnan().all()
    assert report["rewards/sometimes/errors"] == 4
    assert "'sometimes' failed on samples 0 to 3, which get no score: ValueError: not the 2" in caplog.text
    assert same(score(sometimes, on_error=0.5)[0], [[0.5]] * 4)
    once = rloom.reward(sometimes, per_sample=True)
    assert same(score(once, on_error="none")[0], [[1], [1], [nan], [1]])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1.0, nan, 2.0, "3"], [1.0, -1, 2.0, -1]),
        ([1.0], [-1] * 4),
        ([float("inf"), None, 1, 1], [-1, nan, 1, 1]),
    ],
)
def test_only_the_bad_samples_pay(value, expected):
    result, report = score(lambda completions: value, on_error=-1.0)
    assert same(result, [[e] for e in expected])
    assert report["rewards/<lambda>/errors"] == expected.count(-1)


def test_one_failure_does_not_stop_the_others():
    result, _ = score(sometimes, lambda completions: [2.0] * 4, on_error="none")
    assert same(result, [[nan, 2.0]] * 4)


# -- threads and the event loop


def test_async_functions_have_a_limit_and_a_time_limit():
    running, most = [], []

    @rloom.reward(per_sample=True, concurrency=3)
    async def counted(completions):
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.02)
        running.pop()
        return [1.0]

    score(counted, data=batch(12))
    assert max(most) == 3

    @rloom.reward(per_sample=True, time_limit=0.2)
    async def slow(completions, answer):
        await asyncio.sleep(30 if answer[0] == 1 else 0)
        return [1.0]

    result, report = score(slow)
    assert same(result, [[1], [nan], [1], [1]])
    assert report["rewards/slow/timeouts"] == 1


def test_an_async_function_behind_a_lambda():
    async def inner(completions):
        return [1.0] * len(completions)

    assert same(score(lambda completions: inner(completions))[0], [[1]] * 4)


def test_a_plain_streaming_function_is_never_called_twice_at_a_time():
    running = []

    @rloom.reward(streaming=True)
    def alone(completions):
        assert not running
        running.append(1)
        time.sleep(0.01)
        running.pop()
        return [1.0] * len(completions)

    rewards = RewardSet([FunctionReward(alone)], None, workers=4)
    scoring = rewards.begin()
    for position in range(6):
        scoring.add(position, batch(2))
    assert same(scoring.score(batch(12)).scores, [[1]] * 12)
    rewards.close()


def test_groups_in_any_order_give_the_same_columns():
    rows = batch(12)
    logged, expected = {}, {}

    def both(completions, answer, log_extra):
        log_extra("a", answer)
        return [a * 10 for a in answer]

    results = []
    for order, log in (((2, 0, 1), logged), ((0, 1, 2), expected)):
        functions = [
            rloom.reward(both, streaming=True),
            rloom.reward(lambda answer: answer, isolated=True),
            lambda answer: answer,
        ]
        rewards = RewardSet([FunctionReward(f) for f in functions], None, workers=2)
        scoring = rewards.begin()
        for position in order:
            scoring.add(position, rows.take(range(position * 4, position * 4 + 4)))
        scored = scoring.score(rows)
        log |= scored.extra
        results.append(scored.scores)
        rewards.close()
    assert torch.equal(*results)
    assert results[0][:, 0].tolist() == [10.0 * i for i in range(12)]
    assert logged == expected == {"a": list(range(12))}


def test_groups_that_were_added_and_not_asked_for_are_forgotten():
    rewards = RewardSet([FunctionReward(rloom.reward(lambda answer: answer, streaming=True))], None)
    scoring = rewards.begin()
    scoring.add(0, batch(2))
    scoring.cancel()
    assert scoring.score(batch(4)).scores.shape == (4, 1)
    scoring.add(0, batch(3))  # not what is asked for next: scored anew
    assert scoring.score(batch(4)).scores[:, 0].tolist() == [0, 1, 2, 3]
    rewards.close()


# -- call options


def test_call_options_that_make_no_sense():
    def f(completions): ...

    with pytest.raises(RewardError, match="time_limit has no effect"):
        rloom.reward(f, time_limit=1.0)
    with pytest.raises(RewardError, match="above 0"):
        rloom.reward(f, isolated=True, time_limit=0.0)
    with pytest.raises(RewardError, match="concurrency is for async"):
        rloom.reward(f, concurrency=3)
    with pytest.raises(UnknownOptionError, match="did you mean 'isolated'"):
        rloom.reward(f, isolate=True)
    rloom.reward(math_accuracy, time_limit=1.0)
    assert call_options_of(math_accuracy).time_limit is None  # of a copy; the function itself stays as it was


def test_nothing_is_said_when_nothing_fails(caplog):
    with caplog.at_level(logging.WARNING):
        score(rloom.reward(lambda completions: [1.0], isolated=True))
    assert not caplog.records


def test_an_answer_that_cannot_be_sent_costs_its_own_sample():
    class Odd:
        def __str__(self):
            raise ValueError("no")

    def answers(completions, answer):
        return [[10**5000, 1.0, Odd(), 2.0][answer[0] % 4]]

    rewards = RewardSet(
        [FunctionReward(rloom.reward(answers, isolated=True, time_limit=3.0))], None, on_error="none", workers=1
    )
    try:
        for _ in range(2):  # from the second time on, several samples are handed over at once
            scored = rewards.score(batch(40))
            assert same(scored.scores[:, 0], [nan, 1.0, nan, 2.0] * 10)
            report = dict(scored.costs)
            assert report["rewards/answers/errors"] == 20
            assert "rewards/answers/timeouts" not in report
    finally:
        rewards.close()


TROUBLE = {
    "hangs": ("while True: pass", "timeouts"),
    "dies": ("import os; os._exit(3)", "crashes"),
    "breaks its pipe": ("import os, sys; os.close(int(sys.argv[2]))", "crashes"),
}


@pytest.mark.parametrize("what", TROUBLE)
def test_trouble_among_quick_samples_costs_its_own_sample(what):
    """Quick samples travel together, and so do their answers; who is to blame is found out all the same."""
    code, kind = TROUBLE[what]

    def quick(completions, answer, bad):
        if answer[0] in bad[0]:
            exec(code)
        return [float(answer[0])]

    rewards = RewardSet([FunctionReward(rloom.reward(quick, isolated=True, time_limit=0.5))], None, workers=1)
    try:
        for bad in [], [17, 23]:  # in the second round it is known to be quick
            data = batch(64, columns={"answer": list(range(64)), "bad": [bad] * 64})
            expected = [nan if i in bad else float(i) for i in range(64)]
            scored = rewards.score(data)
            assert same(scored.scores[:, 0], expected)
            assert dict(scored.costs).get(f"rewards/quick/{kind}", 0) == len(bad)
    finally:
        rewards.close()


def test_the_time_limit_is_each_samples_own():
    """Samples that turn out slower than they were take longer together than the limit for one."""

    def slower(completions, seconds):
        time.sleep(seconds[0])
        return [1.0]

    rewards = RewardSet([FunctionReward(rloom.reward(slower, isolated=True, time_limit=0.5))], None, workers=1)
    try:
        for seconds in 0.0, 0.2:
            result = rewards.score(batch(32, columns={"seconds": [seconds] * 8 + [0.0] * 24}))
            assert result.scores.flatten().tolist() == [1.0] * 32
    finally:
        rewards.close()


@pytest.mark.parametrize("when", ["in a sample", "between samples"])
def test_what_a_crashed_worker_started_ends_with_it(tmp_path, when):
    note = tmp_path / "child"

    def crashes(completions, answer):
        if not note.exists():
            child = subprocess.Popen(["sleep", "100"])
            note.write_text(str(child.pid))
            if when == "in a sample":
                os._exit(3)
            threading.Timer(0.3, os._exit, [3]).start()
        return [1.0]

    rewards = RewardSet([FunctionReward(rloom.reward(crashes, isolated=True))], None, workers=1)
    try:
        rewards.score(batch(1))
        time.sleep(1.0)
        assert rewards.score(batch(1)).scores.tolist() == [[1.0]]
        for _ in range(50):
            state = subprocess.run(["ps", "-o", "stat=", "-p", note.read_text()], capture_output=True, text=True).stdout
            if not state.strip() or state.startswith("Z"):
                return
            time.sleep(0.1)
        pytest.fail("a process outlived its worker")
    finally:
        rewards.close()


def test_a_function_cannot_buy_itself_time(tmp_path):
    """It writes a clock that is ahead, and more samples than there are, where the worker says how far it is."""

    def cheat(completions):
        import struct
        import sys
        import time

        frame = sys._getframe()
        while "progress" not in frame.f_locals:
            frame = frame.f_back
        struct.Struct("Qd").pack_into(frame.f_locals["progress"], 0, 2**40, time.monotonic() + 1e6)
        time.sleep(1000)

    with WorkerPool(1) as pool:
        key = pool.register(cheat, "cheat")
        (answer,) = pool.submit(key, [{"completions": ["x"]}], time_limit=1.0)
        with pytest.raises(TimeoutError):
            answer.result(timeout=60)


# -- what a worker does first


def test_at_start_is_called_once_in_each_worker_and_not_in_the_sample_s_time(tmp_path):
    def slow_start():
        time.sleep(1.0)
        (tmp_path / str(os.getpid())).touch()

    @rloom.reward(isolated=True, time_limit=0.5, at_start=slow_start)
    def ready(completions):
        return [float((tmp_path / str(os.getpid())).exists())]

    result, report = score(ready, data=batch(8))
    assert same(result, [[1.0]] * 8)
    assert not any("timeouts" in name for name in report)
    assert 1 <= len(list(tmp_path.iterdir())) <= 2


def test_what_at_start_throws_is_told():
    def broken():
        raise ValueError("no such model")

    with pytest.raises(RewardError, match="no such model"):
        score(rloom.reward(lambda completions: [1.0], isolated=True, at_start=broken))
    with pytest.raises(RewardError, match="at_start is for functions with isolated=True, or with threads=True"):
        rloom.reward(lambda completions: [1.0], at_start=broken)

    async def later(completions):
        return [1.0]

    with pytest.raises(RewardError, match="threads=True and not async"):  # it runs in none of these threads
        rloom.reward(later, threads=True, at_start=broken)


def test_at_start_that_throws_in_a_thread_costs_scores_and_not_the_run():
    def broken():
        raise ValueError("no such model")

    function = rloom.reward(lambda completions: [1.0] * len(completions), threads=True, at_start=broken)
    result, report = score(function, on_error="none")
    assert result.isnan().all()
    assert next(value for name, value in report.items() if name.endswith("/errors")) == 4
    with pytest.raises(ValueError, match="no such model"):
        score(function)


def test_a_ready_made_reward_called_in_another_way_leaves_its_start_behind():
    """Which was for worker processes: sympy of this process is not touched."""
    assert call_options_of(math_accuracy).at_start is not None
    for options in ({"isolated": False}, {"isolated": False, "threads": True}):
        assert call_options_of(rloom.reward(math_accuracy, **options)).at_start is None
    assert call_options_of(rloom.reward(math_accuracy, time_limit=5.0)).at_start is not None


def test_a_worker_reads_mathematics_as_this_process_does():
    """There sympy's names are looked up once; what is read must be the same, undefined names and powers included."""
    texts = [
        "1/3",
        "0.25",
        "-7",
        "1e3",
        "max(1, 2)",
        "x + x",
        "pi*2",
        "factorial(5)",
        "1,000",
        "sqrt(8)",
        "unknown_f(3)",
    ]

    def read(completions):
        import sympy
        from sympy.parsing import sympy_parser

        return [
            [
                float(sympy.srepr(sympy.sympify(text)) == expected),
                float(sympy_parser.parse_expr.__module__ == "rloom.rewards.library.accuracy"),
            ]
            for text, expected in completions
        ]

    import sympy

    pairs = [(text, sympy.srepr(sympy.sympify(text))) for text in texts]
    assert call_options_of(math_accuracy).at_start is not None
    with WorkerPool(1) as pool:
        key = pool.register(read, "read", call_options_of(math_accuracy).at_start)
        answers = [a.result() for a in pool.submit(key, [{"completions": [pair]} for pair in pairs], time_limit=60.0)]
    assert [a.get("value", a) for a in answers] == [[[1.0, 1.0]]] * len(pairs)
