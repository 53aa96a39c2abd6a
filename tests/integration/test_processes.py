"""Two processes that train together end as one does that trains on the same batches; nothing is done or counted twice.

One launch of torchrun serves most tests here: starting Python and torch is what takes the time.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from rloom import FakeEngine
from rloom.observe import read_store
from rloom.training import heartbeat
from tests.integration import processes_run
from tests.integration.test_resume import assert_equal, assert_same, strip
from tests.launches import assert_done, torchrun
from tests.made_once import made_once

SCRIPT = Path(processes_run.__file__)
AS_ONE = [
    "sequence",
    "token",
    "whitened",
    "batch",
    "several",
    "lora",
    "images",
    "degenerate",
    "evaluated",
    "out of memory",
    "stopped",
    "ended early",
]
TIMES = ("eps", "total_flos")


def launch(*arguments: str, processes: int = 2) -> subprocess.CompletedProcess:
    return torchrun(str(SCRIPT), *arguments, processes=processes)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The folder of a launch of two processes that has run all kinds."""

    def run(folder: Path) -> None:
        done = launch(
            str(folder), *AS_ONE, "replaced", "bfloat16", "transformers", "dropout", "resumed", "half resumed",
            "corners", "signalled", "busy", "frozen",
        )  # fmt: skip
        assert_done(done)
        (folder / "stderr.txt").write_text(done.stderr)

    return made_once(tmp_path_factory, "processes", run)


def results(two: Path, kind: str, processes: int = 2) -> list[dict]:
    found = [torch.load(two / kind / f"result_{rank}.pt", weights_only=False) for rank in range(processes)]
    assert [result["world"] for result in found] == [processes] * processes
    return found


def assert_close(one: dict, other: dict, allowed: float = 2e-5) -> None:
    assert one["weights"].keys() == other["weights"].keys()
    for name, weight in one["weights"].items():
        torch.testing.assert_close(other["weights"][name], weight, rtol=0, atol=allowed, msg=name)


def assert_same_log(one: dict, other: dict) -> None:
    assert len(one["history"]) == len(other["history"])
    for expected, found in zip(one["history"], other["history"], strict=True):
        assert expected.keys() == found.keys()
        for name in expected.keys() - set(TIMES):
            if name.startswith("mismatch/"):  # rounding, which other batches do otherwise
                assert found[name] < 1e-4
            elif isinstance(expected[name], float):
                assert math.isclose(expected[name], found[name], rel_tol=1e-3, abs_tol=1e-5), name
            else:
                assert expected[name] == found[name], name


# -- as one


def test_one_process_of_a_launcher_is_as_without_it(tmp_path):
    """accelerate would wrap its model for several. To the bit."""
    assert_done(launch(str(tmp_path), "sequence", "lora", processes=1))
    for kind in ("sequence", "lora"):
        one = processes_run.run(tmp_path / "one", kind)
        (found,) = results(tmp_path, kind, processes=1)
        assert_close(one, found, allowed=0.0)
        assert_same_log(one, found)


@pytest.mark.parametrize("kind", AS_ONE)
def test_two_processes_are_as_one(two, kind, tmp_path):
    """Weights after three updates, and every number in the log. Prompts and completions are ragged, so that the two
    have unequally many tokens, and with small micro-batches unequally many of these."""
    one = processes_run.run(tmp_path / "one", kind)
    main, other = results(two, kind)
    assert main["fingerprints"] == other["fingerprints"]  # after each update, to the bit
    assert len(main["fingerprints"]) == len(set(main["fingerprints"]))  # and something was learnt in each
    assert_close(one, main)
    assert_same_log(one, main)
    assert main["wrapped"] == other["wrapped"] == one["wrapped"]


def test_a_diagnosis_ends_the_run_in_all_processes(two):
    main, other = results(two, "ended early")
    assert len(main["fingerprints"]) == len(other["fingerprints"]) == 4
    (folder,) = (two / "ended early").glob("**/checkpoint-4")
    assert (folder / "rloom_state.pt").exists()
    assert (folder / "rloom_state_1.pt").exists()


@pytest.mark.parametrize("kind", ["sequence", "several"])
def test_the_store_has_every_completion_once(two, kind, tmp_path):
    processes_run.run(tmp_path / "one", kind)
    stores = [sorted(map(_told, read_store(folder))) for folder in (tmp_path / "one", two / kind)]
    assert stores[0] == stores[1]
    groups = defaultdict(set)
    for row in read_store(two / kind):
        groups[row["step"], row["group"]].add(row["prompt"])
    assert all(len(prompts) == 1 for prompts in groups.values())


def _told(row: dict) -> tuple:
    advantage = row["advantage"]
    return row["step"], row["prompt"], row["completion"], row["reward"], advantage and round(advantage, 3)


def test_engine_of_transformers_on_the_same_completions(two, tmp_path):
    """What its two processes draw is not what one draws, since it draws for a batch. Given the same completions, one
    process learns the same."""
    main, other = results(two, "transformers")
    assert main["fingerprints"] == other["fingerprints"]
    script: dict[str, list] = defaultdict(list)
    rollouts = [result["drawn"][first : first + 2] for first in (0, 2, 4) for result in (main, other)]
    for prompt, completions in itertools.chain(*rollouts):
        script[prompt].append(completions)
    calls: dict[str, int] = defaultdict(int)

    def replay(prompt, sample, seed):
        tokens = script[prompt.content][calls[prompt.content] // 4][sample]
        calls[prompt.content] += 1
        return tokens

    engine = FakeEngine(replay, eos_token_ids=[2])
    one = processes_run.run(tmp_path / "one", "transformers", engine=engine)
    assert_close(one, main)


def test_bfloat16_weights_stay_together(two):
    main, other = results(two, "bfloat16")
    assert main["fingerprints"] == other["fingerprints"]
    assert len(set(main["fingerprints"])) == len(main["fingerprints"])


def test_processes_replace_groups_of_their_own(two, tmp_path):
    one = processes_run.run(tmp_path / "one", "replaced")
    main, other = results(two, "replaced")
    assert main["fingerprints"] == other["fingerprints"]
    replaced = [sum(e.get("completions/replaced_groups", 0) for e in r["history"]) for r in (one, main)]
    assert replaced[0] > 0
    assert replaced[0] == replaced[1]
    # What was drawn is what one process draws; which of the groups without signal made room for it is not.
    stores = [sorted(_told(row)[:4] for row in read_store(folder)) for folder in (tmp_path / "one", two / "replaced")]
    assert stores[0] == stores[1]


# -- once


def test_streams_small_evaluations_and_tables(two, tmp_path):
    one, (main, other) = processes_run.corners(tmp_path / "one"), results(two, "corners")
    assert_close(one, main)
    assert_same_log(one, main)
    assert_same_log(one, other)
    tables = [{k: v for k, v in result["table"].items() if k != "advantage"} for result in (one, main)]
    assert "length" in tables[0]
    shown = [sorted(map(str, zip(*table.values(), strict=True))) for table in tables]
    assert shown[0] == shown[1]


def test_evaluation_is_counted_once(two, tmp_path):
    main, other = results(two, "evaluated")
    one = processes_run.run(tmp_path / "one", "evaluated")
    times = sum("eval_reward" in entry for entry in main["history"])
    assert times == 2
    assert main["judged"] == one["judged"]
    assert set(main["judged"]) == set(processes_run.TEXTS[:7])
    assert other["judged"] == []
    folders = two / "evaluated", tmp_path / "one"
    rows = [[_told(row) for row in read_store(folder) if row["mode"] == "eval"] for folder in folders]
    assert len(rows[0]) == 7 * 2 * times
    assert rows[0] == rows[1]


def test_only_the_main_process_writes(two):
    names = sorted(path.name for path in (two / "dropout" / "checkpoint-6").iterdir())
    assert [name for name in names if "state" in name] == [
        "rloom_state.pt", "rloom_state_1.pt", "rng_state_0.pth", "rng_state_1.pth", "trainer_state.json",
    ]  # fmt: skip
    assert names.count("README.md") == 1


# -- checkpoints


def test_resumed_is_as_never_stopped(two):
    """With dropout, whose random state each process has for itself, and rollouts that later updates still need."""
    assert_same(two / "dropout" / "checkpoint-6", two / "resumed" / "checkpoint-6")
    for name in ("rloom_state_1.pt", "rng_state_0.pth", "rng_state_1.pth"):
        a, b = (torch.load(two / run / "checkpoint-6" / name, weights_only=False) for run in ("dropout", "resumed"))
        assert_equal(strip(_plain(a)), strip(_plain(b)), name)
    assert read_store(two / "dropout") == read_store(two / "resumed")
    whole, resumed = results(two, "dropout"), results(two, "resumed")
    for rank in (0, 1):
        assert_equal(whole[rank]["history"], resumed[rank]["history"], "log history")


def test_rollouts_that_one_process_has_lost_are_sampled_anew_by_all(two):
    whole, found = results(two, "dropout"), results(two, "half resumed")
    assert found[0]["fingerprints"] == found[1]["fingerprints"]
    assert found[0]["history"][-1]["step"] == 6
    scored = [result["state"]["components"]["shaper"]["moments"][0] for result in (*whole, *found)]
    assert scored[2] == scored[3] == scored[0] + 16  # one rollout more than without a stop


def _plain(value):
    """numpy's random state as a list."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value.tolist() if type(value).__module__ == "numpy" else value


def test_checkpoint_of_two_processes_in_one(two, tmp_path, caplog):
    processes_run.cut_off_after(two / "dropout", tmp_path / "one", step=3)
    one = processes_run.run(tmp_path / "one", "dropout", resume=True)
    assert "the checkpoint is of 2 process(es), and this run has 1" in caplog.text
    assert "sampled anew" in caplog.text
    assert one["history"][-1]["step"] == 6
    main, _ = results(two, "dropout")
    assert (
        one["state"]["components"]["shaper"]["moments"][0] == main["state"]["components"]["shaper"]["moments"][0] + 16
    )  # one rollout more was scored


# -- when something is wrong


def test_a_process_that_stops_is_named_and_one_that_is_busy_is_not(two):
    """The busy one is silent for as long in the gather, the stopped one in its thread too."""
    told = [line for line in (two / "stderr.txt").read_text().splitlines() if "heard of" in line]
    assert told
    assert re.search(r"rloom: process 1 \(.+, pid \d+\) has not been heard of for 2 s", told[0])
    assert all(line.endswith("is heard of again") for line in told[1:]), told  # if there is time before the end


def test_a_store_that_does_not_answer_names_who_keeps_it(monkeypatch, capsys):
    """Without torchrun that is process 0: stopped, it keeps the others from reading what they say."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 0.3)
    release = threading.Event()

    class Stopped(torch.distributed.HashStore):
        def set(self, key, value):
            release.wait(20)

    heart = heartbeat.Heartbeat(Stopped(), rank=1, count=3)
    heart.start()
    deadline = time.monotonic() + 10
    while not heart._named and time.monotonic() < deadline:
        time.sleep(0.02)
    # At the end of the process. A store answers one thread at a time.
    began = time.monotonic()
    heart.stop()
    assert time.monotonic() - began < 10
    release.set()
    assert "rloom: process 0 has not been heard of for 0.3 s" in capsys.readouterr().err


def test_a_process_that_has_ended_is_not_missed(monkeypatch, capsys):
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 1.5)
    store = torch.distributed.HashStore()
    hearts = [heartbeat.Heartbeat(store, rank, 2) for rank in (0, 1)]
    for heart in hearts:
        heart.start()
    time.sleep(0.1)
    hearts[1].stop()
    time.sleep(2.5)
    assert hearts[0].silent() == []
    hearts[0].stop()
    assert capsys.readouterr().err == ""


def test_a_signal_to_one_process_ends_the_run_in_all(two):
    """None goes on in its script as after a whole run."""
    for result in results(two, "signalled"):
        assert (result["code"], result["step"]) == (143, 2)
    assert (two / "signalled" / "checkpoint-2" / "rloom_state_1.pt").exists()
    told = "rloom: stopped after update 2 by SIGTERM in process 1, saved in "
    assert (two / "stderr.txt").read_text().count(told) == 1


def test_processes_on_a_cpu_wait_as_long_as_they_were_told_to(two):
    assert [result["waits"] for result in results(two, "signalled")] == [777.0] * 2


def test_a_failure_in_one_process_ends_the_run(tmp_path):
    done = launch(str(tmp_path), "failing")
    assert done.returncode != 0
    assert "ValueError: the reward of the last process has failed" in done.stderr
    assert "in the reward 'failing', on 8 completions" in done.stderr
    assert not list(tmp_path.glob("failing/result_*"))


@pytest.mark.slow
def test_without_a_launcher_who_is_left_waiting_ends_too(tmp_path):
    """Nobody kills it: it finds the other gone, and says that the reason is to be read there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    line = [sys.executable, str(SCRIPT), str(tmp_path), "failing"]
    started = [
        subprocess.Popen(
            line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": rank,
                 "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    left, failed = (process.communicate(timeout=240)[1] for process in started)
    assert [process.returncode for process in started] == [1, 1]
    assert "ProcessError: another process has ended" in left
    assert "ValueError: the reward of the last process has failed" in failed


def test_each_process_is_told_when_it_would_train_alone(tmp_path):
    """torchrun on a machine without GPUs, and nobody said that it is to be the CPU."""
    script = tmp_path / "script.py"
    script.write_text(
        "from rloom.training.launch import check_launch\n"
        "from transformers import TrainingArguments\n"
        "check_launch(TrainingArguments('out', report_to='none').world_size)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ACCELERATE_USE_CPU"}
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", str(script)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert "each would train alone" in done.stderr
    shutil.rmtree(tmp_path)
