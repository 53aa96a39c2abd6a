"""One process under DeepSpeed: the same weights, with the master weights that DeepSpeed keeps and no others."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rloom.training.loop import UpdateLoop
from rloom.training.processes import Processes
from rloom.training.zero_engine import DeepSpeedProcess
from tests.conftest import make_model

SCRIPT = """
import sys, torch, transformers as tf
from rloom import RLOOConfig, RLOOTrainer
from tests.conftest import make_tokenizer

def by_length(completions, **kwargs):
    return [float(len(text)) for text in completions]

zero = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "gradient_clipping": "auto",
        "data_types": {"grad_accum_dtype": "fp32"}}
torch.manual_seed(0)
shape = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
model = tf.Qwen2ForCausalLM(tf.Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=2)).bfloat16()
config = RLOOConfig(
    sys.argv[1], deepspeed=zero if sys.argv[2] == "with" else None, bf16=True, use_cpu=True, max_steps=4, beta=0.1,
    per_device_train_batch_size=8, gradient_accumulation_steps=2, num_generations=4, max_completion_length=6,
    max_tokens_per_micro_batch=50, learning_rate=1e-3, report_to="none", save_strategy="no", logging_steps=1,
)
rows = [{"prompt": "2 + 3 ="}, {"prompt": "4 + 3 ="}] * 32
trainer = RLOOTrainer(model, by_length, config, rows, processing_class=make_tokenizer())
trainer.train()
print(type(trainer.optimizer.optimizer).__name__)
norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
torch.save(([p.detach().float() for p in model.parameters()], norms), sys.argv[3])
"""


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not in the development set: it compiles itself"
)


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """`SCRIPT` in a process of its own."""
    line = [sys.executable, "-c", SCRIPT, *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(line, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True)


@needs_deepspeed
def test_without_a_launcher_one_is_asked_for(tmp_path):
    done = run_script(str(tmp_path / "out"), "with", str(tmp_path / "result.pt"))
    assert done.returncode == 1
    assert "ConfigError: DeepSpeed wants a launcher, for one process too" in done.stderr


@needs_deepspeed
def test_several_micro_batches_train_as_without(tmp_path):
    def run(how):
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        arguments = str(tmp_path / how), how, str(tmp_path / f"{how}.pt")
        done = run_script(*arguments, **(place if how == "with" else {}))
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.splitlines()[-1], torch.load(tmp_path / f"{how}.pt")

    (plain, (expected, norms)), (theirs, (found, their_norms)) = run("without"), run("with")
    assert their_norms == pytest.approx(norms, rel=0.01)  # AdamW itself would not see that gradients are scaled
    assert (plain, theirs) == ("SplitAdamW", "DeepSpeedZeroOptimizer")
    off = sum(float((a - b).abs().sum()) for a, b in zip(expected, found, strict=True))
    assert off < 0.01 * sum(float(a.abs().sum()) for a in expected)


def test_no_second_master_under_deepspeed():
    model = make_model().bfloat16()
    args = SimpleNamespace(
        optim="adamw_torch", optim_args=None, learning_rate=1e-3, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
        dither_weights=False,
    )  # fmt: skip
    choose = lambda kind: UpdateLoop.get_optimizer_cls_and_kwargs(  # noqa: E731
        SimpleNamespace(processes=kind(), precision=SimpleNamespace(split=None)), args, model
    )[0]
    assert choose(Processes).__name__ == "SplitAdamW"
    assert choose(DeepSpeedProcess) is torch.optim.AdamW
