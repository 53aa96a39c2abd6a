"""The examples run, on small stand-ins for their models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rloom.cli.main import main
from rloom.observe.store import read_store
from tests.conftest import make_model, make_tokenizer
from tests.standins import save_llama

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(Path(name).name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_reward(tmp_path):
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")]
    trainer = load("own_reward").main([*arguments, "--steps", "2", "--max-completion-length", "8"])
    assert trainer.state.global_step == 2
    assert {"rewards/brief/mean", "rewards/full_stop/mean"} <= set(trainer.metrics.values["train"]) | set(
        trainer.state.log_history[-1]
    )
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_the_tutorial_s_prompts_and_reward(tmp_path, monkeypatch):
    load("smollm2/make_prompts").main(["--output", str(tmp_path / "words")])
    train, held_out = (
        [json.loads(line) for line in (tmp_path / "words" / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert (len(train), len(held_out)) == (4096, 256)
    assert not {word for row in train for word in row["words"]} & {word for row in held_out for word in row["words"]}
    save_llama(tmp_path / "model")
    command = ["train", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "words" / "train.jsonl")]
    command += ["--reward", str(EXAMPLES / "smollm2" / "words.py:one_sentence"), "--output_dir", str(tmp_path / "out")]
    flags = "--num_generations 4 --per_device_train_batch_size 8 --max_completion_length 8 --max_steps 1 --use_cpu"
    assert main([*command, *flags.split(), "--report_to", "none"]) == 0
    assert len(read_store(tmp_path / "out")) == 8


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The cat sat down on a mat.", True),
        ("the mat was there, and so was a Cat.", True),
        ("The cat sat on the mats there.", False),
        ("The cat sat. It was on the mat.", False),
        ("The cat sat down on a mat", False),
        ("A cat on a mat.", False),
        ("The cat, " + "and another one, " * 8 + "sat on a mat.", False),
    ],
)
def test_the_tutorial_s_reward(text, right):
    messages = [{"role": "assistant", "content": text}]
    assert load("smollm2/words").one_sentence([messages], [["cat", "mat"]]) == [float(right)]
