"""A run that is killed and resumed ends as the run that was never stopped: to the bit."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rloom.observe import read_store

SCRIPT = Path(__file__).with_name("resume_run.py")


@functools.cache
def runner() -> subprocess.Popen:
    """The program that forks runs. It ends with the tests."""
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.__exit__, None, None, None)  # closes its input, and waits
    return process


def run(kind: str, *jobs: str) -> None:
    process = runner()
    print(json.dumps([kind, *jobs]), file=process.stdin, flush=True)
    wrong = json.loads(process.stdout.readline() or f'"the program ended with {process.poll()}"')
    assert wrong is None, wrong


def last_checkpoint(output: Path) -> Path:
    return max(output.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))


def assert_same(left: Path, right: Path) -> None:
    """The same weights, optimizer, schedule, random state, reference, rollouts and state, byte for byte."""
    assert left.name == right.name
    names = {p.relative_to(left) for p in left.rglob("*") if p.is_file()}
    assert names == {p.relative_to(right) for p in right.rglob("*") if p.is_file()}
    weights = [n for n in names if n.suffix == ".safetensors"]
    assert weights
    for name in weights:
        assert (left / name).read_bytes() == (right / name).read_bytes(), name
    for name in ("optimizer.pt", "scheduler.pt", "rloom_state.pt", "reference.pt"):
        if (left / name).exists():
            a, b = (torch.load(folder / name, weights_only=True) for folder in (left, right))
            assert_equal(strip(a), strip(b), name)
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (left, right)]
    assert_equal(strip(states[0]), strip(states[1]), "trainer_state.json")


def strip(value):
    """Without timings."""
    if isinstance(value, dict):
        return {
            k: strip(v) for k, v in value.items() if not any(t in str(k) for t in ("time", "per_second", "elapsed"))
        }
    if isinstance(value, list):
        return [strip(v) for v in value]
    return value


def assert_equal(a, b, where: str) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, pair in enumerate(zip(a, b, strict=True)):
            assert_equal(*pair, f"{where}/{index}")
    else:
        assert a == b, where


@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("many updates", [1, 2, 3, 4, 9]),  # every update of a rollout that serves four, and one in the next epoch
        ("straddling", [1, 3]),
        ("lora", [1, 2]),
        ("stream", [1, 7]),
    ],
)
def test_killed_and_resumed_is_the_same_run(kind, kills, tmp_path):
    outputs = {kill: tmp_path / f"killed-{kill}" for kill in kills}
    run(kind, str(tmp_path / "whole"), *(f"{output}:kill={kill}" for kill, output in outputs.items()))
    for kill, output in outputs.items():
        assert int(last_checkpoint(output).name.split("-")[1]) == kill
    run(kind, *(f"{output}:resume" for output in outputs.values()))
    for output in outputs.values():
        assert_same(last_checkpoint(tmp_path / "whole"), last_checkpoint(output))
        history = [json.loads((folder / "history.json").read_text()) for folder in (tmp_path / "whole", output)]
        assert_equal(history[0], history[1], "log history")
        stores = [read_store(folder) for folder in (tmp_path / "whole", output)]
        assert stores[0]
        assert stores[0] == stores[1]


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    run("straddling", str(tmp_path / "whole"), f"{tmp_path / 'again'}")
    run("straddling", f"{tmp_path / 'again'}:resume")
    assert_same(last_checkpoint(tmp_path / "whole"), last_checkpoint(tmp_path / "again"))


def test_a_checkpoint_of_the_first_format_goes_on_to_the_same_bits(tmp_path):
    output = tmp_path / "run"
    run("many updates", str(tmp_path / "whole"), f"{output}:kill=2")
    folder = last_checkpoint(output)
    state = torch.load(folder / "rloom_state.pt", weights_only=True)
    torch.save(first_format(state), folder / "rloom_state.pt")
    (folder / "rloom_manifest.json").unlink()
    run("many updates", f"{output}:resume")
    assert_same(last_checkpoint(tmp_path / "whole"), last_checkpoint(output))


def first_format(state):
    """As the first version wrote it: no number, and rollouts with fields that are no more."""
    parts = state["components"]
    rollouts = [{**e, "rollout": {**e["rollout"], "logged": True, "records": []}} for e in parts["buffer"]]
    assert rollouts
    renamed = {"metrics": parts["metrics"], "completions": parts["table"], "credit": parts["credit"]}
    return {"plan": state["plan"], "rollouts": rollouts, "budget": parts["budget"], **renamed, **parts["shaper"],
            **parts["loop"]}  # fmt: skip


def test_an_unfinished_checkpoint_is_passed_over(tmp_path):
    output = tmp_path / "run"
    run("straddling", str(tmp_path / "whole"), f"{output}:kill=2")
    broken = output / "checkpoint-3"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half a fi")
    (broken / "trainer_state.json").write_text('{"global_step": 3, "log_hi')
    run("straddling", f"{output}:resume")
    assert_same(last_checkpoint(tmp_path / "whole"), last_checkpoint(output))


def damaged(folder, how):
    file = folder / ("optimizer.pt" if how != "weights" else "model.safetensors")
    if how == "missing":
        file.unlink()
    elif how == "short":
        file.write_bytes(file.read_bytes()[:-7])
    else:  # one bit
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    return file.name


@pytest.mark.parametrize("how", ["missing", "short", "weights"])
def test_a_damaged_checkpoint_is_passed_over_by_name(how, model, rows, config, tokenizer, caplog, capsys, tmp_path):
    from rloom import RLOOTrainer

    reward = lambda completions, **kwargs: [float(len(text)) for text in completions]  # noqa: E731
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    make = lambda: RLOOTrainer(model, reward, config(**options), rows, processing_class=tokenizer)  # noqa: E731
    make().train()
    newest = tmp_path / "out" / "checkpoint-3"
    name = damaged(newest, how)
    with pytest.raises(ValueError, match=rf"checkpoint-3 is damaged: {name}"):
        make().train(resume_from_checkpoint=str(newest))
    make().train(resume_from_checkpoint="auto")
    assert f"checkpoint-3 is damaged: {name}" in caplog.text
    assert f"going on from {tmp_path / 'out' / 'checkpoint-2'}, after update 2" in capsys.readouterr().err


def test_what_people_edit_is_no_damage(model, rows, config, tokenizer, tmp_path):
    from rloom import RLOOTrainer
    from rloom.training.checkpoint import damage

    reward = lambda completions, **kwargs: [float(len(text)) for text in completions]  # noqa: E731
    options = config(max_steps=1, save_strategy="steps", save_steps=1)
    RLOOTrainer(model, reward, options, rows, processing_class=tokenizer).train()
    folder = tmp_path / "out" / "checkpoint-1"
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "notes.txt").write_text("good")
    assert damage(folder) is None
    (folder / "rloom_manifest.json").write_text("{")
    assert "rloom_manifest.json cannot be read" in damage(folder)
