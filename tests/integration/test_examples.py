"""The examples run, on small stand-ins for their models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.conftest import make_model, make_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
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
